"""HTTP/2 on one connection (RFC 9113): frames in, streams to ``accept``, and what a client may not do.
Responses are made by ``Stream``. A request costs one here and a look-up: a client sends the same header block
again and again, and what it decodes to is remembered while the dynamic table is the same.
"""

from __future__ import annotations

import logging
from typing import Final

from gpuserve.front.exchange.connection import Connection
from gpuserve.front.exchange.exchange import Accept, Head, Piece
from gpuserve.front.exchange.watch import Watch
from gpuserve.front.server.http2 import frames as h2
from gpuserve.front.server.http2.blocks import MAX_HEAD_NBYTES, REMEMBERED_NBYTES, Block, BlockReader
from gpuserve.front.server.http2.bodies import Bodies, refuse_late
from gpuserve.front.server.http2.control import LITTLE, Control, Patience
from gpuserve.front.server.http2.frames import ConnectionFailed, ErrorCode, FrameType, StreamFailed
from gpuserve.front.server.http2.leaving import Ending, Leaving
from gpuserve.front.server.http2.output import Output
from gpuserve.front.server.http2.stream import RECEIVE_WINDOW, State, Stream

logger = logging.getLogger(__name__)

#: Streams of one connection at once. More wait in the client; requests of more are queued anyway.
MAX_CONCURRENT_STREAMS: Final = 4096
#: What a client may send on one connection before it is used up.
CONNECTION_WINDOW: Final = 64 << 20
#: What a client may put in one frame. What comes of a DATA frame is used at once; others, and those with
#: padding, are kept until they are whole, so they may have what a head may.
FRAME_NBYTES: Final = 256 << 10
_WHOLE_NBYTES: Final = MAX_HEAD_NBYTES + 256
#: Of a frame that is passed over, for it is of no type that is known.
_NO_STREAM: Final = -1
#: Streams that we ended first, of which something may still come.
_EARLY: Final = 1024
#: Who cuts a header block into parts this small wants to keep us busy.
_SHORT_CONTINUATION_NBYTES: Final = 1024
#: Frames of small requests that are taken, and streams dropped, without a look at the clock.
_UNTIMED_FRAMES: Final = 16
#: Others count as one more for so many bytes of them.
_LONG_FRAME_NBYTES: Final = 256
#: Who takes an answer in parts this small as well.
_TINY_NBYTES: Final = 1024
_SETTINGS: Final = {
    h2.Setting.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
    h2.Setting.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
    h2.Setting.MAX_FRAME_SIZE: FRAME_NBYTES,
    h2.Setting.MAX_HEADER_LIST_SIZE: MAX_HEAD_NBYTES,
}
_unpack: Final = h2.HEAD.unpack_from


