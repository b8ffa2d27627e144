"""The instances of a model of sequences and their seats: which sequence has a seat where, which wait in the
backlog for one, and which batches run where. A seat (Triton: a batch slot) is a number at one instance: the
row that a sequence has where it keeps one. Nothing is known of what a batch is made of or why. The
counterpart of ``slots.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from gpuserve.front.batching.sequence_state import ActiveSequence, SequenceState
from gpuserve.front.batching.slots import Batch, Instance, Places
from gpuserve.front.queueing.queue import QueuedRequest


@dataclass(eq=False, slots=True)
class SequenceInstance(Instance):
    """One instance. ``ready`` are the sequences with a request that may run; ``dropped`` are those of which
    it has not been told yet that they are no more. One that is ``retired`` keeps the sequences that it has.
    """

    #: A heap, the lowest first: batches that keep rows stay small.
    free_seats: list[int] = field(default_factory=list)
    seated: dict[ActiveSequence, None] = field(default_factory=dict)
    ready: dict[ActiveSequence, None] = field(default_factory=dict)
    dropped: list[int | str] = field(default_factory=list)


class SequenceSlots(Places[SequenceInstance]):
    """Every instance that is up, ``seats`` sequences at each, and the sequences that wait for a seat."""

    def __init__(self, seats: int) -> None:
        super().__init__()
        self.seats = seats
        #: An ordered set.
        self._backlog: dict[ActiveSequence, None] = {}

    # ---- instances ------------------------------------------------------------------------

    def up(self, name: str, at_once: int, prefetch: int) -> None:
        free_seats = list(range(self.seats))
        self._add(SequenceInstance(name, at_once, at_once + prefetch, free_seats=free_seats))
        self.fill_seats()

    def is_idle(self, name: str) -> bool:
        instance = self._instances.get(name)
        return instance is None or not (instance.seated or instance.running)

    def down(self, name: str) -> list[ActiveSequence]:
        instance = self._instances.get(name)
        if instance is None:
            return []
        self._remove(name)
        return list(instance.seated)

    # ---- seats ----------------------------------------------------------------------------

    def add(self, sequence: ActiveSequence) -> None:
        self._backlog[sequence] = None

    def fill_seats(self) -> None:
        while self._backlog:
            instance = max(self._by_use, key=lambda one: len(one.free_seats), default=None)
            if instance is None or not instance.free_seats:
                return
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            sequence.become(SequenceState.SEATED)
            sequence.instance, sequence.seat = instance.name, heapq.heappop(instance.free_seats)
            instance.seated[sequence] = None
            self.note_ready(sequence)

    def note_ready(self, sequence: ActiveSequence) -> None:
        """Remember, of a sequence with a seat, whether its next request may run now."""
        if sequence.state is not SequenceState.SEATED:
            return
        ready = self._instances[sequence.instance].ready
        if sequence.ready:
            ready[sequence] = None
        else:
            ready.pop(sequence, None)

    def step_back(self, sequence: ActiveSequence) -> None:
        """Free the seat of a sequence for others: what waits of it begins anew, behind the backlog."""
        self._leave(sequence)
        sequence.become(SequenceState.BACKLOG)
        self.add(sequence)
        self.fill_seats()

    def end(self, sequence: ActiveSequence) -> None:
        if sequence.begun and sequence.state is SequenceState.SEATED:
            self._instances[sequence.instance].dropped.append(sequence.id)
        self._leave(sequence)
        self._backlog.pop(sequence, None)
        sequence.become(SequenceState.ENDED)
        self.fill_seats()

    def _leave(self, sequence: ActiveSequence) -> None:
        instance = self._instances.get(sequence.instance)
        if instance is not None and sequence in instance.seated:
            del instance.seated[sequence]
            instance.ready.pop(sequence, None)
            heapq.heappush(instance.free_seats, sequence.seat)

    # ---- batches --------------------------------------------------------------------------

    def with_room(self) -> list[str]:
        """The instances that can take a batch and have a sequence that is ready."""
        return [one.name for one in self.ready()]

    def ready(self, among: Collection[str] | None = None) -> Iterator[SequenceInstance]:
        """The same of all instances or of some, also of those that are retired."""
        instances = self._instances.values() if among is None else (self._instances[name] for name in among)
        return (one for one in instances if one.ready and one.running < one.capacity)

    def place(
        self, instance: SequenceInstance, requests: list[QueuedRequest], seats: tuple[int, ...]
    ) -> Batch:
        instance.running += 1
        # Moved behind the others: those that have waited longer for a batch come first.
        self._instances[instance.name] = self._instances.pop(instance.name)
        if not instance.retired:
            self._by_use.remove(instance)
            self._by_use.append(instance)
            self.room -= 1
        dropped, instance.dropped = tuple(instance.dropped), []
        rows = len(requests)  # one each
        batch = Batch(self._next_batch_id, instance.name, requests, rows, False, dropped=dropped, seats=seats)
        self._next_batch_id += 1
        self._running[batch.batch_id] = batch
        instance.batches.append(batch)
        return batch
