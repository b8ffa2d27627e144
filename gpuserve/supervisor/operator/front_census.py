"""Asks the front what only it knows. A front that does not answer is not waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final, TypeAlias

from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.messages import Census
from gpuserve.supervisor.reactor import Reactor

TIMEOUT_S: Final = 2.0

#: Takes the answer; None: there is none.
TakeCensus: TypeAlias = Callable[[Census | None], None]


class FrontCensus:
    """The questions to one front and its successors."""

    def __init__(self, reactor: Reactor, front: FrontKeeper) -> None:
        self._reactor = reactor
        self._front = front
        self._tickets = itertools.count(1)
        self._waiting: dict[int, TakeCensus] = {}

    def ask(self, take: TakeCensus) -> None:
        """Ask, and be answered once, within ``TIMEOUT_S``."""
        if not self._front.ready:
            take(None)
            return
        ticket = next(self._tickets)
        self._waiting[ticket] = take
        self._front.take_census(ticket)
        self._reactor.call_later(TIMEOUT_S, lambda: self._answer(ticket, None))

    def taken(self, census: Census) -> None:
        """The front's answer."""
        self._answer(census.ticket, census)

    def _answer(self, ticket: int, census: Census | None) -> None:
        take = self._waiting.pop(ticket, None)
        if take is not None:
            take(census)
