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

from gpuserve.front.batching.queue import QueuedRequest
from gpuserve.front.batching.service_time import ServiceTime

#: An instance that leads takes a batch so long before all that it has is expected to end.
LEAD_S: Final = 1e-3
#: And never has more than these, however short they are: each is a message in the buffer of its socket.
_MOST_HELD: Final = 16
#: After a batch that took so much longer than expected, this many end before instances lead again.
_DOUBTFUL_S: Final = LEAD_S
_DOUBTS: Final = 16
#: What nothing is known of, or what may kill its worker: nothing is held behind it.
_UNKNOWN_S: Final = 1e6


@dataclass(eq=False, slots=True)
class Batch:
    """Requests that run in one call on one instance. ``batch_id`` is never used twice.

    ``alone``: its one request was not to be merged: the model does not merge, or a worker died
    under it. ``slots`` is how many it takes: all of the instance's, where it is not to have company; none
    once it is computed. ``expected_s`` is how long it is expected to take. ``may_wait``:
    its worker may have begun others before it sends the answer.

    In sequences only: ``dropped`` are those that ended at this instance without their last request.
    ``seats`` are the rows of the requests where those between them are there as well, and not ready.
    """

    batch_id: int
    instance: str
    requests: list[QueuedRequest]
    rows: int
    alone: bool
    slots: int = 1
    expected_s: float = _UNKNOWN_S
    dropped: tuple[int | str, ...] = ()
    seats: tuple[int, ...] = ()
    may_wait: bool = False

    def position_of(self, request: QueuedRequest) -> int:
        position = self.requests.index(request)
        return self.seats[position] if self.seats else position


@dataclass(eq=False, slots=True)
class Instance:
    """One instance. One that is ``retired`` finishes what it has, and counts for nothing else."""

    name: str
    at_once: int
    capacity: int
    running: int = 0
    retired: bool = False

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


@dataclass(eq=False, slots=True)
class LeadingInstance(Instance):
    """An instance that takes its next batch from ``lead_from`` on, where it ``leads``; infinity: what it has
    is enough, or none can tell when it ends. ``batches`` began at ``began_at`` and are expected to take
    ``expected_s``, one after the other.
    """

    leads: bool = False
    began_at: float = math.inf
    expected_s: float = 0.0
    batches: list[Batch] = field(default_factory=list)

    def begin(self, batch: Batch, now: float) -> None:
        if not self.batches:
            self.began_at, self.expected_s = now, 0.0
        self.batches.append(batch)
        self.expected_s += batch.expected_s

    def end(self, batch: Batch, now: float) -> None:
        self.batches.remove(batch)
        self.began_at = now
        self.expected_s -= batch.expected_s

    @property
    def lead_from(self) -> float:
        """What is held is short by itself as well: what runs may take longer than expected."""
        if self.leads and 0 < len(self.batches) < _MOST_HELD:
            held_s = self.expected_s - self.batches[0].expected_s
            if held_s <= LEAD_S and self.expected_s < _UNKNOWN_S:
                return self.began_at + self.expected_s - LEAD_S
        return math.inf


InstanceT = TypeVar("InstanceT", bound=Instance)
_LOAD: Final = operator.attrgetter("load")
_LEAD_FROM: Final = operator.attrgetter("lead_from")


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

    def retire(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is not None and not instance.retired:
            instance.retired = True
            self._by_use.remove(instance)
            self.room -= max(0, instance.capacity - instance.running)

    def is_idle(self, name: str) -> bool:
        return all(batch.instance != name for batch in self._running.values())

    def with_room(self) -> list[str]:
        """The instances that can take a batch, the one with the most room first."""
        return [one.name for one in sorted(self._by_use, key=_LOAD) if one.load < 1]

    def _remove(self, name: str) -> list[Batch]:
        self.retire(name)
        del self._instances[name]
        batches = [batch for batch in self._running.values() if batch.instance == name]
        for batch in batches:
            del self._running[batch.batch_id]
        return batches

    def free_slot(self, batch: Batch) -> None:
        """Free the slot of a batch whose call is over, though it has not ended."""
        instance = self._instances[batch.instance]
        taken, capacity = instance.running, instance.capacity
        instance.running -= batch.slots
        if not instance.retired:
            self.room += max(0, capacity - instance.running) - max(0, capacity - taken)
        batch.slots = 0

    def release(self, batch_id: int, took_s: float | None, now: float) -> Batch:
        """Take a batch out that ended now, and took its worker so long; None: it failed."""
        batch = self._running.pop(batch_id)
        if took_s is not None:
            self.service_time.observe(batch.rows, took_s)
        self.free_slot(batch)
        return batch


class InstanceSlots(Places[LeadingInstance]):
    """Slots for batches on every instance that is up, any batch on any instance. Where none has room, one
    leads from ``lead_from`` on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._doubts = 0

    def up(self, name: str, at_once: int, prefetch: int, *, leads: bool = False) -> None:
        """Add an instance, which runs ``at_once`` and holds ``prefetch`` besides."""
        self._add(LeadingInstance(name, at_once, at_once + prefetch, leads=leads and at_once == 1))

    def release(self, batch_id: int, took_s: float | None, now: float) -> Batch:
        batch = super().release(batch_id, took_s, now)
        if took_s is not None:
            late = took_s > batch.expected_s + _DOUBTFUL_S
            self._doubts = _DOUBTS if late else max(0, self._doubts - 1)
        self._instances[batch.instance].end(batch, now)
        return batch

    @property
    def lead_from(self) -> float:
        """When an instance leads. Where there are others, it must be known which one ends first."""
        if len(self._by_use) == 1:
            return self._by_use[0].lead_from
        return math.inf if self._doubts else min(map(_LEAD_FROM, self._by_use), default=math.inf)

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
            taken = min(self._by_use, key=_LOAD if self.room else _LEAD_FROM)
        if taken is not self._by_use[-1]:
            self._by_use.remove(taken)
            self._by_use.append(taken)
        slots = taken.capacity if secluded and taken.at_once > 1 else 1
        self.room -= min(max(0, taken.capacity - taken.running), slots)
        taken.running += slots
        expected_s = None if secluded else self.service_time.estimate(rows)
        batch = Batch(
            self._next_batch_id,
            taken.name,
            requests,
            rows,
            alone,
            slots,
            _UNKNOWN_S if expected_s is None else expected_s,
        )
        self._next_batch_id += 1
        self._running[batch.batch_id] = batch
        taken.begin(batch, now)
        return batch
