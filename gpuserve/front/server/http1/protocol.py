"""HTTP/1.1 and 1.0 on one connection (RFC 9112): bytes in, one request after the other to ``accept``.

Responses are made by ``Http1Exchange``. Reading goes on while a request is answered, so a client that goes
away is noticed at once; what it sends meanwhile is kept for later::

          a head is complete        the body is          it is answered
    HEAD ────────────────► BODY ───────────────► ANSWER ─────────────► HEAD
     │                      │ answered before     └ the last one ─────► CLOSED
     │ refused              ├────────► DRAIN ──── the body is complete ► HEAD
     └──────► LINGER ◄──────┴────────────┘ refused, or too much of it
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Final

from gpuserve.core.states import StepTable
from gpuserve.front.exchange.connection import Connection
from gpuserve.front.exchange.exchange import Accept, Piece, Release, Sink
from gpuserve.front.exchange.limits import slow_body
from gpuserve.front.exchange.watch import Pace, Watch
from gpuserve.front.server.http1.body import Body, body_of
from gpuserve.front.server.http1.exchange import ENDED, JOINED_NBYTES, Http1Exchange, Progress
from gpuserve.front.server.http1.head import (
    BLANK_LINE,
    REMEMBERED_NBYTES,
    RequestHead,
    RequestRefused,
    check_begun,
    is_as_begun,
    parse,
    remembered,
)
from gpuserve.front.server.http1.response import CONTINUE, refusal

#: What comes before the request is answered is kept up to here; then reading pauses.
KEPT_NBYTES: Final = 64 << 10
#: So much of a body may wait to be used up.
UNCONSUMED_NBYTES: Final = 1 << 20
#: Of a request that was answered before its end, for which the connection is not given up.
DRAIN_NBYTES: Final = 64 << 20
#: Most heads are shorter; a longer one is looked for again.
_USUAL_HEAD_NBYTES: Final = 4096
_CARRIAGE_RETURN: Final = 0x0D
#: All of them at once: a step for each let 256 KiB of them hold the loop for 0.4 s.
_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)+")
#: For the rest of a request that was answered before its end.
_DRAIN_S: Final = 30.0
#: A client that sends nothing for so long after its last answer has read it, or never will.
_QUIET_S: Final = 2.0
#: Without a byte of the answers being taken.
_SENDING_S: Final = 60.0


class Stage(enum.Enum):
    """What the next bytes are, and who is waited for."""

    HEAD = "the head of a request, or nothing for a while"
    BODY = "the body of the request that is with its sink"
    ANSWER = "of a later request: this one is complete, and waits for its answer"
    DRAIN = "the rest of a request that is answered"
    LINGER = "of no interest: a client that still sends would lose the answer with the connection"
    CLOSED = "not read"

    #: Members are looked up all the time, and Enum's own is a Python function.
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


class Http1:
    """The protocol on one connection, one request at a time; one object, as all of it moves one stage."""

    def __init__(self, way: Connection, accept: Accept) -> None:
        self.ends = way.ends
        self.way = way
        self._accept = accept
        self._stage = Stage.HEAD
        #: The request that is not answered, and where its body goes.
        self._exchange: Http1Exchange | None = None
        self._sink: Sink | None = None
        self._body: Body = body_of(0)
        #: The client waits to be told to send it.
        self._awaits_continue = False
        self._unconsumed_nbytes = 0
        self._drained_nbytes = 0
        self._kept = bytearray()
        #: How much of what is kept is the beginning of a head, as far as that was judged.
        self._begun_nbytes = 0
        self._running = False
        self._paused = False
        #: Answers that begin from now on say that they are the last.
        self._retiring = False
        #: The answer to come, or that is there, is the last, and says so.
        self._closing = False
        #: The server wants to be rid of the connection, idle or not.
        self._asked_to_close = False
        self._n_fed = 0
        self._body_nbytes = 0
        self._n_requests = 0
        self._written_nbytes = 0
        self._whole_watch = Watch()
        self._quiet_watch = Watch()
        self._sending_watch = Watch()
        self._body_pace = Pace()

    @property
    def sent(self) -> tuple[int, int]:
        unsent_nbytes = self.way.unsent_nbytes
        return self._written_nbytes - unsent_nbytes, unsent_nbytes

    @property
    def unanswered(self) -> Sequence[str]:
        return () if self._exchange is None else (self._exchange.head.path,)

    # ---- bytes in -------------------------------------------------------------------------

    def feed(self, data: Piece) -> None:
        self._n_fed += 1
        if not self._kept:
            # One whole request is nearly every read.
            rest = self._begin(data) if self._stage is _HEAD else data
            if len(rest):
                self._run(rest, begun=rest is not data)
            return
        self._kept += data
        if self._begun_nbytes and is_as_begun(self._kept, self._begun_nbytes):
            self._begun_nbytes = len(self._kept)
        else:
            self._proceed()

    def go_on(self) -> None:
        if not self._running:
            self._proceed()

    def _proceed(self) -> None:
        if self._kept and self._stage is not Stage.ANSWER:
            data, self._kept = memoryview(self._kept), bytearray()
            self._run(data)
        self._steer_reading()

    def _run(self, data: Piece, *, begun: bool = False) -> None:
        """Take it, up to the end of the turn, where some of it was taken before, or will be."""
        self._running = True
        while len(data):
            if begun and self.way.puts_off():
                self._kept += data
                break
            begun = True
            match self._stage:
                case Stage.HEAD:
                    data = self._begin(data)
                case Stage.BODY:
                    data = self._take_body(data)
                case Stage.ANSWER:
                    data = self._keep(data)
                case Stage.DRAIN:
                    data = self._drain(data)
                case _:
                    break
        self._running = False

    def _begin(self, data: Piece) -> Piece:
        """Give the request that the data begins with to its sink; what is left of the data."""
        self._begun_nbytes = 0
        if self.way.full:
            return self._keep(data)
        text = data if type(data) is bytes else bytes(data[:_USUAL_HEAD_NBYTES])
        end = text.find(BLANK_LINE) + len(BLANK_LINE)
        if end < len(BLANK_LINE) or text[0] == _CARRIAGE_RETURN:
            return self._begin_otherwise(data, text)
        try:
            request = remembered(text[:end]) if end <= REMEMBERED_NBYTES else parse(text[:end])
        except RequestRefused as error:
            return self._refuse(error)
        self._n_requests += 1
        stop = end + request.body_nbytes
        if end <= stop <= len(data):
            self._stage = _ANSWER  # checked by hand: this is every small request
            sink = self._sink_of(Http1Exchange(self, request, request.is_plain and not self._retiring))
            if sink is not None:
                sink.take(data[end:stop], True)
            return data[stop:]
        self._begin_body(request, begun=len(data) > end)
        return data[end:]

    def _sink_of(self, exchange: Http1Exchange) -> Sink | None:
        """Who takes the body; None where it is answered already."""
        self._exchange = exchange
        sink = self._accept(exchange)
        if exchange.progress is ENDED:
            sink.abandon()
            return None
        self._sink = sink
        return sink

    def _begin_otherwise(self, data: Piece, text: bytes) -> Piece:
        """A head that has not come whole, or is long, or has an empty line before it."""
        empty = _EMPTY_LINES.match(text)
        if empty is not None:
            return data[empty.end() :]
        if text == b"\r":
            return self._keep(data)
        if len(text) < len(data):
            return self._begin(bytes(data))
        try:
            check_begun(text)
        except RequestRefused as error:
            return self._refuse(error)
        self._begun_nbytes = len(text)
        return self._keep(data)

    def _begin_body(self, request: RequestHead, *, begun: bool) -> None:
        self._enter(Stage.BODY)
        self._body = body_of(request.body_nbytes)
        self._unconsumed_nbytes = self._drained_nbytes = 0
        self._awaits_continue = request.expects_continue and not begun
        if self._sink_of(Http1Exchange(self, request, is_plain=False)) and self._awaits_continue:
            self._awaits_continue = False
            self.write(CONTINUE)

    def _take_body(self, data: Piece) -> Piece:
        exchange, sink, body = self._exchange, self._sink, self._body
        assert exchange is not None
        assert sink is not None
        try:
            piece, rest = body.cut(data)
        except RequestRefused as error:
            return self._refuse(error)
        if body.ended:
            self._enter(Stage.ANSWER)
            exchange.is_plain = exchange.request.is_plain and not self._retiring
            sink.take(piece, True)
        elif len(piece):
            self._body_nbytes += len(piece)
            self._unconsumed_nbytes += len(piece)
            sink.take(piece, False)
            self._steer_reading()
        return rest

    def _drain(self, data: Piece) -> Piece:
        try:
            _, rest = self._body.cut(data)
        except RequestRefused:
            self._linger()
            return b""
        self._drained_nbytes += len(data) - len(rest)
        if self._body.ended:
            self._enter(Stage.HEAD)
        elif self._drained_nbytes > DRAIN_NBYTES:
            self._linger()
        return rest

    def _keep(self, data: Piece) -> Piece:
        self._kept += data
        self._steer_reading()
        return b""

    def _steer_reading(self) -> None:
        """Stop reading where too much waits, or go on."""
        pause = len(self._kept) > KEPT_NBYTES or (
            self._stage is Stage.BODY and self._unconsumed_nbytes > UNCONSUMED_NBYTES
        )
        if pause and not self._paused:
            self.way.pause_reading()
        elif self._paused and not pause:
            self.way.resume_reading()
        self._paused = pause

    def _refuse(self, error: RequestRefused) -> Piece:
        """Answer what is no request, and read no other: nobody knows where it would begin."""
        exchange = self._exchange
        if exchange is not None and exchange.progress is Progress.SENDING:
            exchange.reset()
            return b""
        self.write(refusal(error.status, str(error)))
        self._linger()
        self._drop_request()
        return b""

    # ---- for the exchange -----------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._written_nbytes += len(data)
        self.way.write(data)

    def write_pieces(self, pieces: Sequence[Piece], release: Release | None) -> Release | None:
        """Send pieces; gives ``release`` back where they were copied, otherwise it is called in time."""
        nbytes = sum(map(len, pieces))
        self._written_nbytes += nbytes
        if nbytes > JOINED_NBYTES:
            self.way.write_pieces(pieces, release)
            return None
        if nbytes:
            self.way.write(b"".join(pieces))
        return release

    def closes_after(self, request: RequestHead) -> bool:
        """Whether the answer of the request is the last of its connection."""
        if self._closing or self._retiring or not request.keep_alive:
            return True
        return self._stage is Stage.BODY and (self._awaits_continue or self._body.left_nbytes > DRAIN_NBYTES)

    def close_after(self) -> None:
        """Have the connection closed once its request is answered."""
        self._closing = True

    def finished(self) -> None:
        sink, self._sink, self._exchange = self._sink, None, None
        if self._stage is _BODY:
            self._finish_early(sink)
        elif self._closing:
            self._close()
        else:
            self._stage = _HEAD  # as in _begin
            if self._kept and not self._running:
                self._proceed()

    def _finish_early(self, sink: Sink | None) -> None:
        """Answered before its end. Where there is no sink yet, it is told later."""
        if self._closing:
            self._linger()
        else:
            self._enter(Stage.DRAIN)
            self._steer_reading()
        if sink is not None:
            sink.abandon()

    def break_off(self, *, politely: bool) -> None:
        """The answer cannot be completed; not politely: even its end would look like one."""
        self._enter(Stage.CLOSED)
        if politely:
            self.way.close()
        else:
            self.way.abort()
        self._drop_request()

    def consumed(self, nbytes: int) -> None:
        self._unconsumed_nbytes -= nbytes
        if self._paused:
            self._steer_reading()

    # ---- the connection -------------------------------------------------------------------

    def drained(self) -> None:
        if self._exchange is not None:
            self._exchange.wake()
        if not self._running:
            self._proceed()

    def lost(self) -> None:
        self._stage = Stage.CLOSED
        self._kept.clear()
        self._drop_request()

    def announce(self) -> None:
        """Tell the client with the next answer that begins, which is the last."""
        self._retiring = True
        if self._exchange is not None:
            self._exchange.is_plain = False

    @property
    def aware(self) -> bool:
        """Whether it is told with the answer to come, or has been."""
        if self._exchange is not None:
            return self._closing or self._exchange.progress is not Progress.SENDING
        return self._stage in (Stage.LINGER, Stage.CLOSED)

    def shut_down(self) -> None:
        """Take no new request but one that is on its way: idle, it is closed the second time."""
        again, self._asked_to_close = self._asked_to_close, True
        self._closing = True
        self.announce()
        if self._exchange is not None:
            return
        if self._stage is Stage.HEAD and again:
            self._close()
        elif self._stage is Stage.DRAIN:
            self._linger()

    def check(self, now: float) -> None:
        unsent = self.way.unsent_nbytes
        sending = bool(unsent), self._written_nbytes - unsent
        if self._sending_watch.unchanged_s(sending, now) > _SENDING_S and unsent:
            self.way.abort()
            self.lost()
            return
        part = self._stage, self._n_requests, bool(self._kept), bool(unsent)
        whole_s = self._whole_watch.unchanged_s(part, now)
        quiet_s = self._quiet_watch.unchanged_s((self._stage, self._n_fed, self._paused), now)
        limits = self.way.limits
        body_nbytes = self._body_nbytes if self._stage is Stage.BODY and not self._paused else None
        is_slow = self._body_pace.is_slow(now, body_nbytes, limits.body_grace_s, limits.min_body_rate)
        match self._stage:
            case Stage.HEAD if self._kept and not self.way.full and whole_s > limits.head_timeout_s:
                text = f"the request head did not come within {limits.head_timeout_s:g} s"
                self._refuse_late("head", text)
            case Stage.HEAD if not (self._kept or unsent) and whole_s > limits.idle_timeout_s:
                self.way.count_late("idle")
                self._close()
            case Stage.BODY if is_slow:
                self._refuse_late("body", slow_body(limits))
            case Stage.DRAIN if whole_s > _DRAIN_S:
                self._close()
            case Stage.LINGER if quiet_s > _QUIET_S or whole_s > _DRAIN_S:
                self._close()

    def _refuse_late(self, what: str, text: str) -> None:
        """Answer what takes too long, and do not wait for the rest of it."""
        self.way.count_late(what)
        self._refuse(RequestRefused(408, text))
        if self._stage is Stage.LINGER:
            self._close()

    def _drop_request(self) -> None:
        exchange, self._exchange = self._exchange, None
        sink, self._sink = self._sink, None
        if exchange is not None:
            exchange.drop()
        if sink is not None:
            sink.abandon()

    def _linger(self) -> None:
        """Everything is said; what still comes is not read."""
        self._enter(Stage.LINGER)
        self._kept.clear()
        self._steer_reading()
        self.way.end_writing()

    def _close(self) -> None:
        self._enter(Stage.CLOSED)
        self._kept.clear()
        self.way.close()

    def _enter(self, stage: Stage) -> None:
        self._stage = _STAGES.step(self._stage, stage)
