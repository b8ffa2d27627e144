"""HTTP/2 connection management: control frames, flood protection, graceful shutdown and timeouts."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from gpuserve.core.states import StepTable
from gpuserve.front.net import http2_frames as h2
from gpuserve.front.net.admission import ChangeTimer, Limits, MinimumRate, slow_body_text
from gpuserve.front.net.exchange import grpc_timeout_s
from gpuserve.front.net.http2_frames import ConnectionFailed, ErrorCode, FrameType, StreamFailed
from gpuserve.front.net.http2_streams import State, Stream, StreamTable

#: Acknowledgements and streams created for a client that does not read. At this number reading stops, too.
MAX_UNREAD: Final = 128
#: The cost, in resets, of a PING, a setting, a look at a stream whose window changes, or ignored body data.
SMALL_COST: Final = 1 / 16
#: The additional cost of a stream that can send after a window change.
_SENDABLE_STREAM_COST: Final = 1 / 4
#: The burst of resets: a client may cancel all streams of a connection at once.
BURST: Final = 4096
#: Resets per second: the rate of a client whose deadlines expire all the time.
PER_S: Final = 1000.0


class FloodGuard:
    """A token bucket for resets, errors and useless frames. Rapid resets and floods end a connection."""

    __slots__ = ("_clock", "_left", "_since")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: float = BURST
        self._since = clock()

    def spend(self, n: float = 1) -> None:
        """Count ``n`` resets. Raise ConnectionFailed if the client is over the rate."""
        self._left -= n
        if self._left < 0:
            now = self._clock()
            self._left = min(BURST, self._left + (now - self._since) * PER_S)
            self._since = now
            if self._left < 0:
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many resets or useless frames")


class ControlFrames:
    """The handler of SETTINGS, PING, PRIORITY, GOAWAY and PUSH_PROMISE frames of one connection."""

    __slots__ = ("_connection", "_flood_guard", "_table", "n_unread", "settings_received")

    def __init__(self, table: StreamTable, flood_guard: FloodGuard) -> None:
        self.settings_received = False
        #: Acknowledgements and streams created while the connection's write buffer was full.
        self.n_unread = 0
        self._connection = table.connection
        self._table = table
        self._flood_guard = flood_guard

    def on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id or (flags & h2.ACK and payload):
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            raise ConnectionFailed(code, "a SETTINGS frame on a stream, or an acknowledgement with settings")
        if flags & h2.ACK:
            self._flood_guard.spend()
            return
        # The last value counts if a setting is repeated.
        cost = self._apply(dict(h2.read_settings(payload))) + len(payload) // 6 * SMALL_COST
        if self.settings_received:
            self._flood_guard.spend(1 + cost)
        self.settings_received = True
        self._acknowledge(h2.SETTINGS_ACK)
        self._table.output.flush_all()

    def on_ping(self, stream_id: int, flags: int, payload: bytes) -> bool:
        """Answer a PING. Return whether the PING is an acknowledgement itself."""
        if stream_id or len(payload) != 8:
            code = ErrorCode.PROTOCOL_ERROR if stream_id else ErrorCode.FRAME_SIZE_ERROR
            raise ConnectionFailed(code, "a PING frame on a stream, or not of 8 bytes")
        self._flood_guard.spend(SMALL_COST)
        if flags & h2.ACK:
            return True
        self._acknowledge(h2.frame(FrameType.PING, h2.ACK, 0, payload))
        return False

    def on_other(self, kind: int, stream_id: int, payload: bytes) -> None:
        """Check and ignore a PRIORITY or GOAWAY frame; refuse PUSH_PROMISE."""
        if kind == FrameType.PUSH_PROMISE or (kind == FrameType.GOAWAY and stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"a frame that a client does not send: {kind}")
        if kind == FrameType.GOAWAY and len(payload) < 8:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY frame of less than 8 bytes")
        if kind == FrameType.PRIORITY:
            if not stream_id:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
            if len(payload) != 5:
                raise StreamFailed(stream_id, ErrorCode.FRAME_SIZE_ERROR)
        self._flood_guard.spend()

    def count_unread(self) -> None:
        """Count output for a client that does not read, and stop reading at ``MAX_UNREAD``."""
        self.n_unread += 1
        if self.n_unread >= MAX_UNREAD:
            self._connection.pause_reading()

    def _apply(self, settings: Mapping[int, int]) -> float:
        """Apply settings and return their cost: a new initial window is a walk over all streams."""
        cost = 0.0
        streams, output = self._table.open, self._table.output
        for setting, value in settings.items():
            if setting == h2.Http2Setting.INITIAL_WINDOW_SIZE:
                n_sendable = output.set_stream_window(value, streams.values())
                cost += len(streams) * SMALL_COST + n_sendable * _SENDABLE_STREAM_COST
            elif setting == h2.Http2Setting.MAX_FRAME_SIZE:
                output.set_frame_size(value)
            elif setting == h2.Http2Setting.HEADER_TABLE_SIZE:
                output.encoder.resize(value)
        return cost

    def _acknowledge(self, frame: bytes) -> None:
        self._connection.write(frame)
        if self._connection.full:
            self.count_unread()


# ---- graceful shutdown and timeouts -------------------------------------------------------

#: Seconds to wait for the client's acknowledgement of the shutdown PING.
ECHO_TIMEOUT_S: Final = 1.0
#: Seconds without any output being accepted by the client's kernel, after which the connection is closed.
SENDING_S: Final = 60.0
#: The same after the last response was written: output that was not accepted by then never will be.
LAST_OUTPUT_S: Final = 1.0
#: Seconds after the last response for a client that accepts the output and does not close.
LINGER_S: Final = 30.0
#: Seconds without progress of responses that wait for a window: a client may work long on data that it has.
WINDOW_S: Final = 300.0
#: Bytes that are read and ignored after the last response.
IGNORED_NBYTES: Final = 4 << 20
_PING_PAYLOAD: Final = b"last one"


class ShutdownStage(enum.Enum):
    """The stage of a graceful shutdown."""

    SERVING = "streams are accepted"
    ANNOUNCED = "streams are accepted, and the client was sent a first GOAWAY"
    FINAL = "no stream is accepted"


_STAGES: Final = StepTable(
    "an HTTP/2 connection",
    {
        ShutdownStage.SERVING: {ShutdownStage.ANNOUNCED},
        ShutdownStage.ANNOUNCED: {ShutdownStage.FINAL},
        ShutdownStage.FINAL: (),
    },
)


class GracefulShutdown:
    """The shutdown of one connection without losing requests in flight (RFC 9113, 6.8). Pure.

    ::

                 announce                     the client acknowledges the PING, or is late
        SERVING ──────────► ANNOUNCED ────────────────────────────────────────────────────► FINAL
                 GOAWAY without a last stream,                   GOAWAY with the last
                 followed by a PING                              stream that was opened

    The client opens no stream after it has read the first GOAWAY. The acknowledgement of the PING shows that
    the client has read the GOAWAY, and every stream opened before has arrived by then.
    """

    __slots__ = ("_final_id", "_stage", "_timer")

    def __init__(self) -> None:
        self._stage = ShutdownStage.SERVING
        self._final_id = h2.STREAM_MASK
        self._timer = ChangeTimer()

    @property
    def is_serving(self) -> bool:
        return self._stage is ShutdownStage.SERVING

    def announce(self) -> bytes:
        """Return the frames that announce the shutdown."""
        self._enter(ShutdownStage.ANNOUNCED)
        return h2.goaway(h2.STREAM_MASK, ErrorCode.NO_ERROR) + h2.frame(FrameType.PING, 0, 0, _PING_PAYLOAD)

    def is_echo(self, payload: bytes) -> bool:
        """Return whether a PING acknowledgement shows that the client has read the announcement."""
        return self._stage is ShutdownStage.ANNOUNCED and payload == _PING_PAYLOAD

    def is_late(self, now: float) -> bool:
        """Return whether the client's acknowledgement is overdue."""
        unchanged_s = self._timer.unchanged_s(self._stage, now)
        return self._stage is ShutdownStage.ANNOUNCED and unchanged_s > ECHO_TIMEOUT_S

    def finish(self, last_id: int) -> bytes:
        """Return the final GOAWAY frame, which names the last stream that is served."""
        self._enter(ShutdownStage.FINAL)
        self._final_id = last_id
        return h2.goaway(last_id, ErrorCode.NO_ERROR)

    def last_id(self, opened_id: int) -> int:
        """Return the last stream to name in a GOAWAY for an error: at most the one named before."""
        return min(opened_id, self._final_id)

    def _enter(self, stage: ShutdownStage) -> None:
        self._stage = _STAGES.step(self._stage, stage)


