"""What a front knows of what happens in the server, and what it tells of it. The supervisor numbers the
events and tells them to every front; what only the front sees, it tells the supervisor first.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gpuserve.core.event_log import KEPT_BY_FRONT, Event, EventKind, RecentEvents, bounded_facts
from gpuserve.front.service.control import Say
from gpuserve.supervisor.control.front_messages import EventBatch, FrontEvent


class EventsInFront:
    """The last events, also of before this front; follow ``recent`` for the next ones."""

    def __init__(self, say: Say) -> None:
        self.recent = RecentEvents(KEPT_BY_FRONT)
        self._say = say

    def happened(self, message: EventBatch) -> None:
        for one in message.events:
            self.recent.add(Event.from_wire(one))

    def tell(
        self, kind: EventKind, *, model: str = "", version: int = 0, instance: str = "", **facts: Any
    ) -> None:
        """Tell what the front has seen; lost where the supervisor has no time for it."""
        with contextlib.suppress(BlockingIOError):
            self._say(FrontEvent(kind.value, model, version, instance, bounded_facts(facts)))
