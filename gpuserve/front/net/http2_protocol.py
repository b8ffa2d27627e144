"""HTTP/2 on one connection (RFC 9113): reads frames, opens streams, and enforces limits on the client.

Responses are sent by ``Stream``. An inference request costs one ``Stream`` and a look-up: clients send the
same header block again and again, so decoded heads are remembered while the dynamic table is unchanged.
"""

from __future__ import annotations

import logging
from typing import Final

from gpuserve.front.net import http2_frames as h2
from gpuserve.front.net.admission import ChangeTimer
from gpuserve.front.net.connection import Connection
from gpuserve.front.net.exchange import Head, Piece, RequestHandler
from gpuserve.front.net.http2_control import (
    SMALL_COST,
    BodyTimeouts,
    ConnectionTimeouts,
    ControlFrames,
    FloodGuard,
    GracefulShutdown,
    refuse_late,
)
from gpuserve.front.net.http2_frames import ConnectionFailed, ErrorCode, FrameType, HeaderBlock, StreamFailed
from gpuserve.front.net.http2_streams import (
    CONNECTION_WINDOW,
    LONG_HEAD_NBYTES,
    RECEIVE_WINDOW,
    State,
    Stream,
    StreamTable,
)

logger = logging.getLogger(__name__)

#: Concurrent streams of one connection. The client holds further streams back; requests are queued anyway.
MAX_CONCURRENT_STREAMS: Final = 4096
#: The largest frame that is accepted. A DATA frame is passed on as it arrives.
FRAME_NBYTES: Final = 256 << 10
#: The largest frame that is buffered until complete: other types, and DATA frames with padding.
_BUFFERED_FRAME_NBYTES: Final = h2.MAX_HEAD_NBYTES + 256
#: The stream id of a frame of unknown type, which is skipped.
_NO_STREAM: Final = -1
#: A CONTINUATION frame below this size counts as abuse: it only keeps the server busy.
_SHORT_CONTINUATION_NBYTES: Final = 1024
#: Frames of small requests that are read, and streams dropped, before the loop budget is checked.
_UNTIMED_FRAMES: Final = 16
#: A connection with so many open streams lets others go first: only two of its frames are read untimed.
_BUSY_STREAMS: Final = 8
_UNTIMED_FRAMES_OF_BUSY: Final = _UNTIMED_FRAMES - 2
#: Other frames count as one more for each so many bytes.
_LONG_FRAME_NBYTES: Final = 256
#: A WINDOW_UPDATE below this size counts as abuse while responses wait.
_TINY_WINDOW_NBYTES: Final = 1024
_SETTINGS: Final = {
    h2.Http2Setting.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
    h2.Http2Setting.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
    h2.Http2Setting.MAX_FRAME_SIZE: FRAME_NBYTES,
    h2.Http2Setting.MAX_HEADER_LIST_SIZE: h2.MAX_HEAD_NBYTES,
}
_unpack: Final = h2.HEAD.unpack_from


