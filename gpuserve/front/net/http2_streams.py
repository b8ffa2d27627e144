"""HTTP/2 streams: requests, responses and flow control of one connection. No frame is read here.

``StreamTable`` has the open streams and the receive window of the connection, ``Http2Output`` has its send
window and decides which stream sends next, and each ``Stream`` is one request and its response.
"""

from __future__ import annotations

import asyncio
import enum
import time
import urllib.parse
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuserve.front.net.connection import Connection
from gpuserve.front.net.exchange import AnswerHead, BodyReceiver, Head, Header, Piece, Release, Waiter, wake
from gpuserve.front.net.http2_frames import (
    DEFAULT_FRAME_NBYTES,
    DEFAULT_WINDOW,
    END_STREAM,
    HEAD,
    MAX_WINDOW,
    ConnectionFailed,
    ErrorCode,
    FrameType,
    StreamFailed,
    header_frames,
    rst_stream,
    window_update,
)
from gpuserve.front.net.http2_hpack import Encoder, status_field

#: The receive window of a connection: bytes that a client may send before they are consumed.
CONNECTION_WINDOW: Final = 64 << 20
#: The receive window of a stream.
RECEIVE_WINDOW: Final = 4 << 20
#: Unsent bytes of a response above which ``Stream.room`` waits.
UNSENT_NBYTES: Final = 256 << 10
#: Bytes that one stream sends before the next stream sends.
TURN_NBYTES: Final = 1 << 20
#: The most bytes that a connection sends in one iteration of the loop.
_FLUSHED_NBYTES: Final = 16 << 20
#: Heads from this size on are counted. All connections of the process may hold so many bytes of them: heads
#: of requests whose bodies do not come would otherwise take any memory.
LONG_HEAD_NBYTES: Final = 4 << 10
_LONG_HEADS_NBYTES: Final = 64 << 20
#: A client that has accepted nothing for this long counts as not reading, in seconds.
STUCK_S: Final = 0.5
#: Up to this size data is copied and joined with other writes: a system call costs more. A message of a
#: little over one frame is the most frequent case.
_COPIED_NBYTES: Final = 24 << 10
#: The largest DATA frame sent: a larger frame would delay the other streams of the connection.
_MAX_SENT_FRAME_NBYTES: Final = 256 << 10
#: Recently reset streams for which frames may still arrive.
_MAX_RESET_IDS: Final = 1024
#: The error for a client that requests more than it reads.
TOO_MUCH_UNREAD: Final = (
    "the answers on this connection are not read: %d bytes of them wait, expected at most %d; read them first"
)
_pack: Final = HEAD.pack


class State(enum.Enum):
    """The state of a stream.

    ::

        OPEN ── the request ends ──► HALF_CLOSED_REMOTE ── the response ends ──► CLOSED
          └──── the response ends ─► HALF_CLOSED_LOCAL ─── the request ends ───► CLOSED

    A reset closes a stream in any state.
    """

    OPEN = "open"
    HALF_CLOSED_REMOTE = "the request is complete"
    HALF_CLOSED_LOCAL = "the response is complete"
    CLOSED = "closed"

    #: States are hashed for every request, and ``Enum.__hash__`` is a Python function.
    __hash__ = object.__hash__


_ANSWERABLE: Final = frozenset({State.OPEN, State.HALF_CLOSED_REMOTE})
#: The unsent data of most streams. Each empty deque would take 600 bytes.
_NO_DATA: Final[deque[Piece]] = deque()


class _ClosedReceiver:
    """The body receiver of a closed stream: ignores everything."""

    __slots__ = ()

    def receive_body(self, data: Piece, end: bool) -> None: ...

    def abandon(self) -> None: ...


_CLOSED_RECEIVER: Final = _ClosedReceiver()


