"""A door's side of requests that the front answers: what comes of them is passed on, and what the front says
is done at their connection. Nothing is answered here, and no path is known.
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

from gpuserve.front.doors.access.users import depends_on_user, user_of
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Piece, Sink
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

#: So many heads of answers are kept, each of which a connection encodes once.
_REMEMBERED: Final = 256


class Forwarding:
    """Passes on what it accepts. ``obey`` says who takes which message of the front."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
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
        one = self._open[number] = PassedOn(self, exchange, number)
        head, ends = exchange.head, exchange.ends
        user = user_of(exchange) if depends_on_user(head) else None
        self.post(
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

    __slots__ = ("_exchange", "_forwarding", "_number", "_parts", "_unsaid_nbytes", "_waiting")

    def __init__(self, forwarding: Forwarding, exchange: Exchange, number: int) -> None:
        self._forwarding = forwarding
        self._exchange = exchange
        self._number = number
        #: Of the body of an answer that has not come whole.
        self._parts: list[bytes] = []
        #: What came of a response for which no ``Sent`` has gone.
        self._unsaid_nbytes = 0
        self._waiting: asyncio.Task[None] | None = None

    # ---- the connection's side ------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        *parts, last = pieces((data,), len(data))
        for part in parts:
            self._forwarding.post(Body(self._number, bytes(part), False))
        self._forwarding.post(Body(self._number, bytes(last), end))

    def abandon(self) -> None:
        self._parts.clear()
        if self._forwarding.forget(self._number):
            self._forwarding.post(Abandoned(self._number))

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
