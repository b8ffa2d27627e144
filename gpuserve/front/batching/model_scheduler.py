"""The scheduler of one model: what waits, what runs where, and when requests become a batch.

Pure: events and the time go in, batches come out. No clock, event loop, socket, task or log here; the driver
owns those. ``front/queueing`` holds what waits and in which order, ``batch_former.py`` says what goes
together, ``slots.py`` holds what runs, ``service_time.py`` knows how long that takes, and this file joins
them. Times are seconds of any one monotonic clock.

What the driver does after every event, and when the time of ``next_wakeup`` has come::

    answer(scheduler.expire(now))
    while (batch := scheduler.next_batch(now)) is not None:
        send(batch)
    wake_at(scheduler.next_wakeup(now))

A batch is formed only when an instance has room (late binding). When requests may wait for others is the
dynamic batcher of Triton; ``BatchFormer`` says it in full.

Every request that was accepted is in exactly one place, at any time::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Final

from gpuserve.core.errors import QueueFull, RequestError
from gpuserve.devices.names import CPU
from gpuserve.front.batching import refusals
from gpuserve.front.batching.batch_former import BatchFormer
from gpuserve.front.batching.eviction import Eviction
from gpuserve.front.batching.interface import (
    HANDED_NBYTES,
    RequestCounts,
    Scheduler,
    SchedulerStatistics,
    statistics_of,
)
from gpuserve.front.batching.slots import LEAD_S, Batch, InstanceSlots
from gpuserve.front.queueing.queue import (
    QueuedRequest,
    RemovalReason,
    RequestQueue,
    RequestState,
    advance,
    first_queued,
)
from gpuserve.front.queueing.queue_factory import request_queue
from gpuserve.front.queueing.suspects import Blame, Suspects
from gpuserve.model.spec import ModelSpec

#: No delay has run out then, so that only a batch that cannot grow is formed.
_BEFORE_EVER: Final = -math.inf
#: Answers to batches that take less may leave their worker together.
_SHORT_S: Final = 2e-4
#: A timer of the event loop may be a millisecond late, or half of one early.
_LEAD_AIM_S: Final = LEAD_S / 2


class ModelScheduler(Scheduler):
    """The queue of one model over all of its instances; also a part of ``DeviceScheduler``. No request is
    ever cut, and one of more rows than ``max_batch_size`` must not come here. What an instance holds besides
    the batches it runs (``prefetch``) cannot grow by waiting: it is full, or one request that is not merged.
    ``slots`` are the instances and ``suspects`` the clients whose requests killed them, where they are not
    only this scheduler's.
    """

    def __init__(
        self, spec: ModelSpec, slots: InstanceSlots | None = None, suspects: Suspects | None = None
    ) -> None:
        self._queue: RequestQueue = request_queue(spec.queue)
        self._former = BatchFormer(spec.max_batch_size, spec.batching, self._queue.by_age)
        self._slots: InstanceSlots = InstanceSlots(may_lead(spec)) if slots is None else slots
        self._prefetch = spec.prefetch
        self._retry_on_death = spec.retry_on_worker_death
        #: Not where it must be known which call is not back: those whose answers wait may be over.
        self._answers_may_wait = spec.retry_on_worker_death and not spec.execution_timeout_s
        self._counts = RequestCounts()
        time = self._slots.service_time
        self._eviction = Eviction(self._queue, self._former, time, self._counts)
        self._evicted = self._eviction.evicted
        #: A stream is worth something before its end, and when that comes is its request's business.
        self._foresees = not spec.decoupled
        self._suspects = Suspects() if suspects is None else suspects
        self._deaths = self._suspects.deaths
        #: No isolated request may run before.
        self._isolated_from = math.inf
        self._client_header = spec.queue.fairness_header.encode()
        self.draining = False

    # ---- requests -------------------------------------------------------------------------

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request. Raises Unavailable: the scheduler is draining; QueueFull: the queue is at its
        limit of requests or bytes, or the request's priority at its own; DeadlineExceeded: the request's
        deadline is not after ``now``; IllegalTransition: the request was submitted before.
        """
        try:
            if self.draining and not request.is_inner:
                raise refusals.stopping()
            try:
                self._queue.add(request, now)
            except QueueFull:
                self._eviction.push_in(request, now)
            if self._deaths and self._is_suspect(request, now):
                self._isolate([request])
            else:
                self._queue.waiting.append(request)
        except RequestError:
            self._counts.rejected += 1
            raise

    def check_room(self, request: QueuedRequest, requests: int, nbytes: int) -> None:
        """Raise QueueFull where the limits allow no more besides so many requests of so many bytes."""
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

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        if device:  # no request here must run on one
            return []
        self._former.dissolve(self._queue.waiting)
        queued = [request for request in self._places() if request.state is RequestState.QUEUED]
        for request in queued:
            self.cancel(request)
        return queued

    def hand_over(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        taken: list[QueuedRequest] = []
        for request in self._places():
            if most_nbytes <= 0:
                break
            if request.state is RequestState.QUEUED and not request.attempts:
                self.cancel(request)
                request.renew()
                taken.append(request)
                most_nbytes -= request.nbytes + HANDED_NBYTES
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
        """Let the requests of a client that wait run alone, and after those of all others."""
        self._former.dissolve(self._queue.waiting)
        places = (*self._queue.retried, *self._queue.waiting)
        queued = [one for one in places if one.state is RequestState.QUEUED]
        moved = [one for one in queued if one.client_of(self._client_header) == client]
        self._queue.displace(moved)
        self._isolate(moved)

    def _isolate(self, requests: Collection[QueuedRequest]) -> None:
        self._queue.isolate(requests)
        for request in requests:
            due_at = self._suspects.due_at(request.client_of(self._client_header))
            self._isolated_from = min(self._isolated_from, due_at)

    def expire(self, now: float) -> list[QueuedRequest]:
        """Take every queued request out whose deadline is not after ``now``, or that its policy refuses; with
        them are those that had to make room for others. ``removal_reason`` says which it is. While no
        instance has room and others wait, those go too whose time is less than any batch takes.
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
        """Form one batch for the instance with the most room, or for the one named. None means that nothing
        is queued, that no instance has room, that it is better to wait, or that the time of requests is over
        and ``expire(now)`` comes first: no request runs after its deadline.
        """
        queue, slots = self._queue, self._slots
        if not queue.requests or (now >= queue.due_from and queue.first_due(now) is not None):
            return None
        if instance is None and not queue.retried:  # nearly always
            if not slots.room and (queue.rows < self._former.full_rows or now < slots.lead_from(now)):
                return None
        elif not self._has_room(None if instance is None else (instance,)):
            return None
        retried = queue.take_retried() if queue.retried else None
        if retried is None and queue.isolated and self._former.first(queue.waiting) is None:
            retried = self._take_isolated(instance, now)
            if retried is None:
                return None
        requests: list[QueuedRequest] | None
        if retried is not None:
            requests = [retried]
        else:
            # What an instance would hold and not yet run does not grow there, and cannot go elsewhere.
            among = None if instance is None else (instance,)
            is_held = not slots.room or (self._prefetch and not slots.begins_at_once(among))
            formed_at = _BEFORE_EVER if is_held else now
            requests = self._former.form(queue.waiting, formed_at)
            if requests is not None and queue.due_from < math.inf and self._foresees:
                requests = self._eviction.in_time(requests, slots.begins_at(now, instance), formed_at)
        if requests is None:
            return None
        rows = queue.dispatched(requests)
        again = retried is not None
        alone = again or not self._former.merges
        batch = slots.place(requests, rows, alone, now, secluded=again, instance=instance)
        if queue.requests and rows == 1 and self._answers_may_wait and requests[0].retriable:
            # Others follow. A worker that dies while the answer waits may have begun some, which run again.
            batch.may_wait = slots.expected_s(batch) < _SHORT_S
        return batch

    def _take_isolated(self, instance: str | None, now: float) -> QueuedRequest | None:
        """Take the first request of a suspect off the queue whose back-off is over, if an instance can run
        the request without company.
        """
        among = None if instance is None else (instance,)
        if now < self._isolated_from or not self._slots.has_room(among, secluded=True):
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
        """Whether an instance can take what is next; what may have killed a worker gets one for itself."""
        secluded = bool(self._queue.retried) and self._queue.has_retried
        return self._slots.has_room(among, secluded=secluded)

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something: a delay or a deadline runs out. Never before ``now``. Meant for
        after ``next_batch`` gave None. The time itself counts: at it, ``expire`` or ``next_batch`` has
        something to give. None: only another event can change anything. ``among``: nothing runs but on these
        instances.
        """
        if self._evicted:
            return now
        if not self._queue.requests:
            return None
        soonest = self._queue.next_due()
        # Where a batch would only be held, its age changes nothing.
        if self._has_room(among) and (not self._prefetch or self._slots.begins_at_once(among)):
            soonest = min(soonest, self._former.ready_at(self._queue.waiting))
        elif among is None and not self._has_secluded() and self._queue.rows >= self._former.full_rows:
            soonest = min(soonest, self._slots.lead_from(now) + _LEAD_AIM_S)
        if self._queue.isolated and self._only_isolated_wait() and self._slots.has_room(among, secluded=True):
            soonest = min(soonest, self._isolated_from)
        return None if soonest == math.inf else max(now, soonest)

    def _has_secluded(self) -> bool:
        """Whether requests wait that no instance takes early."""
        return bool(self._queue.retried or self._queue.isolated)

    def _only_isolated_wait(self) -> bool:
        return not self._queue.has_retried and self._former.first(self._queue.waiting) is None

    def computed(self, batch: Batch) -> None:
        self._slots.free_slot(batch)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        batch = self._slots.release(batch_id, took_s, now)
        requests, counts = batch.requests, self._counts
        advance(requests, "complete")
        counts.finished += len(requests)
        for request in requests:
            if request.cancelled:
                counts.cancelled += 1
                counts.finished -= 1
        return batch

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        self._slots.up(name, slots, self._prefetch)

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        """An instance died: the requests that are lost with it. Nothing where it was not up.

        What it had goes back to the front of the queue, to run once more, each request by itself: one of
        them may be what killed the worker. Lost are those that died twice (``attempts`` is 2) and those that
        may not run again (``attempts`` is 1). Cancelled ones are neither; they just finish. What the worker
        only held has not been tried. A request that was isolated does not run again.
        """
        again, lost = self.take_down(name, died_at)
        self.put_back(again)
        if self.blame is not None and self.blame.is_new:
            self.isolate(self.blame.client)
        return lost

    def take_down(
        self, name: str, died_at: float | None = None
    ) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Take an instance out that died: the requests to run again, for ``put_back``, and those lost."""
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
        """Count the death for the client of the only request that ran. Of several, none is known to do it."""
        requests = [one for batch in began for one in batch.requests]
        client = requests[0].client_of(self._client_header) if len(requests) == 1 else ""
        return self._suspects.blame(client, died_at, requests[0].attempts + 1) if client else None

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        again = tuple(requests)
        self._queue.put_back(again)
        self._counts.retried += len(again)

    def statistics(self) -> SchedulerStatistics:
        return statistics_of(self._queue, self._counts, self._slots)


def may_lead(spec: ModelSpec) -> bool:
    """Whether its instances may be given a batch just before they are free, where each runs one at once.

    Not where they hold some at all times (``prefetch``), or are on a device, whose pipeline says itself when
    it takes more. A callable that awaits or yields begins all that it is given.
    """
    on_host = all(one.device == CPU for one in spec.instances)
    return on_host and not (spec.prefetch or spec.concurrency or spec.decoupled)
