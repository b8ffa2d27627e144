"""The client's end of HTTP/2 for tests: makes frames, right or wrong, and judges those of the server."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import hpack

from gpuserve.cli.bench.http2_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    PADDED,
    PING,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    PUSH_PROMISE,
    SETTINGS,
    TABLE_SIZE,
    WINDOW_UPDATE,
    FrameReader,
    frame,
)  # fmt: skip
from gpuserve.cli.bench.http2_client import FIRST_WINDOW_NBYTES as DEFAULT_WINDOW
from gpuserve.cli.bench.http2_client import RESET as RST_STREAM
from gpuserve.cli.bench.http2_client import settings_frame as settings
from gpuserve.cli.bench.http2_client import window_update as grow

__all__ = [
    "ACK", "CANCEL", "COMPRESSION_ERROR", "CONTINUATION", "DATA", "END_HEADERS", "END_STREAM",
    "ENHANCE_YOUR_CALM", "FLOW_CONTROL_ERROR", "FRAME_SIZE_ERROR", "GOAWAY", "HEADERS", "NO_ERROR", "PADDED",
    "PING", "PING_FRAME", "POST", "PREFACE", "PRIORITIZED", "PRIORITY", "PROTOCOL_ERROR", "PUSH_PROMISE",
    "REFUSED_STREAM", "RST_STREAM", "SETTINGS", "STREAM_CLOSED", "WINDOW_UPDATE", "Frame", "Peer", "data",
    "frame", "grow", "reset", "settings", "u32",
]  # fmt: skip
(
    NO_ERROR,
    PROTOCOL_ERROR,
    INTERNAL_ERROR,
    FLOW_CONTROL_ERROR,
    SETTINGS_TIMEOUT,
    STREAM_CLOSED,
    FRAME_SIZE_ERROR,
    REFUSED_STREAM,
    CANCEL,
    COMPRESSION_ERROR,
    CONNECT_ERROR,
    ENHANCE_YOUR_CALM,
) = range(12)
POST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a?b=c"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes = b""

    def encode(self) -> bytes:
        return frame(*self)


def u32(number: int) -> bytes:
    return struct.pack(">I", number)


def data(stream_id: int, body: bytes, *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, stream_id, body)


def reset(stream_id: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream_id, u32(code))


PING_FRAME = frame(PING, payload=b"12345678")


class Response:
    """What has come on one stream."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.heads: list[list[tuple[str, str]]] = []
        self.body = b""
        self.ended = False
        self.reset: int | None = None

    @property
    def status(self) -> str:
        return dict(self.heads[0])[":status"]

    @property
    def trailers(self) -> dict[str, str]:
        return dict(self.heads[-1]) if len(self.heads) > 1 else {}


