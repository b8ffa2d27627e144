"""The scheduler of a model whose requests belong to sequences. Pure, with the interface of ``scheduler.py``.
``sequence_slots.py`` holds the state of a sequence, the instances and their seats.

The first request of a sequence gets a free seat at any instance, and the sequence keeps the seat until it
ends, so it always meets the same instance. All others wait in the backlog, in order. Its requests run one at
a time and in order. A sequence ends

- with the request that has the END flag: its seat goes to the backlog;
- when no request of it has waited or run for ``max_sequence_idle_us``;
- when one of its requests is cancelled or its time runs out: its other requests are removed as well;
- when its instance dies: its running and waiting requests are lost. No request of a sequence runs twice.

If an instance was given a part of a sequence but will not be given its end, its next batch says so
(``Batch.dropped``). Every accepted request is in exactly one place::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Final, Literal, Protocol

from gpuserve.core.errors import RequestError
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.batch_former import BatchFormer
from gpuserve.front.scheduling.request_queue import (
    QueueAccounting,
    QueuedRequest,
    RemovalReason,
    RequestState,
    advance,
)
from gpuserve.front.scheduling.scheduler import (
    TRANSFER_COST_NBYTES,
    RequestCounts,
    Scheduler,
    SchedulerStatistics,
    statistics_of,
)
from gpuserve.front.scheduling.sequence_slots import (
    ActiveSequence,
    SequenceInstance,
    SequenceSlots,
    SequenceState,
)
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import DIRECT, BatchingSpec, ModelSpec, SequenceBatching

#: The most lost sequences that are remembered, the latest ones.
MAX_LOST: Final = 1 << 14


class LostSequences(dict[int | str, None]):
    """The ids of sequences that were open when their instance was lost, until a client starts them again.
    Before ``unknown_lost_until`` an unknown sequence is assumed to be one of the previous front, which died.
    """

    def __init__(self, unknown_lost_until: float = -math.inf) -> None:
        super().__init__()
        self._unknown_lost_until = unknown_lost_until

    def remember(self, sequence: int | str) -> None:
        if len(self) >= MAX_LOST:
            del self[next(iter(self))]
        self[sequence] = None

    def refusal(self, model: str, sequence: int | str, now: float, *, known: bool) -> RequestError:
        """Return the error of a request without the START flag that cannot continue a sequence."""
        if sequence in self:
            return refusals.lost_before(model, sequence, "its instance")
        if not known and now < self._unknown_lost_until:
            return refusals.lost_before(model, sequence, "the front process that died")
        return refusals.not_started(model, sequence)


class IdleSequences:
    """The open sequences without requests. Each is dropped after ``max_idle_s`` seconds."""

    def __init__(self, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        #: The time at which each is dropped, nearest first.
        self._due_at: OrderedDict[ActiveSequence, float] = OrderedDict()
        #: Sequences that have become idle since the last ``pop_due``.
        self._new: dict[ActiveSequence, None] = {}

    def add(self, sequence: ActiveSequence) -> None:
        """Count a sequence as idle from the next ``pop_due`` on."""
        self._new[sequence] = None

    def remove(self, sequence: ActiveSequence) -> None:
        self._due_at.pop(sequence, None)
        self._new.pop(sequence, None)

    def pop_due(self, now: float) -> Iterator[ActiveSequence]:
        for sequence in self._new:
            self._due_at[sequence] = now + self._max_idle_s
        self._new.clear()
        while self.next_due() <= now:
            yield self._due_at.popitem(last=False)[0]

    def next_due(self) -> float:
        """Return when the next sequence is to be dropped; infinity if none is idle."""
        return next(iter(self._due_at.values())) if self._due_at else math.inf


class SequenceScheduler(Scheduler):
    """The sequences of one model over all of its instances. Every request has one row."""

    def __init__(self, spec: ModelSpec, front_lost_at: float = -math.inf) -> None:
        self._spec = spec
        max_idle_s = spec.sequence.max_sequence_idle_us / 1e6
        self._strategy = strategy_of(spec.sequence, spec.batching, spec.max_batch_size)
        self._queue = QueueAccounting(spec.queue)
        self._slots: SequenceSlots = SequenceSlots(spec.sequence.seats(spec.max_batch_size))
        self._sequences: dict[int | str, ActiveSequence] = {}
        self._idle = IdleSequences(max_idle_s)
        self._lost = LostSequences(front_lost_at + max_idle_s)
        #: Removed requests that ``expire`` has not returned yet.
        self._removed: list[QueuedRequest] = []
        self._counts = RequestCounts()
        self.draining = False

    # ---- requests -------------------------------------------------------------------------

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request of a sequence.

        As in Triton its ``timeout_s`` limits how long its sequence may wait for a seat: a request left out
        later would change the following ones. Raises InvalidArgument if the request has no START flag, and
        its sequence does not exist or has its end; Unavailable if the request has no START flag, and its
        sequence was lost with its instance or its front; Unavailable, QueueFull, DeadlineExceeded,
        IllegalTransition as ``ModelScheduler.submit``.
        """
        assert request.correlation is not None
        correlation_id, start, _ = request.correlation
        try:
            if self.draining and not request.is_ensemble_step:
                raise refusals.stopping()
            self._drop_idle(now)
            sequence = self._sequences.get(correlation_id)
            if not start and (sequence is None or not sequence.open):
                known = sequence is not None
                raise self._lost.refusal(self._spec.name, correlation_id, now, known=known)
            if request.timeout_s is not None:
                request.deadline, request.timeout_s = now + request.timeout_s, None
            self._queue.add(request, now)
        except RequestError:
            self._counts.rejected += 1
            raise
        if sequence is None:
            sequence = self._sequences[correlation_id] = ActiveSequence(correlation_id)
            self._slots.add(sequence)
            self._lost.pop(correlation_id, None)
        sequence.join(request)
        self._idle.remove(sequence)
        self._slots.fill_seats()
        self._slots.update_ready(sequence)

    def cancel(self, request: QueuedRequest) -> bool:
        """Cancel a request and the waiting requests of its sequence, which ``expire`` returns."""
        if request.state is RequestState.FINISHED:
            return False
        sequence = self._sequence_of(request)
        if request.state is RequestState.RUNNING:
            request.cancelled = True
            self._cancel_removed(sequence.remove_begun(), RemovalReason.CANCELLED)
            self._update(sequence)
            return False
        self._remove_run_of(request, "cancel", RemovalReason.CANCELLED)
        request.cancelled = True
        self._counts.cancelled += 1
        return True

    def remove_all(self, device: str = "") -> list[QueuedRequest]:
        if device:
            return []
        taken: list[QueuedRequest] = []
        for sequence in list(self._sequences.values()):
            taken += sequence.waiting
            sequence.waiting.clear()
            if sequence.open:
                self._lost.remember(sequence.id)
            sequence.open = False
            self._update(sequence)
        self._cancel_all(taken)
        return taken

    def transfer(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        """Transfer the sequences that no instance has begun, each as a whole. Begun sequences are lost."""
        taken: list[QueuedRequest] = []
        for sequence in list(self._sequences.values()):
            if sequence.begun or sequence.running is not None:
                if sequence.open:
                    self._lost.remember(sequence.id)
            elif most_nbytes > 0:
                most_nbytes -= sum([one.nbytes + TRANSFER_COST_NBYTES for one in sequence.waiting])
                taken += sequence.waiting
                sequence.waiting.clear()
            else:
                continue
            sequence.open = False
            self._update(sequence)
        self._cancel_all(taken)
        for request in taken:
            request.reset()
        if isinstance(to, SequenceScheduler):
            while self._lost:
                to._lost.remember(self._lost.popitem()[0])
        return taken

    def expire(self, now: float) -> list[QueuedRequest]:
        """Return the requests that were removed or are late, each with its ``removal_reason``."""
        self._drop_idle(now)
        while (request := self._queue.first_due(now)) is not None:
            if self._sequence_of(request).state is not SequenceState.BACKLOG:
                self._queue.drop_deadline(request)
                continue
            request.removal_reason = RemovalReason.LATE_IN_BACKLOG
            self._removed.append(request)
            self._counts.expired += 1
            self._remove_run_of(request, "expire", RemovalReason.LATE_IN_BACKLOG)
        removed, self._removed = self._removed, []
        return removed

    def _remove_run_of(
        self, request: QueuedRequest, event: Literal["cancel", "expire"], others: RemovalReason
    ) -> None:
        """Remove a waiting request, and with the reason ``others`` the waiting requests of its run."""
        sequence = self._sequence_of(request)
        run = sequence.remove_run(request)
        run.remove(request)
        self._queue.remove(request, event)
        self._cancel_removed(run, others)
        self._update(sequence)

    def _cancel_removed(self, requests: list[QueuedRequest], reason: RemovalReason) -> None:
        for request in requests:
            request.removal_reason = reason
        self._cancel_all(requests)
        self._removed += requests

    def _cancel_all(self, requests: Iterable[QueuedRequest]) -> None:
        for request in requests:
            self._queue.remove(request, "cancel")
            request.cancelled = True
            self._counts.cancelled += 1

    # ---- batches --------------------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        if not self._queue.requests or self._queue.first_due(now) is not None:
            return None
        for place in self._slots.ready(None if instance is None else (instance,)):
            requests = self._strategy.form(place.ready, now)
            if requests is not None:
                return self._dispatch(place, requests)
        return None

    def _dispatch(self, place: SequenceInstance, requests: list[QueuedRequest]) -> Batch:
        seats = []
        for request in requests:
            if request.deadline is not None:
                self._queue.drop_deadline(request)
            sequence = self._sequence_of(request)
            sequence.dispatch()
            del place.ready[sequence]
            seats.append(sequence.seat)
        self._queue.mark_dispatched(requests)
        return self._slots.place(place, requests, tuple(seats) if self._spec.sequence.keeps_rows else ())

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        if self._removed:
            return now
        self._drop_idle(now)
        times = [self._strategy.ready_at(one.ready) for one in self._slots.ready(among)]
        soonest = min(*times, self._queue.next_due(), self._idle.next_due())
        return None if soonest == math.inf else max(now, soonest)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        batch = self._slots.release(batch_id, took_s, now)
        advance(batch.requests, "complete")
        for request in batch.requests:
            self._counts.cancelled += request.cancelled
            self._counts.finished += not request.cancelled
            sequence = self._sequence_of(request)
            if sequence.finish() and sequence.waiting:
                self._slots.return_to_backlog(sequence)
            self._update(sequence)
        return batch

    def return_batch(self, batch_id: int, *, begun: bool) -> list[QueuedRequest]:
        raise NotImplementedError("only a stepped callable returns batches, and it has no sequences")

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        at_once, prefetch = slots, self._spec.prefetch
        if self._spec.sequence.strategy == DIRECT:
            at_once, prefetch = 1, 0  # one batch after the other
        self._slots.up(name, at_once, prefetch)

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        """Remove an instance that died. All requests of sequences that had begun there are lost."""
        lost: list[QueuedRequest] = []
        for sequence in self._slots.down(name):
            if sequence.begun:
                lost += self._lose(sequence)
            sequence.begun = False  # no worker is left to be notified
            if sequence.waiting:
                self._slots.return_to_backlog(sequence)
            self._update(sequence)
        self._counts.lost += len(lost)
        return lost

    def _lose(self, sequence: ActiveSequence) -> list[QueuedRequest]:
        """Remove the requests that are lost with the instance of a sequence that had begun there."""
        lost: list[QueuedRequest] = []
        running, sequence.running = sequence.running, None
        if running is not None and running.cancelled:
            advance((running,), "complete")
            self._counts.cancelled += 1
        elif running is not None:
            advance((running,), "lose")
            running.attempts += 1
            lost.append(running)
        was_open, waiting = sequence.open, sequence.remove_begun()
        if was_open and not sequence.open:
            self._lost.remember(sequence.id)
        for request in waiting:
            self._queue.remove(request, "cancel")
        return lost + waiting

    # ---- sequences ------------------------------------------------------------------------

    def _sequence_of(self, request: QueuedRequest) -> ActiveSequence:
        assert request.correlation is not None
        return self._sequences[request.correlation.id]

    def _update(self, sequence: ActiveSequence) -> None:
        if not sequence.idle:
            self._slots.update_ready(sequence)
        elif sequence.open:
            self._idle.add(sequence)
        elif sequence.state is not SequenceState.ENDED:
            self._idle.remove(sequence)
            del self._sequences[sequence.id]
            self._slots.end(sequence)

    def _drop_idle(self, now: float) -> None:
        """End the sequences that have been idle for too long. Newly idle ones start to count now."""
        for sequence in self._idle.pop_due(now):
            sequence.open = False
            self._update(sequence)

    def statistics(self) -> SchedulerStatistics:
        counts = statistics_of(self._queue, self._counts, self._slots)
        return counts._replace(sequences=len(self._sequences), seats=counts.instances * self._slots.seats)


_SEAT: Final = operator.attrgetter("seat")
_ACCEPTED: Final = operator.attrgetter("sequence")


class SequenceStrategy(Protocol):
    """The choice of one batch among the ready sequences of an instance, one request of each. At least one
    sequence is ready. A strategy has no memory: it is called again whenever something may have changed.
    """

    def form(self, ready: Collection[ActiveSequence], now: float) -> list[QueuedRequest] | None:
        """Return the next requests that run together now; None: not yet."""

    def ready_at(self, ready: Collection[ActiveSequence]) -> float:
        """Return when a batch is formed at the latest if no other event happens."""


def strategy_of(sequence: SequenceBatching, batching: BatchingSpec, max_batch_size: int) -> SequenceStrategy:
    if sequence.strategy == DIRECT:
        least = sequence.minimum_slot_utilization * max(1, max_batch_size)
        return DirectStrategy(batching.max_queue_delay_us / 1e6, least, merges=batching.merge)
    return OldestStrategy(max_batch_size, batching)


class DirectStrategy:
    """A batch of every ready sequence, by seat. While fewer than ``least`` are ready, the oldest may wait."""

    def __init__(self, delay_s: float, least: float, *, merges: bool) -> None:
        self._delay_s = delay_s
        self._least = least
        self._merges = merges

    def form(self, ready: Collection[ActiveSequence], now: float) -> list[QueuedRequest] | None:
        if now < self.ready_at(ready):
            return None
        oldest = _oldest(ready)
        if not self._merges:
            return [oldest]
        heads = [sequence.waiting[0] for sequence in sorted(ready, key=_SEAT)]
        return [one for one in heads if one.merge_key == oldest.merge_key]

    def ready_at(self, ready: Collection[ActiveSequence]) -> float:
        enqueued_at = _oldest(ready).enqueued_at
        return enqueued_at + self._delay_s if len(ready) < self._least else enqueued_at


class OldestStrategy:
    """The batch of the dynamic batcher over the next request of each ready sequence."""

    def __init__(self, max_batch_size: int, batching: BatchingSpec) -> None:
        self._former = BatchFormer(max_batch_size, batching, by_age=True)

    def form(self, ready: Collection[ActiveSequence], now: float) -> list[QueuedRequest] | None:
        waiting = _heads(ready)
        requests = self._former.form(waiting, now)
        if requests is None:
            self._former.dissolve(waiting)
        return requests

    def ready_at(self, ready: Collection[ActiveSequence]) -> float:
        return self._former.ready_at(_heads(ready))


def _oldest(ready: Collection[ActiveSequence]) -> QueuedRequest:
    return min([sequence.waiting[0] for sequence in ready], key=_ACCEPTED)


def _heads(ready: Collection[ActiveSequence]) -> deque[QueuedRequest]:
    return deque(sorted([sequence.waiting[0] for sequence in ready], key=_ACCEPTED))
