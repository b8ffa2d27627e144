"""HTTP/1.1 and 1.0 on one connection (RFC 9112): reads one request after the other and sends its response.

``Http1`` reads requests, ``Http1Exchange`` is one request and its response. Reading continues while a request
is answered, so a client that leaves is noticed at once; what it sends meanwhile is buffered::

          a head is complete        the body is          the response is
    HEAD ────────────────► BODY ───────────────► ANSWER ─────────────► HEAD
     │                      │ answered before     └ the last one ─────► CLOSED
     │ refused              ├────────► DRAIN ──── the body is complete ► HEAD
     └──────► LINGER ◄──────┴────────────┘ refused, or too much of it
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
from collections.abc import Iterable, Sequence
from time import time
from typing import Final

from gpuserve.core.states import StepTable
from gpuserve.front.net import http1_messages as h1
from gpuserve.front.net.admission import ChangeTimer, MinimumRate, slow_body_text
from gpuserve.front.net.connection import Connection
from gpuserve.front.net.exchange import (
    AnswerHead,
    BodyReceiver,
    Header,
    Piece,
    Release,
    RequestHandler,
    Waiter,
    wake,
)
from gpuserve.front.net.http1_messages import AWAITED, ENDED, PROGRESS, AnswerProgress, Framing, RequestHead

logger = logging.getLogger(__name__)

#: Up to this size the pieces of a response are joined: a second write costs more than the copy.
JOINED_NBYTES: Final = 64 << 10
#: Input that is buffered before the current request is answered; above this reading pauses.
BUFFERED_NBYTES: Final = 64 << 10
#: Bytes of a body that may wait to be consumed.
UNCONSUMED_NBYTES: Final = 1 << 20
#: Bytes that are read and ignored of a request that was answered early, before the connection is closed.
DRAIN_NBYTES: Final = 64 << 20
#: Most heads are shorter; a longer head is searched for again.
_USUAL_HEAD_NBYTES: Final = 4096
_CARRIAGE_RETURN: Final = 0x0D
#: All empty lines at once: with one step each, 256 KiB of them kept the event loop for 0.4 s.
_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)+")
#: Seconds for the rest of a request that was answered early.
_DRAIN_S: Final = 30.0
#: Seconds without input after the last response: the client has read the response, or never will.
_QUIET_S: Final = 2.0
#: Seconds without any output being accepted by the client's kernel.
_SENDING_S: Final = 60.0


class Http1Exchange:
    """A request and its response (an ``Exchange``). ``is_plain``: an encoded head can be sent unchanged."""

    __slots__ = (
        *("_framing", "_http1", "_left_nbytes", "_start"),
        *("endpoints", "head", "is_plain", "progress", "request", "waiter"),
    )

    _start: tuple[int, tuple[Header, ...]]
    _framing: Framing
    _left_nbytes: int

    def __init__(self, http1: Http1, request: RequestHead, is_plain: bool) -> None:
        self.head = request.head
        self.endpoints = http1.connection.endpoints
        self.request = request
        self.is_plain = is_plain
        self.progress = AWAITED
        self._http1 = http1
        self.waiter: Waiter = None

    @property
    def started(self) -> bool:
        return self.progress is not AnswerProgress.AWAITED

    @property
    def ended(self) -> bool:
        return self.progress is AnswerProgress.ENDED

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        if self.progress is not AWAITED:
            if release is not None:
                release()
            return
        http1 = self._http1
        text = h1.whole_head(head.text or h1.head_template(head), nbytes, int(time()))
        if not self.is_plain:
            if http1.closes_after(self.request):
                text = h1.with_line(text, h1.CLOSE)
                http1.closing = True
            elif self.head.http_version == "1.0":
                text = h1.with_line(text, h1.KEEP_ALIVE)
            if self.head.method == "HEAD":
                body = ()
        self.progress = ENDED
        if nbytes <= JOINED_NBYTES:
            http1.write(b"".join((text, *body)))
        else:
            release = http1.write_pieces((text, *body), release)
        http1.on_response_sent()
        if release is not None:
            release()

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        """Begin the response. The head is sent with the first part of the body."""
        if self.progress is not AnswerProgress.ENDED:
            self.progress = PROGRESS.step(self.progress, AnswerProgress.STARTED)
            self._start = status, tuple(headers)
            if end:
                self.send(b"", end=True)

    def send(self, data: bytes, end: bool = False) -> None:
        if self.progress is AnswerProgress.ENDED:
            return
        head = b""
        if self.progress is AnswerProgress.STARTED:
            status, headers = self._start
            keep_alive = not self._http1.closes_after(self.request)
            version, method, nbytes = self.head.http_version, self.head.method, len(data) if end else None
            encoded = h1.response_head(status, headers, version, method, nbytes=nbytes, keep_alive=keep_alive)
            self.progress = PROGRESS.step(self.progress, AnswerProgress.SENDING)
            head, self._framing, self._left_nbytes = encoded
            if not keep_alive or self._framing is Framing.CLOSED:
                self._http1.closing = True
        if self._framing is Framing.SIZED:
            self._left_nbytes -= len(data)
            if self._left_nbytes < 0 or (end and self._left_nbytes):
                logger.error("aborted a response: its length differs from its content-length")
                self.reset()
                return
        pieces: tuple[Piece, ...] = () if self._framing is Framing.NONE else (data,)
        if self._framing is Framing.CHUNKED:
            pieces = (b"%x\r\n" % len(data), data, b"\r\n") if data else ()
            pieces = (*pieces, h1.LAST_CHUNK) if end else pieces
        self._http1.write_pieces((head, *pieces), None)
        if end:
            self.progress = PROGRESS.step(self.progress, AnswerProgress.ENDED)
            self._http1.on_response_sent()
            wake(self.waiter)

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        self.send(b"", end=True)

    def reset(self) -> None:
        if self.progress is not AnswerProgress.ENDED:
            # A body framed by the end of the connection looks complete unless the connection fails.
            close = self.progress is not AnswerProgress.SENDING or self._framing is not Framing.CLOSED
            self.progress = AnswerProgress.ENDED
            self._http1.abort_response(close=close)
            wake(self.waiter)

    def consumed(self, nbytes: int) -> None:
        if self.progress is not ENDED:
            self._http1.consumed(nbytes)

    def drop_unsent(self) -> None:
        pass  # all data is in the socket's buffer

    async def room(self) -> None:
        while self.progress is not AnswerProgress.ENDED and self._http1.connection.full:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.progress is AnswerProgress.ENDED:
            raise ConnectionResetError("the client is gone")


class Stage(enum.Enum):
    """The stage of a connection: what the next input is."""

    HEAD = "the head of a request, or nothing for a while"
    BODY = "the body of the current request"
    ANSWER = "of a later request: the current one is complete, and waits for its response"
    DRAIN = "the rest of a request that was answered early"
    LINGER = "ignored: closing at once would make a client that still sends lose the response"
    CLOSED = "not read"

    #: Stages are hashed for every request, and ``Enum.__hash__`` is a Python function.
    __hash__ = object.__hash__


# Compared in every request: a look-up on an Enum class costs ten times one of a global.
_HEAD: Final = Stage.HEAD
_BODY: Final = Stage.BODY
_ANSWER: Final = Stage.ANSWER

_STAGES: Final = StepTable(
    "an HTTP/1 connection",
    {
        Stage.HEAD: {Stage.BODY, Stage.ANSWER, Stage.LINGER, Stage.CLOSED},
        Stage.BODY: {Stage.ANSWER, Stage.DRAIN, Stage.LINGER, Stage.CLOSED},
        Stage.ANSWER: {Stage.HEAD, Stage.CLOSED},
        Stage.DRAIN: {Stage.HEAD, Stage.LINGER, Stage.CLOSED},
        Stage.LINGER: {Stage.CLOSED},
        Stage.CLOSED: (),
    },
)


class _Timers:
    """The timers of ``Http1.check``."""

    __slots__ = ("body_rate", "quiet", "sending", "stage")

    def __init__(self) -> None:
        self.stage = ChangeTimer()
        self.quiet = ChangeTimer()
        self.sending = ChangeTimer()
        self.body_rate = MinimumRate()


class Http1:
    """HTTP/1 on one connection (a ``ConnectionProtocol``). Input, output and timeouts move one stage."""

    #: The body of the current request in the stages ``BODY`` and ``DRAIN``.
    _body: h1.RequestBody

    def __init__(self, connection: Connection, handler: RequestHandler) -> None:
        self.connection = connection
        self._handler = handler
        self._stage = Stage.HEAD
        #: The current request, until answered, and the receiver of its body.
        self._exchange: Http1Exchange | None = None
        self._receiver: BodyReceiver | None = None
        #: Whether the client waits for ``100 Continue`` before it sends the body.
        self._awaits_continue = False
        self._unconsumed_nbytes = 0
        self._drained_nbytes = 0
        self._buffered = bytearray()
        #: The bytes of a buffered incomplete head that were checked.
        self._checked_nbytes = 0
        self._running = False
        self._paused = False
        #: Whether responses that begin from now on close the connection.
        self._retiring = False
        #: Whether the current or the next response closes the connection.
        self.closing = False
        #: Whether ``shut_down`` was called.
        self._asked_to_close = False
        self._n_fed = 0
        self._body_nbytes = 0
        self._n_requests = 0
        self._written_nbytes = 0
        #: Made by the first ``check``: many connections end before.
        self._timers: _Timers | None = None

    @property
    def sent(self) -> tuple[int, int]:
        unsent_nbytes = self.connection.unsent_nbytes
        return self._written_nbytes - unsent_nbytes, unsent_nbytes

    @property
    def unanswered(self) -> Sequence[str]:
        return () if self._exchange is None else (self._exchange.head.path,)

    def feed(self, data: Piece) -> None:
        self._n_fed += 1
        if not self._buffered:
            # Nearly every read is one whole request.
            rest = self._begin(data) if self._stage is _HEAD else data
            if len(rest):
                self._run(rest, begun=rest is not data)
            return
        self._buffered += data
        if self._checked_nbytes and h1.is_as_begun(self._buffered, self._checked_nbytes):
            self._checked_nbytes = len(self._buffered)
        else:
            self._proceed()

    def resume(self) -> None:
        if not self._running:
            self._proceed()

    def _proceed(self) -> None:
        if self._buffered and self._stage is not Stage.ANSWER:
            data, self._buffered = memoryview(self._buffered), bytearray()
            self._run(data)
        self._steer_reading()

    def _run(self, data: Piece, *, begun: bool = False) -> None:
        """Process input until the loop budget is spent. ``begun``: this call has processed some already."""
        self._running = True
        while len(data):
            if begun and self.connection.defers():
                self._buffered += data
                break
            begun = True
            match self._stage:
                case Stage.HEAD:
                    data = self._begin(data)
                case Stage.BODY:
                    data = self._on_body(data)
                case Stage.ANSWER:
                    data = self._buffer(data)
                case Stage.DRAIN:
                    data = self._drain(data)
                case _:
                    break
        self._running = False

    def _begin(self, data: Piece) -> Piece:
        """Pass the request at the start of the data to its receiver. Return the rest of the data."""
        self._checked_nbytes = 0
        if self.connection.full:
            return self._buffer(data)
        text = data if type(data) is bytes else bytes(data[:_USUAL_HEAD_NBYTES])
        end = text.find(h1.BLANK_LINE) + len(h1.BLANK_LINE)
        if end < len(h1.BLANK_LINE) or text[0] == _CARRIAGE_RETURN:
            return self._begin_incomplete(data, text)
        try:
            request = h1.parse_head(text[:end])
        except h1.RequestRefused as error:
            return self._refuse(error)
        self._n_requests += 1
        stop = end + request.body_nbytes
        if end <= stop <= len(data):
            self._stage = _ANSWER  # not by _STAGES: this is every small request
            receiver = self._call_handler(
                Http1Exchange(self, request, request.is_plain and not self._retiring)
            )
            if receiver is not None:
                receiver.receive_body(data[end:stop], True)
            return data[stop:]
        self._enter(Stage.BODY)
        self._body = h1.request_body(request.body_nbytes)
        self._unconsumed_nbytes = self._drained_nbytes = 0
        self._awaits_continue = request.expects_continue and len(data) <= end
        if self._call_handler(Http1Exchange(self, request, is_plain=False)) and self._awaits_continue:
            self._awaits_continue = False
            self.write(h1.CONTINUE)
        return data[end:]

    def _call_handler(self, exchange: Http1Exchange) -> BodyReceiver | None:
        """Return the receiver of the body, or None if the handler has answered the request already."""
        self._exchange = exchange
        receiver = self._handler(exchange)
        if exchange.progress is ENDED:
            receiver.abandon()
            return None
        self._receiver = receiver
        return receiver

    def _begin_incomplete(self, data: Piece, text: bytes) -> Piece:
        """Process a head that is incomplete or long, or has empty lines before it."""
        empty = _EMPTY_LINES.match(text)
        if empty is not None:
            return data[empty.end() :]
        if text == b"\r":
            return self._buffer(data)
        if len(text) < len(data):
            return self._begin(bytes(data))
        try:
            h1.check_begun(text)
        except h1.RequestRefused as error:
            return self._refuse(error)
        self._checked_nbytes = len(text)
        return self._buffer(data)

    def _on_body(self, data: Piece) -> Piece:
        exchange, receiver, body = self._exchange, self._receiver, self._body
        assert exchange is not None
        assert receiver is not None
        try:
            piece, rest = body.cut(data)
        except h1.RequestRefused as error:
            return self._refuse(error)
        if body.ended:
            self._enter(Stage.ANSWER)
            exchange.is_plain = exchange.request.is_plain and not self._retiring
            receiver.receive_body(piece, True)
        elif len(piece):
            self._body_nbytes += len(piece)
            self._unconsumed_nbytes += len(piece)
            receiver.receive_body(piece, False)
            self._steer_reading()
        return rest

    def _drain(self, data: Piece) -> Piece:
        """Ignore the rest of a body that was answered early."""
        try:
            _, rest = self._body.cut(data)
        except h1.RequestRefused:
            self._linger()
            return b""
        self._drained_nbytes += len(data) - len(rest)
        if self._body.ended:
            self._enter(Stage.HEAD)
        elif self._drained_nbytes > DRAIN_NBYTES:
            self._linger()
        return rest

    def _buffer(self, data: Piece) -> Piece:
        self._buffered += data
        self._steer_reading()
        return b""

    def _steer_reading(self) -> None:
        pause = len(self._buffered) > BUFFERED_NBYTES or (
            self._stage is Stage.BODY and self._unconsumed_nbytes > UNCONSUMED_NBYTES
        )
        if pause and not self._paused:
            self.connection.pause_reading()
        elif self._paused and not pause:
            self.connection.resume_reading()
        self._paused = pause

    def _refuse(self, error: h1.RequestRefused) -> Piece:
        """Answer an invalid request and read no other: the start of the next request is unknown."""
        exchange = self._exchange
        if exchange is not None and exchange.progress is AnswerProgress.SENDING:
            exchange.reset()
            return b""
        self.write(h1.error_response(error.status, str(error)))
        self._linger()
        self._drop_request()
        return b""

    def write(self, data: bytes) -> None:
        self._written_nbytes += len(data)
        self.connection.write(data)

    def write_pieces(self, pieces: Sequence[Piece], release: Release | None) -> Release | None:
        """Send pieces. Return ``release`` if they were copied; otherwise the connection calls it later."""
        nbytes = sum(map(len, pieces))
        self._written_nbytes += nbytes
        if nbytes > JOINED_NBYTES:
            self.connection.write_pieces(pieces, release)
            return None
        if nbytes:
            self.connection.write(b"".join(pieces))
        return release

    def closes_after(self, request: RequestHead) -> bool:
        """Return whether the response to the request is the last of the connection."""
        if self.closing or self._retiring or not request.keep_alive:
            return True
        return self._stage is Stage.BODY and (self._awaits_continue or self._body.left_nbytes > DRAIN_NBYTES)

    def on_response_sent(self) -> None:
        receiver, self._receiver, self._exchange = self._receiver, None, None
        if self._stage is _BODY:  # answered early
            if self.closing:
                self._linger()
            else:
                self._enter(Stage.DRAIN)
                self._steer_reading()
            if receiver is not None:
                receiver.abandon()
        elif self.closing:
            self._close()
        else:
            self._stage = _HEAD  # not by _STAGES, as in _begin
            if self._buffered and not self._running:
                self._proceed()

    def abort_response(self, *, close: bool) -> None:
        """Abort a response. Without ``close`` the connection is reset: its end may look like the body's."""
        self._enter(Stage.CLOSED)
        if close:
            self.connection.close()
        else:
            self.connection.abort()
        self._drop_request()

    def consumed(self, nbytes: int) -> None:
        self._unconsumed_nbytes -= nbytes
        if self._paused:
            self._steer_reading()

    def drained(self) -> None:
        if self._exchange is not None:
            wake(self._exchange.waiter)
        if not self._running:
            self._proceed()

    def lost(self) -> None:
        self._stage = Stage.CLOSED
        self._buffered.clear()
        self._drop_request()

    def announce(self) -> None:
        """Close the connection with the next response that begins."""
        self._retiring = True
        if self._exchange is not None:
            self._exchange.is_plain = False

    @property
    def aware(self) -> bool:
        if self._exchange is not None:
            return self.closing or self._exchange.progress is not AnswerProgress.SENDING
        return self._stage in (Stage.LINGER, Stage.CLOSED)

    def shut_down(self) -> None:
        """Accept no further request, and close an idle connection at the second call: one may come."""
        again, self._asked_to_close = self._asked_to_close, True
        self.closing = True
        self.announce()
        if self._exchange is not None:
            return
        if self._stage is Stage.HEAD and again:
            self._close()
        elif self._stage is Stage.DRAIN:
            self._linger()

    def check(self, now: float) -> None:
        connection, limits = self.connection, self.connection.limits
        timers = self._timers = self._timers or _Timers()
        unsent = connection.unsent_nbytes
        sending = bool(unsent), self._written_nbytes - unsent
        if timers.sending.unchanged_s(sending, now) > _SENDING_S and unsent:
            connection.abort()
            self.lost()
            return
        part = self._stage, self._n_requests, bool(self._buffered), bool(unsent)
        stage_s = timers.stage.unchanged_s(part, now)
        quiet_s = timers.quiet.unchanged_s((self._stage, self._n_fed, self._paused), now)
        body_nbytes = self._body_nbytes if self._stage is Stage.BODY and not self._paused else None
        is_slow = timers.body_rate.is_slow(now, body_nbytes, limits.body_grace_s, limits.min_body_rate)
        match self._stage:
            case Stage.HEAD if self._buffered and not connection.full and stage_s > limits.head_timeout_s:
                text = f"the request head did not come within {limits.head_timeout_s:g} s"
                self._refuse_late("head", text)
            case Stage.HEAD if not (self._buffered or unsent) and stage_s > limits.idle_timeout_s:
                connection.count_late("idle")
                self._close()
            case Stage.BODY if is_slow:
                self._refuse_late("body", slow_body_text(limits))
            case Stage.DRAIN if stage_s > _DRAIN_S:
                self._close()
            case Stage.LINGER if quiet_s > _QUIET_S or stage_s > _DRAIN_S:
                self._close()

    def _refuse_late(self, what: str, text: str) -> None:
        self.connection.count_late(what)
        self._refuse(h1.RequestRefused(408, text))
        if self._stage is Stage.LINGER:
            self._close()

    def _drop_request(self) -> None:
        exchange, self._exchange = self._exchange, None
        receiver, self._receiver = self._receiver, None
        if exchange is not None:
            exchange.progress = AnswerProgress.ENDED
            wake(exchange.waiter)
        if receiver is not None:
            receiver.abandon()

    def _linger(self) -> None:
        self._enter(Stage.LINGER)
        self._buffered.clear()
        self._steer_reading()
        self.connection.end_writing()

    def _close(self) -> None:
        self._enter(Stage.CLOSED)
        self._buffered.clear()
        self.connection.close()

    def _enter(self, stage: Stage) -> None:
        self._stage = _STAGES.step(self._stage, stage)
