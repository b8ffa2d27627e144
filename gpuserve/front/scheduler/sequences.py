"""The scheduler of a model whose requests belong to sequences: which sequence is at which instance, what
waits behind what, and when a sequence ends. Pure, with the interface of ``batcher.py``;
``sequence_state.py`` is one sequence, ``seats.py`` the instances, ``steps.py`` the choice of a batch.

A sequence that has a free seat anywhere is given it with its first request and keeps it until it ends, so
it always meets the same instance; all others wait in the backlog, in order. Its requests run one at a
time and in order. It ends

- with the request that says so: its seat goes to the backlog;
- when nothing of it has waited or run for ``max_idle_us``;
- when a request of it is taken back or its time runs out: the rest of it is taken out as well;
- when its instance dies: what ran or waited of it is lost. Nothing of a sequence ever runs twice.

An instance that was given a part of a sequence but will not be given its end is told so with its next
batch (``Batch.dropped``). Here too, every request that was accepted is in exactly one place::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from gpuserve.errors import RequestError
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.interface import SchedulerStatistics
from gpuserve.front.scheduler.queue import Admission, Fate, QueuedRequest, RequestState, advance
from gpuserve.front.scheduler.seats import SeatedInstance, Seats
from gpuserve.front.scheduler.sequence_state import ActiveSequence, SequenceState
from gpuserve.front.scheduler.slots import Batch
from gpuserve.front.scheduler.steps import step_of
from gpuserve.sequence_spec import DIRECT, SequenceSpec
from gpuserve.spec import BatchingSpec, InstanceSpec, QueueSpec


class SequenceScheduler:
    """The sequences of one model over all of its instances. Not thread-safe.

    Args:
        model: its name, for what a client is told.
        max_batch_size: the most rows a batch may have; 0 for a model that does not batch. Every request
            has one row.
        prefetch: how many batches an instance may hold besides the one it runs; none where the strategy is
            "direct", whose steps follow each other.
    """

    def __init__(
        self,
        model: str,
        *,
        max_batch_size: int,
        sequence: SequenceSpec,
        batching: BatchingSpec,
        queue: QueueSpec,
        prefetch: int,
    ) -> None:
        self._model = model
        self._step = step_of(sequence, batching, max_batch_size)
        self._stepwise = sequence.strategy == DIRECT
        self._keeps_rows = sequence.keeps_rows
        self._max_idle_s = sequence.max_idle_us / 1e6
        self._prefetch = prefetch
        self._admission = Admission(queue)
        self._seats = Seats(sequence.seats(max_batch_size))
        self._sequences: dict[int | str, ActiveSequence] = {}
        #: An ordered set.
        self._backlog: dict[ActiveSequence, None] = {}
        #: Those of which nothing waits or runs, with the time at which they are dropped, nearest first.
        self._idle: OrderedDict[ActiveSequence, float] = OrderedDict()
        #: Those that have become so since the time was last told.
        self._newly_idle: dict[ActiveSequence, None] = {}
        #: Taken out, and not yet given by ``expire``.
        self._fallen: list[QueuedRequest] = []
        self._draining = False
        self._finished = 0
        self._rejected = 0
        self._cancelled = 0
        self._expired = 0
        self._lost = 0

    # ---- requests -------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; what was accepted is still run."""
        self._draining = True

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request, which must name its sequence. Its ``timeout_s`` becomes the time that it may
        wait.

        Raises:
            InvalidArgument: it is no start, and its sequence is not there or has been given its end.
            Unavailable, QueueFull, DeadlineExceeded, IllegalTransition: as ``ModelScheduler.submit``.
        """
        assert request.correlation is not None
        correlation_id, start, _ = request.correlation
        try:
            if self._draining and not request.is_inner:
                raise refusals.stopping()
            self._drop_idle(now)
            sequence = self._sequences.get(correlation_id)
            if not start and (sequence is None or not sequence.open):
                raise refusals.not_started(self._model, correlation_id)
            if request.timeout_s is not None:
                request.deadline, request.timeout_s = now + request.timeout_s, None
            self._admission.add(request, now)
        except RequestError:
            self._rejected += 1
            raise
        if sequence is None:
            sequence = self._sequences[correlation_id] = ActiveSequence(correlation_id)
            self._backlog[sequence] = None
        sequence.join(request)
        self._awake(sequence)
        self._fill_seats()
        self._note_ready(sequence)

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back, and with it what waits of its sequence, which ``expire`` gives.

        True: it was queued and will never run. False: it runs, and its result is to be dropped
        (``request.cancelled``), or it has finished.
        """
        if request.state is RequestState.FINISHED:
            return False
        sequence = self._sequence_of(request)
        if request.state is RequestState.RUNNING:
            request.cancelled = True
            self._fall(sequence.take_begun(), Fate.CANCELLED)
            self._settle(sequence)
            return False
        run = sequence.take_run(request)
        run.remove(request)
        self._admission.remove(request, "cancel")
        request.cancelled = True
        self._cancelled += 1
        self._fall(run, Fate.CANCELLED)
        self._settle(sequence)
        return True

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        """Take every queued request out; no sequence can be gone on with. None must run on one device."""
        if device:
            return []
        taken: list[QueuedRequest] = []
        for sequence in list(self._sequences.values()):
            waiting = list(sequence.waiting)
            sequence.waiting.clear()
            sequence.open = False
            taken += waiting
            self._settle(sequence)
        self._remove(taken)
        return taken

    def expire(self, now: float) -> list[QueuedRequest]:
        """The requests that were taken out since, each with its ``fate``; those that are late go now."""
        self._drop_idle(now)
        while (request := self._admission.first_due(now)) is not None:
            self._expire(request)
        fallen, self._fallen = self._fallen, []
        return fallen

    def _expire(self, request: QueuedRequest) -> None:
        sequence = self._sequence_of(request)
        fate = Fate.LATE_IN_BACKLOG if sequence.state is SequenceState.BACKLOG else Fate.LATE
        run = sequence.take_run(request)
        run.remove(request)
        self._admission.remove(request, "expire")
        request.fate = fate
        self._expired += 1
        self._fallen.append(request)
        self._fall(run, Fate.CANCELLED if fate is Fate.LATE else fate)
        self._settle(sequence)

    def _fall(self, requests: list[QueuedRequest], fate: Fate) -> None:
        for request in requests:
            request.fate = fate
        self._remove(requests)
        self._fallen += requests

    def _remove(self, requests: Iterable[QueuedRequest]) -> None:
        for request in requests:
            self._admission.remove(request, "cancel")
            request.cancelled = True
            self._cancelled += 1

    # ---- batches --------------------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch, for an instance that has waited long or for the one named. Call it until it
        gives None: nothing is ready, or it is better to wait, or ``expire(now)`` comes first.
        """
        if not self._admission.requests or self._admission.first_due(now) is not None:
            return None
        for place in self._seats.with_room(None if instance is None else (instance,)):
            requests = self._step.form(place.ready, now)
            if requests is not None:
                return self._dispatch(place, requests)
        return None

    def _dispatch(self, place: SeatedInstance, requests: list[QueuedRequest]) -> Batch:
        seats = []
        for request in requests:
            sequence = self._sequence_of(request)
            sequence.dispatch()
            del place.ready[sequence]
            seats.append(sequence.seat)
        self._admission.dispatched(requests)
        return self._seats.place(place, requests, tuple(seats) if self._keeps_rows else ())

    def with_room(self) -> list[str]:
        """The instances that can take a batch and have something for it."""
        return [one.name for one in self._seats.with_room()]

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something, as ``ModelScheduler.next_wakeup``."""
        if self._fallen:
            return now
        self._drop_idle(now)
        times = [self._step.ready_at(one.ready) for one in self._seats.with_room(among)]
        due = self._admission.next_due()
        if due is not None:
            times.append(due)
        if self._idle:
            times.append(next(iter(self._idle.values())))
        return max(now, min(times)) if times else None

    def computed(self, batch: Batch) -> None:
        """The call of a batch is over; the sequences in it go on when it has ended, and not before."""

    def complete(self, batch_id: int) -> Batch:
        """A batch ended, well or badly: its requests have finished, and their sequences may go on.

        Raises:
            KeyError: no such batch runs: it ended before, or its instance went down.
        """
        batch = self._seats.release(batch_id)
        advance(batch.requests, "complete")
        for request in batch.requests:
            self._cancelled += request.cancelled
            self._finished += not request.cancelled
            sequence = self._sequence_of(request)
            if sequence.finish() and sequence.waiting:
                self._step_back(sequence)
            self._settle(sequence)
        return batch

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1) -> None:
        """An instance is ready for batches, of which it runs ``slots`` at once, or one where steps follow
        each other.

        Raises:
            ValueError: it is up already.
        """
        at_once, prefetch = (1, 0) if self._stepwise else (slots, self._prefetch)
        self._seats.up(name, at_once, prefetch)
        self._fill_seats()

    def resize(self, instances: Sequence[InstanceSpec]) -> None:
        """The model has these instances from now on, which come up later where they are new."""

    def retire(self, name: str) -> None:
        """An instance takes no more sequences; it goes down once those that it has are over."""
        self._seats.retire(name)

    def is_idle(self, name: str) -> bool:
        """Whether nothing is left for an instance that was retired to do."""
        return self._seats.is_idle(name)

    def instance_down(self, name: str) -> list[QueuedRequest]:
        """An instance died: what ran there, and what waited of the sequences that had begun, is lost."""
        lost: list[QueuedRequest] = []
        for sequence in self._seats.down(name):
            if sequence.begun:
                lost += self._lose(sequence)
            sequence.begun = False  # there is nobody to be told of it
            if sequence.waiting:
                self._step_back(sequence)
            self._settle(sequence)
        self._lost += len(lost)
        return lost

    def _lose(self, sequence: ActiveSequence) -> list[QueuedRequest]:
        """Take out what is lost with its instance of a sequence that had begun there."""
        lost: list[QueuedRequest] = []
        running, sequence.running = sequence.running, None
        if running is not None and running.cancelled:
            advance((running,), "complete")
            self._cancelled += 1
        elif running is not None:
            advance((running,), "lose")
            running.attempts += 1
            lost.append(running)
        waiting = sequence.take_begun()
        for request in waiting:
            self._admission.remove(request, "cancel")
        return lost + waiting

    # ---- sequences ------------------------------------------------------------------------

    def _sequence_of(self, request: QueuedRequest) -> ActiveSequence:
        assert request.correlation is not None
        return self._sequences[request.correlation.id]

    def _settle(self, sequence: ActiveSequence) -> None:
        """Something of a sequence has gone: it goes on, is idle, or has ended."""
        if not sequence.idle:
            self._note_ready(sequence)
        elif sequence.open:
            self._newly_idle[sequence] = None
        elif sequence.state is not SequenceState.ENDED:
            self._end(sequence)

    def _end(self, sequence: ActiveSequence) -> None:
        self._awake(sequence)
        if sequence.begun and sequence.state is SequenceState.SEATED:
            self._seats[sequence.instance].dropped.append(sequence.id)
        self._seats.leave(sequence)
        self._backlog.pop(sequence, None)
        sequence.advance("end")
        del self._sequences[sequence.id]
        self._fill_seats()

    def _step_back(self, sequence: ActiveSequence) -> None:
        """Its seat is free for others: what waits of it begins anew, behind the backlog."""
        self._seats.leave(sequence)
        sequence.advance("step_back")
        self._backlog[sequence] = None
        self._fill_seats()

    def _fill_seats(self) -> None:
        while self._backlog:
            sequence = next(iter(self._backlog))
            if not self._seats.seat(sequence):
                return
            del self._backlog[sequence]
            self._note_ready(sequence)

    def _note_ready(self, sequence: ActiveSequence) -> None:
        if sequence.state is not SequenceState.SEATED:
            return
        ready = self._seats[sequence.instance].ready
        if sequence.ready:
            ready[sequence] = None
        else:
            ready.pop(sequence, None)

    def _awake(self, sequence: ActiveSequence) -> None:
        self._idle.pop(sequence, None)
        self._newly_idle.pop(sequence, None)

    def _drop_idle(self, now: float) -> None:
        """End the sequences that have been idle for too long. What became so since begins to count now."""
        for sequence in self._newly_idle:
            self._idle[sequence] = now + self._max_idle_s
        self._newly_idle.clear()
        while self._idle:
            sequence, due_at = next(iter(self._idle.items()))
            if due_at > now:
                return
            sequence.open = False
            self._end(sequence)

    def close(self) -> None:
        """Nothing more will be asked of it."""

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
        running = self._seats.running
        running_requests = sum(len(batch.requests) for batch in running)
        return SchedulerStatistics(
            queued=self._admission.requests,
            queued_rows=self._admission.rows,
            queued_nbytes=self._admission.nbytes,
            running_batches=len(running),
            running_requests=running_requests,
            computing_requests=running_requests,
            computing_rows=sum(batch.rows for batch in running),
            instances=len(self._seats),
            slots=self._seats.at_once,
            room=self._seats.room,
            accepted=self._admission.accepted,
            finished=self._finished,
            rejected=self._rejected,
            cancelled=self._cancelled,
            expired=self._expired,
            retried=0,
            lost=self._lost,
            sequences=len(self._sequences),
            seats=len(self._seats) * self._seats.seats,
        )