class ConnectionTimeouts:
    """The limits on what one connection may take after and during its responses. Pure."""

    __slots__ = ("_finished", "_held", "_ignored_nbytes", "_unsent")

    def __init__(self) -> None:
        self._unsent = ChangeTimer()
        self._finished = ChangeTimer()
        self._held = ChangeTimer()
        self._ignored_nbytes = 0

    def is_late(self, now: float, unsent_nbytes: int, *, finished: bool) -> bool:
        """Return whether the connection is to be closed. ``finished``: the last response was written."""
        stuck_s = self._unsent.unchanged_s((unsent_nbytes, finished), now)
        finished_s = self._finished.unchanged_s(finished, now)
        if finished:
            return stuck_s > LAST_OUTPUT_S or finished_s > LINGER_S
        return unsent_nbytes > 0 and stuck_s > SENDING_S

    def is_too_much(self, nbytes: int) -> bool:
        """Count ``nbytes`` received after the last response. Return whether the client sends too much."""
        self._ignored_nbytes += nbytes
        return self._ignored_nbytes > IGNORED_NBYTES

    def is_stuck(self, now: float, held_nbytes: int) -> bool:
        """Return whether ``held_nbytes`` of responses have waited too long for the client's windows."""
        stuck_s = self._held.unchanged_s(held_nbytes, now)
        return held_nbytes > 0 and stuck_s > WINDOW_S


