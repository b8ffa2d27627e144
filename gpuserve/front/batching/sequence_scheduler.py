"""The scheduler of a model whose requests belong to sequences: what waits behind what, and when a sequence
ends. Pure, with the interface of ``model_scheduler.py``. ``sequence_state.py`` is one sequence,
``sequence_slots.py`` the instances and who has a seat there, ``sequence_strategies.py`` the choice of a
batch.

A sequence that has a free seat anywhere is given it with its first request and keeps it until it ends, so
it always meets the same instance; all others wait in the backlog, in order. Its requests run one at a
time and in order. It ends

- with the request that says so: its seat goes to the backlog;
- when nothing of it has waited or run for ``max_sequence_idle_us``;
- when a request of it is taken back or its time runs out: the rest of it is taken out as well;
- when its instance dies: what ran or waited of it is lost. Nothing of a sequence ever runs twice.

An instance that was given a part of a sequence but will not be given its end is told so with its next
batch (``Batch.dropped``). Here too, every request that was accepted is in exactly one place::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Final, Literal

from gpuserve.core.errors import RequestError
from gpuserve.front.batching import refusals
from gpuserve.front.batching.interface import (
    HANDED_NBYTES,
    RequestCounts,
    Scheduler,
    SchedulerStatistics,
    statistics_of,
)
from gpuserve.front.batching.sequence_slots import SequenceInstance, SequenceSlots
from gpuserve.front.batching.sequence_state import ActiveSequence, SequenceState
from gpuserve.front.batching.sequence_strategies import strategy_of
from gpuserve.front.batching.slots import Batch
from gpuserve.front.queueing.queue import QueuedRequest, RemovalReason, RequestState, WaitingRoom, advance
from gpuserve.model.spec import DIRECT, ModelSpec

#: So many sequences that were lost are remembered, the latest.
MAX_LOST: Final = 1 << 14


class LostSequences(dict[int | str, None]):
    """The ids of sequences that were open when their instance was lost, until they begin anew. Before
    ``strangers_until`` one that nobody knows is taken for one of the front before this, which has died.
    """

    def __init__(self, strangers_until: float = -math.inf) -> None:
        super().__init__()
        self._strangers_until = strangers_until

    def note(self, sequence: int | str) -> None:
        if len(self) >= MAX_LOST:
            del self[next(iter(self))]
        self[sequence] = None

    def refusal(self, model: str, sequence: int | str, now: float, *, known: bool) -> RequestError:
        """Say why a request that is no start cannot go on with a sequence."""
        if sequence in self:
            return refusals.lost_before(model, sequence, "its instance")
        if not known and now < self._strangers_until:
            return refusals.lost_before(model, sequence, "the front process that died")
        return refusals.not_started(model, sequence)


class IdleSequences:
    """The open sequences of which nothing waits or runs. Each is dropped after ``max_idle_s`` seconds."""

    def __init__(self, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        #: With the time at which they are dropped, nearest first.
        self._due_at: OrderedDict[ActiveSequence, float] = OrderedDict()
        #: Those that have become idle since the time was last told.
        self._new: dict[ActiveSequence, None] = {}

    def add(self, sequence: ActiveSequence) -> None:
        """Let a sequence count as idle from the next time that is told."""
        self._new[sequence] = None

    def remove(self, sequence: ActiveSequence) -> None:
        self._due_at.pop(sequence, None)
        self._new.pop(sequence, None)

    def take_due(self, now: float) -> Iterator[ActiveSequence]:
        for sequence in self._new:
            self._due_at[sequence] = now + self._max_idle_s
        self._new.clear()
        while self.next_due() <= now:
            yield self._due_at.popitem(last=False)[0]

    def next_due(self) -> float:
        """When the next of them is to be dropped; infinity: none is idle."""
        return next(iter(self._due_at.values())) if self._due_at else math.inf


class SequenceScheduler(Scheduler):
    """The sequences of one model over all of its instances. Every request has one row."""

    def __init__(self, spec: ModelSpec, front_lost_at: float = -math.inf) -> None:
        self._spec = spec
        max_idle_s = spec.sequence.max_sequence_idle_us / 1e6
        self._strategy = strategy_of(spec.sequence, spec.batching, spec.max_batch_size)
        self._queue = WaitingRoom(spec.queue)
        self._slots: SequenceSlots = SequenceSlots(spec.sequence.seats(spec.max_batch_size))
        self._sequences: dict[int | str, ActiveSequence] = {}
        self._idle = IdleSequences(max_idle_s)
        self._lost = LostSequences(front_lost_at + max_idle_s)
        #: Taken out, and not yet given by ``expire``.
        self._removed: list[QueuedRequest] = []
        self._counts = RequestCounts()
        self.draining = False

    # ---- requests -------------------------------------------------------------------------

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request of a sequence. Its ``timeout_s`` becomes how long its sequence may wait for a
        seat, as in Triton: a part that was left out later on would change what comes after it. Raises
        InvalidArgument: it is no start, and its sequence is not there or has been given its end; Unavailable:
        it is no start, and its sequence was lost with its instance or its front; Unavailable, QueueFull,
        DeadlineExceeded, IllegalTransition: as ``ModelScheduler.submit``.
        """
        assert request.correlation is not None
        correlation_id, start, _ = request.correlation
        try:
            if self.draining and not request.is_inner:
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
        self._slots.note_ready(sequence)

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back, and with it what waits of its sequence, which ``expire`` gives."""
        if request.state is RequestState.FINISHED:
            return False
        sequence = self._sequence_of(request)
        if request.state is RequestState.RUNNING:
            request.cancelled = True
            self._give_up(sequence.take_begun(), RemovalReason.CANCELLED)
            self._settle(sequence)
            return False
        self._take_out(request, "cancel", RemovalReason.CANCELLED)
        request.cancelled = True
        self._counts.cancelled += 1
        return True

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        if device:
            return []
        taken: list[QueuedRequest] = []
        for sequence in list(self._sequences.values()):
            taken += sequence.waiting
            sequence.waiting.clear()
            if sequence.open:
                self._lost.note(sequence.id)
            sequence.open = False
            self._settle(sequence)
        self._cancel_all(taken)
        return taken

    def hand_over(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        """A sequence that no instance has begun goes as a whole; any other is not gone on with."""
        taken: list[QueuedRequest] = []
        for sequence in list(self._sequences.values()):
            if sequence.begun or sequence.running is not None:
                if sequence.open:
                    self._lost.note(sequence.id)
            elif most_nbytes > 0:
                most_nbytes -= sum([one.nbytes + HANDED_NBYTES for one in sequence.waiting])
                taken += sequence.waiting
                sequence.waiting.clear()
            else:
                continue
            sequence.open = False
            self._settle(sequence)
        self._cancel_all(taken)
        for request in taken:
            request.renew()
        if isinstance(to, SequenceScheduler):
            while self._lost:
                to._lost.note(self._lost.popitem()[0])
        return taken

    def expire(self, now: float) -> list[QueuedRequest]:
        """The requests that were taken out, or are late, each with its ``removal_reason``."""
        self._drop_idle(now)
        while (request := self._queue.first_due(now)) is not None:
            if self._sequence_of(request).state is not SequenceState.BACKLOG:
                self._queue.lift_deadline(request)
                continue
            request.removal_reason = RemovalReason.LATE_IN_BACKLOG
            self._removed.append(request)
            self._counts.expired += 1
            self._take_out(request, "expire", RemovalReason.LATE_IN_BACKLOG)
        removed, self._removed = self._removed, []
        return removed

    def _take_out(
        self, request: QueuedRequest, event: Literal["cancel", "expire"], others: RemovalReason
    ) -> None:
        """Take a request out that waits, and for the reason of ``others`` what waits of its run."""
        sequence = self._sequence_of(request)
        run = sequence.take_run(request)
        run.remove(request)
        self._queue.remove(request, event)
        self._give_up(run, others)
        self._settle(sequence)

    def _give_up(self, requests: list[QueuedRequest], reason: RemovalReason) -> None:
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
                self._queue.lift_deadline(request)
            sequence = self._sequence_of(request)
            sequence.dispatch()
            del place.ready[sequence]
            seats.append(sequence.seat)
        self._queue.dispatched(requests)
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
                self._slots.step_back(sequence)
            self._settle(sequence)
        return batch

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        at_once, prefetch = slots, self._spec.prefetch
        if self._spec.sequence.strategy == DIRECT:
            at_once, prefetch = 1, 0  # batches follow each other
        self._slots.up(name, at_once, prefetch)

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        """An instance died: what ran there, and what waited of the sequences that had begun, is lost."""
        lost: list[QueuedRequest] = []
        for sequence in self._slots.down(name):
            if sequence.begun:
                lost += self._lose(sequence)
            sequence.begun = False  # there is nobody to be told of it
            if sequence.waiting:
                self._slots.step_back(sequence)
            self._settle(sequence)
        self._counts.lost += len(lost)
        return lost

    def _lose(self, sequence: ActiveSequence) -> list[QueuedRequest]:
        """Take out what is lost with its instance of a sequence that had begun there."""
        lost: list[QueuedRequest] = []
        running, sequence.running = sequence.running, None
        if running is not None and running.cancelled:
            advance((running,), "complete")
            self._counts.cancelled += 1
        elif running is not None:
            advance((running,), "lose")
            running.attempts += 1
            lost.append(running)
        was_open, waiting = sequence.open, sequence.take_begun()
        if was_open and not sequence.open:
            self._lost.note(sequence.id)
        for request in waiting:
            self._queue.remove(request, "cancel")
        return lost + waiting

    # ---- sequences ------------------------------------------------------------------------

    def _sequence_of(self, request: QueuedRequest) -> ActiveSequence:
        assert request.correlation is not None
        return self._sequences[request.correlation.id]

    def _settle(self, sequence: ActiveSequence) -> None:
        if not sequence.idle:
            self._slots.note_ready(sequence)
        elif sequence.open:
            self._idle.add(sequence)
        elif sequence.state is not SequenceState.ENDED:
            self._idle.remove(sequence)
            del self._sequences[sequence.id]
            self._slots.end(sequence)

    def _drop_idle(self, now: float) -> None:
        """End the sequences that have been idle for too long. What became so since begins to count now."""
        for sequence in self._idle.take_due(now):
            sequence.open = False
            self._settle(sequence)

    def statistics(self) -> SchedulerStatistics:
        counts = statistics_of(self._queue, self._counts, self._slots)
        return counts._replace(sequences=len(self._sequences), seats=counts.instances * self._slots.seats)
