"""The last events of a server, and who wants to hear of the next. Used where they are told and where they are
shown; one thread's alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from gpuserve.journal.event import Event

#: How many a server keeps, and how many of them its front does.
KEPT: Final = 500
KEPT_BY_FRONT: Final = 200

Follower: TypeAlias = Callable[[Event], None]


class RecentEvents:
    """The last ``limit`` events in their order. Followers must neither block nor raise."""

    def __init__(self, limit: int) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._followers: list[Follower] = []

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def last_number(self) -> int:
        return self._events[-1].number if self._events else 0

    def after(self, number: int) -> list[Event]:
        """Return the events that are kept of those after this number."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.number <= number:
                break
            found.append(event)
        return found[::-1]

    def add(self, event: Event) -> None:
        """Keep one more, unless it is known already: a front may be told again what it was told."""
        if event.number > self.last_number:
            self._events.append(event)
            for follower in tuple(self._followers):
                follower(event)

    def follow(self, follower: Follower) -> Callable[[], None]:
        """Call ``follower`` for each event from now on; what is returned ends that."""
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)
