"""Instances, their slots for batches, and the expected duration of batches. An instance is a name here: this
module knows no processes or links, and no rules of batch formation.

Besides filling its slots an instance may *lead*: it takes one more batch when all of its batches are expected
to end within ``LEAD_S``. So the next batch is there when one ends, and is bound to an instance only when it
is known which instance is free first.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from gpuserve.front.scheduling.request_queue import QueuedRequest

#: The time before the expected end of all its batches at which an instance takes one more.
LEAD_S: Final = 1e-3
#: The most batches of an instance that leads, however short they are: each is a message in its socket's
#: buffer.
_MOST_HELD: Final = 16


@dataclass(eq=False, slots=True)
class Batch:
    """One batch at an instance.

    ``slots`` is the number of slots that the batch occupies: all slots of the instance if the batch must run
    alone there, none once it is computed. ``expected_s`` is the expected duration, None until the first
    request for it. ``may_wait``: its worker may begin other batches before it sends the answer.

    For sequences only: ``dropped`` are the sequences that ended at this instance without their last request.
    ``seats`` are the rows of the requests in the batch, if rows between them belong to sequences that are not
    ready.
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
    """One instance and its batches, oldest first. The first batch began at ``began_at`` at the earliest. A
    ``retired`` instance finishes its batches, and takes no new ones.
    """

    name: str
    at_once: int
    capacity: int
    running: int = 0
    retired: bool = False
    batches: list[Batch] = field(default_factory=list)
    began_at: float = math.inf
    #: The slots that stay free until a batch ends, because the callable has no room for a request.
    held: int = 0

    @property
    def has_exclusive_room(self) -> bool:
        """Return whether one more batch would be the only one that runs here. Others may wait behind it."""
        return self.running == 0 if self.at_once > 1 else self.running < self.capacity

    @property
    def begins_at_once(self) -> bool:
        """Return whether one more batch would run now, instead of waiting behind another."""
        return self.running < self.at_once

    @property
    def load(self) -> float:
        """Return the occupied part of its slots; 1 or more if it has no room."""
        return self.running / self.capacity


InstanceT = TypeVar("InstanceT", bound=Instance)
_LOAD: Final = operator.attrgetter("load")
_FROM: Final = operator.itemgetter(0)