class Http2:
    """The protocol on one connection, a ``Spoken``, which has any number of streams. Parts of it are objects
    of their own: what is sent (``Output``), header blocks, control frames, leave. What is left is the way of
    frames in, which is read as one.
    """

    def __init__(self, way: Connection, accept: Accept) -> None:
        self.way = way
        self.ends = way.ends
        self.output = Output(way)
        self._accept = accept
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._blocks = BlockReader()
        #: The beginning of a frame that has not come whole.
        self._kept = b""
        #: Of a DATA frame that has not, or one to pass over: its stream, its flags, and how much is to come.
        self._body_left = (0, 0, 0)
        self._receive_window = CONNECTION_WINDOW
        self._uncredited = 0
        self._early: dict[int, None] = {}
        self._patience = Patience()
        self._control = Control(way, self.output, self._patience, self._streams)
        self._leaving = Leaving()
        #: No stream is taken any more.
        self._draining = False
        #: Nothing that comes is of interest any more.
        self._over = False
        self._ending = Ending()
        self._bodies = Bodies()
        self._frame_watch = Watch()
        self._idle_watch = Watch()
        grown = h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)
        way.write(h2.settings_frame(_SETTINGS) + grown)

    @property
    def sent(self) -> tuple[int, int]:
        unsent_nbytes = self.way.unsent_nbytes
        return self.output.sent_nbytes - unsent_nbytes, self.output.held_nbytes + unsent_nbytes

    @property
    def unanswered(self) -> list[str]:
        return [stream.head.path for stream in self._streams.values()]

    # ---- bytes in -------------------------------------------------------------------------

    def feed(self, data: Piece) -> None:
        if self._over:
            if self._ending.is_too_much(len(data)):
                self.way.abort()
            return
        try:
            if self._body_left[2]:
                data = self._go_on(data)
            elif self._kept:
                data, self._kept = self._kept + data, b""
            self._read(data)
        except ConnectionFailed as failure:
            self._fail(failure)

    def go_on(self) -> None:
        if self._over:
            self._drop_streams()
        elif self._kept:
            self.feed(b"")

    def _read(self, data: Piece) -> None:
        """Every frame in the data; the beginning of another is kept, or passed on if it is a body's, and so
        is everything from where the turn is over.
        """
        position, nbytes, streams, heads, n = 0, len(data), self._streams, self._blocks.heads, 0
        while nbytes - position >= h2.HEAD_NBYTES:
            n += 1
            if n > _UNTIMED_FRAMES and self.way.puts_off():
                self._kept = bytes(data[position:])
                return
            high, low, kind, flags, stream_id = _unpack(data, position)
            length = high << 16 | low
            start = position + h2.HEAD_NBYTES
            end = start + length
            if end > nbytes or length > FRAME_NBYTES:
                break
            position = end
            # The two frames of a small request, without further ado.
            if kind == 0 and flags <= 1 and (stream := streams.get(stream_id)) is not None:
                if length <= stream.receive_window and self._blocks.unfinished is None:
                    if flags:
                        self._take(stream, data[start:end], length, True)
                    else:
                        position = self._take_run(stream, data, start, end)
                    continue
            elif kind == 1 and flags == h2.END_HEADERS and stream_id > self._last_id:
                head = heads.get(bytes(data[start:end])) if length <= REMEMBERED_NBYTES else None
                # Odd, and without the reserved bit.
                if head is not None and stream_id & 0x80000001 == 1 and self._blocks.unfinished is None:
                    self._open(stream_id, head, False)
                    continue
            self._frame(kind, flags, stream_id & h2.STREAM_MASK, bytes(data[start:end]))
            n += length // _LONG_FRAME_NBYTES
        if position < nbytes and not self._over:
            self._begin(data[position:])

    def _take_run(self, stream: Stream, data: Piece, start: int, end: int) -> int:
        """Take a body's frame, and those of the body that follow it at once, as one part; where they end."""
        parts = [data[start:end]]
        end, ended = h2.body_run(data, end, stream.id, stream.receive_window - (end - start), parts)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._take(stream, body, len(body), ended)
        return end

    def _begin(self, data: Piece) -> None:
        """Keep the beginning of a frame; of a body's, pass on what there is."""
        if len(data) >= h2.HEAD_NBYTES:
            high, low, kind, flags, stream_id = _unpack(data)
            length = high << 16 | low
            if length > FRAME_NBYTES:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if not kind and flags <= 1 and self._blocks.unfinished is None:
                left = length + h2.HEAD_NBYTES - len(data)
                self._body_left = stream_id & h2.STREAM_MASK, flags, left
                if len(data) > h2.HEAD_NBYTES:
                    self._body(stream_id & h2.STREAM_MASK, data[h2.HEAD_NBYTES :], length - left, end=False)
                return
            if kind > FrameType.CONTINUATION and self._control.settled and self._blocks.unfinished is None:
                self._patience.spend()
                self._body_left = _NO_STREAM, 0, length + h2.HEAD_NBYTES - len(data)
                return
            if length > _WHOLE_NBYTES:
                raise ConnectionFailed(
                    ErrorCode.ENHANCE_YOUR_CALM, f"{length} bytes in a frame that is no body's"
                )
        self._kept = bytes(data)

    def _go_on(self, data: Piece) -> Piece:
        """Pass on what has come of a DATA frame that began before; what comes after it."""
        stream_id, flags, left = self._body_left
        part = data[:left]
        left -= len(part)
        self._body_left = stream_id, flags, left
        if stream_id != _NO_STREAM:
            self._body(stream_id, part, len(part), end=flags == 1 and not left)
        return data[len(part) :]

    # ---- frames in ------------------------------------------------------------------------

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._blocks.unfinished is not None and kind != FrameType.CONTINUATION:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._control.settled and kind != FrameType.SETTINGS:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        try:
            match kind:
                case FrameType.HEADERS:
                    self._on_headers(stream_id, flags, payload)
                case FrameType.DATA:
                    self._on_data(stream_id, flags, payload)
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
                    self._patience.spend()
        except StreamFailed as failure:
            self._fail_stream(failure)

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        block = self._blocks.begin(stream_id, flags, payload)
        if block is not None:
            self._on_block(block)

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) < _SHORT_CONTINUATION_NBYTES and not flags & h2.END_HEADERS:
            self._patience.spend()
        block = self._blocks.go_on(stream_id, flags, payload)
        if block is not None:
            self._on_block(block)

    def _on_block(self, block: Block) -> None:
        """A header block is complete: of a new stream, or the trailers of one that is there."""
        stream_id, end = block.stream_id, bool(block.flags & h2.END_STREAM)
        if stream_id > self._last_id:
            self._last_id = stream_id
            self._open(stream_id, self._blocks.head(block), end)
            return
        stream = self._streams.get(stream_id)
        if stream is None and stream_id not in self._early:
            raise ConnectionFailed(ErrorCode.STREAM_CLOSED, f"HEADERS on the closed stream {stream_id}")
        if stream is not None and stream.state is State.HALF_CLOSED_REMOTE:
            self._blocks.skip(block)
            raise StreamFailed(stream_id, ErrorCode.STREAM_CLOSED)
        self._blocks.trailers(block)
        if stream is None:
            return
        if end or stream.state is not State.OPEN:
            stream.receive(b"", end=True)
        else:
            raise StreamFailed(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _open(self, stream_id: int, head: Head, end: bool) -> None:
        self._last_id = stream_id
        if self._draining or len(self._streams) >= MAX_CONCURRENT_STREAMS:
            self._fail_stream(StreamFailed(stream_id, ErrorCode.REFUSED_STREAM))
            return
        stream = self._streams[stream_id] = Stream(self, stream_id, head, self.output.stream_window)
        stream.sink = self._accept(stream)
        if end:
            stream.receive(b"", end=True)
        if self.way.full:
            self._control.count_unread()

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        """A DATA frame that is not the usual one: padded, empty, or of no stream that is there."""
        data = h2.unpadded(flags & h2.PADDED, payload)
        self._body(stream_id, data, len(payload), bool(flags & h2.END_STREAM))

    def _body(self, stream_id: int, data: Piece, length: int, end: bool) -> None:
        """A part of a body; ``length`` is what it takes of the windows."""
        stream = self._streams.get(stream_id)
        if stream is not None and length <= stream.receive_window:
            self._take(stream, data, length, end)
            return
        self._receive_window -= length
        self.credit(length)
        if not data and not end:
            self._patience.spend()
        self._patience.spend(LITTLE)
        if stream is not None:
            self._fail_stream(StreamFailed(stream_id, ErrorCode.FLOW_CONTROL_ERROR))
        elif self._is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is not open")
        elif stream_id not in self._early:
            self._fail_stream(StreamFailed(stream_id, ErrorCode.STREAM_CLOSED))

    def _take(self, stream: Stream, data: Piece, length: int, end: bool) -> None:
        self._receive_window -= length
        if self._receive_window < 0:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
        if not end:
            stream.receive_window -= length
            if not data:
                self._patience.spend()
        if length != len(data):
            stream.pad(length - len(data))
        try:
            stream.receive(data, end)
        except StreamFailed as failure:
            self._fail_stream(failure)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise h2.wrong_size(payload)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._patience.spend()
            stream.drop()
        elif self._is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}")

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise h2.wrong_size(payload)
        nbytes = int.from_bytes(payload) & h2.MAX_WINDOW
        if nbytes < _TINY_NBYTES and self.output.held_nbytes:
            self._patience.spend()
        if not stream_id:
            self.output.grow(nbytes)
            self.output.flush_all()
            return
        stream = self._streams.get(stream_id)
        if stream is not None:
            self.output.grow_stream(stream, nbytes)
        elif self._is_idle(stream_id):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}")

    def _is_idle(self, stream_id: int) -> bool:
        """Whether the client has not opened this stream, or cannot."""
        return stream_id > self._last_id or not stream_id & 1

    # ---- for the streams ------------------------------------------------------------------

    def credit(self, nbytes: int) -> None:
        """So much of what came is used up: the client may send as much again."""
        self._uncredited += nbytes
        if self._uncredited >= CONNECTION_WINDOW // 2:
            self._receive_window += self._uncredited
            self.way.write(h2.window_update(0, self._uncredited))
            self._uncredited = 0

    def forget(self, stream: Stream, held_nbytes: int) -> None:
        """A stream is closed; so much of its body was not used up before."""
        self._uncredited += held_nbytes
        if self._uncredited >= CONNECTION_WINDOW // 2:
            self.credit(0)
        self._streams.pop(stream.id, None)
        if self._draining and not self._streams:
            self._finish()

    def forget_early(self, stream_id: int) -> None:
        """What still comes of this stream is to be dropped."""
        if len(self._early) >= _EARLY:
            del self._early[next(iter(self._early))]
        self._early[stream_id] = None

    # ---- the connection's word ------------------------------------------------------------

    def drained(self) -> None:
        self.output.flush_all()
        if not self.way.full:
            self._control.n_unread = 0
            self.way.resume_reading()

    def lost(self) -> None:
        self._over = True
        self._drop_streams()

    def _drop_streams(self) -> None:
        """All that there are, so many in a turn: thousands of them take a tenth of a second."""
        for n, stream in enumerate(list(self._streams.values()), 1):
            stream.drop()
            if not n % _UNTIMED_FRAMES and self._streams and self.way.puts_off():
                return

    def announce(self) -> None:
        if self._leaving.staying and not self._over:
            self.way.write(self._leaving.announce())

    @property
    def aware(self) -> bool:
        return self._draining or self._over

    def shut_down(self) -> None:
        self.announce()

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._control.on_ping(stream_id, flags, payload) and self._leaving.is_echo(payload):
            self._take_last()

    def _take_last(self) -> None:
        """The client has heard of it, or will not: from now on no stream is taken."""
        self._draining = True
        self.way.write(self._leaving.promise(self._last_id))
        if not self._streams:
            self._finish()

    def check(self, now: float) -> None:
        if not self._over:
            self._check_frames(now)
            self._check_idleness(now)
            late = self._bodies.late(
                now, list(self._streams.values()), self.way.limits, has_room=self._receive_window > 0
            )
            for stream, text in late:
                self.way.count_late("body")
                refuse_late(stream, text)
            self.way.n_half = self._bodies.weight
        if self._leaving.is_late(now) and not self._over:
            self._take_last()
        if self._ending.is_stuck(now, self.output.held_nbytes):
            self._fail(ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "the answers are not taken"))
        unsent_nbytes = self.way.unsent_nbytes
        if self._ending.is_late(now, unsent_nbytes, over=self._over):
            if unsent_nbytes:
                self.way.abort()
            else:
                self.way.close()

    def _check_frames(self, now: float) -> None:
        """Close a connection on which a frame, or a header block, has begun and does not go on."""
        begun = bool(self._kept) or self._blocks.unfinished is not None
        begun_s = self._frame_watch.unchanged_s((begun, self._last_id, self._receive_window), now)
        if begun and begun_s > self.way.limits.head_timeout_s:
            self.way.count_late("head")
            self._fail(ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a header block takes too long"))

    def _check_idleness(self, now: float) -> None:
        """Take leave of a client that has asked for nothing in a long time."""
        idle_s = self._idle_watch.unchanged_s((self._last_id, bool(self._streams)), now)
        is_idle = not (self._streams or self._over) and self._leaving.staying
        if is_idle and idle_s > self.way.limits.idle_timeout_s:
            self.way.count_late("idle")
            self.announce()

    def _fail_stream(self, failure: StreamFailed) -> None:
        self._patience.spend(failure.cost)
        stream = self._streams.get(failure.stream_id)
        if stream is not None:
            stream.fail(failure.code)
        elif self._is_idle(failure.stream_id):
            raise ConnectionFailed(failure.code, f"a broken frame on stream {failure.stream_id}")
        elif failure.stream_id not in self._early:
            self.forget_early(failure.stream_id)
            self.way.write(h2.rst_stream(failure.stream_id, failure.code))

    def _fail(self, failure: ConnectionFailed) -> None:
        logger.debug("an HTTP/2 connection is closed: %s", failure)
        self.way.write(h2.goaway(self._leaving.last_id(self._last_id), failure.code, str(failure)))
        self.lost()
        self._finish()

    def _finish(self) -> None:
        """Say no more; what still comes is read and ignored: closing now could take our last words back."""
        self._over = True
        self._kept = b""
        self.way.resume_reading()
        if self.ends.tls:
            self.way.close()  # which waits for the client's end
        else:
            self.way.end_writing()
