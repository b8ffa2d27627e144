"""The frames of HTTP/2 that are about the connection: SETTINGS, PING, and those that say nothing here; and
how much of what costs a server more than its client one connection may do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from gpuserve.front.exchange.connection import Connection
from gpuserve.front.server.http2 import frames as h2
from gpuserve.front.server.http2.frames import ConnectionFailed, ErrorCode, FrameType, StreamFailed
from gpuserve.front.server.http2.output import Output
from gpuserve.front.server.http2.stream import Stream

#: So much is made for a client that does not read what is sent to it; then it is not read from either.
MAX_UNREAD: Final = 128
#: What costs less than a reset does: a PING, a setting, a look at a stream whose window changes, a part of a
#: body that nobody wants.
LITTLE: Final = 1 / 16
#: And a stream that has something to send then.
_TURN_COST: Final = 1 / 4

#: As many as a connection has streams: a client may give all of them up at once.
BURST: Final = 4096
#: A client whose deadlines pass all the time resets this many streams a second.
PER_S: Final = 1000.0


class Patience:
    """Counts resets, errors, and frames without a use: rapid resets and floods end a connection here."""

    __slots__ = ("_clock", "_left", "_since")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: float = BURST
        self._since = clock()

    def spend(self, n: float = 1) -> None:
        """Count so many more of them; ``ConnectionFailed`` where they are too many."""
        self._left -= n
        if self._left < 0:
            now = self._clock()
            self._left = min(BURST, self._left + (now - self._since) * PER_S)
            self._since = now
            if self._left < 0:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many resets or useless frames")


class Control:
    """Takes the control frames of one connection."""

    __slots__ = ("_output", "_patience", "_streams", "_way", "n_unread", "settled")

    def __init__(
        self, way: Connection, output: Output, patience: Patience, streams: Mapping[int, Stream]
    ) -> None:
        self.settled = False
        #: What was made while the way was full.
        self.n_unread = 0
        self._way = way
        self._output = output
        self._patience = patience
        self._streams = streams

    def on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id or (flags & h2.ACK and payload):
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            raise ConnectionFailed(code, "a SETTINGS frame on a stream, or an acknowledgement with settings")
        if flags & h2.ACK:
            self._patience.spend()
            return
        # Of a setting that is there twice the last counts.
        cost = self._apply(dict(h2.read_settings(payload))) + len(payload) // 6 * LITTLE
        if self.settled:
            self._patience.spend(1 + cost)
        self.settled = True
        self._acknowledge(h2.SETTINGS_ACK)
        self._output.flush_all()

    def on_ping(self, stream_id: int, flags: int, payload: bytes) -> bool:
        """Answer a PING; True: it is an answer itself."""
        if stream_id or len(payload) != 8:
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            raise ConnectionFailed(code, "a PING frame on a stream, or not of 8 bytes")
        self._patience.spend(LITTLE)
        if flags & h2.ACK:
            return True
        self._acknowledge(h2.frame(FrameType.PING, h2.ACK, 0, payload))
        return False

    def on_other(self, kind: int, stream_id: int, payload: bytes) -> None:
        """A PRIORITY, GOAWAY or PUSH_PROMISE frame."""
        if kind == FrameType.PUSH_PROMISE or (kind == FrameType.GOAWAY and stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"a frame that a client does not send: {kind}")
        if kind == FrameType.GOAWAY and len(payload) < 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY frame of less than 8 bytes")
        if kind == FrameType.PRIORITY:
            if not stream_id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
            if len(payload) != 5:
                raise StreamFailed(stream_id, ErrorCode.FRAME_SIZE_ERROR)
        self._patience.spend()

    def count_unread(self) -> None:
        """Something was made for a client that does not read; a slow one may ask for a few of them."""
        self.n_unread += 1
        if self.n_unread >= MAX_UNREAD:
            self._way.pause_reading()

    def _apply(self, settings: Mapping[int, int]) -> float:
        """What it cost: the window of all streams is a walk over them."""
        cost = 0.0
        for setting, value in settings.items():
            if setting == h2.Setting.INITIAL_WINDOW_SIZE:
                n_turns = self._output.set_stream_window(value, self._streams.values())
                cost += len(self._streams) * LITTLE + n_turns * _TURN_COST
            elif setting == h2.Setting.MAX_FRAME_SIZE:
                self._output.set_frame_size(value)
            elif setting == h2.Setting.HEADER_TABLE_SIZE:
                self._output.encoder.resize(value)
        return cost

    def _acknowledge(self, frame: bytes) -> None:
        self._way.write(frame)
        if self._way.full:
            self.count_unread()
