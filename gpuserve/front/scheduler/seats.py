"""The instances of a model of sequences: who has a seat at which of them, and which batches run where.

An instance is a name here, and a seat a number: the row that a sequence has where it keeps one. Nothing is
known of what a batch is made of or why. The counterpart of ``slots.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from gpuserve.front.scheduler.queue import QueuedRequest
from gpuserve.front.scheduler.sequence_state import ActiveSequence
from gpuserve.front.scheduler.slots import Batch


class SeatedInstance:
    """One instance. ``ready`` are the sequences with a request that may run; ``dropped`` are those of which
    it has not been told yet that they are no more. One that is ``retired`` keeps the sequences that it has.
    """

    __slots__ = (
        "at_once", "capacity", "dropped", "free_seats", "name", "ready", "retired", "running", "seated",
    )  # fmt: skip

    def __init__(self, name: str, seats: int, at_once: int, capacity: int) -> None:
        self.name = name
        self.at_once = at_once
        self.capacity = capacity
        self.running = 0
        self.retired = False
        #: The lowest first: batches that keep rows stay small.
        self.free_seats = list(range(seats))
        self.seated: dict[ActiveSequence, None] = {}
        self.ready: dict[ActiveSequence, None] = {}
        self.dropped: list[int | str] = []

    @property
    def has_room(self) -> bool:
        """Whether it can take a batch."""
        return self.running < self.capacity


class Seats:
    """Every instance that is up, ``seats`` sequences at each."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self._instances: dict[str, SeatedInstance] = {}
        self._running: dict[int, Batch] = {}
        self._next_batch_id = 0

    def __len__(self) -> int:
        return len(self._in_rotation())

    def __getitem__(self, name: str) -> SeatedInstance:
        return self._instances[name]

    @property
    def at_once(self) -> int:
        """How many batches the instances that are up run at once."""
        return sum(one.at_once for one in self._in_rotation())

    @property
    def room(self) -> int:
        """How many batches could be taken."""
        return sum(one.capacity - one.running for one in self._in_rotation())

    @property
    def running(self) -> tuple[Batch, ...]:
        """The batches that run or are held, oldest first."""
        return tuple(self._running.values())

    def up(self, name: str, at_once: int, prefetch: int) -> None:
        """An instance takes batches from now on: it runs ``at_once`` and holds ``prefetch`` besides.

        Raises:
            ValueError: it already does.
        """
        if name in self._instances:
            raise ValueError(f"instance {name!r} is up already")
        self._instances[name] = SeatedInstance(name, self.seats, at_once, at_once + prefetch)

    def retire(self, name: str) -> None:
        """An instance takes no more sequences; nothing where it is not up."""
        if name in self._instances:
            self._instances[name].retired = True

    def is_idle(self, name: str) -> bool:
        """Whether an instance has neither a sequence nor a batch."""
        instance = self._instances.get(name)
        return instance is None or not (instance.seated or instance.running)

    def _in_rotation(self) -> list[SeatedInstance]:
        return [one for one in self._instances.values() if not one.retired]

    def down(self, name: str) -> list[ActiveSequence]:
        """An instance is gone, and so are its batches: the sequences that were seated there."""
        instance = self._instances.pop(name, None)
        if instance is None:
            return []
        for batch_id in [n for n, batch in self._running.items() if batch.instance == name]:
            del self._running[batch_id]
        return list(instance.seated)

    def with_room(self, among: Collection[str] | None = None) -> Iterator[SeatedInstance]:
        """The instances, or those of some, that can take a batch and have a sequence that is ready."""
        instances = self._instances.values() if among is None else (self._instances[name] for name in among)
        return (one for one in instances if one.ready and one.has_room)

    def seat(self, sequence: ActiveSequence) -> bool:
        """Give a sequence a seat where most are free; False: there is none."""
        instance = max(self._in_rotation(), key=_free_seats, default=None)
        if instance is None or not instance.free_seats:
            return False
        sequence.advance("seat")
        sequence.instance, sequence.seat = instance.name, heapq.heappop(instance.free_seats)
        instance.seated[sequence] = None
        return True

    def leave(self, sequence: ActiveSequence) -> None:
        """A sequence gives its seat up; not if its instance is gone."""
        instance = self._instances.get(sequence.instance)
        if instance is not None and sequence in instance.seated:
            del instance.seated[sequence]
            instance.ready.pop(sequence, None)
            heapq.heappush(instance.free_seats, sequence.seat)

    def place(self, instance: SeatedInstance, requests: list[QueuedRequest], seats: tuple[int, ...]) -> Batch:
        """Make a batch of requests, one of each of as many sequences, for an instance with room."""
        instance.running += 1
        # Moved behind the others: those that have waited longer for a batch come first.
        self._instances[instance.name] = self._instances.pop(instance.name)
        dropped, instance.dropped = tuple(instance.dropped), []
        rows = sum([request.rows for request in requests])
        batch = Batch(self._next_batch_id, instance.name, requests, rows, False, dropped=dropped, seats=seats)
        self._next_batch_id += 1
        self._running[batch.batch_id] = batch
        return batch

    def release(self, batch_id: int) -> Batch:
        """A batch ended.

        Raises:
            KeyError: no such batch runs: it ended before, or its instance went down.
        """
        batch = self._running.pop(batch_id)
        self._instances[batch.instance].running -= 1
        return batch


def _free_seats(instance: SeatedInstance) -> int:
    return len(instance.free_seats)
