"""A door's side of requests that the front answers: what comes of them is passed on, and what the front says
is done at their connection. No path is known here. Nothing is answered here, but requests whose front has
died, or that come while there is no front for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import RequestError
from gpuserve.front.doors.access.users import depends_on_user, user_of
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Head, Piece, Sink
from gpuserve.front.passage.absence import FrontAbsence, front_died
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
from gpuserve.front.passage.pieces import CREDIT_NBYTES, pieces

logger = logging.getLogger(__name__)

#: What may be asked twice.
_SAFE: Final = frozenset({"GET", "HEAD"})
#: So many heads of answers are kept, each of which a connection encodes once.
_REMEMBERED: Final = 256


class Forwarding:
    """Passes on what it accepts. ``obey`` says who takes which message of the front. During an ``absence`` of
    the front what comes waits. ``refuse`` ends an exchange with an error. A request that may be asked twice,
    and that the dead front had, waits for the next one unless it ``is_urgent``.
    """

    def __init__(
        self,
        passage: Passage,
        absence: FrontAbsence,
        refuse: Callable[[Exchange, RequestError], None],
        is_urgent: Callable[[Head], bool] = lambda _: False,
    ) -> None:
        self._passage = passage
        self._absence = absence
        self.refuse = refuse
        self.is_urgent = is_urgent
        self._numbers = itertools.count()
        self._open: dict[int, PassedOn] = {}
        self.answer_head = functools.lru_cache(_REMEMBERED)(AnswerHead)
        self.obey: Mapping[type, Callable[[Any], None]] = {
            message: partial(self._obey, act)
            for message, act in (
                (AnswerPart, PassedOn.add),
                (WholeAnswer, PassedOn.answer),
                (Start, PassedOn.start),
                (Send, PassedOn.send),
                (DropUnsent, PassedOn.drop_unsent),
                (Finish, PassedOn.finish),
                (Reset, PassedOn.reset),
                (Consumed, PassedOn.consumed),
            )
        }

    @property
    def n_open(self) -> int:
        """How many requests the front has not answered."""
        return len(self._open)

    def accept(self, exchange: Exchange) -> Sink:
        number = next(self._numbers)
        one = self._open[number] = PassedOn(self, exchange, number, exchange.head.method in _SAFE)
        head, ends = exchange.head, exchange.ends
        user = user_of(exchange) if depends_on_user(head) else None
        if self._absence.is_now:
            one.hold(self._absence)
        one.post(
            Opened(
                number,
                head.method,
                head.target,
                tuple(head.headers),
                head.http_version,
                head.content_length,
                head.scheme,
                ends.client,
                ends.server,
                ends.tls,
                user,
            )
        )
        return one

    def post(self, message: Any) -> None:
        self._passage.post(message)

    def lose(self) -> None:
        """Have the next front answer requests that may be asked twice, once, and answer the others: the front
        that had them has died.
        """
        for one in list(self._open.values()):
            if not one.hold_again(self._absence):
                one.give_up(front_died())

    def is_open(self, number: int) -> bool:
        """Whether a request has no answer yet, and its client still waits."""
        return number in self._open

    def forget(self, number: int) -> bool:
        """Let a request go; False: it was gone before."""
        return self._open.pop(number, None) is not None

    def _obey(self, act: Callable[[PassedOn, Any], None], message: Any) -> None:
        one = self._open.get(message.exchange)
        if one is None:
            return  # its client went while this was on its way
        try:
            act(one, message)
        except Exception:
            logger.exception("defect of the server; a request is broken off")
            one.break_off()


class PassedOn:
    """A request that was passed on: the ``Sink`` of its body, and who does what the front says of it."""

    __slots__ = (
        "_exchange", "_forwarding", "_held", "_number", "_parts", "_said", "_unsaid_nbytes", "_waiting",
    )  # fmt: skip

    def __init__(self, forwarding: Forwarding, exchange: Exchange, number: int, is_safe: bool) -> None:
        self._forwarding = forwarding
        self._exchange = exchange
        self._number = number
        #: What the next front is to be told of it, while there is none.
        self._held: list[Any] | None = None
        #: What the front was told of a request without a body that may be asked twice.
        self._said: list[Any] | None = [] if is_safe else None
        #: Of the body of an answer that has not come whole.
        self._parts: list[bytes] = []
        #: What came of a response for which no ``Sent`` has gone.
        self._unsaid_nbytes = 0
        self._waiting: asyncio.Task[None] | None = None

    # ---- the connection's side ------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        if data:
            self._said = None
        *parts, last = pieces((data,), len(data))
        for part in parts:
            self.post(Body(self._number, bytes(part), False))
        self.post(Body(self._number, bytes(last), end))

    def abandon(self) -> None:
        self._parts.clear()
        if self._forwarding.forget(self._number) and self._held is None:
            self._forwarding.post(Abandoned(self._number))

    # ---- without a front ------------------------------------------------------------------

    def hold(self, absence: FrontAbsence) -> None:
        """Keep what is to be posted until a front is there."""
        self._held = []
        absence.hold(self._resume, self.give_up)

    def hold_again(self, absence: FrontAbsence) -> bool:
        """Have the next front told all of it once more; False: it must not be, or was before."""
        said, self._said = self._said, None
        if said is None or self._parts or self._exchange.started:
            return False
        if self._forwarding.is_urgent(self._exchange.head):
            return False
        self.hold(absence)
        self._held = said
        return True

    def post(self, message: Any) -> None:
        if self._held is None:
            self._forwarding.post(message)
            if self._said is not None:
                self._said.append(message)
        else:
            self._held.append(message)

    def give_up(self, error: RequestError) -> None:
        """End with an error; a response of HTTP that has begun can only be broken off."""
        self._parts.clear()
        if self._held is not None:
            self._held.clear()
        if not self._forwarding.forget(self._number):
            return
        if self._exchange.started and not self._exchange.head.is_grpc:
            self._exchange.reset()
        else:
            self._forwarding.refuse(self._exchange, error)

    def _resume(self) -> None:
        held, self._held = self._held, None
        if self._forwarding.is_open(self._number):
            for message in held or ():
                self.post(message)

    # ---- the front's side -----------------------------------------------------------------

    def add(self, message: AnswerPart) -> None:
        self._parts.append(message.data)
        self._forwarding.post(Sent(self._number, len(message.data)))

    def answer(self, message: WholeAnswer) -> None:
        body, self._parts = (*self._parts, message.body), []
        head = self._forwarding.answer_head(message.status, message.headers, message.trailers)
        self._forwarding.forget(self._number)
        self._exchange.answer(head, body, sum(map(len, body)))

    def start(self, message: Start) -> None:
        if message.end:
            self._forwarding.forget(self._number)
        self._exchange.start(message.status, message.headers, message.end)

    def send(self, message: Send) -> None:
        if message.end:
            self._forwarding.forget(self._number)
        self._exchange.send(message.data, message.end)
        self._unsaid_nbytes += len(message.data)
        if self._unsaid_nbytes >= CREDIT_NBYTES and self._waiting is None and not self._exchange.ended:
            self._waiting = asyncio.get_running_loop().create_task(self._say_sent())

    def drop_unsent(self, message: DropUnsent) -> None:
        self._exchange.drop_unsent()

    def finish(self, message: Finish) -> None:
        self._forwarding.forget(self._number)
        self._exchange.finish(message.trailers)

    def reset(self, message: Reset) -> None:
        self.break_off()

    def break_off(self) -> None:
        self._forwarding.forget(self._number)
        self._exchange.reset()

    def consumed(self, message: Consumed) -> None:
        self._exchange.consumed(message.nbytes)

    async def _say_sent(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            await self._exchange.room()
            self._waiting = None
            nbytes, self._unsaid_nbytes = self._unsaid_nbytes, 0
            self._forwarding.post(Sent(self._number, nbytes))
