"""Passes on to the front what happens, for it shows that to people. A front that is slow is told later, one
that takes the place of another is told what is kept, and nobody waits for either.
"""

from __future__ import annotations

from typing import Final

from gpuserve.control.messages import Happened
from gpuserve.control.reactor import Reactor
from gpuserve.journal.recent import KEPT_BY_FRONT, RecentEvents
from gpuserve.supervisor.core.front_keeper import FrontKeeper

#: So many events go in one message, and so long later it is tried again where the front has no room for it.
_AT_ONCE: Final = 20
_AGAIN_S: Final = 0.1


class EventsForFront:
    """What the present front knows of the ``recent`` events, which are passed on from ``open()`` on."""

    def __init__(self, recent: RecentEvents, front: FrontKeeper, reactor: Reactor) -> None:
        self._recent = recent
        self._front = front
        self._reactor = reactor
        self._told = 0
        self._is_planned = False

    def open(self) -> None:
        self._recent.follow(lambda _: self._pass_on())

    def front_ready(self) -> None:
        """Tell a new front what is kept; not before it listens, since what it is not told yet waits here."""
        self._told = 0
        self._pass_on()

    def _pass_on(self) -> None:
        if self._is_planned or not self._front.ready:
            return
        events = self._recent.after(self._told)[-KEPT_BY_FRONT:]
        for start in range(0, len(events), _AT_ONCE):
            some = events[start : start + _AT_ONCE]
            if not self._front.offer(Happened(tuple(one.to_wire() for one in some))):
                self._is_planned = True
                self._reactor.call_later(_AGAIN_S, self._again)
                return
            self._told = some[-1].number

    def _again(self) -> None:
        self._is_planned = False
        self._pass_on()
