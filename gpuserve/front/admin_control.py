"""What operators ask over HTTP, on its way to the supervisor: who waits for which answer. What a verb means,
and whether its arguments can be, the supervisor says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

from gpuserve.errors import Unimplemented
from gpuserve.supervisor.operator.outcome import Outcome

#: Sends a verb with its arguments on, under a ticket.
Ask: TypeAlias = Callable[[int, str, dict[str, Any]], None]


class AdminControl:
    """The questions under way. ``ask`` sends them on; without it there is no admin API."""

    def __init__(self, ask: Ask | None = None) -> None:
        self._ask = ask
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}

    @property
    def is_open(self) -> bool:
        """Whether there is an admin API."""
        return self._ask is not None

    async def ask(self, verb: str, arguments: dict[str, Any]) -> Outcome:
        """Return once the supervisor has answered. What was begun goes on where nobody waits any more.

        Raises:
            Unimplemented: there is no admin API.
        """
        if self._ask is None:
            raise Unimplemented("this server has no admin API; the setting admin_api opens it")
        ticket = next(self._tickets)
        self._waiting[ticket] = waiting = asyncio.get_running_loop().create_future()
        self._ask(ticket, verb, arguments)
        try:
            outcome: Outcome = await waiting
        finally:
            self._waiting.pop(ticket, None)
        return outcome

    def answered(self, ticket: int, outcome: Outcome) -> None:
        """The supervisor's answer."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)