_DEADLINE_EXCEEDED: Final = 4
_HEAD_NBYTES: Final = 1 << 10


class _IncompleteBody(NamedTuple):
    """A body that was incomplete at a check: its rate, and the deadline of its call.

    ``weight`` is 1 for the request and 1 more for each KiB of its head.
    """

    rate: MinimumRate
    ends_at: float | None
    timeout_s: float | None
    weight: int


class BodyTimeouts:
    """The incomplete request bodies of one connection, tracked from the first check (once a second). Pure."""

    __slots__ = ("_incomplete",)

    def __init__(self) -> None:
        self._incomplete: dict[int, _IncompleteBody] = {}

    @property
    def weight(self) -> int:
        """The sum of the weights as of the last check."""
        return sum([one.weight for one in self._incomplete.values()])

    def late(
        self, now: float, streams: Iterable[Stream], limits: Limits, *, has_room: bool
    ) -> Iterator[tuple[Stream, str]]:
        """Yield overdue streams, and why. Without ``has_room`` slow bodies are not the clients' fault."""
        incomplete: dict[int, _IncompleteBody] = {}
        for one in streams:
            # A stream of messages may be open as long as the client likes.
            if one.state is State.HALF_CLOSED_REMOTE or getattr(one.receiver, "is_stream", False):
                continue
            if (body := self._incomplete.get(one.id)) is None:
                timeout_s = grpc_timeout_s(one.head.headers) if one.head.is_grpc else None
                head_nbytes = sum([len(name) + len(value) for name, value in one.head.headers])
                ends_at = None if timeout_s is None else now + timeout_s
                body = _IncompleteBody(MinimumRate(), ends_at, timeout_s, 1 + head_nbytes // _HEAD_NBYTES)
            incomplete[one.id] = body
        self._incomplete = incomplete
        for stream in [one for one in streams if one.id in incomplete]:
            rate, ends_at, timeout_s, _ = incomplete[stream.id]
            moved = stream.received_nbytes if has_room and stream.receive_window > 0 else None
            if ends_at is not None and now >= ends_at:
                yield stream, f"the request did not come whole within its {timeout_s:g} s"
            elif rate.is_slow(now, moved, limits.body_grace_s, limits.min_body_rate):
                yield stream, slow_body_text(limits)


def refuse_late(stream: Stream, text: str) -> None:
    """Answer an overdue request with an error unless its response has started, and end the stream."""
    if not stream.started:
        stream.send_error(text, 408, _DEADLINE_EXCEEDED)
    stream.fail(ErrorCode.NO_ERROR)