class Peer:
    """Makes the frames of a client whose header blocks are right, and reads the server's.

    A frame that the server may not send is an ``AssertionError``: over a window, too large, after the end.
    """

    def __init__(self, window: int = DEFAULT_WINDOW, frame_nbytes: int = 16384) -> None:
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.stream_window = window
        self.window = DEFAULT_WINDOW
        self.frame_nbytes = frame_nbytes
        #: What the server's end lets us send.
        self.send_window = DEFAULT_WINDOW
        self.send_windows: dict[int, int] = {}
        self.responses: dict[int, Response] = {}
        self.goaways: list[tuple[int, int]] = []
        self.settings: list[dict[int, int]] = []
        self.n_acks = 0
        self.pongs: list[bytes] = []
        #: What the server wants to have back.
        self.pings: list[bytes] = []
        self._reader = FrameReader()
        self._block: tuple[Frame, bytes] | None = None

    def greeting(self) -> bytes:
        """What a connection begins with."""
        return PREFACE + self.first_settings()

    def first_settings(self) -> bytes:
        return settings({INITIAL_WINDOW: self.stream_window, MAX_FRAME: self.frame_nbytes})

    def headers(
        self,
        stream_id: int,
        fields: Iterable[tuple[str, str]] = POST,
        *,
        end: bool = False,
        table: bool = True,
    ) -> bytes:
        """A HEADERS frame. ``table``: with the dynamic table."""
        block = self.encoder.encode([(*field, not table) for field in fields])
        return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, block)

    def request(self, stream_id: int, body: bytes = b"", *, end: bool = True) -> bytes:
        """A POST, in frames of 16 KiB."""
        parts = [body[at : at + 16384] for at in range(0, len(body), 16384)] or [b""]
        frames = [data(stream_id, part, end=end and part is parts[-1]) for part in parts]
        return b"".join([self.headers(stream_id), *frames])

    def echo(self) -> bytes:
        """The acknowledgements of the PINGs that have come."""
        pings, self.pings = self.pings, []
        return b"".join(frame(PING, ACK, 0, one) for one in pings)

    def resize(self, window: int) -> bytes:
        """SETTINGS with another window for streams."""
        for response in self.responses.values():
            response.window += window - self.stream_window
        self.stream_window = window
        return settings({INITIAL_WINDOW: window})

    def resize_table(self, nbytes: int) -> bytes:
        """SETTINGS with another size of the table that the server's blocks use; none of them is under way."""
        self.decoder.max_allowed_table_size = nbytes
        return settings({TABLE_SIZE: nbytes})

    def grow(self, stream_id: int, nbytes: int) -> bytes:
        """A WINDOW_UPDATE."""
        if stream_id:
            self.response(stream_id).window += nbytes
        else:
            self.window += nbytes
        return grow(stream_id, nbytes)

    def response(self, stream_id: int) -> Response:
        return self.responses.setdefault(stream_id, Response(self.stream_window))

    @property
    def error(self) -> int:
        """The error code with which the connection was aborted."""
        return self.goaways[-1][1]

    # ---- what the server sends ------------------------------------------------------------

    def read(self, received: bytes) -> list[Frame]:
        """The frames in it, judged."""
        frames = [Frame(*one) for one in self._reader.read(received)]
        for one in frames:
            self._take(one)
        return frames

    def _take(self, one: Frame) -> None:
        assert len(one.payload) <= self.frame_nbytes
        assert self._block is None or one.kind == CONTINUATION
        match one.kind:
            case 0:
                self._take_data(one)
            case 1 | 9:
                self._take_block(one)
            case 3:
                assert self.response(one.stream_id).reset is None
                self.response(one.stream_id).reset = int.from_bytes(one.payload)
            case 4 if one.flags & ACK:
                self.n_acks += 1
            case 4:
                self.settings.append(dict(struct.iter_unpack(">HI", one.payload)))
            case 6 if one.flags == ACK:
                self.pongs.append(one.payload)
            case 6:
                self.pings.append(one.payload)
            case 7:
                assert one.stream_id == 0
                self.goaways.append(struct.unpack(">II", one.payload[:8]))
            case 8:
                self._take_grow(one.stream_id, int.from_bytes(one.payload))
            case other:
                raise AssertionError(f"a server sends no frame of type {other}")

    def _open_response(self, stream_id: int) -> Response:
        response = self.response(stream_id)
        assert not response.ended
        assert response.reset is None
        return response

    def _take_data(self, one: Frame) -> None:
        response = self._open_response(one.stream_id)
        assert response.heads
        response.body += one.payload
        response.window -= len(one.payload)
        self.window -= len(one.payload)
        assert not one.payload or min(response.window, self.window) >= 0
        response.ended = bool(one.flags & END_STREAM)

    def _take_block(self, one: Frame) -> None:
        first, block = self._block or (one, b"")
        assert first.stream_id == one.stream_id
        self._block = first, block + one.payload
        if one.flags & END_HEADERS:
            self._block = None
            response = self._open_response(one.stream_id)
            response.heads.append(self.decoder.decode(block + one.payload))
            response.ended = bool(first.flags & END_STREAM)

    def _take_grow(self, stream_id: int, nbytes: int) -> None:
        assert nbytes > 0
        if stream_id:
            self.send_windows[stream_id] = self.send_windows.get(stream_id, 0) + nbytes
        else:
            self.send_window += nbytes
            assert self.send_window < 1 << 31
