"""Which door gets the next connection, which one hangs, and when one that died is started again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

#: A door that has said nothing for so long gets no connection while another does. It says something four
#: times a second.
SILENT_S: Final = 2.0
#: A door that has said nothing for so long hangs: its clients are better off with another.
HUNG_S: Final = 30.0
#: After so long it is asked for its stacks, and after so long it is forced: see ``protocol/stacks.py``.
TOLD_S: Final = 10.0
FORCED_S: Final = 25.0
#: How often a door is looked at for that.
LOOK_S: Final = 1.0
#: A door that lived so long died of something else than its start.
_YOUNG_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 30.0
#: Where a door comes up and dies young, clients wait for it: it is back within a second.
_SERVED_PAUSE_S: Final = 0.25


class Candidate(Protocol):
    """A door that takes connections."""

    @property
    def n_open(self) -> int:
        """How many connections it has."""

    @property
    def heard_at(self) -> float:
        """When it last said something."""


_Door = TypeVar("_Door", bound=Candidate)


def next_door(doors: Iterable[_Door], now: float) -> _Door | None:
    """The one with the fewest connections, of those that turn if any does; None: there is none."""
    there = list(doors)
    turning = [one for one in there if now - one.heard_at < SILENT_S]
    return min(turning or there, key=lambda one: one.n_open, default=None)


class RestartPatience:
    """How long is waited until a door that died is started again: not at all, but for one that dies young
    again and again, and longer and longer for one that does not even come up.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_s(self, lived_s: float, *, came_up: bool) -> float:
        if lived_s >= _YOUNG_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        if came_up:
            self._pause_s = _SERVED_PAUSE_S
            return min(pause_s, _SERVED_PAUSE_S)
        self._pause_s = min(_LONGEST_PAUSE_S, max(1.0, 2 * pause_s))
        return pause_s
