"""The front's side of requests that a door has passed on: each is an ``Exchange`` as if its connection were
here, answered by whoever answers those. What goes to the door is cut into pieces, a few of which are on their
way at once.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gpuserve.core.states import StepTable
from gpuserve.front.exchange.exchange import Accept, AnswerHead, Ends, Head, Header, Piece, Release, Sink
from gpuserve.front.exchange.limits import source_of
from gpuserve.front.passage.messages import (
    Abandoned,
    AnswerPart,
    Body,
    Consumed,
    DropUnsent,
    Finish,
    Opened,
    Reset,
    Send,
    Sent,
    Start,
    WholeAnswer,
)
from gpuserve.front.passage.passage import Passage
from gpuserve.front.passage.pieces import WINDOW_NBYTES, pieces

logger = logging.getLogger(__name__)

#: So many heads are kept of a door, none of them longer than this.
_REMEMBERED: Final = 1024
_REMEMBERED_NBYTES: Final = 4096
#: What waits to be sent before ``room`` waits.
_UNSENT_NBYTES: Final = 256 << 10
#: So much of a body that has ended is let be: the client gets it back with the answer.
_UNCREDITED_NBYTES: Final = 8 << 10


class ForwardedProgress(enum.Enum):
    """How far a response has gone to the door."""

    AWAITED = "nothing is known of it"
    STARTED = "its head has gone, and maybe some of its body"
    ENDING = "all of it is known, and the rest goes as the door takes it"
    OVER = "all of it has gone, or nobody waits for it"


_AWAITED: Final = ForwardedProgress.AWAITED
_OVER: Final = ForwardedProgress.OVER

_PROGRESS: Final = StepTable(
    "a forwarded response",
    {
        ForwardedProgress.AWAITED: {
            ForwardedProgress.STARTED,
            ForwardedProgress.ENDING,
            ForwardedProgress.OVER,
        },
        ForwardedProgress.STARTED: {ForwardedProgress.ENDING, ForwardedProgress.OVER},
        ForwardedProgress.ENDING: {ForwardedProgress.OVER},
        ForwardedProgress.OVER: (),
    },
)


class ForwardedExchanges:
    """The requests that one door has passed on, until they are answered or given up. ``obey`` says who takes
    which message of the door.
    """

    def __init__(self, passage: Passage, accept: Accept) -> None:
        self._passage = passage
        self._accept = accept
        self._open: dict[int, ForwardedExchange] = {}
        self._head = functools.lru_cache(_REMEMBERED)(Head)
        self.obey: Mapping[type, Callable[[Any], None]] = {
            Opened: self._begin,
            Body: partial(self._tell, ForwardedExchange.take),
            Sent: partial(self._tell, ForwardedExchange.on_sent),
            Abandoned: partial(self._tell, ForwardedExchange.on_abandoned),
        }

    @property
    def n_open(self) -> int:
        """How many requests are not over."""
        return len(self._open)

    def close(self) -> None:
        """The door is gone, and so are all of its clients."""
        for exchange in list(self._open.values()):
            self._guard(exchange, exchange.drop)

    def post(self, message: Any) -> None:
        self._passage.post(message)

    def forget(self, number: int) -> None:
        self._open.pop(number, None)

    def _begin(self, opened: Opened) -> None:
        exchange = ForwardedExchange(self, opened.exchange, self._head_of(opened), _ends(opened))
        self._open[opened.exchange] = exchange
        self._guard(exchange, partial(exchange.begin, self._accept))

    def _tell(self, act: Callable[[ForwardedExchange, Any], None], message: Any) -> None:
        exchange = self._open.get(message.exchange)
        if exchange is not None:  # else it was over when this was on its way
            self._guard(exchange, partial(act, exchange, message))

    def _guard(self, exchange: ForwardedExchange, act: Callable[[], None]) -> None:
        """A defect that one request shows is not for those beside it."""
        try:
            act()
        except Exception:
            logger.exception("defect of the server; a request is broken off")
            exchange.reset()

    def _head_of(self, opened: Opened) -> Head:
        """Its head; equal ones share one, for what was worked out of it."""
        headers = opened.headers
        nbytes = len(opened.target) + sum([len(name) + len(value) for name, value in headers])
        return (self._head if nbytes <= _REMEMBERED_NBYTES else Head)(
            opened.method, opened.target, headers, opened.http_version, opened.content_length, opened.scheme
        )


class ForwardedExchange:
    """One request at a connection of a door: an ``Exchange``."""

    __slots__ = (
        "_all",
        "_body_ended",
        "_last",
        "_number",
        "_on_way_nbytes",
        "_progress",
        "_release",
        "_sink",
        "_uncredited_nbytes",
        "_unsent",
        "_unsent_nbytes",
        "_waiter",
        "ends",
        "head",
    )

    def __init__(self, all_of_door: ForwardedExchanges, number: int, head: Head, ends: Ends) -> None:
        self.head = head
        self.ends = ends
        self._all = all_of_door
        self._number = number
        self._progress = _AWAITED
        self._sink: Sink | None = None
        self._body_ended = False
        self._uncredited_nbytes = 0
        #: What of the response has not gone, and the message with which it ends.
        self._unsent: deque[Piece] = deque()
        self._last: WholeAnswer | Start | Send | Finish | None = None
        self._unsent_nbytes = 0
        self._on_way_nbytes = 0
        self._release: Release | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- the door's side ------------------------------------------------------------------

    def begin(self, accept: Accept) -> None:
        sink = accept(self)
        if self.ended:
            sink.abandon()
        else:
            self._sink = sink

    def take(self, body: Body) -> None:
        self._body_ended = body.end
        if self._sink is not None:
            self._sink.take(body.data, body.end)

    def on_sent(self, sent: Sent) -> None:
        self._on_way_nbytes -= sent.nbytes
        self._push()
        if not self._is_full:
            self._wake()

    def on_abandoned(self, _abandoned: Abandoned) -> None:
        self.drop()

    def drop(self) -> None:
        """Nobody waits for the rest of it."""
        sink, self._sink = self._sink, None
        self._let_go()
        if sink is not None:
            sink.abandon()

    # ---- the response ---------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self._progress is not _AWAITED

    @property
    def ended(self) -> bool:
        return self._progress is _OVER or self._progress is ForwardedProgress.ENDING

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        if self._progress is not _AWAITED:
            if release is not None:
                release()
            return
        *parts, last = pieces(body, nbytes)
        self._release = release
        self._queue(parts)
        self._end(WholeAnswer(self._number, head.status, head.headers, head.trailers, bytes(last)))

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        if self.ended:
            return
        message = Start(self._number, status, tuple(headers), end)
        if end:
            self._end(message)
        else:
            self._move(ForwardedProgress.STARTED)
            self._all.post(message)

    def send(self, data: bytes, end: bool = False) -> None:
        if self.ended:
            return
        *parts, last = pieces((data,), len(data))
        self._queue(parts)
        if end:
            self._end(Send(self._number, bytes(last), True))
        else:
            self._queue((last,))
            self._push()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if not self.ended:
            self._end(Finish(self._number, tuple(trailers)))

    def drop_unsent(self) -> None:
        if not self.ended:
            self._unsent.clear()
            self._unsent_nbytes = 0
            self._all.post(DropUnsent(self._number))
            self._wake()

    def reset(self) -> None:
        if self._progress is not _OVER:
            self._all.post(Reset(self._number))
            self.drop()

    def consumed(self, nbytes: int) -> None:
        if self.ended:
            return
        self._uncredited_nbytes += nbytes
        if self._uncredited_nbytes > (_UNCREDITED_NBYTES if self._body_ended else 0):
            self._all.post(Consumed(self._number, self._uncredited_nbytes))
            self._uncredited_nbytes = 0

    async def room(self) -> None:
        while self._is_full and self._progress is not _OVER:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._progress is _OVER:
            raise ConnectionResetError("the client is gone")

    # ---- what of it has gone --------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._unsent_nbytes + self._on_way_nbytes > _UNSENT_NBYTES

    def _queue(self, parts: Sequence[Piece]) -> None:
        for part in parts:
            self._unsent.append(part)
            self._unsent_nbytes += len(part)

    def _end(self, last: WholeAnswer | Start | Send | Finish) -> None:
        """All of it is known: who answers is told if the body is not of interest any more."""
        self._move(ForwardedProgress.ENDING)
        self._last = last
        sink, self._sink = self._sink, None
        self._push()
        if sink is not None and not self._body_ended:
            sink.abandon()

    def _push(self) -> None:
        """Have as much go as may be on its way."""
        is_whole = isinstance(self._last, WholeAnswer)
        while self._unsent and self._on_way_nbytes < WINDOW_NBYTES:
            part = bytes(self._unsent.popleft())
            self._unsent_nbytes -= len(part)
            self._on_way_nbytes += len(part)
            self._all.post(AnswerPart(self._number, part) if is_whole else Send(self._number, part, False))
        if self._last is not None and not self._unsent:
            self._all.post(self._last)
            self._let_go()

    def _let_go(self) -> None:
        """It is over, however it ended."""
        if self._progress is _OVER:
            return
        self._move(_OVER)
        self._all.forget(self._number)
        self._unsent.clear()
        self._wake()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _move(self, progress: ForwardedProgress) -> None:
        self._progress = _PROGRESS.step(self._progress, progress)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _ends(opened: Opened) -> Ends:
    client = opened.client
    source = source_of(client and client[0])
    return Ends(client, opened.server, opened.tls, source=source, user=opened.user)
