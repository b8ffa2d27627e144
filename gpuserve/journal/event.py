"""One event: what it says, and the plain data that stand for it in messages and documents. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.journal.kinds import EventKind

#: A text of an event is no longer; what is left of a longer one says so.
MAX_TEXT_CHARACTERS: Final = 2000
#: An event as the field of a message.
EventWire: TypeAlias = tuple[int, float, str, str, int, str, dict[str, Any]]


class Event(NamedTuple):
    """What happened, and when, in seconds since 1970. ``number`` counts the events of one server. Without a
    model it is about the server; without a version, 0, about all of them.
    """

    number: int
    time_s: float
    kind: EventKind
    model: str = ""
    version: int = 0
    instance: str = ""
    facts: Mapping[str, Any] = {}

    def to_wire(self) -> EventWire:
        return (*self[:2], self.kind.value, *self[3:6], dict(self.facts))

    @classmethod
    def from_wire(cls, wire: EventWire) -> Event:
        number, time_s, kind, model, version, instance, facts = wire
        return cls(number, time_s, EventKind(kind), model, version, instance, facts)

    def document(self) -> dict[str, Any]:
        """Give it as people and programs get it; what it is not about is left out."""
        about = {"model": self.model, "version": self.version, "instance": self.instance}
        named = {name: value for name, value in about.items() if value}
        return {
            "time": round(self.time_s, 3),
            "number": self.number,
            "kind": self.kind.value,
            **named,
            **self.facts,
        }


def told(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Give facts as they may be told: a text has a bound, for it may be what somebody's callable raised, and
    what is infinite is null.
    """
    return {name: _told(value) for name, value in facts.items()}


def _told(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
        return f"{value[:MAX_TEXT_CHARACTERS]} ..."
    return None if isinstance(value, float) and not math.isfinite(value) else value
