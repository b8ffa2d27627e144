"""gRPC's length-prefixed messages: cut out of a body, framed, and compressed, either way. Pure. Before each
are five bytes: a flag whether it is compressed, and its length as a big-endian ``uint32``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from gpuserve.core.errors import InvalidArgument, ResourceExhausted, Unimplemented
from gpuserve.front.doors.access.inflation import WINDOW_BITS, Buffer, inflate
from gpuserve.front.v2.limits import InflationLimits

PREFIX_NBYTES: Final = 5
IDENTITY: Final = "identity"
#: What the server answers in ``grpc-accept-encoding``.
ACCEPTED_ENCODINGS: Final = "identity, deflate, gzip"
PREFIX: Final = struct.Struct(">BI")
#: A message up to this size is cut out of the chunks that it came in.
_COPIED_NBYTES: Final = 1 << 20
#: Of small messages, whose size alone is limited.
_ANY_RATIO: Final = 1 << 20
#: Level as in the settings -> zlib's, 0 for no compression.
LEVELS: Final[dict[str, int]] = {"none": 0, "low": 1, "medium": 6, "high": 9}
#: Shorter messages are not compressed: they are one packet either way, floats of that length get smaller by
#: less than a tenth, and compressing takes as long as the rest of the request.
COMPRESSED_NBYTES: Final = 1024


def frame(nbytes: int) -> bytes:
    """The five bytes before an uncompressed message of ``nbytes``."""
    return PREFIX.pack(0, nbytes)


def read_prefix(
    data: Buffer, limit_nbytes: int, encoding: str = IDENTITY, position: int = 0
) -> tuple[bool, int]:
    """(compressed, nbytes) by five bytes; InvalidArgument: a wrong flag; ResourceExhausted: too large."""
    flag, nbytes = PREFIX.unpack_from(data, position)
    if flag > 1:
        raise InvalidArgument(f"a gRPC message starts with a flag of 0 or 1, got {flag}")
    if flag and encoding == IDENTITY:
        raise InvalidArgument(
            "a gRPC message is marked as compressed, but the call names no grpc-encoding: "
            "expected gzip or deflate"
        )
    if nbytes > limit_nbytes:
        raise ResourceExhausted(f"a request of {nbytes} bytes is over the limit of {limit_nbytes} bytes")
    return bool(flag), nbytes


def check_encoding(encoding: str) -> str:
    """The encoding that a call names, if the server can read it, "" for identity; else Unimplemented."""
    encoding = encoding or IDENTITY
    if encoding != IDENTITY and encoding not in WINDOW_BITS:
        raise Unimplemented(
            f"grpc-encoding '{encoding[:64]}' is not supported, expected one of {ACCEPTED_ENCODINGS}"
        )
    return encoding


def unary_message(body: Buffer, limit_nbytes: int, encoding: str = "") -> Buffer:
    """The one message of a whole body, copied only if it was compressed; errors are of ``unary_part``."""
    compressed, message = unary_part(body, limit_nbytes, encoding)
    return inflate(message, encoding, InflationLimits(limit_nbytes, _ANY_RATIO)) if compressed else message


def unary_part(body: Buffer, limit_nbytes: int, encoding: str = "") -> tuple[bool, Buffer]:
    """(compressed, message) of a body with exactly one, else InvalidArgument. ResourceExhausted: it is too
    large; Unimplemented: the encoding is not known.
    """
    encoding = check_encoding(encoding)
    if len(body) < PREFIX_NBYTES:
        raise truncated(len(body), PREFIX_NBYTES)
    compressed, nbytes = read_prefix(body, limit_nbytes, encoding)
    if len(body) < PREFIX_NBYTES + nbytes:
        raise truncated(len(body), PREFIX_NBYTES + nbytes)
    if len(body) > PREFIX_NBYTES + nbytes:
        raise surplus()
    return compressed, memoryview(body)[PREFIX_NBYTES:]


class Unframer:
    """Cuts a body that comes in chunks into its messages; Unimplemented: the encoding is not known."""

    def __init__(self, limit_nbytes: int, encoding: str = "") -> None:
        self._limit_nbytes = limit_nbytes
        self._encoding = check_encoding(encoding)
        #: Of messages that are not complete, or were not asked for yet: all from this position on.
        self._data: bytes | bytearray = b""
        self._position = 0

    @property
    def unread_nbytes(self) -> int:
        return len(self._data) - self._position

    def feed(self, chunk: Buffer) -> list[bytes]:
        return list(self.messages(chunk))

    def messages(self, chunk: Buffer) -> Iterator[bytes]:
        """The small messages that a chunk completes, each inflated when asked for; raises as ``parts``."""
        limits = InflationLimits(self._limit_nbytes, _ANY_RATIO)
        for compressed, message in self.parts(chunk):
            yield inflate(message, self._encoding, limits) if compressed else bytes(message)

    def parts(self, chunk: Buffer) -> Iterator[tuple[bool, bytes | memoryview]]:
        """(compressed, message) that are whole; InvalidArgument: bad prefix; ResourceExhausted: too large. A
        long one that came in several chunks is not copied.
        """
        self._keep(chunk)
        while self.unread_nbytes >= PREFIX_NBYTES:
            data, start = self._data, self._position + PREFIX_NBYTES
            compressed, nbytes = read_prefix(data, self._limit_nbytes, self._encoding, self._position)
            if len(data) < start + nbytes:
                break
            end = start + nbytes
            if type(data) is bytes:
                self._position = end
                if end == len(data):
                    self._data, self._position = b"", 0
                yield compressed, data[start:end]
            else:
                del data  # or it would be kept for as long as somebody works at the message
                yield compressed, self._cut(start, end)

    def _cut(self, start: int, end: int) -> bytes | memoryview:
        view = memoryview(self._data)
        if end - start > _COPIED_NBYTES:
            self._data, self._position = bytes(view[end:]), 0
            return view[start:end]
        message = bytes(view[start:end])
        view.release()
        self._position = end
        if end == len(self._data):
            self._data, self._position = b"", 0
        return message

    def _keep(self, chunk: Buffer) -> None:
        """Small messages mostly come whole: only what goes on in another chunk is joined."""
        if not self._data:
            self._data = bytes(chunk)
            return
        if type(self._data) is bytes:
            self._data = bytearray(memoryview(self._data)[self._position :])
        else:
            del self._data[: self._position]  # type: ignore[union-attr]
        self._position = 0
        self._data += chunk

    def finish(self) -> None:
        """The body has ended; InvalidArgument: in the middle of a message."""
        if given := self.unread_nbytes:
            expected = PREFIX_NBYTES
            if given >= PREFIX_NBYTES:
                expected += PREFIX.unpack_from(self._data, self._position)[1]
            raise truncated(given, expected)


def joined(pieces: Sequence[Buffer], most_nbytes: int) -> Iterator[bytes]:
    """Yield pieces joined to parts of at most so many bytes; a longer one is cut, each part once it is asked
    for.
    """
    parts: list[Buffer] = []
    room = most_nbytes
    for piece in pieces:
        for at in range(0, len(piece), most_nbytes):
            part = piece if len(piece) <= most_nbytes else memoryview(piece)[at : at + most_nbytes]
            if len(part) > room:
                yield b"".join(parts)
                parts, room = [], most_nbytes
            parts.append(part)
            room -= len(part)
    if parts:
        yield b"".join(parts)


def compress_messages(coding: str, level: int, data: Buffer) -> bytes:
    """Framed messages, each compressed by gzip or deflate where that makes it smaller, as its flag says;
    those under ``COMPRESSED_NBYTES`` stay as they are.
    """
    parts: list[bytes] = []
    position, framed = 0, memoryview(data)
    while position < len(framed):
        end = position + PREFIX_NBYTES + PREFIX.unpack_from(framed, position)[1]
        parts.append(_compressed(coding, level, framed[position:end]))
        position = end
    return b"".join(parts)


def _compressed(coding: str, level: int, framed: memoryview) -> bytes:
    message = framed[PREFIX_NBYTES:]
    if len(message) < COMPRESSED_NBYTES:
        return bytes(framed)
    compressor = zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[coding])
    packed = compressor.compress(message) + compressor.flush()
    return PREFIX.pack(1, len(packed)) + packed if len(packed) < len(message) else bytes(framed)


def truncated(given: int, expected: int) -> InvalidArgument:
    return InvalidArgument(f"the request body is truncated: expected {expected} bytes, got {given}")


def surplus() -> InvalidArgument:
    return InvalidArgument("the request body goes on after its message: expected exactly one in a unary call")
