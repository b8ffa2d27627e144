"""One stream of HTTP/2: where it is, what of its body is not used up, and what of its response is not sent.
Flow control is here for the stream and in ``Output`` for the connection. No frame is read here.
"""

from __future__ import annotations

import asyncio
import enum
import urllib.parse
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from gpuserve.front.exchange.exchange import AnswerHead, Head, Header, Piece, Release, Sink
from gpuserve.front.server.http2.frames import (
    DEFAULT_FRAME_NBYTES,
    END_STREAM,
    HEAD,
    ErrorCode,
    FrameType,
    StreamFailed,
    header_frames,
    rst_stream,
    window_update,
)
from gpuserve.front.server.http2.hpack import status_field

if TYPE_CHECKING:
    from gpuserve.front.server.http2.protocol import Http2

#: What a client may send of one body before it is used up.
RECEIVE_WINDOW: Final = 4 << 20
#: What of a response waits to be sent before ``room`` waits.
UNSENT_NBYTES: Final = 256 << 10
#: What is answered to a client that asks for more than it reads.
TOO_MUCH_UNREAD: Final = (
    "the answers on this connection are not read: %d bytes of them wait, expected at most %d; read them first"
)
_pack: Final = HEAD.pack


class State(enum.Enum):
    """Where a stream is.

    ::

        OPEN ── the request ends ──► HALF_CLOSED_REMOTE ── the response ends ──► CLOSED
          └──── the response ends ─► HALF_CLOSED_LOCAL ─── the request ends ───► CLOSED

    A reset closes it from anywhere.
    """

    OPEN = "open"
    HALF_CLOSED_REMOTE = "the request is complete"
    HALF_CLOSED_LOCAL = "the response is complete"
    CLOSED = "closed"

    #: Members are looked up for every request, and Enum's own is a Python function.
    __hash__ = object.__hash__


#: What most streams have to send, always: an empty deque takes 600 bytes.
_NOTHING: Final[deque[Piece]] = deque()


class _Nobody:
    """The sink of a stream that is closed."""

    __slots__ = ()

    def take(self, data: Piece, end: bool) -> None:
        pass

    def abandon(self) -> None:
        pass


_NOBODY: Final = _Nobody()


