"""The event log of a server: kinds of events, the event as plain data, the log of recent events with its
subscribers, and the topics by which clients subscribe. It knows no processes and no sockets.
"""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias


class EventKind(enum.Enum):
    """The kind of an event, by the name that subscribers see."""

    SERVER_STATE = "server_state"
    INSTANCE_STATE = "instance_state"
    INSTANCE_DIED = "instance_died"
    INSTANCE_RESTART = "instance_restart"
    MODEL_LOADED = "model_loaded"
    MODEL_LOAD_FAILED = "model_load_failed"
    MODEL_UNLOADED = "model_unloaded"
    MODEL_EVICTED = "model_evicted"
    MODEL_ASLEEP = "model_asleep"
    CONFIG_RELOADED = "config_reloaded"
    SCALED = "scaled"
    DRAINED = "drained"
    GPU_FENCED = "gpu_fenced"
    GPU_RELEASED = "gpu_released"
    FRONT_DIED = "front_died"
    FRONT_HUNG = "front_hung"
    INGRESS_DIED = "door_died"
    INGRESS_HUNG = "door_hung"
    REFUSALS = "refusals"
    SLOW_BATCH = "slow_batch"
    EXECUTION_HUNG = "execution_hung"
    LOAD_SLOW = "load_slow"
    LOG = "log"
    SAMPLE = "sample"


#: Kinds that are too frequent to be kept in the event log.
FREQUENT: Final = frozenset({EventKind.LOG, EventKind.SAMPLE})
#: Kinds that only the front observes and reports to the supervisor.
OBSERVED_BY_FRONT: Final = frozenset(
    {EventKind.INGRESS_DIED, EventKind.INGRESS_HUNG, EventKind.REFUSALS, EventKind.SLOW_BATCH}
)
#: The facts that events of a kind can have, besides the time, the model, its version and the instance.
FACTS: Final[Mapping[EventKind, tuple[str, ...]]] = {
    EventKind.SERVER_STATE: ("state",),
    EventKind.INSTANCE_STATE: ("state", "phase", "device", "pid"),
    EventKind.INSTANCE_DIED: ("reason", "device", "restart_in_s", "restarts"),
    EventKind.INSTANCE_RESTART: ("device", "pid", "restarts"),
    EventKind.MODEL_LOADED: ("source", "instances", "load_s"),
    EventKind.MODEL_LOAD_FAILED: ("reason",),
    EventKind.MODEL_UNLOADED: ("source",),
    EventKind.MODEL_EVICTED: ("reason",),
    EventKind.MODEL_ASLEEP: ("reason",),
    EventKind.CONFIG_RELOADED: ("ok", "reason", "changes"),
    EventKind.SCALED: ("instances",),
    EventKind.DRAINED: ("service", "unfinished"),
    EventKind.GPU_FENCED: ("uuid", "device", "reason"),
    EventKind.GPU_RELEASED: ("uuid", "device"),
    EventKind.FRONT_DIED: ("reason", "pid", "restart_in_s"),
    EventKind.FRONT_HUNG: ("pid", "silent_s", "replaced"),
    EventKind.INGRESS_DIED: ("door", "reason", "restart_in_s"),
    EventKind.INGRESS_HUNG: ("door", "pid", "silent_s"),
    EventKind.REFUSALS: ("refusals", "reasons", "period_s"),
    EventKind.SLOW_BATCH: ("over_s", "usual_s", "batches"),
    EventKind.EXECUTION_HUNG: ("running_s", "limit_s", "pid"),
    EventKind.LOAD_SLOW: ("loading_s", "phase", "place", "device", "pid"),
    EventKind.LOG: ("line", "level"),
    EventKind.SAMPLE: ("server", "models", "gpus", "doors"),
}