class Http2:
    """HTTP/2 on one connection (a ``ConnectionProtocol``): reads frames; other objects do the rest."""

    def __init__(self, connection: Connection, handler: RequestHandler) -> None:
        self.connection = connection
        self._handler = handler
        self._table = StreamTable(connection)
        self._output = self._table.output
        self._streams = self._table.open
        self._last_id = 0
        self._blocks = h2.HeaderBlockReader()
        #: The beginning of an incomplete frame.
        self._buffered = b""
        #: An incomplete DATA or skipped frame: its stream id, its flags, and the bytes still missing.
        self._partial_frame = (0, 0, 0)
        self._flood_guard = FloodGuard()
        self._control = ControlFrames(self._table, self._flood_guard)
        self._shutdown = GracefulShutdown()
        #: Whether further streams are refused.
        self._draining = False
        #: Whether the last response was written; further input is ignored.
        self._finished = False
        self._timeouts = ConnectionTimeouts()
        self._bodies = BodyTimeouts()
        self._frame_timer = ChangeTimer()
        self._idle_timer = ChangeTimer()
        window_growth = h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)
        connection.write(h2.settings_frame(_SETTINGS) + window_growth)

    @property
    def sent(self) -> tuple[int, int]:
        unsent_nbytes = self.connection.unsent_nbytes
        return self._output.sent_nbytes - unsent_nbytes, self._output.held_nbytes + unsent_nbytes

    @property
    def unanswered(self) -> list[str]:
        return [stream.head.path for stream in self._streams.values()]

    # ---- input ----------------------------------------------------------------------------

    def feed(self, data: Piece) -> None:
        if self._finished:
            if self._timeouts.is_too_much(len(data)):
                self.connection.abort()
            return
        try:
            if self._partial_frame[2]:
                data = self._continue_frame(data)
            elif self._buffered:
                data, self._buffered = self._buffered + data, b""
            self._read(data)
        except ConnectionFailed as failure:
            self._fail(failure)

    def resume(self) -> None:
        if self._finished:
            self._drop_streams()
        elif self._buffered:
            self.feed(b"")

    def _read(self, data: Piece) -> None:
        """Read every whole frame. Buffer the beginning of another, or the rest if the budget is spent."""
        position, nbytes, streams, heads = 0, len(data), self._streams, self._blocks.heads
        n = _UNTIMED_FRAMES_OF_BUSY if len(streams) >= _BUSY_STREAMS else 0
        while nbytes - position >= h2.HEAD_NBYTES:
            n += 1
            if n > _UNTIMED_FRAMES and self.connection.defers():
                self._buffered = bytes(data[position:])
                return
            high, low, kind, flags, stream_id = _unpack(data, position)
            length = high << 16 | low
            start = position + h2.HEAD_NBYTES
            end = start + length
            if end > nbytes or length > FRAME_NBYTES:
                break
            position = end
            # The fast path: the two frames of a small request.
            if kind == 0 and flags <= 1 and (stream := streams.get(stream_id)) is not None:
                if length <= stream.receive_window and self._blocks.unfinished is None:
                    if flags:
                        self._receive_data(stream, data[start:end], length, True)
                    else:
                        # Consecutive DATA frames of a body are passed on as one part.
                        parts = [data[start:end]]
                        room = stream.receive_window - length
                        position, ended = h2.body_run(data, end, stream_id, room, parts)
                        body = parts[0] if len(parts) == 1 else b"".join(parts)
                        self._receive_data(stream, body, len(body), ended)
                    continue
            elif kind == 1 and flags == h2.END_HEADERS and stream_id > self._last_id:
                head = heads.get(bytes(data[start:end])) if length <= h2.REMEMBERED_NBYTES else None
                # An odd id without the reserved bit.
                if head is not None and stream_id & 0x80000001 == 1 and self._blocks.unfinished is None:
                    self._open(stream_id, head, False)
                    continue
            self._on_frame(kind, flags, stream_id & h2.STREAM_MASK, bytes(data[start:end]))
            n += length // _LONG_FRAME_NBYTES
        if position < nbytes and not self._finished:
            self._begin_frame(data[position:])

    def _begin_frame(self, data: Piece) -> None:
        if len(data) >= h2.HEAD_NBYTES:
            high, low, kind, flags, stream_id = _unpack(data)
            length = high << 16 | low
            if length > FRAME_NBYTES:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if not kind and flags <= 1 and self._blocks.unfinished is None:
                left = length + h2.HEAD_NBYTES - len(data)
                self._partial_frame = stream_id & h2.STREAM_MASK, flags, left
                if len(data) > h2.HEAD_NBYTES:
                    body = data[h2.HEAD_NBYTES :]
                    self._on_body(stream_id & h2.STREAM_MASK, body, length - left, end=False)
                return
            is_open = self._control.settings_received and self._blocks.unfinished is None
            if kind > FrameType.CONTINUATION and is_open:
                self._flood_guard.spend()
                self._partial_frame = _NO_STREAM, 0, length + h2.HEAD_NBYTES - len(data)
                return
            if length > _BUFFERED_FRAME_NBYTES:
                text = f"{length} bytes in a frame that is no body's"
                raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, text)
        self._buffered = bytes(data)

    def _continue_frame(self, data: Piece) -> Piece:
        stream_id, flags, left = self._partial_frame
        part = data[:left]
        left -= len(part)
        self._partial_frame = stream_id, flags, left
        if stream_id != _NO_STREAM:
            self._on_body(stream_id, part, len(part), end=flags == 1 and not left)
        return data[len(part) :]

    # ---- frames ---------------------------------------------------------------------------

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._blocks.unfinished is not None and kind != FrameType.CONTINUATION:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._control.settings_received and kind != FrameType.SETTINGS:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        try:
            match kind:
                case FrameType.HEADERS:
                    self._on_block(self._blocks.begin(stream_id, flags, payload))
                case FrameType.DATA:  # padded, empty, or of an unknown stream: not the fast path
                    data = h2.unpadded(flags & h2.PADDED, payload)
                    self._on_body(stream_id, data, len(payload), bool(flags & h2.END_STREAM))
                case FrameType.RST_STREAM:
                    self._on_reset(stream_id, payload)
                case FrameType.WINDOW_UPDATE:
                    self._on_window_update(stream_id, payload)
                case FrameType.SETTINGS:
                    self._control.on_settings(stream_id, flags, payload)
                case FrameType.PING:
                    self._on_ping(stream_id, flags, payload)
                case FrameType.CONTINUATION:
                    self._on_continuation(stream_id, flags, payload)
                case FrameType.GOAWAY | FrameType.PRIORITY | FrameType.PUSH_PROMISE:
                    self._control.on_other(kind, stream_id, payload)
                case _:
                    self._flood_guard.spend()
        except StreamFailed as failure:
            self._fail_stream(failure)

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._control.on_ping(stream_id, flags, payload) and self._shutdown.is_echo(payload):
            self._refuse_streams()

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) < _SHORT_CONTINUATION_NBYTES and not flags & h2.END_HEADERS:
            self._flood_guard.spend()
        self._on_block(self._blocks.continue_block(stream_id, flags, payload))

    def _on_block(self, block: HeaderBlock | None) -> None:
        """Process a complete header block: the head of a new stream, or trailers. None: incomplete."""
        if block is None:
            return
        stream_id, end = block.stream_id, bool(block.flags & h2.END_STREAM)
        if stream_id > self._last_id:
            self._last_id = stream_id
            head = self._blocks.head(block)
            self._open(stream_id, head, end)
            if len(block.data) >= LONG_HEAD_NBYTES and stream_id in self._streams:
                self._table.hold_head(stream_id, len(block.data))
            return
        stream = self._streams.get(stream_id)
        if stream is None and stream_id not in self._table.reset_ids:
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, f"HEADERS on the closed stream {stream_id}")
        if stream is not None and stream.state is State.HALF_CLOSED_REMOTE:
            self._blocks.skip(block)
            raise StreamFailed(stream_id, ErrorCode.STREAM_CLOSED)
        self._blocks.check_trailers(block)
        if stream is None:
            return
        if end or stream.state is not State.OPEN:
            stream.on_data(b"", end=True)
        else:
            raise StreamFailed(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _open(self, stream_id: int, head: Head, end: bool) -> None:
        self._last_id = stream_id
        if self._draining or len(self._streams) >= MAX_CONCURRENT_STREAMS:
            self._fail_stream(StreamFailed(stream_id, ErrorCode.REFUSED_STREAM))
            return
        stream = self._streams[stream_id] = Stream(self._table, stream_id, head)
        stream.receiver = self._handler(stream)
        if end:
            stream.on_data(b"", end=True)
        if self.connection.full:
            self._control.count_unread()

    def _on_body(self, stream_id: int, data: Piece, length: int, end: bool) -> None:
        """Process a part of a body. ``length`` is what the part uses of the windows."""
        stream = self._streams.get(stream_id)
        if stream is not None and length <= stream.receive_window:
            self._receive_data(stream, data, length, end)
            return
        self._table.receive_window -= length
        self._table.credit(length)
        if not data and not end:
            self._flood_guard.spend()
        self._flood_guard.spend(SMALL_COST)
        if stream is not None:
            self._fail_stream(StreamFailed(stream_id, ErrorCode.FLOW_CONTROL_ERROR))
        elif self._is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is not open")
        elif stream_id not in self._table.reset_ids:
            self._fail_stream(StreamFailed(stream_id, ErrorCode.STREAM_CLOSED))

    def _receive_data(self, stream: Stream, data: Piece, length: int, end: bool) -> None:
        table = self._table
        table.receive_window -= length
        if table.receive_window < 0:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
        if not end:
            stream.receive_window -= length
            if not data:
                self._flood_guard.spend()
        if length != len(data):
            stream.on_padding(length - len(data))
        try:
            stream.on_data(data, end)
        except StreamFailed as failure:
            self._fail_stream(failure)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise h2.wrong_size(payload)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._flood_guard.spend()
            stream.drop()
        elif self._is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}")

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise h2.wrong_size(payload)
        nbytes = int.from_bytes(payload) & h2.MAX_WINDOW
        if nbytes < _TINY_WINDOW_NBYTES and self._output.held_nbytes:
            self._flood_guard.spend()
        if not stream_id:
            self._output.grow_window(nbytes)
            self._output.flush_all()
            return
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._output.grow_stream_window(stream, nbytes)
        elif self._is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}")

    def _is_idle(self, stream_id: int) -> bool:
        """Return whether the client has not opened this stream, or cannot open such a stream."""
        return stream_id > self._last_id or not stream_id & 1

    # ---- for the connection ---------------------------------------------------------------

    def drained(self) -> None:
        self._output.flush_all()
        if not self.connection.full:
            self._control.n_unread = 0
            self.connection.resume_reading()

    def lost(self) -> None:
        self._finished = True
        self._drop_streams()

    def _drop_streams(self) -> None:
        """Drop all streams, as many in one loop iteration as the budget allows: thousands take 0.1 s."""
        for n, stream in enumerate(list(self._streams.values()), 1):
            stream.drop()
            if not n % _UNTIMED_FRAMES and self._streams and self.connection.defers():
                return

    def announce(self) -> None:
        if self._shutdown.is_serving and not self._finished:
            self.connection.write(self._shutdown.announce())

    @property
    def aware(self) -> bool:
        return self._draining or self._finished

    def shut_down(self) -> None:
        self.announce()

    def _refuse_streams(self) -> None:
        """Refuse further streams: the client has read the announcement, or its acknowledgement is overdue."""
        self._draining = True
        self.connection.write(self._shutdown.finish(self._last_id))
        self._table.on_empty = self._finish
        if not self._streams:
            self._finish()

    def check(self, now: float) -> None:
        connection, limits = self.connection, self.connection.limits
        if not self._finished:
            self._table.check_heads()
            self._check_frames(now)
            self._check_idleness(now)
            has_room = self._table.receive_window > 0
            late = self._bodies.late(now, list(self._streams.values()), limits, has_room=has_room)
            for stream, text in late:
                connection.count_late("body")
                refuse_late(stream, text)
            connection.n_incomplete = self._bodies.weight
        if self._shutdown.is_late(now) and not self._finished:
            self._refuse_streams()
        if self._timeouts.is_stuck(now, self._output.held_nbytes):
            self._fail(ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "the answers are not taken"))
        unsent_nbytes = connection.unsent_nbytes
        if self._timeouts.is_late(now, unsent_nbytes, finished=self._finished):
            if unsent_nbytes:
                connection.abort()
            else:
                connection.close()

    def _check_frames(self, now: float) -> None:
        """Close a connection on which a frame or a header block has begun and does not continue."""
        begun = bool(self._buffered) or self._blocks.unfinished is not None
        begun_s = self._frame_timer.unchanged_s((begun, self._last_id, self._table.receive_window), now)
        if begun and begun_s > self.connection.limits.head_timeout_s:
            self.connection.count_late("head")
            self._fail(ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block takes too long"))

    def _check_idleness(self, now: float) -> None:
        """Announce the shutdown to a client that has sent no request for ``idle_timeout_s``."""
        idle_s = self._idle_timer.unchanged_s((self._last_id, bool(self._streams)), now)
        is_idle = not (self._streams or self._finished) and self._shutdown.is_serving
        if is_idle and idle_s > self.connection.limits.idle_timeout_s:
            self.connection.count_late("idle")
            self.announce()

    def _fail_stream(self, failure: StreamFailed) -> None:
        self._flood_guard.spend(failure.cost)
        stream = self._streams.get(failure.stream_id)
        if stream is not None:
            stream.fail(failure.code)
        elif self._is_idle(failure.stream_id):
            raise ConnectionFailed(failure.code, f"a broken frame on stream {failure.stream_id}")
        elif failure.stream_id not in self._table.reset_ids:
            self._table.note_reset(failure.stream_id)
            self.connection.write(h2.rst_stream(failure.stream_id, failure.code))

    def _fail(self, failure: ConnectionFailed) -> None:
        logger.debug("closed an HTTP/2 connection: %s", failure)
        last_id = self._shutdown.last_id(self._last_id)
        self.connection.write(h2.goaway(last_id, failure.code, str(failure)))
        self.lost()
        self._finish()

    def _finish(self) -> None:
        """Write nothing more, and ignore further input: closing at once could discard output in flight."""
        self._finished = True
        self._buffered = b""
        self._table.on_empty = None
        self.connection.resume_reading()
        if self.connection.endpoints.tls:
            self.connection.close()  # which waits for the client's close_notify
        else:
            self.connection.end_writing()
