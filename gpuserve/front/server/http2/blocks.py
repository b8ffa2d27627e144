"""Header blocks of one connection: decoded, and made a ``Head`` of, once while the table is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from gpuserve.front.exchange.exchange import Head, Header
from gpuserve.front.server.http2.frames import (
    END_HEADERS,
    PADDED,
    PRIORITY,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
    unpadded,
)
from gpuserve.front.server.http2.head import MalformedHead, check_trailers, request_head
from gpuserve.front.server.http2.hpack import Decoder, HeadTooLarge, HpackError

T = TypeVar("T")

#: How many resets a head over the limit counts for.
_LARGE_HEAD_COST: Final = 256

#: The head of a request, encoded and decoded.
MAX_HEAD_NBYTES: Final = 64 << 10
#: A client has few heads that it sends again. Those of a connection are kept while it is open, at 2 KiB each
#: and three times their own size, and there are thousands of connections.
REMEMBERED_HEADS: Final = 16
REMEMBERED_NBYTES: Final = 4096


class Block(NamedTuple):
    """A complete header block, encoded. ``flags`` are those of its first frame."""

    stream_id: int
    flags: int
    data: bytes


class BlockReader:
    """Reads the blocks, in order; raises ``ConnectionFailed`` or ``StreamFailed``
    (decodes, but is no head).
    """

    __slots__ = ("_decoder", "_nbytes", "heads", "unfinished")

    def __init__(self) -> None:
        #: By their blocks, which have so many bytes altogether.
        self.heads: dict[bytes, Head] = {}
        self._nbytes = 0
        #: Of a block that goes on in the next frame.
        self.unfinished: Block | None = None
        self._decoder = Decoder(MAX_HEAD_NBYTES)

    def begin(self, stream_id: int, flags: int, payload: bytes) -> Block | None:
        if flags & (PADDED | PRIORITY):
            payload = unpadded(flags, payload)
        block = _checked(Block(stream_id, flags, payload))
        if flags & END_HEADERS:
            return block
        self.unfinished = block
        return None

    def go_on(self, stream_id: int, flags: int, payload: bytes) -> Block | None:
        block = self.unfinished
        if block is None or block.stream_id != stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION of no header block")
        block = _checked(block._replace(data=block.data + payload))
        self.unfinished = None if flags & END_HEADERS else block
        return block if flags & END_HEADERS else None

    def head(self, block: Block) -> Head:
        nbytes = len(block.data)
        if nbytes <= REMEMBERED_NBYTES and (known := self.heads.get(block.data)) is not None:
            return known
        revision = self._decoder.revision
        head = self._read(block, request_head)
        if self._decoder.revision == revision and nbytes <= REMEMBERED_NBYTES:
            if len(self.heads) >= REMEMBERED_HEADS or self._nbytes + nbytes > REMEMBERED_NBYTES:
                self._forget()
            self.heads[block.data] = head
            self._nbytes += nbytes
        return head

    def _forget(self) -> None:
        self.heads.clear()
        self._nbytes = 0

    def trailers(self, block: Block) -> None:
        """Check the trailers of a request, which say nothing here."""
        self._read(block, check_trailers)

    def skip(self, block: Block) -> None:
        """Decode a block that says nothing to anybody, for what it does to the table."""
        self._read(block, lambda _: None)

    def _read(self, block: Block, read: Callable[[list[Header]], T]) -> T:
        revision = self._decoder.revision
        try:
            fields = self._decoder.decode(block.data)
            if self._decoder.revision != revision:
                self._forget()
            return read(fields)
        except MalformedHead:
            raise StreamFailed(block.stream_id, ErrorCode.PROTOCOL_ERROR) from None
        except HeadTooLarge as error:
            if self._decoder.revision != revision:
                self._forget()
            # The connection may be a proxy's, whose other clients are not to pay. Such a block takes a few
            # milliseconds to decode, so that not many of them are let through.
            raise StreamFailed(block.stream_id, ErrorCode.ENHANCE_YOUR_CALM, _LARGE_HEAD_COST) from error
        except HpackError as error:
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, str(error)) from None


def _checked(block: Block) -> Block:
    if len(block.data) > MAX_HEAD_NBYTES:
        raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "a request head is too large")
    return block
