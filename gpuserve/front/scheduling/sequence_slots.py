"""The instances of a model with sequences, their seats, and the state of a sequence. Pure.

A seat (Triton: a batch slot) is a number at one instance: the row of a sequence that keeps its row. This
module does not choose batches. It is the counterpart of ``slots.py``. The states of a sequence::

    BACKLOG ──seat──► SEATED ──end──► ENDED
       ▲  │             │               ▲
       │  └─────────────┼──────end──────┘
       └───step back────┘

A correlation id may start again at any time, also before its last request has run. The requests of both
sequences then wait in one line here, so that the callable never sees them in another order. A *run* is the
requests from one start to the next.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from gpuserve.core.states import StepTable
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.slots import Batch, Instance, InstanceTable


@dataclass(eq=False, slots=True)
class SequenceInstance(Instance):
    """One instance. ``ready`` are the sequences with a request that may run; ``dropped`` are the ended
    sequences that it still has to be told of. A ``retired`` instance keeps its sequences.
    """

    #: A heap, the lowest first, so that batches that keep rows stay small.
    free_seats: list[int] = field(default_factory=list)
    seated: dict[ActiveSequence, None] = field(default_factory=dict)
    ready: dict[ActiveSequence, None] = field(default_factory=dict)
    dropped: list[int | str] = field(default_factory=list)


class SequenceSlots(InstanceTable[SequenceInstance]):
    """All instances that are up, ``seats`` sequences at each, and the sequences that wait for a seat."""

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
            self.update_ready(sequence)

    def update_ready(self, sequence: ActiveSequence) -> None:
        """Record whether the next request of a seated sequence may run now."""
        if sequence.state is not SequenceState.SEATED:
            return
        ready = self._instances[sequence.instance].ready
        if sequence.ready:
            ready[sequence] = None
        else:
            ready.pop(sequence, None)

    def return_to_backlog(self, sequence: ActiveSequence) -> None:
        """Free a sequence's seat; its requests wait again, at the end of the backlog."""
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
        """Return the instances that can take a batch and have a sequence that is ready."""
        return [one.name for one in self.ready()]

    def ready(self, among: Collection[str] | None = None) -> Iterator[SequenceInstance]:
        """Iterate over instances (``among``, retired too) with room and a ready sequence."""
        instances = self._instances.values() if among is None else (self._instances[name] for name in among)
        return (one for one in instances if one.ready and one.running < one.capacity)

    def place(
        self, instance: SequenceInstance, requests: list[QueuedRequest], seats: tuple[int, ...]
    ) -> Batch:
        instance.running += 1
        # Moved behind the others: instances that have waited longer for a batch come first.
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


class SequenceState(enum.Enum):
    """The state of a sequence: in the backlog, seated, or ended, which is final."""

    BACKLOG = enum.auto()
    SEATED = enum.auto()
    ENDED = enum.auto()


STATES: Final = StepTable(
    "sequence",
    {
        SequenceState.BACKLOG: {SequenceState.SEATED, SequenceState.ENDED},
        SequenceState.SEATED: {SequenceState.BACKLOG, SequenceState.ENDED},
    },
)


@dataclass(eq=False, slots=True)
class ActiveSequence:
    """A sequence that has not ended. ``open``: a request without the START flag may join. ``begun``: the
    callable has been given a part of the sequence and not yet its end.
    """

    id: int | str
    state: SequenceState = SequenceState.BACKLOG
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    running: QueuedRequest | None = None
    open: bool = False
    begun: bool = False
    instance: str = ""
    seat: int = -1

    def become(self, state: SequenceState) -> None:
        """Go to another state. Raises ``IllegalTransition`` if that cannot follow."""
        self.state = STATES.step(self.state, state, repr(self.id))

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and self.running is None and self.state is SequenceState.SEATED

    @property
    def idle(self) -> bool:
        return not self.waiting and self.running is None

    def join(self, request: QueuedRequest) -> None:
        self.waiting.append(request)
        self.open = not _ends(request)

    def dispatch(self) -> QueuedRequest:
        self.running = request = self.waiting.popleft()
        self.begun = True
        return request

    def finish(self) -> bool:
        """End the running request. Returns whether it was the last of its run."""
        assert self.running is not None
        last = _ends(self.running)
        self.running = None
        if last:
            self.begun = False
        return last

    def remove_begun(self) -> list[QueuedRequest]:
        """Remove the waiting requests of the run that has begun; those of later runs stay."""
        position = next((n for n, one in enumerate(self.waiting) if _starts(one)), len(self.waiting))
        return self._remove_waiting(0, position)

    def remove_run(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Remove the waiting requests of the run of a waiting request, including that request."""
        at = self.waiting.index(request)
        first = next((n for n in range(at, -1, -1) if _starts(self.waiting[n])), 0)
        behind = range(at + 1, len(self.waiting))
        end = next((n for n in behind if _starts(self.waiting[n])), len(self.waiting))
        return self._remove_waiting(first, end)

    def _remove_waiting(self, first: int, end: int) -> list[QueuedRequest]:
        taken = list(islice(self.waiting, first, end))
        if end == len(self.waiting):  # a run with removed requests cannot be continued
            self.open = False
        left = [*islice(self.waiting, first), *islice(self.waiting, end, None)]
        self.waiting = deque(left)
        return taken


def _starts(request: QueuedRequest) -> bool:
    return request.correlation is not None and request.correlation.start


def _ends(request: QueuedRequest) -> bool:
    return request.correlation is not None and request.correlation.end
