"""Bodies of HTTP/1 requests while they arrive (RFC 9112, 6.3 and 7.1): what of the bytes is theirs. Pure."""

from __future__ import annotations

import enum
import re
from typing import Final, TypeAlias

from gpuserve.front.exchange.exchange import Piece
from gpuserve.front.server.http1.head import CHUNKED, RequestRefused, parse_fields, shown

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
#: A chunk's size without extensions, and the end of its line.
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
#: A chunk's size with its extensions.
_SIZE_LINE_NBYTES: Final = 256
_TRAILERS_NBYTES: Final = 16 << 10
#: Chunks that are taken in one go: clocks are looked at between.
_CHUNKS: Final = 512


class SizedBody:
    """A body whose length is known. ``left_nbytes`` is to come; ``ended``: all of it has."""

    __slots__ = ("ended", "left_nbytes")

    def __init__(self, nbytes: int) -> None:
        self.left_nbytes = nbytes
        self.ended = nbytes == 0

    def cut(self, data: Piece) -> tuple[Piece, Piece]:
        """What of the data is the body's, and what comes after its end."""
        left, nbytes = self.left_nbytes, len(data)
        if nbytes < left:
            self.left_nbytes = left - nbytes
            return data, b""
        self.left_nbytes, self.ended = 0, True
        return (data, b"") if nbytes == left else (data[:left], data[left:])


class Part(enum.Enum):
    """What of a chunked body comes next."""

    SIZE = "the line with a chunk's size"
    DATA = "a chunk's data"
    DATA_END = "the line's end after it"
    TRAILERS = "the trailers, up to an empty line"


class ChunkedBody:
    """A body in chunks, and the trailers after it, checked and dropped. ``ended``: all of it is there.

    ::

        SIZE ──► DATA ──► DATA_END ──► SIZE …
          └─ 0 ──► TRAILERS ──► ended
    """

    __slots__ = ("_kept", "_left", "_part", "_trailers_nbytes", "ended")

    #: How much is to come, nobody knows.
    left_nbytes: Final = 0

    def __init__(self) -> None:
        self.ended = False
        self._part = Part.SIZE
        #: Of a chunk's data.
        self._left = 0
        #: The beginning of a line.
        self._kept = b""
        self._trailers_nbytes = 0

    def cut(self, data: Piece) -> tuple[Piece, Piece]:
        """What of the data is the body's, joined, and what comes after it, which may be more of the body
        where there were many chunks; or ``RequestRefused``.
        """
        position, nbytes = 0, len(data)
        pieces: list[Piece] = []
        while position < nbytes and not self.ended and len(pieces) < _CHUNKS:
            if self._part is Part.DATA:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._part = Part.DATA_END
            elif self._part is Part.SIZE and not self._kept and (found := _CHUNK.match(data, position)):
                position = _take_chunks(data, position, found, pieces)
                if position == found.start():
                    position = self._read_line(data, position)
            else:
                position = self._read_line(data, position)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), data[position:]

    def _read_line(self, data: Piece, position: int) -> int:
        """Take a line, or keep its beginning; where what follows it begins."""
        limit = _TRAILERS_NBYTES if self._part is Part.TRAILERS else _SIZE_LINE_NBYTES
        kept = self._kept
        text = kept + bytes(data[position : position + limit + 1 - len(kept)])
        end = text.find(b"\r\n")
        if end >= 0:
            self._kept = b""
            self._on_line(text[:end])
            return position + end + 2 - len(kept)
        if len(text) > limit:
            raise RequestRefused(400, f"a line between the chunks of the body is over {limit} bytes")
        self._kept = text
        return len(data)

    def _on_line(self, line: bytes) -> None:
        match self._part:
            case Part.SIZE:
                self._begin_chunk(line)
            case Part.DATA_END:
                if line:
                    raise RequestRefused(400, "a chunk of the body is longer than its size")
                self._part = Part.SIZE
            case _:
                self._on_trailer(line)

    def _begin_chunk(self, line: bytes) -> None:
        found = _SIZE.fullmatch(line)
        if found is None:
            raise RequestRefused(400, f"a chunk of the body must begin with its size, got {shown(line)}")
        self._left = int(found[1], 16)
        self._part = Part.DATA if self._left else Part.TRAILERS

    def _on_trailer(self, line: bytes) -> None:
        self._trailers_nbytes += len(line) + 2
        if self._trailers_nbytes > _TRAILERS_NBYTES:
            raise RequestRefused(431, f"the trailers are over the limit of {_TRAILERS_NBYTES} bytes")
        if line:
            parse_fields((line,))
        else:
            self.ended = True


def _take_chunks(data: Piece, position: int, found: re.Match[bytes] | None, pieces: list[Piece]) -> int:
    """Append the data of whole chunks; where they end. Line by line takes five times as long."""
    while found is not None and len(pieces) < _CHUNKS:
        start = found.end()
        end = start + int(found[1], 16)
        if end == start or data[end : end + 2] != b"\r\n":
            break
        pieces.append(data[start:end])
        position = end + 2
        found = _CHUNK.match(data, position)
    return position


#: A body that arrives.
Body: TypeAlias = SizedBody | ChunkedBody


def body_of(nbytes: int) -> Body:
    """A body of so many bytes, or of chunks where that is ``CHUNKED``."""
    return ChunkedBody() if nbytes == CHUNKED else SizedBody(nbytes)