class StreamTable:
    """The open streams of a connection, and its receive window. ``on_empty``: called when the last closes."""

    __slots__ = (
        *(
            "_is_paused",
            "_long_heads",
            "_uncredited",
            "connection",
            "on_empty",
            "open",
            "output",
            "receive_window",
        ),
        "reset_ids",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.output = Http2Output(connection)
        self.open: dict[int, Stream] = {}
        #: Streams that were reset here before the client ended them; their further frames are ignored.
        self.reset_ids: dict[int, None] = {}
        self.receive_window = CONNECTION_WINDOW
        self.on_empty: Callable[[], None] | None = None
        self._uncredited = 0
        #: The sizes of long heads of open streams.
        self._long_heads: dict[int, int] = {}
        self._is_paused = False

    def hold_head(self, stream_id: int, nbytes: int) -> None:
        """Count a long head until its stream closes. While such heads hold too much, stop reading until
        ``check_heads``: to refuse streams would cost other clients more.
        """
        admission = self.connection.admission
        admission.heads_nbytes += nbytes
        self._long_heads[stream_id] = nbytes
        if admission.heads_nbytes > _LONG_HEADS_NBYTES and not self._is_paused:
            self._is_paused = True
            self.connection.pause_reading()

    def check_heads(self) -> None:
        """Read the connection again if there is room for long heads. Called about once a second."""
        if self._is_paused and self.connection.admission.heads_nbytes <= _LONG_HEADS_NBYTES:
            self._is_paused = False
            self.connection.resume_reading()

    def drop_head(self, stream_id: int) -> None:
        self.connection.admission.heads_nbytes -= self._long_heads.pop(stream_id, 0)

    def credit(self, nbytes: int) -> None:
        """Allow the client to send as many bytes again as were consumed."""
        self._uncredited += nbytes
        if self._uncredited >= CONNECTION_WINDOW // 2:
            self.receive_window += self._uncredited
            self.connection.write(window_update(0, self._uncredited))
            self._uncredited = 0

    def remove(self, stream: Stream, unconsumed_nbytes: int) -> None:
        """Remove a closed stream and credit the part of its body that was not consumed."""
        self._uncredited += unconsumed_nbytes
        if self._uncredited >= CONNECTION_WINDOW // 2:
            self.credit(0)
        self.open.pop(stream.id, None)
        if self._long_heads:
            self.drop_head(stream.id)
        if self.on_empty is not None and not self.open:
            self.on_empty()

    def note_reset(self, stream_id: int) -> None:
        """Have further frames of this stream ignored."""
        if len(self.reset_ids) >= _MAX_RESET_IDS:
            del self.reset_ids[next(iter(self.reset_ids))]
        self.reset_ids[stream_id] = None


class Http2Output:
    """The sending half of a connection. ``window`` is the connection's send window in bytes.

    A stream whose own window is exhausted is in no queue, so window changes by a client cost no look at
    streams that cannot send. A window that grows by 0 or beyond 2^31-1 raises ``ConnectionFailed`` or
    ``StreamFailed``.
    """

    __slots__ = (
        "_ending", "_sendable", "connection", "encoder", "frame_nbytes", "held_nbytes", "moved_at",
        "sent_nbytes", "stream_window", "window",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.window = DEFAULT_WINDOW
        #: The initial send window of new streams.
        self.stream_window = DEFAULT_WINDOW
        self.frame_nbytes = DEFAULT_FRAME_NBYTES
        self.encoder = Encoder()
        #: Body bytes that wait for a window, body bytes sent, and the time of the last progress.
        self.held_nbytes = 0
        self.sent_nbytes = 0
        self.moved_at = 0.0
        #: Streams with data that their windows let through; the first sends next.
        self._sendable: OrderedDict[Stream, None] = OrderedDict()
        #: Streams with nothing left but the end of the response, which needs no window.
        self._ending: OrderedDict[Stream, None] = OrderedDict()

    def flush(self, stream: Stream) -> None:
        """Queue a stream if it can send, and send everything that the windows let through."""
        if stream.all_framed:
            self._ending[stream] = None
        elif stream.unsent and stream.window > 0:
            self._sendable[stream] = None
        self.flush_all()

    def flush_all(self) -> None:
        """Send everything that the windows let through, stream by stream. A client that reads as fast as the
        server writes gets the rest in a later iteration of the loop.
        """
        most_nbytes = self.sent_nbytes + _FLUSHED_NBYTES
        while not self.connection.full:
            if self.sent_nbytes >= most_nbytes:
                asyncio.get_running_loop().call_soon(self.flush_all)
                return
            if self._ending:
                stream, _ = self._ending.popitem(last=False)
            elif self._sendable and self.window > 0:
                stream, _ = self._sendable.popitem(last=False)
            else:
                return
            self._send(stream)
            if stream.unsent and stream.window > 0:
                self._sendable[stream] = None

    def hold(self, nbytes: int) -> None:
        """Count ``nbytes`` more body bytes as waiting for a window."""
        if not self.held_nbytes:
            self.moved_at = time.monotonic()
        self._change_held(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Return whether more may wait: clients that do not read share ``max_unsent_nbytes``."""
        connection = self.connection
        return (
            not self.held_nbytes
            or connection.admission.held_nbytes + nbytes <= connection.limits.max_unsent_nbytes
            or time.monotonic() - self.moved_at < STUCK_S
        )

    def _change_held(self, nbytes: int) -> None:
        self.held_nbytes += nbytes
        self.connection.admission.held_nbytes += nbytes

    def drop(self, stream: Stream) -> None:
        """Remove a stream from the queues, with its unsent data."""
        if stream.unsent_nbytes:
            self._change_held(-stream.unsent_nbytes)
        self._sendable.pop(stream, None)
        self._ending.pop(stream, None)

    def grow_window(self, nbytes: int) -> None:
        """Enlarge the connection's send window by a WINDOW_UPDATE of the client."""
        if not nbytes:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
        self.window += nbytes
        if self.window > MAX_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is over 2^31-1")

    def grow_stream_window(self, stream: Stream, nbytes: int) -> None:
        """Enlarge the send window of a stream by a WINDOW_UPDATE of the client."""
        if not nbytes:
            raise StreamFailed(stream.id, ErrorCode.PROTOCOL_ERROR)
        stream.window += nbytes
        if stream.window > MAX_WINDOW:
            raise StreamFailed(stream.id, ErrorCode.FLOW_CONTROL_ERROR)
        if stream.unsent:
            self.flush(stream)

    def set_stream_window(self, nbytes: int, streams: Iterable[Stream]) -> int:
        """Set the initial window and move those of ``streams``. Return how many of these can send then."""
        difference = nbytes - self.stream_window
        n_sendable = 0
        self.stream_window = nbytes
        for stream in streams:
            stream.window += difference
            if stream.window > MAX_WINDOW:
                raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is over 2^31-1")
            if stream.unsent and stream.window > 0:
                self._sendable[stream] = None
                n_sendable += 1
        return n_sendable

    def set_frame_size(self, nbytes: int) -> None:
        self.frame_nbytes = min(nbytes, _MAX_SENT_FRAME_NBYTES)

    def _send(self, stream: Stream) -> None:
        before = stream.unsent_nbytes
        frames = stream.frames(min(self.window, TURN_NBYTES), self.frame_nbytes)
        nbytes = before - stream.unsent_nbytes
        if nbytes:
            self.window -= nbytes
            self._change_held(-nbytes)
            self.sent_nbytes += nbytes
            self.moved_at = time.monotonic()
        release = stream.pop_release() if stream.all_framed else None
        if nbytes > _COPIED_NBYTES:
            self.connection.write_pieces(frames, release)
        else:
            if frames:
                self.connection.write(b"".join(frames))
            if release is not None:  # earlier frames of the stream may wait for the kernel uncopied
                self.connection.write_pieces((), release)
        if stream.all_framed:
            stream.on_response_sent()
        wake(stream.waiter)


class Stream:
    """A request and its response (an ``Exchange``). One object, as each small request creates one."""

    __slots__ = (
        *("_ending", "_held_nbytes", "_left_nbytes", "_output", "_release", "_table", "_trailers"),
        *("_uncredited", "credited_nbytes", "endpoints", "head", "id", "receive_window", "waiter"),
        *("receiver", "started", "state", "unsent", "unsent_nbytes", "window"),
    )

    receiver: BodyReceiver

    def __init__(self, table: StreamTable, stream_id: int, head: Head) -> None:
        self.id = stream_id
        self.head = head
        self.endpoints = table.connection.endpoints
        self.state = State.OPEN
        self._table = table
        self._output = table.output
        self.window = table.output.stream_window
        self.receive_window = RECEIVE_WINDOW
        self.credited_nbytes = 0
        self.started = False
        self.unsent = _NO_DATA
        self.unsent_nbytes = 0
        self._left_nbytes = head.content_length
        self._held_nbytes = 0
        self._uncredited = 0
        self._ending = False
        self._trailers: tuple[Header, ...] = ()
        self._release: Release | None = None
        self.waiter: Waiter = None

    # ---- the request ----------------------------------------------------------------------

    def on_data(self, data: Piece, end: bool) -> None:
        """Pass on a part of the body. Raise StreamFailed after its end, or if its length is wrong."""
        nbytes = len(data)
        if self.state is not State.OPEN:
            # Data after the response is ignored; data after the end of the request is an error.
            self._table.credit(nbytes)
            if self.state is not State.HALF_CLOSED_LOCAL:
                raise StreamFailed(self.id, ErrorCode.STREAM_CLOSED)
            if end:
                self._close()
            return
        self._held_nbytes += nbytes
        if self._left_nbytes is not None:
            self._left_nbytes -= nbytes
            if self._left_nbytes < 0 or (end and self._left_nbytes):
                raise StreamFailed(self.id, ErrorCode.PROTOCOL_ERROR)
        if end:
            self.state = State.HALF_CLOSED_REMOTE
        self.receiver.receive_body(data, end)

    def consumed(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._held_nbytes)
        self._held_nbytes -= nbytes
        self._table.credit(nbytes)
        if self.state is State.OPEN:
            self._uncredited += nbytes
            if self._uncredited >= RECEIVE_WINDOW // 2:
                self.receive_window += self._uncredited
                self.credited_nbytes += self._uncredited
                self._output.connection.write(window_update(self.id, self._uncredited))
                self._uncredited = 0

    @property
    def received_nbytes(self) -> int:
        """The received bytes of a body that has not ended."""
        return self.credited_nbytes + RECEIVE_WINDOW - self.receive_window

    def on_padding(self, nbytes: int) -> None:
        """Return the window that padding used, which is consumed at once."""
        self._held_nbytes += nbytes
        self.consumed(nbytes)

    # ---- the response ---------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ending or self.state not in _ANSWERABLE

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        out = self._output
        encoder = out.encoder
        if (
            nbytes <= DEFAULT_FRAME_NBYTES
            and nbytes <= self.window
            and nbytes <= out.window
            and self.state is State.HALF_CLOSED_REMOTE
            and head.trailers
            and not out.connection.full
        ):
            out.window -= nbytes
            stream_id = self.id
            block = encoder.heads.get(head) or encoder.head(head)
            tail = encoder.tails.get(head) or encoder.tail(head)
            data_head, tail_head = _pack(0, nbytes, 0, 0, stream_id), _pack(0, len(tail), 1, 5, stream_id)
            head_frame = _pack(0, len(block), 1, 4, stream_id)
            out.connection.write(b"".join((head_frame, block, data_head, *body, tail_head, tail)))
            self._close()
            if release is not None:
                release()
        elif self.state in _ANSWERABLE and not self.started and not out.has_room(nbytes):
            if release is not None:
                release()
            limit_nbytes = out.connection.limits.max_unsent_nbytes
            self.send_error(TOO_MUCH_UNREAD % (out.held_nbytes, limit_nbytes), 503, 8)
        elif self.state in _ANSWERABLE and not self.started:
            block = encoder.heads.get(head) or encoder.head(head)
            if not head.trailers:
                block += encoder.encode(((b"content-length", b"%d" % nbytes),))
            self._send_head(block, end=False)
            self._trailers, self._release = head.trailers, release
            if self.head.method != "HEAD":
                self._queue(body)
            self._ending = True
            out.flush(self)
        elif release is not None:
            release()

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        if self.state not in _ANSWERABLE:
            return
        self._send_head(self._output.encoder.encode((status_field(status), *headers)), end=end)
        if end:
            self.on_response_sent()

    def send(self, data: bytes, end: bool = False) -> None:
        if self.state not in _ANSWERABLE or self._ending:
            return
        if self.head.method != "HEAD":
            self._queue((data,))
        self._ending = end
        self._output.flush(self)

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if self.state not in _ANSWERABLE or self._ending:
            return
        self._trailers = tuple(trailers)
        self._ending = True
        self._output.flush(self)

    def send_error(self, text: str, status: int, grpc_status: int) -> None:
        """Respond with an error, as HTTP or as gRPC."""
        if self.head.is_grpc:
            message = urllib.parse.quote(text, safe=" ,:;").encode()
            outcome = ((b"grpc-status", b"%d" % grpc_status), (b"grpc-message", message))
            self.start(200, ((b"content-type", b"application/grpc"), *outcome), end=True)
        else:
            self.start(status, ((b"content-type", b"text/plain; charset=utf-8"),))
            self.send(f"{text}\n".encode(), end=True)

    def drop_unsent(self) -> None:
        if not self._ending:
            self._discard_unsent()
            wake(self.waiter)

    def reset(self) -> None:
        self.fail(ErrorCode.INTERNAL_ERROR)

    async def room(self) -> None:
        while self.unsent_nbytes > UNSENT_NBYTES and self.state in _ANSWERABLE:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.state not in _ANSWERABLE:
            raise ConnectionResetError("the client is gone")

    def _send_head(self, block: bytes, *, end: bool) -> None:
        self.started = True
        out = self._output
        out.connection.write(header_frames(self.id, block, out.frame_nbytes, end=end))

    def _queue(self, pieces: Iterable[Piece]) -> None:
        before = self.unsent_nbytes
        for piece in pieces:
            if piece:
                if self.unsent is _NO_DATA:
                    self.unsent = deque()
                self.unsent.append(memoryview(piece) if len(piece) > UNSENT_NBYTES else piece)
                self.unsent_nbytes += len(piece)
        self._output.hold(self.unsent_nbytes - before)

    # ---- for the output -------------------------------------------------------------------

    def frames(self, max_nbytes: int, frame_nbytes: int) -> list[Piece]:
        """Remove up to ``max_nbytes`` of data. Return frames of it, and of the end if all is framed."""
        frames: list[Piece] = []
        room = max(0, min(max_nbytes, self.window))
        while self.unsent and room:
            piece = self.unsent.popleft()
            nbytes = min(len(piece), room)
            if nbytes < len(piece):
                self.unsent.appendleft(memoryview(piece)[nbytes:])
            room -= nbytes
            self.window -= nbytes
            self.unsent_nbytes -= nbytes
            frames += self._data_frames(piece, nbytes, frame_nbytes)
        if self.all_framed and self._trailers:
            tail = self._output.encoder.encode(self._trailers)
            frames.append(header_frames(self.id, tail, frame_nbytes, end=True))
        elif self.all_framed and not frames:
            frames.append(_pack(0, 0, FrameType.DATA, END_STREAM, self.id))
        return frames

    def _data_frames(self, piece: Piece, nbytes: int, frame_nbytes: int) -> list[Piece]:
        """Return the first ``nbytes`` of a piece in frames of at most ``frame_nbytes``."""
        frames: list[Piece] = []
        start = 0
        if nbytes > frame_nbytes:
            piece = memoryview(piece)
            head = _pack(frame_nbytes >> 16, frame_nbytes & 0xFFFF, FrameType.DATA, 0, self.id)
            while nbytes - start > frame_nbytes:
                frames += (head, piece[start : start + frame_nbytes])
                start += frame_nbytes
        left = nbytes - start
        flags = END_STREAM if self.all_framed and not self._trailers else 0
        frames += (_pack(left >> 16, left & 0xFFFF, FrameType.DATA, flags, self.id), piece[start:nbytes])
        return frames

    @property
    def all_framed(self) -> bool:
        """True if the whole response has been made into frames."""
        return self._ending and not self.unsent

    def pop_release(self) -> Release | None:
        """Return the callback for when the last frames are sent, and forget it."""
        release, self._release = self._release, None
        return release

    # ---- ending ---------------------------------------------------------------------------

    def on_response_sent(self) -> None:
        """End the response. A short rest of the request is ignored: some clients lose it at a reset."""
        if self.state is State.HALF_CLOSED_REMOTE:
            self._close()
            return
        self.state = State.HALF_CLOSED_LOCAL
        if self._left_nbytes is not None and self._left_nbytes <= self.receive_window:
            receiver, self.receiver = self.receiver, _CLOSED_RECEIVER
            receiver.abandon()
            self._table.credit(self._held_nbytes)
            self._held_nbytes = 0
        else:
            self._output.connection.write(rst_stream(self.id, ErrorCode.NO_ERROR))
            self._table.note_reset(self.id)
            self.drop()

    def fail(self, code: ErrorCode) -> None:
        """Reset the stream with an error code."""
        if self.state is not State.CLOSED:
            self._output.connection.write(rst_stream(self.id, code))
            self._table.note_reset(self.id)
            self.drop()

    def drop(self) -> None:
        """Close the stream, discard its unsent data and abandon its request."""
        if self.state is State.CLOSED:
            return
        self._discard_unsent()
        receiver = self.receiver
        self._close()
        receiver.abandon()
        wake(self.waiter)
        if (release := self.pop_release()) is not None:
            self._output.connection.write_pieces((), release)

    def _discard_unsent(self) -> None:
        self._output.drop(self)
        self.unsent.clear()
        self.unsent_nbytes = 0

    def _close(self) -> None:
        self.state = State.CLOSED
        unconsumed_nbytes, self._held_nbytes = self._held_nbytes, 0
        self._table.remove(self, unconsumed_nbytes)
        self.receiver = _CLOSED_RECEIVER  # the receiver refers to the stream: this breaks a reference cycle
