"""The frames of HTTP/2 (RFC 9113, 4 and 6): numbers, layouts, and how ours are written. Pure."""

from __future__ import annotations

import enum
import struct
from typing import Final


class FrameType(enum.IntEnum):
    """The types that mean something here; others are passed over."""

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
    """Why a stream or a connection ends."""

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


class Setting(enum.IntEnum):
    """The settings that mean something here."""

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
#: Of one body, taken in one go.
_RUN_FRAMES: Final = 256
#: What both sides begin with.
DEFAULT_WINDOW: Final = 65535
DEFAULT_FRAME_NBYTES: Final = 16384
MAX_FRAME_NBYTES: Final = (1 << 24) - 1
MAX_WINDOW: Final = (1 << 31) - 1
STREAM_MASK: Final = (1 << 31) - 1

#: Length in two parts, type, flags, stream.
HEAD: Final = struct.Struct(">BHBBI")
_U32: Final = struct.Struct(">I")
_SETTING: Final = struct.Struct(">HI")
_GOAWAY: Final = struct.Struct(">II")
SETTINGS_ACK: Final = HEAD.pack(0, 0, FrameType.SETTINGS, ACK, 0)


#: What a setting may be, and the error where it is not.
_BOUNDS: Final[dict[int, tuple[int, int, ErrorCode]]] = {
    Setting.ENABLE_PUSH: (0, 1, ErrorCode.PROTOCOL_ERROR),
    Setting.INITIAL_WINDOW_SIZE: (0, MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR),
    Setting.MAX_FRAME_SIZE: (DEFAULT_FRAME_NBYTES, MAX_FRAME_NBYTES, ErrorCode.PROTOCOL_ERROR),
}


class ConnectionFailed(Exception):
    """The client broke the protocol so that its connection is of no more use."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailed(Exception):
    """The client broke the protocol on one stream. ``cost`` is how many resets the failure counts for."""

    def __init__(self, stream_id: int, code: ErrorCode, cost: int = 1) -> None:
        super().__init__(f"stream {stream_id}: {code.name}")
        self.stream_id = stream_id
        self.code = code
        self.cost = cost


def frame(kind: FrameType, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    nbytes = len(payload)
    return HEAD.pack(nbytes >> 16, nbytes & 0xFFFF, kind, flags, stream_id) + payload


def settings_frame(settings: dict[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in settings.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def window_update(stream_id: int, nbytes: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _U32.pack(nbytes))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """No stream after this one is served."""
    return frame(FrameType.GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + text.encode())


def header_frames(stream_id: int, block: bytes, most_nbytes: int, *, end: bool) -> bytes:
    """A header block as one frame, or as many as its size needs."""
    flags = END_STREAM if end else 0
    if len(block) <= most_nbytes:
        return frame(FrameType.HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [block[at : at + most_nbytes] for at in range(0, len(block), most_nbytes)]
    frames = [frame(FrameType.HEADERS, flags, stream_id, parts[0])]
    frames += [frame(FrameType.CONTINUATION, 0, stream_id, part) for part in parts[1:-1]]
    return b"".join([*frames, frame(FrameType.CONTINUATION, END_HEADERS, stream_id, parts[-1])])


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The settings of a frame, judged; ``ConnectionFailed``: a value that cannot be, or one cut off."""
    if len(payload) % _SETTING.size:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame ends in the middle of one")
    settings = list(_SETTING.iter_unpack(payload))
    for setting, value in settings:
        if setting in _BOUNDS:
            least, most, code = _BOUNDS[setting]
            if not least <= value <= most:
                raise ConnectionFailed(code, f"SETTINGS_{Setting(setting).name} is {value}")
    return settings


def wrong_size(payload: bytes) -> ConnectionFailed:
    """The failure of a RST_STREAM or a WINDOW_UPDATE that is not one number."""
    return ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"a frame of 4 bytes has {len(payload)}")


def body_run(
    data: bytes | memoryview, position: int, stream_id: int, room_nbytes: int, parts: list[bytes | memoryview]
) -> tuple[int, bool]:
    """Append what DATA frames of one stream hold, as long as they come whole and one after the other.

    Clients cut a large body into frames of 16 KiB: to join what they hold costs less than to hand on each.
    Only so many, as clocks are looked at between.

    Returns:
        where they end, and whether the last of them ends the stream.
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
    """What a DATA or HEADERS payload holds without padding and priority; or ``ConnectionFailed``."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - (payload[0] if payload else 0)
    if flags & PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a frame is shorter than its padding")
    return payload[start:end]
