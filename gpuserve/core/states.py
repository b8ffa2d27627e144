"""State machines as tables: which state may follow which, and one error for a transition that the table
lacks. Each table stands beside its states; nothing here knows models, processes or requests.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class IllegalTransition(RuntimeError):
    """A transition that the table lacks: a defect of gpuserve, never a client's fault."""


class StepTable(Generic[State]):
    """A table of the states that may follow each state. ``what`` names the owner of the states."""

    __slots__ = ("_following", "_what")

    def __init__(self, what: str, table: Mapping[State, Iterable[State]]) -> None:
        self._what = what
        self._following = {before: frozenset(following) for before, following in table.items()}

    def step(self, before: State, after: State, name: object = "") -> State:
        """Return ``after`` if it may follow ``before``, or raise ``IllegalTransition`` with ``name``."""
        if after not in self._following.get(before, ()):
            raise IllegalTransition(
                f"{_subject(self._what, name)} is {before.name} and cannot become {after.name}"
            )
        return after

    def arrows(self) -> Iterator[tuple[State, State, str]]:
        """Yield every transition: the state before, the state after, and an empty label."""
        for before, following in self._following.items():
            yield from ((before, after, "") for after in following)


class EventTable(Generic[State, Event]):
    """A table from a state and an event to the next state. ``what`` names the owner of the states."""

    __slots__ = ("_table", "_what")

    def __init__(self, what: str, table: Mapping[tuple[State, Event], State]) -> None:
        self._what = what
        self._table = dict(table)

    def after(self, before: State, event: Event, name: object = "") -> State:
        """Return the state that ``event`` leads to, or raise ``IllegalTransition`` with ``name``."""
        try:
            return self._table[before, event]
        except KeyError:
            text = f"{_subject(self._what, name)} is {before.name}, where {event.name} cannot happen"
            raise IllegalTransition(text) from None

    def arrows(self) -> Iterator[tuple[State, State, str]]:
        """Yield every transition: the state before, the state after, and the name of the event."""
        for (before, event), after in self._table.items():
            yield before, after, event.name


def _subject(what: str, name: object) -> str:
    return f"{what} {name}" if name != "" else what
