"""The scheduler of one model: the queue, the running batches, and when requests become a batch.

Pure: events and the time go in, batches come out. The driver owns the clock, event loop, sockets and log.
``request_queue.py`` holds the waiting requests, ``batch_former.py`` forms batches, ``slots.py`` holds the
running batches and their expected durations, and this file joins them. Times are seconds of any one monotonic
clock.

After every event, and at the time of ``next_wakeup``, the driver calls::

    answer(scheduler.expire(now))
    while (batch := scheduler.next_batch(now)) is not None:
        send(batch)
    wake_at(scheduler.next_wakeup(now))

A batch is formed only when an instance has room (late binding). ``BatchFormer`` documents when requests wait
for others. Every accepted request is in exactly one place, at any time::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Final

from gpuserve.core.errors import QueueFull, RequestError
from gpuserve.devices.names import CPU
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.batch_former import BatchFormer, Eviction
from gpuserve.front.scheduling.priority_queue import FairQueue, make_request_queue
from gpuserve.front.scheduling.request_queue import (
    QueuedRequest,
    RemovalReason,
    RequestQueue,
    RequestState,
    advance,
    first_queued,
)
from gpuserve.front.scheduling.returning_requests import ReturningRequests
from gpuserve.front.scheduling.scheduler import (
    TRANSFER_COST_NBYTES,
    RequestCounts,
    Scheduler,
    SchedulerStatistics,
    statistics_of,
)
from gpuserve.front.scheduling.shape_groups import FairShapeGroups, MixedShapes, ShapeGroups
from gpuserve.front.scheduling.slots import LEAD_S, Batch, InstanceSlots
from gpuserve.front.scheduling.suspects import Blame, Suspects
from gpuserve.model.spec import ModelSpec

#: Answers to batches that take less time may leave their worker together.
_SHORT_S: Final = 2e-4
#: A timer of the event loop may be one millisecond late, or half a millisecond early.
_LEAD_AIM_S: Final = LEAD_S / 2


class ModelScheduler(Scheduler):
    """The queue of one model over all of its instances; also a part of ``DeviceScheduler``.

    No request is ever split, and the caller rejects requests with more rows than ``max_batch_size``. A batch
    that an instance only holds (``prefetch``) cannot grow by waiting: it is full, or one request that is not
    merged. ``slots`` and ``suspects`` are given if other schedulers share them.
    """

    def __init__(
        self, spec: ModelSpec, slots: InstanceSlots | None = None, suspects: Suspects | None = None
    ) -> None:
        self._queue: RequestQueue = make_request_queue(spec.queue)
        self._mixed_shapes = MixedShapes()
        self._former = BatchFormer(spec.max_batch_size, spec.batching, self._queue.by_age, self._regroup)
        self._slots: InstanceSlots = InstanceSlots(can_lead(spec)) if slots is None else slots
        self._prefetch = spec.prefetch
        self._retry_on_death = spec.retry_on_worker_death
        #: False with a time limit for calls, which must know whose call is overdue: a call whose answer waits
        #: may be over.
        self._answers_may_wait = spec.retry_on_worker_death and not spec.execution_timeout_s
        self._counts = RequestCounts()
        time = self._slots.service_time
        self._eviction = Eviction(self._queue, self._former, time, self._counts)
        self._evicted = self._eviction.evicted
        #: False for streams: a stream is of use before its end, and its length depends on the request.
        self._foresees = not spec.decoupled
        self._suspects = Suspects() if suspects is None else suspects
        self._deaths = self._suspects.deaths
        #: The earliest time at which an isolated request may run.
        self._isolated_from = math.inf
        self._client_header = spec.queue.fairness_header.encode()
        batching = spec.batching
        #: None if batches do not wait, or wait for as long as the model says.
        self._returning = (
            ReturningRequests()
            if batching.anticipate
            and self._former.merges
            and self._foresees
            and not (batching.max_queue_delay_us or batching.preferred_batch_sizes)
            else None
        )
        #: Until when the waiting requests wait for others that are expected.
        self._waits_until = -math.inf
        self.draining = False

    # ---- requests -------------------------------------------------------------------------

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request.

        Raises Unavailable if the scheduler is draining; QueueFull if the queue is at its limit of requests or
        bytes, or the request's priority at its own limit; DeadlineExceeded if the request's deadline is not
        after ``now``; IllegalTransition if the request was submitted before.
        """
        try:
            if self.draining and not request.is_ensemble_step:
                raise refusals.stopping()
            try:
                self._queue.add(request, now)
            except QueueFull:
                self._eviction.add_by_evicting(request, now)
            if self._deaths and self._is_suspect(request, now):
                self._isolate([request])
            else:
                self._queue.waiting.append(request)
            returning = self._returning
            if returning is not None and now <= returning.until:
                returning.rows += request.rows
                returning.last_at = now
        except RequestError:
            self._counts.rejected += 1
            raise

    def check_room(self, request: QueuedRequest, requests: int, nbytes: int) -> None:
        """Raise QueueFull if the limits allow no request beside ``requests`` requests of ``nbytes`` bytes."""
        try:
            self._queue.check_room(request, requests, nbytes)
        except QueueFull:
            self._counts.rejected += 1
            raise

    def cancel(self, request: QueuedRequest) -> bool:
        if request.state is RequestState.FINISHED:
            return False
        if request.state is RequestState.RUNNING:
            request.cancelled = True
            return False
        self._former.dissolve(self._queue.waiting)
        self._queue.remove(request, "cancel")
        request.cancelled = True
        self._counts.cancelled += 1
        return True

    def remove_all(self, device: str = "") -> list[QueuedRequest]:
        if device:  # no request here is bound to a device
            return []
        self._former.dissolve(self._queue.waiting)
        queued = [request for request in self._places() if request.state is RequestState.QUEUED]
        for request in queued:
            self.cancel(request)
        return queued

    def transfer(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        taken: list[QueuedRequest] = []
        for request in self._places():
            if most_nbytes <= 0:
                break
            if request.state is RequestState.QUEUED and not request.attempts:
                self.cancel(request)
                request.reset()
                taken.append(request)
                most_nbytes -= request.nbytes + TRANSFER_COST_NBYTES
        return taken

    def first(self) -> QueuedRequest | None:
        queue = self._queue
        waits = first_queued(queue.retried) or self._former.first(queue.waiting)
        return waits or first_queued(queue.isolated)

    def _places(self) -> tuple[QueuedRequest, ...]:
        return (*self._queue.retried, *self._queue.waiting, *self._queue.isolated)

    def _is_suspect(self, request: QueuedRequest, now: float) -> bool:
        self._suspects.forgive(now)
        return request.client_of(self._client_header) in self._suspects

    def isolate(self, client: Hashable) -> None:
        """Let the waiting requests of a client run alone, and after those of all others."""
        self._former.dissolve(self._queue.waiting)
        places = (*self._queue.retried, *self._queue.waiting)
        queued = [one for one in places if one.state is RequestState.QUEUED]
        moved = [one for one in queued if one.client_of(self._client_header) == client]
        self._queue.remove_places(moved)
        self._isolate(moved)

    def _isolate(self, requests: Collection[QueuedRequest]) -> None:
        self._queue.isolate(requests)
        for request in requests:
            due_at = self._suspects.due_at(request.client_of(self._client_header))
            self._isolated_from = min(self._isolated_from, due_at)

    def expire(self, now: float) -> list[QueuedRequest]:
        """Remove and return every queued request whose deadline is not after ``now`` or whose policy refuses
        it, and the evicted requests. ``removal_reason`` is set. While no instance has room and others wait,
        requests with less time left than any batch takes go too.
        """
        due: list[QueuedRequest] = []
        if self._queue.due_from < math.inf and self._foresees and not self._slots.room:
            self._eviction.evict_hopeless(now)
        if now < self._queue.due_from and not self._evicted:
            return due
        while (request := self._queue.first_due(now)) is not None:
            self._former.dissolve(self._queue.waiting)
            if self._queue.expire(request, now):
                due.append(request)
        self._counts.expired += len(due)
        due += self._evicted
        self._evicted.clear()
        return due

    # ---- batches --------------------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch for the instance with the most room, or for ``instance``.

        Returns None if nothing is queued, if no instance has room, if it is better to wait, or if requests
        are due, so that ``expire(now)`` must come first: no request runs after its deadline.
        """
        queue, slots = self._queue, self._slots
        if not queue.requests or (now >= queue.due_from and queue.first_due(now) is not None):
            return None
        if instance is None and not queue.retried:  # nearly always
            if not slots.room and (not self._has_full() or now < slots.lead_from(now)):
                return None
        elif not self._has_room(None if instance is None else (instance,)):
            return None
        retried = queue.pop_retried() if queue.retried else None
        if retried is None and queue.isolated and self._former.first(queue.waiting) is None:
            retried = self._pop_isolated(instance, now)
            if retried is None:
                return None
        requests: list[QueuedRequest] | None
        if retried is not None:
            requests = [retried]
        else:
            # A batch that an instance would only hold does not grow there, and cannot go elsewhere.
            among = None if instance is None else (instance,)
            is_held = not slots.room or (self._prefetch > 0 and not slots.begins_at_once(among))
            waits = not is_held and self._expects_more(now)
            requests = None if waits else self._former.form(queue.waiting, now, is_held)
            if requests is not None and queue.due_from < math.inf and self._foresees:
                requests = self._eviction.in_time(requests, slots.begins_at(now, instance), now, is_held)
        if requests is None:
            return None
        if queue.groups is not None and not queue.groups:  # until requests differ again
            queue.groups, queue.waiting = None, queue.new_places()
        rows = queue.mark_dispatched(requests)
        again = retried is not None
        alone = again or not self._former.merges
        batch = slots.place(requests, rows, alone, now, exclusive=again, instance=instance)
        self._observe_shapes(rows)
        if queue.requests and rows == 1 and self._answers_may_wait and requests[0].retriable:
            # Other batches follow. If the worker dies while this answer waits, it may have begun some of
            # them, which run again.
            batch.may_wait = slots.expected_s(batch) < _SHORT_S
        return batch

    def _expects_more(self, now: float) -> bool:
        """Return whether the waiting requests should wait for others that are about to come."""
        self._waits_until = -math.inf
        rows, returning = self._queue.rows, self._returning
        if returning is None or now >= returning.until or rows >= self._former.full_rows or self.draining:
            return False
        most = self._former.full_rows - rows
        estimate = self._slots.service_time.estimate
        until = returning.wait_until(rows, now, most, estimate)
        if until + (estimate(rows) or 0.0) < self._queue.due_from:
            self._waits_until = until
        return now < self._waits_until

    def _observe_shapes(self, rows: int) -> None:
        groups = self._queue.groups
        if groups is not None and self._mixed_shapes.observe(rows, self._queue.rows, groups.n_groups):
            self.shapes_report = f"batches hold {rows} rows while {self._queue.rows} wait"

    def _has_full(self) -> bool:
        """Return whether enough requests wait for a batch that cannot grow."""
        groups = self._queue.groups
        if groups is None:
            return self._queue.rows >= self._former.full_rows
        return self._former.has_full(groups)

    def _regroup(self, full_rows: int) -> ShapeGroups:
        """Put the waiting requests, which differ in shape, in groups."""
        kind = FairShapeGroups if isinstance(self._queue, FairQueue) else ShapeGroups
        groups = kind(self._queue.waiting, full_rows, self._queue.new_places)
        self._queue.waiting = self._queue.groups = groups
        return groups

    def _pop_isolated(self, instance: str | None, now: float) -> QueuedRequest | None:
        """Take the first isolated request that is due off the queue, if an instance can run it alone."""
        among = None if instance is None else (instance,)
        if now < self._isolated_from or not self._slots.has_room(among, exclusive=True):
            return None
        soonest = math.inf
        for position, request in enumerate(self._queue.isolated):
            if request.state is RequestState.QUEUED:
                due_at = self._suspects.due_at(request.client_of(self._client_header))
                if due_at <= now:
                    del self._queue.isolated[position]
                    return request
                soonest = min(soonest, due_at)
        self._isolated_from = soonest
        return None

    def _has_room(self, among: Collection[str] | None) -> bool:
        """Return whether an instance has room; a request that may have killed a worker needs one alone."""
        exclusive = bool(self._queue.retried) and self._queue.has_retried
        return self._slots.has_room(among, exclusive=exclusive)

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """Return when time alone changes something (a delay or a deadline expires), never before ``now``;
        None if only another event can.

        Call it after ``next_batch`` returned None. At that very time ``expire`` or ``next_batch`` returns
        something. ``among``: batches can run on these instances only.
        """
        if self._evicted:
            return now
        if not self._queue.requests:
            return None
        soonest = self._queue.next_due()
        # If a batch would only be held, its age changes nothing.
        if self._has_room(among) and (not self._prefetch or self._slots.begins_at_once(among)):
            soonest = min(soonest, max(self._waits_until, self._former.ready_at(self._queue.waiting)))
        elif (
            among is None
            and not (self._queue.retried or self._queue.isolated)  # which no instance takes early
            and self._has_full()
        ):
            soonest = min(soonest, self._slots.lead_from(now) + _LEAD_AIM_S)
        if (
            self._queue.isolated
            and not self._queue.has_retried
            and self._former.first(self._queue.waiting) is None
            and self._slots.has_room(among, exclusive=True)
        ):
            soonest = min(soonest, self._isolated_from)
        return None if soonest == math.inf else max(now, soonest)

    def exceeded_memory(self, batch: Batch) -> None:
        self._former.halve(batch.requests)

    def computed(self, batch: Batch) -> None:
        self._slots.free_slot(batch)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        batch = self._slots.release(batch_id, took_s, now)
        requests, counts = batch.requests, self._counts
        advance(requests, "complete")
        if self._returning is not None and took_s is not None:
            self._returning.on_answered(batch.rows, took_s, now)
        counts.finished += len(requests)
        for request in requests:
            if request.cancelled:
                counts.cancelled += 1
                counts.finished -= 1
        return batch

    def return_batch(self, batch_id: int, *, begun: bool) -> list[QueuedRequest]:
        batch = self._slots.release(batch_id, None, math.inf)
        if not begun:
            self._slots.hold(batch.instance)
        lost: list[QueuedRequest] = []
        for request in batch.requests:
            request.attempts += begun
            if request.cancelled:
                advance((request,), "complete")
                self._counts.cancelled += 1
            elif not begun:
                self._queue.put_back(request)
            elif self._retry_on_death and request.retriable and request.attempts == 1:
                self.requeue((request,))
            else:
                lost.append(request)
        advance(lost, "lose")
        self._counts.lost += len(lost)
        return lost

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        self._slots.up(name, slots, self._prefetch)

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        """Remove an instance that died. Returns the requests that are lost with it; none if it was not up.

        Its requests go back to the front of the queue and run once more, each alone: one of them may have
        killed the worker. Lost are requests under which two workers died (``attempts`` is 2), and requests
        that must not run again, because they are not retriable or were isolated. Cancelled requests just
        finish. Batches that the worker only held were not tried.
        """
        again, lost = self.remove_instance(name, died_at)
        self.requeue(again)
        if self.blame is not None and self.blame.is_new:
            self.isolate(self.blame.client)
        return lost

    def remove_instance(
        self, name: str, died_at: float | None = None
    ) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Remove an instance that died. Returns the requests to run again, for ``requeue``, and the lost."""
        again: list[QueuedRequest] = []
        lost: list[QueuedRequest] = []
        down = self._slots.down(name)
        self.blame = None if died_at is None else self._blame(down[0], died_at)
        was_isolated = self.blame is not None and self.blame.was_isolated
        for began, batches in zip((True, False), down, strict=True):
            for request in [one for batch in batches for one in batch.requests]:
                request.attempts += began
                if began and was_isolated:
                    request.removal_reason = RemovalReason.ISOLATED
                if request.cancelled:
                    advance((request,), "complete")
                    self._counts.cancelled += 1
                elif not began or (
                    self._retry_on_death and request.retriable and request.attempts == 1 and not was_isolated
                ):
                    again.append(request)
                else:
                    lost.append(request)
        advance(lost, "lose")
        self._counts.lost += len(lost)
        return again, lost

    def _blame(self, began: Sequence[Batch], died_at: float) -> Blame | None:
        """Count the death for the client of the only running request. Of several, the cause is unknown."""
        requests = [one for batch in began for one in batch.requests]
        client = requests[0].client_of(self._client_header) if len(requests) == 1 else ""
        return self._suspects.blame(client, died_at, requests[0].attempts + 1) if client else None

    def requeue(self, requests: Iterable[QueuedRequest]) -> None:
        again = tuple(requests)
        self._queue.requeue(again)
        self._counts.retried += len(again)

    def statistics(self) -> SchedulerStatistics:
        statistics = statistics_of(self._queue, self._counts, self._slots)
        groups = self._queue.groups
        return (
            statistics if groups is None else statistics._replace(shape_groups=self._former.n_groups(groups))
        )


def can_lead(spec: ModelSpec) -> bool:
    """Return whether an instance that runs one batch at once may be given the next one just before it is
    free.

    False if instances always hold batches (``prefetch``), or are on a device, whose pipeline reports itself
    when it takes more, or if the callable awaits or yields, because it begins every batch that it is given.
    """
    on_host = all(one.device == CPU for one in spec.instances)
    return on_host and not (spec.prefetch or spec.concurrency or spec.decoupled)
