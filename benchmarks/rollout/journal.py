"""What happened to the pods, and when: for the report, and to find out why a request was lost."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class What(Enum):
    """The kinds of events."""

    CREATED = "created"
    STARTED = "container started"
    READY = "ready"
    NOT_READY = "not ready"
    DELETED = "deleted"
    TERM = "SIGTERM"
    EXITED = "exited"
    OUTLIVED_GRACE = "SIGKILL at the end of its grace period"
    CRASHED = "all processes killed"
    GONE = "gone"


class Event(NamedTuple):
    """``at_s`` is of ``time.monotonic``; ``detail`` such as an exit status."""

    at_s: float
    pod: str
    address: str
    what: What
    detail: str = ""


class Journal:
    """The events in the order of their time."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, event: Event) -> None:
        self.events.append(event)

    def of(self, what: What) -> Iterator[Event]:
        return (event for event in self.events if event.what is what)

    def before(self, at_s: float, within_s: float) -> list[Event]:
        """What had happened shortly before, the newest last."""
        return [event for event in self.events if at_s - within_s <= event.at_s <= at_s]

    def endings_s(self) -> list[float]:
        """From SIGTERM to the exit, for each container that was told to end."""
        told: dict[str, float] = {}
        found = []
        for event in self.events:
            if event.what is What.TERM:
                told[event.pod] = event.at_s
            elif event.what is What.EXITED and event.pod in told:
                found.append(event.at_s - told.pop(event.pod))
        return found
