"""The batches of one model and the slots that its instances have for them. An instance is a name here;
nothing is known of processes or links, nor of what a batch is made of.

Besides its slots an instance may *lead*: it takes one more batch when all that it has is expected to end
within ``LEAD_S``. So the next batch is there when one ends, and yet is bound to an instance only when it is
known which one ends first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from gpuserve.front.batching.service_time import ServiceTime
from gpuserve.front.queueing.queue import QueuedRequest

#: An instance that leads takes a batch so long before all that it has is expected to end.
LEAD_S: Final = 1e-3
#: And never has more than these, however short they are: each is a message in the buffer of its socket.
_MOST_HELD: Final = 16


@dataclass(eq=False, slots=True)
class Batch:
    """Requests that run in one call on one instance. ``batch_id`` is never used twice.

    ``alone``: its one request was not to be merged: the model does not merge, or a worker died
    under it. ``slots`` is how many it takes: all of the instance's, where it is not to have company; none
    once it is computed. ``expected_s`` is how long it is expected to take, None until somebody asks.
    ``may_wait``: its worker may have begun others before it sends the answer.

    In sequences only: ``dropped`` are those that ended at this instance without their last request.
    ``seats`` are the rows of the requests where those between them are there as well, and not ready.
    """

    batch_id: int
    instance: str
    requests: list[QueuedRequest]
    rows: int
    alone: bool
    slots: int = 1
    expected_s: float | None = None
    dropped: tuple[int | str, ...] = ()
    seats: tuple[int, ...] = ()
    may_wait: bool = False

    def position_of(self, request: QueuedRequest) -> int:
        position = self.requests.index(request)
        return self.seats[position] if self.seats else position


@dataclass(eq=False, slots=True)
class Instance:
    """One instance, with its batches, oldest first; the first began not before ``began_at``. One that is
    ``retired`` finishes what it has, and counts for nothing else.
    """

    name: str
    at_once: int
    capacity: int
    running: int = 0
    retired: bool = False
    batches: list[Batch] = field(default_factory=list)
    began_at: float = math.inf

    @property
    def has_seclusion(self) -> bool:
        """Whether one more batch would be the only one that runs here: others may wait behind it."""
        return self.running == 0 if self.at_once > 1 else self.running < self.capacity

    @property
    def begins_at_once(self) -> bool:
        """Whether one more batch would run now, and not wait behind another."""
        return self.running < self.at_once

    @property
    def load(self) -> float:
        """The part of its slots that is taken; 1 and more where there is no room."""
        return self.running / self.capacity


InstanceT = TypeVar("InstanceT", bound=Instance)
_LOAD: Final = operator.attrgetter("load")
_FROM: Final = operator.itemgetter(0)


class Places(Generic[InstanceT]):
    """The instances that are up, and the batches on them. ``room`` is how many more they could take."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceT] = {}
        #: Those that are not retired, least recently used first; one that has just come up counts as used.
        self._by_use: list[InstanceT] = []
        self._running: dict[int, Batch] = {}
        self._next_batch_id = 0
        self.room = 0
        self.service_time = ServiceTime()
        #: From when and until when one leads, and the instance, if one does; None: to be found out.
        self._lead: tuple[float, float, InstanceT | None] | None = None

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._by_use]

    @property
    def at_once(self) -> int:
        return sum(one.at_once for one in self._by_use)

    @property
    def running(self) -> tuple[Batch, ...]:
        """The batches that have not ended, oldest first."""
        return tuple(self._running.values())

    def _add(self, instance: InstanceT) -> None:
        if instance.name in self._instances:
            raise ValueError(f"instance {instance.name!r} is up already")
        self._instances[instance.name] = instance
        self._by_use.append(instance)
        self.room += instance.capacity
        self._lead = None

    def began_at(self, name: str) -> float:
        """When the oldest batch of an instance that runs one at a time began at the earliest."""
        instance = self._instances.get(name)
        return 0.0 if instance is None or instance.began_at == math.inf else instance.began_at

    def retire(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is not None and not instance.retired:
            instance.retired = True
            self._by_use.remove(instance)
            self.room -= max(0, instance.capacity - instance.running)
            self._lead = None

    def is_idle(self, name: str) -> bool:
        return name not in self._instances or not self._instances[name].batches

    def with_room(self) -> list[str]:
        """The instances that can take a batch, the one with the most room first."""
        return [one.name for one in sorted(self._by_use, key=_LOAD) if one.load < 1]

    def _remove(self, name: str) -> list[Batch]:
        self.retire(name)
        batches = self._instances.pop(name).batches
        for batch in batches:
            del self._running[batch.batch_id]
        return batches

    def free_slot(self, batch: Batch) -> None:
        """Free the slot of a batch whose call is over, though it has not ended."""
        instance = self._instances[batch.instance]
        instance.running -= batch.slots
        if instance.running < instance.capacity and not instance.retired:  # else it led
            self.room += batch.slots
        batch.slots = 0

    def release(self, batch_id: int, took_s: float | None, now: float) -> Batch:
        """Take a batch out that ended now, and took its worker so long; None: it failed."""
        batch = self._running.pop(batch_id)
        if took_s is not None:
            self.service_time.observe(batch.rows, took_s)
        instance = self._instances[batch.instance]
        instance.batches.remove(batch)
        instance.began_at = now
        self._lead = None
        self.free_slot(batch)
        return batch


class InstanceSlots(Places[Instance]):
    """Slots for batches on every instance that is up, any batch on any instance. ``leads``: an instance that
    runs one at once may take the next one early.
    """

    def __init__(self, leads: bool = False) -> None:
        super().__init__()
        self._leads = leads

    def up(self, name: str, at_once: int, prefetch: int) -> None:
        """Add an instance, which runs ``at_once`` and holds ``prefetch`` besides."""
        self._add(Instance(name, at_once, at_once + prefetch))

    def lead_from(self, now: float) -> float:
        """From when on an instance takes a batch though none has room; infinity: what they have is enough, or
        none can tell when it ends. Where there are several, it must be known which one ends first.
        """
        if self._lead is None or now > self._lead[1]:
            self._lead = (math.inf, math.inf, None)
            if self._leads and (len(self._by_use) == 1 or self.service_time.is_steady):
                leads = map(self._lead_of, self._by_use)
                self._lead = min((one for one in leads if one[1] >= now), default=self._lead, key=_FROM)
        return self._lead[0]

    def _lead_of(self, instance: Instance) -> tuple[float, float, Instance]:
        """From when an instance leads and until when: what has not ended a while after that may take any
        time. What is held is short by itself as well.
        """
        if instance.at_once > 1 or not 0 < len(instance.batches) < _MOST_HELD:
            return math.inf, math.inf, instance
        first_s, *held_s = map(self.expected_s, instance.batches)
        behind_s, ends_at = sum(held_s), instance.began_at + first_s
        lead_from = math.inf if behind_s > LEAD_S else ends_at + behind_s - LEAD_S
        return lead_from, ends_at + LEAD_S, instance

    def expected_s(self, batch: Batch) -> float:
        """How long a batch is expected to take; infinity: nobody can tell."""
        if batch.expected_s is None:
            batch.expected_s = self.service_time.estimate(batch.rows)
        return math.inf if batch.expected_s is None else batch.expected_s

    def down(self, name: str) -> tuple[list[Batch], list[Batch]]:
        """An instance is gone: the batches that it may have begun, and those only held, oldest first."""
        instance = self._instances.get(name)
        if instance is None:
            return [], []
        batches = self._remove(name)
        computed = [batch for batch in batches if not batch.slots]
        others = [batch for batch in batches if batch.slots]
        begun = next((n for n, batch in enumerate(others) if not batch.may_wait), len(others))
        begun = max(instance.at_once, begun)
        return computed + others[:begun], others[begun:]

    def has_room(self, among: Collection[str] | None = None, *, secluded: bool = False) -> bool:
        """Whether one of some instances, or any, can take a batch; ``secluded``: one without company."""
        if among is None and not secluded:
            return self.room > 0
        instances = self._by_use if among is None else [self._instances[name] for name in among]
        return any(one.has_seclusion if secluded else one.load < 1 for one in instances)

    def begins_at_once(self, among: Collection[str] | None = None) -> bool:
        """Whether one of some instances, or any, would run a batch now, and not only hold it."""
        instances = self._by_use if among is None else [self._instances[name] for name in among]
        return any(one.begins_at_once for one in instances)

    def begins_at(self, now: float, name: str | None = None) -> float:
        """When a batch that is placed now is expected to begin: now, where none is before it, or nobody can
        tell.
        """
        if not self.room:
            free_at = self.lead_from(now) + LEAD_S
        else:
            taken = min(self._by_use, key=_LOAD) if name is None else self._instances[name]
            if taken.begins_at_once or taken.at_once > 1:
                return now
            free_at = taken.began_at + sum(map(self.expected_s, taken.batches))
        return max(now, free_at) if free_at < math.inf else now

    def place(
        self,
        requests: list[QueuedRequest],
        rows: int,
        alone: bool,
        now: float,
        *,
        secluded: bool,
        instance: str | None = None,
    ) -> Batch:
        """Make a batch of requests and give it to the instance with the most room, or to the one named, which
        has room; where none has, to the one that leads and is expected to be free first. ``secluded``:
        nothing else runs there meanwhile; needs ``has_room(secluded=True)``.
        """
        if instance is not None:
            taken = self._instances[instance]
        elif len(self._by_use) == 1:
            taken = self._by_use[0]
        else:  # of equals, the least recently used, since min() keeps the first
            taken = min(self._by_use, key=_LOAD)
        if not self.room and self._lead is not None and self._lead[2] is not None:
            taken = self._lead[2]
        if taken is not self._by_use[-1]:
            self._by_use.remove(taken)
            self._by_use.append(taken)
        slots = taken.capacity if secluded and taken.at_once > 1 else 1
        if taken.running < taken.capacity:
            self.room -= slots
        taken.running += slots
        batch = Batch(self._next_batch_id, taken.name, requests, rows, alone, slots)
        if secluded:  # nothing is held behind what may kill its worker
            batch.expected_s = math.inf
        self._next_batch_id += 1
        self._running[batch.batch_id] = batch
        if not taken.batches:
            taken.began_at = now
        taken.batches.append(batch)
        self._lead = None
        return batch