#: Maximum length of a text in an event; a longer text is cut and marked.
MAX_TEXT_CHARACTERS: Final = 2000
#: An event as a field of a message.
EventWire: TypeAlias = tuple[int, float, str, str, int, str, dict[str, Any]]
#: Number of events that a server keeps, and that its front keeps.
KEPT: Final = 500
KEPT_BY_FRONT: Final = 200

#: A client that subscribes to this prefix, with a suffix of its own, is answered once. All its earlier
#: subscriptions are active by then.
HELLO: Final = b"hello/"
_SUBSCRIBE: Final = b"\1"


class Event(NamedTuple):
    """An event and its time, in seconds since 1970. ``number`` counts the events of one server. An event
    without a model is about the server, one with version 0 about all versions of the model.
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
        """Return the event as it is shown to people and programs, without empty fields."""
        about = {"model": self.model, "version": self.version, "instance": self.instance}
        named = {name: value for name, value in about.items() if value}
        return {
            "time": round(self.time_s, 3),
            "number": self.number,
            "kind": self.kind.value,
            **named,
            **self.facts,
        }


def bounded_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts for an event: long texts (exceptions of users) cut, infinite numbers None."""
    bounded = dict(facts)
    for name, value in facts.items():
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
            bounded[name] = f"{value[:MAX_TEXT_CHARACTERS]} ..."
        elif isinstance(value, float) and not math.isfinite(value):
            bounded[name] = None
    return bounded


#: Called with each new event.
EventSubscriber: TypeAlias = Callable[[Event], None]


class RecentEvents:
    """The last ``limit`` events, for use in one thread. Subscribers must not block or raise."""

    def __init__(self, limit: int) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        self._subscribers: list[EventSubscriber] = []

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    @property
    def last_number(self) -> int:
        return self._events[-1].number if self._events else 0

    def after(self, number: int) -> list[Event]:
        """Return the kept events after this number."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.number <= number:
                break
            found.append(event)
        return found[::-1]

    def add(self, event: Event) -> None:
        """Add an event, unless it is known already: a front that was restarted may get an event twice."""
        if event.number > self.last_number:
            self._events.append(event)
            for subscriber in tuple(self._subscribers):
                subscriber(event)

    def subscribe(self, subscriber: EventSubscriber) -> Callable[[], None]:
        """Call ``subscriber`` with each event from now on. Return a function that ends the subscription."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)


class EventLog:
    """The event log of one server. ``clock`` returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.recent = RecentEvents(KEPT)
        self._clock = clock
        self._number = 0

    def record(
        self, kind: EventKind, *, model: str = "", version: int = 0, instance: str = "", **facts: Any
    ) -> None:
        """Record an event. Costs a few microseconds. Only for the thread of the server."""
        self._number += 1
        self.recent.add(
            Event(self._number, self._clock(), kind, model, version, instance, bounded_facts(facts))
        )


def topic(kind: EventKind, model: str = "") -> bytes:
    """Return the topic of an event, or without a model the prefix of all topics of the kind."""
    return f"{kind.value}/{model}".encode()


class Subscriptions:
    """The subscriptions of all clients together, as the publishing socket reports them."""

    def __init__(self) -> None:
        self._prefixes: set[bytes] = set()

    def handle(self, message: bytes) -> bytes:
        """Handle the first subscription to a prefix (1 and the prefix), or the end of its last one (0 and the
        prefix). Return the topic of a greeting that has to be answered, or b"".
        """
        prefix = message[1:]
        if message[:1] != _SUBSCRIBE:
            self._prefixes.discard(prefix)
            return b""
        self._prefixes.add(prefix)
        return prefix if prefix.startswith(HELLO) else b""

    def wants(self, wanted: bytes) -> bool:
        return any(wanted.startswith(prefix) for prefix in self._prefixes)

    def wants_some(self, kind: EventKind) -> bool:
        """Return whether events of a kind are wanted, of any model."""
        start = topic(kind)
        return any(prefix.startswith(start) or start.startswith(prefix) for prefix in self._prefixes)
