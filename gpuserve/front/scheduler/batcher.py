"""The scheduler of one model: what waits, what runs where, and when requests become a batch.

Pure: events and the time go in, batches come out. No clock, event loop, socket, task or log here; the
driver owns those. ``queue.py`` holds what waits, ``levels.py`` in which order where there are priorities,
``slots.py`` what runs, and this file the decision between them. Times are seconds of any one monotonic clock.

What the driver does after every event, and when the time of ``next_wakeup`` has come::

    answer(scheduler.expire(now))
    while (batch := scheduler.next_batch(now)) is not None:
        send(batch)
    wake_at(scheduler.next_wakeup(now))

A batch is formed only when an instance has room (late binding). So it is as large as the backlog allows,
and no request stands behind another on a busy instance while an idle one could take it. When requests
may wait for others is the dynamic batcher of Triton; ``BatchFormer`` says it in full.

Every request that was accepted is in exactly one place, at any time::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Final

from gpuserve.errors import RequestError
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.interface import SchedulerStatistics
from gpuserve.front.scheduler.levels import request_queue
from gpuserve.front.scheduler.queue import (
    IllegalTransition,
    QueuedRequest,
    RequestState,
    Waiting,
    advance,
    first_queued,
)
from gpuserve.front.scheduler.slots import Batch, InstanceSlots
from gpuserve.spec import BatchingSpec, QueueSpec

__all__ = [
    "Batch",
    "IllegalTransition",
    "ModelScheduler",
    "QueuedRequest",
    "RequestState",
    "SchedulerStatistics",
]


# Looked at once a request: a look-up on an Enum class costs ten times one of a global.
_QUEUED: Final = RequestState.QUEUED
#: No delay has run out then, so that only a batch that cannot grow is formed.
_BEFORE_EVER: Final = -math.inf
_ENQUEUED_AT: Final = operator.attrgetter("enqueued_at")


class BatchFormer:
    """Which requests at the head of the queue make the next batch, or whether to wait for more.

    Requests are walked in the order in which they wait, whatever their priorities, and taken until the batch
    is *closed*, because the next one would exceed ``max_batch_size`` or has another merge key, or the queue
    ends. *best* is the largest preferred size that the walk hit, or else all that came before the request
    that went over the largest preferred size. Then, with the age of the oldest request taken:

    1. best, and the delay has not run out: send exactly best.
    2. closed, or at least the largest preferred size: send all that was taken.
    3. the delay has run out, or there is none: send all that was taken.
    4. wait.

    Without preferred sizes, ``max_batch_size`` is the one. A model that does not merge sends every request
    by itself, at once. ``by_age`` says that the first request that waits is always the oldest.

    What was taken stays here while it waits, so that an arrival is walked once, not once for each later one.
    Only one that stands before any of it, by its priority, makes the walk begin anew.
    Rule 4 leaves no best behind and nothing closed: the requests and their rows are all there is to keep.
    """

    def __init__(self, max_batch_size: int, batching: BatchingSpec, by_age: bool) -> None:
        self.merges = batching.merge and max_batch_size > 0
        self._max_rows = max_batch_size
        self._preferred = frozenset(batching.preferred_batch_sizes or (max_batch_size,))
        self._largest_preferred = max(self._preferred)
        self._delay_s = batching.max_queue_delay_us / 1e6
        self._taken: list[QueuedRequest] = []
        self._rows = 0
        self._by_age = by_age

    def form(self, waiting: Waiting, now: float) -> list[QueuedRequest] | None:
        """Take the next batch off the queue, where at least one request waits; None: not yet."""
        if not self.merges:
            first_queued(waiting)
            return [waiting.popleft()]
        if not self._by_age and self._taken:
            self._make_way(waiting)
        best, closed = self._walk(waiting)
        # The same sum as in ready_at(): a difference could round to the other side of the delay.
        oldest = self._taken[0] if self._by_age else min(self._taken, key=_ENQUEUED_AT)
        overdue = now >= oldest.enqueued_at + self._delay_s
        if best and not (overdue and self._delay_s > 0):
            return self._cut(best, waiting)
        if closed or overdue or self._rows >= self._largest_preferred:
            return self._cut(len(self._taken), waiting)
        return None

    def ready_at(self, waiting: Waiting) -> float | None:
        """When the delay of the oldest request runs out; None where none waits."""
        if self._by_age or not self._taken:
            oldest = self._taken[0] if self._taken else first_queued(waiting)
        else:
            oldest = min(self._taken, key=_ENQUEUED_AT)
        return None if oldest is None else oldest.enqueued_at + self._delay_s

    def dissolve(self, waiting: Waiting) -> None:
        """Put back what was taken, because one of it may be about to leave the queue."""
        self._cut(0, waiting)

    def _make_way(self, waiting: Waiting) -> None:
        """Put back what was taken if a request that came since stands before any of it."""
        first = first_queued(waiting)
        if first is not None and first.lane < self._taken[-1].lane:
            self.dissolve(waiting)

    def _walk(self, waiting: Waiting) -> tuple[int, bool]:
        """Take requests: how many of them are the best size (0: none was hit), and whether it is closed."""
        taken, rows, best = self._taken, self._rows, 0
        preferred, max_rows = self._preferred, self._max_rows
        while waiting:
            request = waiting[0]
            if request.state is not _QUEUED:
                waiting.popleft()
                continue
            total = rows + request.rows
            if taken:
                if total > self._largest_preferred and not best:
                    best = len(taken)
                if total > max_rows or request.merge_key != taken[0].merge_key:
                    self._rows = rows
                    return best, True
            taken.append(waiting.popleft())
            rows = total
            if rows in preferred:
                best = len(taken)
        self._rows = rows
        return best, False

    def _cut(self, count: int, waiting: Waiting) -> list[QueuedRequest]:
        """The first ``count`` requests taken; the others go back, to be walked afresh."""
        batch, self._taken, self._rows = self._taken, [], 0
        if count < len(batch):
            waiting.extendleft(reversed(batch[count:]))
            del batch[count:]
        return batch


class ModelScheduler:
    """The queue of one model over all of its instances. Not thread-safe.

    Args:
        max_batch_size: the most rows a batch may have; 0 for a model that does not batch. No request is
            ever cut, and one of more rows must not come here.
        prefetch: how many batches an instance may hold besides those it runs. Only what cannot grow by
            waiting is held: a full batch, or a request that is not merged.
        retry_on_death: whether a request may run again when a worker died under it.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        batching: BatchingSpec,
        queue: QueueSpec,
        prefetch: int,
        retry_on_death: bool,
    ) -> None:
        self._queue = request_queue(queue)
        self._former = BatchFormer(max_batch_size, batching, self._queue.by_age)
        self._slots = InstanceSlots()
        self._prefetch = prefetch
        self._retry_on_death = retry_on_death
        self._draining = False
        self._finished = 0
        self._rejected = 0
        self._cancelled = 0
        self._expired = 0
        self._retried = 0
        self._lost = 0

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; what was accepted is still run."""
        self._draining = True

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request.

        Raises:
            Unavailable: the scheduler is draining.
            QueueFull: the queue is at its limit of requests or bytes, or the request's priority at its own.
            DeadlineExceeded: the request's deadline is not after ``now``.
            IllegalTransition: the request was submitted before.
        """
        try:
            if self._draining and not request.is_inner:
                raise refusals.stopping()
            self._queue.add(request, now)
            self._queue.waiting.append(request)
        except RequestError:
            self._rejected += 1
            raise

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back. True: it was queued and will never run. False: it runs, and its result is
        to be dropped (``request.cancelled``), or it has finished.

        Raises:
            IllegalTransition: it was never accepted.
        """
        if request.state is RequestState.FINISHED:
            return False
        if request.state is RequestState.RUNNING:
            request.cancelled = True
            return False
        self._former.dissolve(self._queue.waiting)
        self._queue.remove(request, "cancel")
        request.cancelled = True
        self._cancelled += 1
        return True

    def take_all(self) -> list[QueuedRequest]:
        """Take every queued request out, as ``cancel`` does: no instance is to be had for them."""
        self._former.dissolve(self._queue.waiting)
        places = (*self._queue.retried, *self._queue.waiting)
        queued = [request for request in places if request.state is RequestState.QUEUED]
        for request in queued:
            self.cancel(request)
        return queued

    def expire(self, now: float) -> list[QueuedRequest]:
        """Take every queued request out whose deadline is not after ``now``, nearest deadline first.

        So are those that their policy refuses; those that it delays step back.
        """
        due: list[QueuedRequest] = []
        if not self._queue.requests:
            return due
        while (request := self._queue.first_due(now)) is not None:
            self._former.dissolve(self._queue.waiting)
            if self._queue.expire(request, now):
                due.append(request)
        self._expired += len(due)
        return due

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch for the instance with the most room, or for the one named. Call it until it
        gives None.

        None means that nothing is queued, that no instance has room, that it is better to wait, or that
        the time of requests is over and ``expire(now)`` comes first: no request runs after its deadline.
        """
        queue = self._queue
        if not queue.requests or queue.first_due(now) is not None:
            return None
        if instance is None and not queue.retried:  # nearly always
            if not self._slots.room:
                return None
        elif not self._has_room(None if instance is None else (instance,)):
            return None
        retried = queue.take_retried()
        requests = self._form(now, instance) if retried is None else [retried]
        if requests is None:
            return None
        queue.dispatched(requests)
        rows = sum([request.rows for request in requests])
        again = retried is not None
        alone = again or not self._former.merges
        return self._slots.place(requests, rows, alone, secluded=again, instance=instance)

    def _form(self, now: float, instance: str | None) -> list[QueuedRequest] | None:
        """What an instance would hold and not yet run does not grow there, and cannot go elsewhere."""
        if self._prefetch and not self._slots.begins_at_once(None if instance is None else (instance,)):
            return self._former.form(self._queue.waiting, _BEFORE_EVER)
        return self._former.form(self._queue.waiting, now)

    def _has_room(self, among: Collection[str] | None) -> bool:
        """Whether an instance can take what is next; what may have killed a worker gets one for itself."""
        secluded = bool(self._queue.retried) and self._queue.has_retried
        return self._slots.has_room(among, secluded=secluded)

    def with_room(self) -> list[str]:
        """The instances that can take a batch, the one with the most room first."""
        return self._slots.with_room()

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something: a delay or a deadline runs out. Never before ``now``.

        Meant for after ``next_batch`` gave None. The time itself counts: at it, ``expire`` or ``next_batch``
        has something to give. None: only another event can change anything. ``among``: nothing runs but
        on these instances.
        """
        if not self._queue.requests:
            return None
        deadline = self._queue.next_due()
        ready_at = None
        # Where a batch would only be held, its age changes nothing.
        if self._has_room(among) and (not self._prefetch or self._slots.begins_at_once(among)):
            ready_at = self._former.ready_at(self._queue.waiting)
        times = [time for time in (deadline, ready_at) if time is not None]
        return max(now, min(times)) if times else None

    def instance_up(self, name: str, slots: int = 1) -> None:
        """An instance is ready for batches, of which it runs ``slots`` at once.

        Raises:
            ValueError: it is up already.
        """
        self._slots.up(name, slots, self._prefetch)

    def instance_down(self, name: str) -> list[QueuedRequest]:
        """An instance died: the requests that are lost with it. Nothing where it was not up.

        What it had goes back to the front of the queue, to run once more, each request by itself: one of
        them may be what killed the worker. Lost are those that died twice (``attempts`` is 2) and those that
        may not run again (``attempts`` is 1). Cancelled ones are neither; they just finish. What the worker
        only held has not been tried.
        """
        again: list[QueuedRequest] = []
        lost: list[QueuedRequest] = []
        for began, batches in zip((True, False), self._slots.down(name), strict=True):
            for request in [one for batch in batches for one in batch.requests]:
                request.attempts += began
                if request.cancelled:
                    advance((request,), "complete")
                    self._cancelled += 1
                elif not began or self._may_run_again(request):
                    again.append(request)
                else:
                    lost.append(request)
        advance(lost, "lose")
        self._queue.put_back(again)
        self._retried += len(again)
        self._lost += len(lost)
        return lost

    def _may_run_again(self, request: QueuedRequest) -> bool:
        return self._retry_on_death and request.retriable and request.attempts == 1

    def complete(self, batch_id: int) -> Batch:
        """A batch ended, well or badly: its slot is free and its requests have finished.

        Raises:
            KeyError: no such batch runs: it ended before, or its instance went down.
        """
        batch = self._slots.release(batch_id)
        advance(batch.requests, "complete")
        cancelled = sum([request.cancelled for request in batch.requests])
        self._cancelled += cancelled
        self._finished += len(batch.requests) - cancelled
        return batch

    def close(self) -> None:
        """Nothing more will be asked of it."""

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
        running = self._slots.running
        return SchedulerStatistics(
            queued=self._queue.requests,
            queued_rows=self._queue.rows,
            queued_nbytes=self._queue.nbytes,
            running_batches=len(running),
            running_requests=sum(len(batch.requests) for batch in running),
            instances=self._slots.instances,
            room=self._slots.room,
            accepted=self._queue.accepted,
            finished=self._finished,
            rejected=self._rejected,
            cancelled=self._cancelled,
            expired=self._expired,
            retried=self._retried,
            lost=self._lost,
        )