class InstanceTable(Generic[InstanceT]):
    """The instances that are up, and their batches. ``room`` is the number of further batches that fit."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceT] = {}
        #: The instances that are not retired, least recently used first. A new instance counts as used.
        self._by_use: list[InstanceT] = []
        self._running: dict[int, Batch] = {}
        self._next_batch_id = 0
        self.room = 0
        self.service_time = ServiceTime()
        #: The begin and end of the time at which an instance leads, and the instance if any; None if unknown
        #: yet.
        self._lead: tuple[float, float, InstanceT | None] | None = None

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._by_use]

    @property
    def at_once(self) -> int:
        return sum(one.at_once for one in self._by_use)

    @property
    def running(self) -> tuple[Batch, ...]:
        """Return the batches that have not ended, oldest first."""
        return tuple(self._running.values())

    def _add(self, instance: InstanceT) -> None:
        if instance.name in self._instances:
            raise ValueError(f"instance {instance.name!r} is up already")
        self._instances[instance.name] = instance
        self._by_use.append(instance)
        self.room += instance.capacity
        self._lead = None

    def began_at(self, name: str) -> float:
        """Return the earliest time at which the oldest batch of a one-at-a-time instance began."""
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
        """Return the instances that can take a batch, the one with the most room first."""
        return [one.name for one in sorted(self._by_use, key=_LOAD) if one.load < 1]

    def load(self, name: str) -> float:
        return self._instances[name].load

    def _remove(self, name: str) -> list[Batch]:
        self.retire(name)
        batches = self._instances.pop(name).batches
        for batch in batches:
            del self._running[batch.batch_id]
        return batches

    def free_slot(self, batch: Batch) -> None:
        """Free the slot of a batch whose call is over, though the batch has not ended."""
        instance = self._instances[batch.instance]
        instance.running -= batch.slots
        if instance.running < instance.capacity and not instance.retired:  # otherwise the instance led
            self.room += batch.slots
        batch.slots = 0

    def release(self, batch_id: int, took_s: float | None, now: float) -> Batch:
        """Remove a batch that ended now. ``took_s`` is its duration in the worker, None for a failure."""
        batch = self._running.pop(batch_id)
        if took_s is not None:
            self.service_time.observe(batch.rows, took_s)
        instance = self._instances[batch.instance]
        instance.batches.remove(batch)
        instance.began_at = now
        self._lead = None
        self.free_slot(batch)
        if instance.held:
            self._hold(instance, -instance.held)
        return batch

    def batch(self, batch_id: int) -> Batch:
        """Return a running batch. Raises KeyError if no such batch runs."""
        return self._running[batch_id]

    def hold(self, name: str) -> None:
        """Place no batch at an instance before one of its batches has ended."""
        instance = self._instances[name]
        if instance.batches and not instance.held:
            self._hold(instance, instance.capacity - instance.running)

    def share(self, batch: Batch) -> None:
        """Let other batches run beside a batch that has run alone until now."""
        instance, others = self._instances[batch.instance], batch.slots - 1
        if others > 0:
            batch.slots = 1
            instance.running -= others
            self.room += 0 if instance.retired else others

    def _hold(self, instance: InstanceT, slots: int) -> None:
        instance.held += slots
        instance.running += slots
        self.room -= 0 if instance.retired else slots


class InstanceSlots(InstanceTable[Instance]):
    """The slots of the instances of a model in which any batch may run on any instance. ``leads``: an
    instance that runs one batch at once may take the next one early.
    """

    def __init__(self, leads: bool = False) -> None:
        super().__init__()
        self._leads = leads

    def up(self, name: str, at_once: int, prefetch: int) -> None:
        """Add an instance that runs ``at_once`` batches and holds ``prefetch`` more."""
        self._add(Instance(name, at_once, at_once + prefetch))

    def lead_from(self, now: float) -> float:
        """Return from when on an instance takes a batch though none has room. Infinity if their batches
        suffice, or if the end of no batch can be estimated. With several instances it must be known which
        ends first.
        """
        if self._lead is None or now > self._lead[1]:
            self._lead = (math.inf, math.inf, None)
            if self._leads and (len(self._by_use) == 1 or self.service_time.is_steady):
                leads = map(self._lead_of, self._by_use)
                self._lead = min((one for one in leads if one[1] >= now), default=self._lead, key=_FROM)
        return self._lead[0]

    def _lead_of(self, instance: Instance) -> tuple[float, float, Instance]:
        """Return from when and until when an instance leads. A batch that has not ended by then may take any
        time. The batches that it holds must be short as well.
        """
        if instance.at_once > 1 or not 0 < len(instance.batches) < _MOST_HELD:
            return math.inf, math.inf, instance
        first_s, *held_s = map(self.expected_s, instance.batches)
        behind_s, ends_at = sum(held_s), instance.began_at + first_s
        lead_from = math.inf if behind_s > LEAD_S else ends_at + behind_s - LEAD_S
        return lead_from, ends_at + LEAD_S, instance

    def expected_s(self, batch: Batch) -> float:
        """Return the expected duration of a batch; infinity if there is no estimate."""
        if batch.expected_s is None:
            batch.expected_s = self.service_time.estimate(batch.rows)
        return math.inf if batch.expected_s is None else batch.expected_s

    def down(self, name: str) -> tuple[list[Batch], list[Batch]]:
        """Remove an instance. Returns the batches that may have begun, and those only held, oldest first."""
        instance = self._instances.get(name)
        if instance is None:
            return [], []
        batches = self._remove(name)
        computed = [batch for batch in batches if not batch.slots]
        others = [batch for batch in batches if batch.slots]
        begun = next((n for n, batch in enumerate(others) if not batch.may_wait), len(others))
        begun = max(instance.at_once, begun)
        return computed + others[:begun], others[begun:]

    def has_room(self, among: Collection[str] | None = None, *, exclusive: bool = False) -> bool:
        """Return whether an instance (``among``) can take a batch; ``exclusive``: one that runs alone."""
        if among is None and not exclusive:
            return self.room > 0
        instances = self._by_use if among is None else [self._instances[name] for name in among]
        return any(one.has_exclusive_room if exclusive else one.load < 1 for one in instances)

    def begins_at_once(self, among: Collection[str] | None = None) -> bool:
        """Return whether one of the instances ``among``, or any, would run a batch now."""
        instances = self._by_use if among is None else [self._instances[name] for name in among]
        return any(one.begins_at_once for one in instances)

    def begins_at(self, now: float, name: str | None = None) -> float:
        """Return when a batch placed now is expected to begin; ``now`` if there is no estimate."""
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
        exclusive: bool,
        instance: str | None = None,
    ) -> Batch:
        """Make a batch and assign it to the instance with the most room, or to ``instance``, which has room.
        If no instance has room, assign it to the leading instance that is expected to be free first.

        ``exclusive``: nothing else runs on the instance meanwhile; requires ``has_room(exclusive=True)``.
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
        slots = taken.capacity if exclusive and taken.at_once > 1 else 1
        if taken.running < taken.capacity:
            self.room -= slots
        taken.running += slots
        batch = Batch(self._next_batch_id, taken.name, requests, rows, alone, slots)
        if exclusive:  # no batch is held behind one that may kill its worker
            batch.expected_s = math.inf
        self._next_batch_id += 1
        self._running[batch.batch_id] = batch
        if not taken.batches:
            taken.began_at = now
        taken.batches.append(batch)
        self._lead = None
        return batch


