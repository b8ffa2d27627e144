"""Content codings of the HTTP endpoint: gzip and deflate (zlib) of requests and of responses.

Pure; zlib releases the GIL, so a caller may move large bodies to a thread. What a body grows to is
limited while it grows, never after.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from gpuserve.errors import InvalidArgument, ResourceExhausted, Unimplemented
from gpuserve.front.exchange.exchange import AnswerHead

#: Goes with the refusal of a coding, so that the client learns what it may use.
ACCEPT_ENCODING: Final = (b"accept-encoding", b"gzip, deflate")
IDENTITY: Final = "identity"
#: coding -> zlib's window bits, which also say which container it is.
_WINDOW_BITS: Final[dict[str, int]] = {"gzip": 31, "deflate": 15}
#: The fastest: tensors are mostly floats, where harder work gains next to nothing.
_LEVEL: Final = 1


class UnsupportedCoding(Unimplemented):
    """A request body in a coding that this server does not read."""


def request_coding(content_encoding: str | None) -> str:
    """The coding of a request body: "identity", "gzip" or "deflate".

    Raises:
        UnsupportedCoding: any other; answer it with the ``ACCEPT_ENCODING`` header.
    """
    coding = (content_encoding or IDENTITY).strip().lower().removeprefix("x-") or IDENTITY
    if coding != IDENTITY and coding not in _WINDOW_BITS:
        raise UnsupportedCoding("Unsupported compression type")
    return coding


class Decompressor:
    """A request body in "gzip" or "deflate", chunk by chunk, up to ``limit_nbytes`` of what comes out."""

    def __init__(self, coding: str, limit_nbytes: int) -> None:
        self._coding = coding
        self._limit_nbytes = limit_nbytes
        self._zlib = zlib.decompressobj(_WINDOW_BITS[coding])
        self._nbytes = 0

    def feed(self, chunk: bytes | memoryview) -> bytes:
        """Decompress a chunk; what comes out may be empty.

        Raises:
            InvalidArgument: not of this coding, or it goes on behind its end.
            ResourceExhausted: more than the limit.
        """
        try:
            # One byte more than allowed is enough to know; zero would mean without limit.
            out = self._zlib.decompress(chunk, self._limit_nbytes - self._nbytes + 1)
        except zlib.error:
            raise InvalidArgument(f"the request body is not valid {self._coding} data") from None
        self._nbytes += len(out)
        if self._nbytes > self._limit_nbytes:
            raise ResourceExhausted(
                f"the request body exceeds the maximum allowed input size of {self._limit_nbytes} bytes "
                "after decompression. Use --max-request-nbytes to increase the limit."
            )
        # A second gzip member is legal but nobody sends one; a million empty ones are an attack.
        if self._zlib.unused_data:
            raise InvalidArgument(f"the request body goes on behind the end of its {self._coding} data")
        return out

    def last(self, chunk: bytes | memoryview) -> bytes:
        """Decompress the last chunk.

        Raises:
            InvalidArgument, ResourceExhausted: as ``feed``, or the compressed data has not ended.
        """
        out = self.feed(chunk)
        if not self._zlib.eof:
            raise InvalidArgument(f"the {self._coding} data of the request body is truncated")
        return out


def negotiate(accept_encoding: str | None) -> str:
    """The coding of a response: of those known here the one with the highest q-value, the first of equals.

    ``accept_encoding`` is the request's header. "identity", "gzip" or "deflate".
    """
    if not accept_encoding:
        return IDENTITY
    best, best_quality = IDENTITY, 0.0
    for coding, quality in _preferences(accept_encoding):
        known = coding == IDENTITY or coding in _WINDOW_BITS
        if known and quality > best_quality:
            best, best_quality = coding, quality
    return best


def compress(
    coding: str, head: AnswerHead, pieces: Iterable[bytes | memoryview]
) -> tuple[AnswerHead, list[bytes]]:
    """Head and body of a response in the coding that ``negotiate`` chose ("gzip" or "deflate")."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    out = [compressor.compress(piece) for piece in pieces]
    out = [piece for piece in (*out, compressor.flush()) if piece]
    coded = ((b"content-encoding", coding.encode()), (b"vary", b"accept-encoding"))
    return AnswerHead(head.status, (*head.headers, *coded)), out


def _preferences(accept_encoding: str) -> Iterator[tuple[str, float]]:
    for item in accept_encoding.lower().split(","):
        coding, _, parameters = item.partition(";")
        yield coding.strip(), _quality(parameters)


def _quality(parameters: str) -> float:
    """The q-value, 1 where there is none; one that is no number from 0 to 1 counts as refused."""
    key, _, value = parameters.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
