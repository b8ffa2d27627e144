"""Which door gets the next connection, and when one that died is started again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

#: A door that has said nothing for so long gets no connection while another does. It says something four
#: times a second.
SILENT_S: Final = 2.0
#: A door that lived so long died of something else than its start.
_YOUNG_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 30.0


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
    again and again.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_s(self, lived_s: float) -> float:
        if lived_s >= _YOUNG_S:
            self._pause_s = 0.0
        pause_s, self._pause_s = self._pause_s, min(_LONGEST_PAUSE_S, max(1.0, 2 * self._pause_s))
        return pause_s