#: The number of remembered batches of one size; two of them may be outliers.
_REMEMBERED: Final = 5
#: A batch that takes this much longer than expected is a surprise, and makes further surprises likely.
_SURPRISE_S: Final = 1e-3
_STEADY: Final = 16
#: The fewest batches for a median. The first batch of a size is often slower: caches fill, kernels are
#: compiled.
_LEAST: Final = 2


class ServiceTime:
    """Medians of the durations of recent batches of one model, by size. Sizes that differ by less than a
    quarter are one.

    The durations come from workers: inputs, call and outputs of one batch, without the way to the worker and
    back. The estimate is computed once per batch, never once per request.

    For deadlines: a request taken at ``t`` cannot end before ``t + estimate(rows)``, where ``rows`` are the
    rows of its batch; the estimate for its own rows, which are fewer, is a lower bound. For an unseen size
    the estimate is the least possible duration if more rows never take less time, and no more for each row.
    An estimate describes the past: a model that has become faster is known to be faster only after it has
    run. So no request is refused by an estimate while an instance is idle, or the model would never be tried
    again.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[float, int]]] = {}
        #: The duration and the rows of the median batch, by size.
        self._medians: dict[int, tuple[float, int]] = {}
        #: The sorted keys of ``_medians``.
        self._sizes: list[int] = []
        self._since_surprise = _STEADY

    @property
    def is_steady(self) -> bool:
        """Return whether recent batches took hardly longer than expected."""
        return self._since_surprise >= _STEADY

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a successful batch of ``rows`` rows."""
        size = rows if rows < 8 else _size(rows)
        last = self._last.get(size)
        if last is None:
            last = self._last[size] = deque(maxlen=_REMEMBERED)
        self._since_surprise += 1
        if size in self._medians and seconds > self._medians[size][0] + _SURPRISE_S:
            self._since_surprise = 0
        last.append((seconds, rows))
        if len(last) >= _LEAST:
            self._medians[size] = sorted(last)[(len(last) - 1) // 2]
            if len(self._medians) > len(self._sizes):
                self._sizes = sorted(self._medians)

    def estimate(self, rows: int) -> float | None:
        """Return the expected duration of a batch of ``rows`` rows in seconds; None if unknown."""
        median = self._medians.get(rows if rows < 8 else _size(rows))
        return self._between(rows) if median is None else median[0]

    def _between(self, rows: int) -> float | None:
        """Return the least duration of a batch of an unknown size, interpolated between known sizes."""
        if not self._sizes:
            return None
        place = bisect(self._sizes, _size(rows))
        below = self._medians[self._sizes[place - 1]] if place else (0.0, 0)
        if place == len(self._sizes):
            return below[0]
        above = self._medians[self._sizes[place]]
        part = (rows - below[1]) / (above[1] - below[1])
        return below[0] + max(0.0, above[0] - below[0]) * part


def _size(rows: int) -> int:
    """Return a number that grows with the rows, the same for row counts with three equal leading bits."""
    more = max(0, rows.bit_length() - 3)
    return (more << 2) + (rows >> more)