class Stream:
    """A request and its response: an ``Exchange``; one object with slots, as each small request has one."""

    __slots__ = (
        "_connection",
        "_ending",
        "_held_nbytes",
        "_left_nbytes",
        "_release",
        "_trailers",
        "_uncredited",
        "_waiter",
        "credited_nbytes",
        "ends",
        "head",
        "id",
        "receive_window",
        "sink",
        "started",
        "state",
        "unsent",
        "unsent_nbytes",
        "window",
    )

    sink: Sink

    def __init__(self, connection: Http2, stream_id: int, head: Head, window: int) -> None:
        self.id = stream_id
        self.head = head
        self.ends = connection.ends
        self.state = State.OPEN
        self.window = window
        self.receive_window = RECEIVE_WINDOW
        self.credited_nbytes = 0
        self.started = False
        self.unsent = _NOTHING
        self.unsent_nbytes = 0
        self._connection = connection
        self._left_nbytes = head.content_length
        self._held_nbytes = 0
        self._uncredited = 0
        self._ending = False
        self._trailers: tuple[Header, ...] = ()
        self._release: Release | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- the request ----------------------------------------------------------------------

    def receive(self, data: Piece, end: bool) -> None:
        """A part of the body has come; StreamFailed: the request had ended, or its length is another."""
        nbytes = len(data)
        if self.state is not State.OPEN:
            self._receive_late(nbytes, end)
            return
        self._held_nbytes += nbytes
        if self._left_nbytes is not None:
            self._left_nbytes -= nbytes
            if self._left_nbytes < 0 or (end and self._left_nbytes):
                raise StreamFailed(self.id, ErrorCode.PROTOCOL_ERROR)
        if end:
            self.state = State.HALF_CLOSED_REMOTE
        self.sink.take(data, end)

    def _receive_late(self, nbytes: int, end: bool) -> None:
        """After the response nobody reads the rest; after the end of the request there is none."""
        self._connection.credit(nbytes)
        if self.state is not State.HALF_CLOSED_LOCAL:
            raise StreamFailed(self.id, ErrorCode.STREAM_CLOSED)
        if end:
            self._close()

    def consumed(self, nbytes: int) -> None:
        nbytes = min(nbytes, self._held_nbytes)
        self._held_nbytes -= nbytes
        self._connection.credit(nbytes)
        if self.state is State.OPEN:
            self._uncredited += nbytes
            if self._uncredited >= RECEIVE_WINDOW // 2:
                self.receive_window += self._uncredited
                self.credited_nbytes += self._uncredited
                self._connection.way.write(window_update(self.id, self._uncredited))
                self._uncredited = 0

    @property
    def received_nbytes(self) -> int:
        """How much of a body that has not ended has come."""
        return self.credited_nbytes + RECEIVE_WINDOW - self.receive_window

    def pad(self, nbytes: int) -> None:
        """So much of the windows went to padding, which is used up at once."""
        self._held_nbytes += nbytes
        self.consumed(nbytes)

    # ---- the response ---------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ending or self.state not in _ANSWERABLE

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        connection = self._connection
        out = connection.output
        encoder = out.encoder
        if (
            nbytes <= DEFAULT_FRAME_NBYTES
            and nbytes <= self.window
            and nbytes <= out.window
            and self.state is State.HALF_CLOSED_REMOTE
            and head.trailers
            and not connection.way.full
        ):
            out.window -= nbytes
            stream_id = self.id
            block = encoder.heads.get(head) or encoder.head(head)
            tail = encoder.tails.get(head) or encoder.tail(head)
            connection.way.write(
                b"".join(
                    (
                        _pack(0, len(block), 1, 4, stream_id),
                        block,
                        _pack(0, nbytes, 0, 0, stream_id),
                        *body,
                        _pack(0, len(tail), 1, 5, stream_id),
                        tail,
                    )
                )
            )
            self._close()
            if release is not None:
                release()
        elif self.state in _ANSWERABLE and not self.started and not out.has_room(nbytes):
            if release is not None:
                release()
            refuse(self, TOO_MUCH_UNREAD % (out.held_nbytes, connection.way.limits.max_unsent_nbytes), 503, 8)
        elif self.state in _ANSWERABLE and not self.started:
            self._answer_large(head, body, nbytes, release)
        elif release is not None:
            release()

    def _answer_large(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None
    ) -> None:
        encoder = self._connection.output.encoder
        block = encoder.heads.get(head) or encoder.head(head)
        if not head.trailers:
            block += encoder.encode(((b"content-length", b"%d" % nbytes),))
        self._begin(block, end=False)
        self._trailers, self._release = head.trailers, release
        if self.head.method != "HEAD":
            self._queue(body)
        self._ending = True
        self._connection.output.flush(self)

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        if self.state not in _ANSWERABLE:
            return
        self._begin(self._connection.output.encoder.encode((status_field(status), *headers)), end=end)
        if end:
            self.on_ended()

    def send(self, data: bytes, end: bool = False) -> None:
        if self.state not in _ANSWERABLE or self._ending:
            return
        if self.head.method != "HEAD":
            self._queue((data,))
        self._ending = end
        self._connection.output.flush(self)

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if self.state not in _ANSWERABLE or self._ending:
            return
        self._trailers = tuple(trailers)
        self._ending = True
        self._connection.output.flush(self)

    def drop_unsent(self) -> None:
        if not self._ending:
            self._forget_unsent()
            self.wake()

    def reset(self) -> None:
        self.fail(ErrorCode.INTERNAL_ERROR)

    async def room(self) -> None:
        while self.unsent_nbytes > UNSENT_NBYTES and self.state in _ANSWERABLE:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.state not in _ANSWERABLE:
            raise ConnectionResetError("the client is gone")

    def _begin(self, block: bytes, *, end: bool) -> None:
        self.started = True
        out = self._connection.output
        self._connection.way.write(header_frames(self.id, block, out.frame_nbytes, end=end))

    def _queue(self, pieces: Iterable[Piece]) -> None:
        before = self.unsent_nbytes
        for piece in pieces:
            if piece:
                if self.unsent is _NOTHING:
                    self.unsent = deque()
                self.unsent.append(memoryview(piece) if len(piece) > UNSENT_NBYTES else piece)
                self.unsent_nbytes += len(piece)
        self._connection.output.hold(self.unsent_nbytes - before)

    # ---- for the output -------------------------------------------------------------------

    def frames(self, most_nbytes: int, frame_nbytes: int) -> list[Piece]:
        """DATA frames of what waits, taken out of it; and the end of the response, where it follows."""
        frames: list[Piece] = []
        room = max(0, min(most_nbytes, self.window))
        while self.unsent and room:
            piece = self.unsent.popleft()
            nbytes = min(len(piece), room)
            if nbytes < len(piece):
                self.unsent.appendleft(memoryview(piece)[nbytes:])
            room -= nbytes
            self.window -= nbytes
            self.unsent_nbytes -= nbytes
            frames += self._data_frames(piece, nbytes, frame_nbytes)
        if self.through and self._trailers:
            tail = self._connection.output.encoder.encode(self._trailers)
            frames.append(header_frames(self.id, tail, frame_nbytes, end=True))
        elif self.through and not frames:
            frames.append(_pack(0, 0, FrameType.DATA, END_STREAM, self.id))
        return frames

    def _data_frames(self, piece: Piece, nbytes: int, most_nbytes: int) -> list[Piece]:
        """The first so many bytes of a piece that was taken out, in frames."""
        frames: list[Piece] = []
        start = 0
        if nbytes > most_nbytes:
            piece = memoryview(piece)
            head = _pack(most_nbytes >> 16, most_nbytes & 0xFFFF, FrameType.DATA, 0, self.id)
            while nbytes - start > most_nbytes:
                frames += (head, piece[start : start + most_nbytes])
                start += most_nbytes
        left = nbytes - start
        flags = END_STREAM if self.through and not self._trailers else 0
        frames += (_pack(left >> 16, left & 0xFFFF, FrameType.DATA, flags, self.id), piece[start:nbytes])
        return frames

    @property
    def through(self) -> bool:
        """Whether all of the response has been made into frames."""
        return self._ending and not self.unsent

    def take_release(self) -> Release | None:
        """What to call when the last frames are sent."""
        release, self._release = self._release, None
        return release

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- ending ---------------------------------------------------------------------------

    def on_ended(self) -> None:
        """The response is complete. What still comes is let come: some clients lose the answer otherwise."""
        if self.state is State.HALF_CLOSED_REMOTE:
            self._close()
            return
        self.state = State.HALF_CLOSED_LOCAL
        if self._left_nbytes is not None and self._left_nbytes <= self.receive_window:
            sink, self.sink = self.sink, _NOBODY
            sink.abandon()
            self._connection.credit(self._held_nbytes)
            self._held_nbytes = 0
        else:
            self._connection.way.write(rst_stream(self.id, ErrorCode.NO_ERROR))
            self._connection.forget_early(self.id)
            self.drop()

    def fail(self, code: ErrorCode) -> None:
        """Tell the client that the stream is over, for this reason."""
        if self.state is not State.CLOSED:
            self._connection.way.write(rst_stream(self.id, code))
            self._connection.forget_early(self.id)
            self.drop()

    def drop(self) -> None:
        if self.state is State.CLOSED:
            return
        self._forget_unsent()
        sink = self.sink
        self._close()
        sink.abandon()
        self.wake()
        if (release := self.take_release()) is not None:
            self._connection.way.write_pieces((), release)

    def _forget_unsent(self) -> None:
        self._connection.output.drop(self)
        self.unsent.clear()
        self.unsent_nbytes = 0

    def _close(self) -> None:
        self.state = State.CLOSED
        held_nbytes, self._held_nbytes = self._held_nbytes, 0
        self._connection.forget(self, held_nbytes)
        self.sink = _NOBODY  # the sink refers to the stream: no cycle is left to the garbage collector


def refuse(stream: Stream, text: str, status: int, grpc_status: int) -> None:
    """Answer with an error alone, as HTTP or as gRPC."""
    if stream.head.is_grpc:
        message = urllib.parse.quote(text, safe=" ,:;").encode()
        told = ((b"grpc-status", b"%d" % grpc_status), (b"grpc-message", message))
        stream.start(200, ((b"content-type", b"application/grpc"), *told), end=True)
    else:
        stream.start(status, ((b"content-type", b"text/plain; charset=utf-8"),))
        stream.send(f"{text}\n".encode(), end=True)


_ANSWERABLE: Final = frozenset({State.OPEN, State.HALF_CLOSED_REMOTE})
