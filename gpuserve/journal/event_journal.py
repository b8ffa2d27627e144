"""Where a server tells what happens in it: one call at the place where it happens. Who passes it on follows
``recent``; nothing here knows processes, sockets or formats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpuserve.journal.event import Event, told
from gpuserve.journal.kinds import EventKind
from gpuserve.journal.recent import KEPT, RecentEvents


class EventJournal:
    """The events of one server. ``clock`` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.recent = RecentEvents(KEPT)
        self._clock = clock
        self._number = 0

    def tell(
        self, kind: EventKind, *, model: str = "", version: int = 0, instance: str = "", **facts: Any
    ) -> None:
        """Note what happened. Costs a few microseconds; called in the thread of the server alone."""
        self._number += 1
        self.recent.add(Event(self._number, self._clock(), kind, model, version, instance, told(facts)))
