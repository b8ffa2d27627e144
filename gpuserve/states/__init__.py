"""Lives told as tables: which state follows which, and one error for a step that the table does not have.

What the states are stands beside whoever lives them; nothing here knows a model, a process or a request.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class IllegalTransition(RuntimeError):
    """A step that its table does not have: a defect of ours, never a client's fault."""


class StepTable(Generic[State]):
    """A table from each state to those that may follow it. ``what`` names whose states they are."""

    __slots__ = ("_following", "_what")

    def __init__(self, what: str, table: Mapping[State, Iterable[State]]) -> None:
        self._what = what
        self._following = {before: frozenset(following) for before, following in table.items()}

    def step(self, before: State, after: State, name: object = "") -> State:
        """Give ``after`` if it may follow ``before``, or raise ``IllegalTransition`` with ``name``."""
        if after not in self._following.get(before, ()):
            raise IllegalTransition(
                f"{_who(self._what, name)} is {before.name} and cannot become {after.name}"
            )
        return after

    def arrows(self) -> Iterator[tuple[State, State, str]]:
        """Yield every step: the state before, the one after, and no word."""
        for before, following in self._following.items():
            yield from ((before, after, "") for after in following)


class EventTable(Generic[State, Event]):
    """A table from a state and what happens in it to the next state. ``what`` names whose states they are."""

    __slots__ = ("_table", "_what")

    def __init__(self, what: str, table: Mapping[tuple[State, Event], State]) -> None:
        self._what = what
        self._table = dict(table)

    def after(self, before: State, event: Event, name: object = "") -> State:
        """Give the state that ``event`` leads to, or raise ``IllegalTransition`` with ``name``."""
        try:
            return self._table[before, event]
        except KeyError:
            text = f"{_who(self._what, name)} is {before.name}, where {event.name} cannot happen"
            raise IllegalTransition(text) from None

    def arrows(self) -> Iterator[tuple[State, State, str]]:
        """Yield every step: the state before, the one after, and the name of the event between them."""
        for (before, event), after in self._table.items():
            yield before, after, event.name


def _who(what: str, name: object) -> str:
    return f"{what} {name}" if name != "" else what
