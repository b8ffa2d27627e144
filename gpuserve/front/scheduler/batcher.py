"""The scheduler of one model: what waits, what runs where, and when requests become a batch.

Pure: events and the time go in, batches come out. No clock, event loop, socket, task or log here; the
driver owns those. ``queue.py`` holds what waits, ``levels.py`` in which order where there are priorities,
``former.py`` says what goes together, ``slots.py`` holds what runs, and this file joins them. Times are
seconds of any one monotonic clock.

What the driver does after every event, and when the time of ``next_wakeup`` has come::

    answer(scheduler.expire(now))
    while (batch := scheduler.next_batch(now)) is not None:
        send(batch)
    wake_at(scheduler.next_wakeup(now))

A batch is formed only when an instance has room (late binding). So it is as large as the backlog allows,
and no request stands behind another on a busy instance while an idle one could take it. When requests
may wait for others is the dynamic batcher of Triton; ``BatchFormer`` says it in full. ``devices.py`` is on
top of this where some requests may run on some instances only.

Every request that was accepted is in exactly one place, at any time::

    accepted == queued + running_requests + finished + cancelled + expired + lost
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from gpuserve.errors import RequestError
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.former import BatchFormer
from gpuserve.front.scheduler.interface import SchedulerStatistics
from gpuserve.front.scheduler.levels import request_queue
from gpuserve.front.scheduler.queue import (
    IllegalTransition,
    QueuedRequest,
    RequestState,
    advance,
    first_queued,
)
from gpuserve.front.scheduler.slots import Batch, InstanceSlots
from gpuserve.spec import BatchingSpec, InstanceSpec, QueueSpec

__all__ = [
    "Batch",
    "IllegalTransition",
    "ModelScheduler",
    "QueuedRequest",
    "RequestState",
    "SchedulerStatistics",
]


#: No delay has run out then, so that only a batch that cannot grow is formed.
_BEFORE_EVER: Final = -math.inf


class ModelScheduler:
    """The queue of one model over all of its instances. Not thread-safe.

    Args:
        max_batch_size: the most rows a batch may have; 0 for a model that does not batch. No request is
            ever cut, and one of more rows must not come here.
        prefetch: how many batches an instance may hold besides those it runs. Only what cannot grow by
            waiting is held: a full batch, or a request that is not merged.
        retry_on_death: whether a request may run again when a worker died under it.
        slots: the instances, where they are not only this scheduler's.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        batching: BatchingSpec,
        queue: QueueSpec,
        prefetch: int,
        retry_on_death: bool,
        slots: InstanceSlots | None = None,
    ) -> None:
        self._queue = request_queue(queue)
        self._former = BatchFormer(max_batch_size, batching, self._queue.by_age)
        self._slots = InstanceSlots() if slots is None else slots
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

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        """Take every queued request out, as ``cancel`` does: no instance is to be had for them. With a device
        given, only those that must run there.
        """
        if device:
            return []
        self._former.dissolve(self._queue.waiting)
        places = (*self._queue.retried, *self._queue.waiting)
        queued = [request for request in places if request.state is RequestState.QUEUED]
        for request in queued:
            self.cancel(request)
        return queued

    def first(self) -> QueuedRequest | None:
        """The request that goes next; None where none waits."""
        return first_queued(self._queue.retried) or self._former.first(self._queue.waiting)

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

    def resize(self, instances: Sequence[InstanceSpec]) -> None:
        """The model has these instances from now on, which come up later where they are new."""

    def retire(self, name: str) -> None:
        """An instance takes no more batches; it goes down once it is idle."""
        self._slots.retire(name)

    def is_idle(self, name: str) -> bool:
        """Whether nothing is left for an instance that was retired to do."""
        return self._slots.is_idle(name)

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
        self._put_back(again)
        self._lost += len(lost)
        return lost

    def _put_back(self, requests: list[QueuedRequest]) -> None:
        self._queue.put_back(requests)
        self._retried += len(requests)

    def _may_run_again(self, request: QueuedRequest) -> bool:
        return self._retry_on_death and request.retriable and request.attempts == 1

    def computed(self, batch: Batch) -> None:
        """The call of a batch that runs is over: another may run in its slot before it has ended."""
        self._slots.free_slot(batch)

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
        computing = [batch for batch in running if batch.slots]
        return SchedulerStatistics(
            queued=self._queue.requests,
            queued_rows=self._queue.rows,
            queued_nbytes=self._queue.nbytes,
            running_batches=len(running),
            running_requests=sum(len(batch.requests) for batch in running),
            computing_requests=sum(len(batch.requests) for batch in computing),
            computing_rows=sum(batch.rows for batch in computing),
            instances=self._slots.instances,
            slots=self._slots.at_once,
            room=self._slots.room,
            accepted=self._queue.accepted,
            finished=self._finished,
            rejected=self._rejected,
            cancelled=self._cancelled,
            expired=self._expired,
            retried=self._retried,
            lost=self._lost,
        )
