"""HTTP/2 frames and header blocks (RFC 9113, 4, 6 and 8): layouts, encoding and request heads. Pure."""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from gpuserve.front.net.exchange import TE, Head, Header
from gpuserve.front.net.http2_hpack import Decoder, HeadTooLarge, HpackError


class FrameType(enum.IntEnum):
    """The frame types that have a meaning here; frames of other types are ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class ErrorCode(enum.IntEnum):
    """The reason why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class Http2Setting(enum.IntEnum):
    """The settings that have a meaning here."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

HEAD_NBYTES: Final = 9
#: DATA frames that are joined into one part of a body; the loop budget is checked between parts.
_RUN_FRAMES: Final = 256
#: The initial values of both sides.
DEFAULT_WINDOW: Final = 65535
DEFAULT_FRAME_NBYTES: Final = 16384
MAX_FRAME_NBYTES: Final = (1 << 24) - 1
MAX_WINDOW: Final = (1 << 31) - 1
STREAM_MASK: Final = (1 << 31) - 1

#: The frame header: length in two parts, type, flags, stream.
HEAD: Final = struct.Struct(">BHBBI")
_U32: Final = struct.Struct(">I")
_SETTING: Final = struct.Struct(">HI")
_GOAWAY: Final = struct.Struct(">II")
SETTINGS_ACK: Final = HEAD.pack(0, 0, FrameType.SETTINGS, ACK, 0)

#: The bounds of each setting, and the error for a value outside.
_BOUNDS: Final[dict[int, tuple[int, int, ErrorCode]]] = {
    Http2Setting.ENABLE_PUSH: (0, 1, ErrorCode.PROTOCOL_ERROR),
    Http2Setting.INITIAL_WINDOW_SIZE: (0, MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR),
    Http2Setting.MAX_FRAME_SIZE: (DEFAULT_FRAME_NBYTES, MAX_FRAME_NBYTES, ErrorCode.PROTOCOL_ERROR),
}


class ConnectionFailed(Exception):
    """A violation of the protocol that makes the whole connection unusable."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailed(Exception):
    """A violation of the protocol on one stream. ``cost``: the number of resets that it counts for."""

    def __init__(self, stream_id: int, code: ErrorCode, cost: int = 1) -> None:
        super().__init__(f"stream {stream_id}: {code.name}")
        self.stream_id = stream_id
        self.code = code
        self.cost = cost


def frame(kind: FrameType, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    nbytes = len(payload)
    return HEAD.pack(nbytes >> 16, nbytes & 0xFFFF, kind, flags, stream_id) + payload


def settings_frame(settings: dict[Http2Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in settings.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def window_update(stream_id: int, nbytes: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _U32.pack(nbytes))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """Return a GOAWAY frame: no stream after ``last_stream_id`` is served."""
    return frame(FrameType.GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + text.encode())


def header_frames(stream_id: int, block: bytes, most_nbytes: int, *, end: bool) -> bytes:
    """Return a header block as a HEADERS frame, with CONTINUATION frames above ``most_nbytes``."""
    flags = END_STREAM if end else 0
    if len(block) <= most_nbytes:
        return frame(FrameType.HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [block[at : at + most_nbytes] for at in range(0, len(block), most_nbytes)]
    frames = [frame(FrameType.HEADERS, flags, stream_id, parts[0])]
    frames += [frame(FrameType.CONTINUATION, 0, stream_id, part) for part in parts[1:-1]]
    return b"".join([*frames, frame(FrameType.CONTINUATION, END_HEADERS, stream_id, parts[-1])])


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings of a frame. Raise ConnectionFailed if a value is out of bounds or cut off."""
    if len(payload) % _SETTING.size:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame ends in the middle of a setting")
    settings = list(_SETTING.iter_unpack(payload))
    for setting, value in settings:
        if setting in _BOUNDS:
            least, most, code = _BOUNDS[setting]
            if not least <= value <= most:
                raise ConnectionFailed(code, f"SETTINGS_{Http2Setting(setting).name} is {value}")
    return settings


def wrong_size(payload: bytes) -> ConnectionFailed:
    """Return the failure for a RST_STREAM or WINDOW_UPDATE frame whose payload is not 4 bytes."""
    return ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"a frame of 4 bytes has {len(payload)}")


def body_run(
    data: bytes | memoryview, position: int, stream_id: int, room_nbytes: int, parts: list[bytes | memoryview]
) -> tuple[int, bool]:
    """Append the payloads of consecutive complete DATA frames of one stream to ``parts``.

    Clients cut a large body into frames of 16 KiB: joining the payloads costs less than passing on each of
    them. The number of frames is limited, because the loop budget is checked between calls.

    Returns:
        The position after the last of these frames, and whether that frame ends the stream.
    """
    ended = False
    while not ended and len(data) - position >= HEAD_NBYTES and len(parts) < _RUN_FRAMES:
        high, low, kind, flags, of_stream = HEAD.unpack_from(data, position)
        length = high << 16 | low
        start = position + HEAD_NBYTES
        if kind or flags > END_STREAM or of_stream != stream_id:
            break
        if not length or start + length > len(data) or length > room_nbytes:
            break
        position = start + length
        room_nbytes -= length
        parts.append(data[start:position])
        ended = flags == END_STREAM
    return position, ended


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return a payload without padding and priority. Raise ConnectionFailed if it is too short."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - (payload[0] if payload else 0)
    if flags & PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a frame is shorter than its padding")
    return payload[start:end]


# ---- request heads -------------------------------------------------------------------------------

_PSEUDO: Final = frozenset({b":method", b":scheme", b":authority", b":path"})
_NEEDED: Final = (b":method", b":scheme", b":path")
#: Headers of the connection, which HTTP/2 forbids in requests.
_FORBIDDEN: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+\-.]*")
_PATH: Final = re.compile(rb"/[\x21-\x7e]*|\*")
#: Neither user information, spaces nor control characters. gRPC clients put names of targets here.
_AUTHORITY: Final = re.compile(rb"[\x21-\x3f\x41-\x7e]*")
_LENGTH: Final = re.compile(rb"[0-9]{1,19}")


class MalformedHead(ValueError):
    """Fields that are not the head of a request. The stream fails; the connection does not."""


def request_head(fields: Iterable[Header]) -> Head:
    """Return the head for the fields of a header block. Raise MalformedHead if they are invalid."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[Header] = []
    for field in fields:
        name, value = field
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or headers:
                raise MalformedHead(f"the field {name!r} is unknown, double or late")
            pseudo[name] = value
        else:
            _check(field)
            headers.append(field)
        if b"\0" in value or b"\r" in value or b"\n" in value or value != value.strip(b" \t"):
            raise MalformedHead(f"the value of {name!r} has characters that it cannot have")
    if not all(pseudo.get(name) for name in _NEEDED):
        raise MalformedHead("a request needs :method, :scheme and :path")
    method, scheme, path = (pseudo[name] for name in _NEEDED)
    if not (_METHOD.fullmatch(method) and _SCHEME.fullmatch(scheme) and _PATH.fullmatch(path)):
        raise MalformedHead(":method, :scheme or :path has characters that it cannot have")
    host = _host_of(pseudo.get(b":authority", b""), headers)
    if host and not any(name == b"host" for name, _ in headers):
        headers.insert(0, (b"host", host))
    lengths = {value for name, value in headers if name == b"content-length"}
    if len(lengths) > 1 or any(_LENGTH.fullmatch(value) is None for value in lengths):
        raise MalformedHead("content-length is no number, or there are several")
    length = int(lengths.pop()) if lengths else None
    return Head(method.decode(), path, headers, "2", length, scheme.decode())


def _check(field: Header) -> None:
    name = field[0]
    if _NAME.fullmatch(name) is None:
        raise MalformedHead(f"{name!r} is not a header name")
    if name in _FORBIDDEN or (name == b"te" and field != TE):
        raise MalformedHead(f"the header {name!r} is of the connection")


def check_trailers(fields: Iterable[Header]) -> None:
    for field in fields:
        _check(field)


def _host_of(authority: bytes, headers: Iterable[Header]) -> bytes:
    """Return the host of a request. Raise MalformedHead if :authority and host contradict each other."""
    hosts = [value for name, value in headers if name == b"host"]
    host = authority or b"".join(hosts)
    if len(hosts) > 1 or any(one.lower() != host.lower() for one in hosts):
        raise MalformedHead("there are several hosts")
    if _AUTHORITY.fullmatch(host) is None:
        raise MalformedHead("the host has characters that it cannot have")
    return host


# ---- header blocks -------------------------------------------------------------------------------

T = TypeVar("T")

#: The cost, in resets, of a head over the limit.
_LARGE_HEAD_COST: Final = 256

#: The limit of a request head, both encoded and decoded.
MAX_HEAD_NBYTES: Final = 64 << 10
#: Decoded heads that a connection remembers while open, and their encoded bytes. They take 2 KiB each and
#: three times their own size, and there are thousands of connections.
REMEMBERED_HEADS: Final = 16
REMEMBERED_NBYTES: Final = 4096


class HeaderBlock(NamedTuple):
    """A complete header block, encoded. ``flags`` are those of its first frame."""

    stream_id: int
    flags: int
    data: bytes


class HeaderBlockReader:
    """The header blocks of one connection, read in order. Heads are remembered while the table is unchanged.

    Methods raise ConnectionFailed, or StreamFailed if a block decodes but is not a valid head.
    """

    __slots__ = ("_decoder", "_nbytes", "heads", "unfinished")

    def __init__(self) -> None:
        #: Remembered heads by encoded block.
        self.heads: dict[bytes, Head] = {}
        self._nbytes = 0
        #: A block that continues in the next frame.
        self.unfinished: HeaderBlock | None = None
        self._decoder = Decoder(MAX_HEAD_NBYTES)

    def begin(self, stream_id: int, flags: int, payload: bytes) -> HeaderBlock | None:
        """Start a block with a HEADERS frame. Return the block if it is complete."""
        if not stream_id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if flags & (PADDED | PRIORITY):
            payload = unpadded(flags, payload)
        block = _checked(HeaderBlock(stream_id, flags, payload))
        if flags & END_HEADERS:
            return block
        self.unfinished = block
        return None

    def continue_block(self, stream_id: int, flags: int, payload: bytes) -> HeaderBlock | None:
        """Add a CONTINUATION frame to the block. Return the block if it is complete."""
        block = self.unfinished
        if block is None or block.stream_id != stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION of no header block")
        block = _checked(block._replace(data=block.data + payload))
        self.unfinished = None if flags & END_HEADERS else block
        return block if flags & END_HEADERS else None

    def head(self, block: HeaderBlock) -> Head:
        """Return the request head in a block."""
        nbytes = len(block.data)
        if nbytes <= REMEMBERED_NBYTES and (known := self.heads.get(block.data)) is not None:
            return known
        revision = self._decoder.revision
        head = self._decode(block, request_head)
        if self._decoder.revision == revision and nbytes <= REMEMBERED_NBYTES:
            if len(self.heads) >= REMEMBERED_HEADS or self._nbytes + nbytes > REMEMBERED_NBYTES:
                self._forget()
            self.heads[block.data] = head
            self._nbytes += nbytes
        return head

    def _forget(self) -> None:
        self.heads.clear()
        self._nbytes = 0

    def check_trailers(self, block: HeaderBlock) -> None:
        """Check the trailers of a request, which are ignored otherwise."""
        self._decode(block, check_trailers)

    def skip(self, block: HeaderBlock) -> None:
        """Decode an ignored block to keep the dynamic table current."""
        self._decode(block, lambda _: None)

    def _decode(self, block: HeaderBlock, read: Callable[[list[Header]], T]) -> T:
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
            # The connection may belong to a proxy, so its other clients must not suffer: only the stream
            # fails. Decoding such a block takes a few milliseconds, so the cost limits their number.
            raise StreamFailed(block.stream_id, ErrorCode.ENHANCE_YOUR_CALM, _LARGE_HEAD_COST) from error
        except HpackError as error:
            raise ConnectionFailed(ErrorCode.COMPRESSION_ERROR, str(error)) from None


def _checked(block: HeaderBlock) -> HeaderBlock:
    if len(block.data) > MAX_HEAD_NBYTES:
        raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "a request head is too large")
    return block
