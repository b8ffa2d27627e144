"""A model's scheduler interface, statistics and saturation; ``model_scheduler.py`` has the call order."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from gpuserve.front.scheduling.request_queue import QueueAccounting, QueuedRequest
from gpuserve.front.scheduling.slots import Batch, InstanceTable
from gpuserve.front.scheduling.suspects import Blame
from gpuserve.model.spec import BatchingSpec, ModelSpec


class SchedulerStatistics(NamedTuple):
    """A snapshot of a scheduler: current values first, then totals since its start.

    ``slots`` is the number of batches that the instances run at once, without batches that they only hold.
    ``computing_requests`` and ``computing_rows`` belong to batches that run or are held, and whose call is
    not over. ``sequences`` counts sequences with or without a seat, and ``seats`` all seats.

    ``rejected`` requests were never accepted. ``finished`` requests were in a batch that ended, successfully
    or not; ``cancelled`` requests were cancelled before that, while queued or running; ``expired`` requests
    were removed from the queue because of their deadline or to make room; ``lost`` requests ended with their
    worker. ``retried`` counts second runs, not requests that ended.
    """

    queued: int = 0
    queued_rows: int = 0
    queued_nbytes: int = 0
    running_batches: int = 0
    running_requests: int = 0
    computing_requests: int = 0
    computing_rows: int = 0
    instances: int = 0
    slots: int = 0
    room: int = 0
    accepted: int = 0
    finished: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    retried: int = 0
    lost: int = 0
    sequences: int = 0
    seats: int = 0
    shape_groups: int = 0


@dataclass(slots=True)
class RequestCounts:
    """The totals of ``SchedulerStatistics`` since the start of a scheduler."""

    finished: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    retried: int = 0
    lost: int = 0


def statistics_of(
    queue: QueueAccounting, counts: RequestCounts, slots: InstanceTable[Any]
) -> SchedulerStatistics:
    """Return the statistics of a scheduler from its queue, its totals, and its running batches."""
    running = slots.running
    computing = [batch for batch in running if batch.slots]
    return SchedulerStatistics(
        queued=queue.requests,
        queued_rows=queue.rows,
        queued_nbytes=queue.nbytes,
        running_batches=len(running),
        running_requests=sum(len(batch.requests) for batch in running),
        computing_requests=sum(len(batch.requests) for batch in computing),
        computing_rows=sum(batch.rows for batch in computing),
        instances=len(slots.names),
        slots=slots.at_once,
        room=slots.room,
        accepted=queue.accepted,
        finished=counts.finished,
        rejected=counts.rejected,
        cancelled=counts.cancelled,
        expired=counts.expired,
        retried=counts.retried,
        lost=counts.lost,
    )


#: The cost of transferring one request to another scheduler, in bytes that take as long to copy.
TRANSFER_COST_NBYTES: Final = 64 << 10


class BatchSource(Protocol):
    """The source of a model's batches: its scheduler, or ``RateLimitedSource`` around the scheduler."""

    def next_batch(self, now: float) -> Batch | None:
        """Form one batch for any instance. Returns None if nothing can or should run now."""

    def next_wakeup(self, now: float) -> float | None:
        """Return when time alone changes something, in seconds of the clock; None for never."""

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        """Free an ended batch's slot; ``took_s`` None: it failed. Raises KeyError for an unknown batch."""

    def return_batch(self, batch_id: int, *, begun: bool) -> list[QueuedRequest]:
        """Return the requests of a batch that has sent nothing to the queue: to its head if it was not
        ``begun``, else to run once more, alone. Returns the requests that must not run again.
        """

    def retire(self, name: str) -> None:
        """Give an instance no new batches. Once it is idle, ``instance_down`` removes it for good."""

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        """Remove an instance that died. Returns the requests that are lost with it. ``died_at`` is the time
        of death on the scheduler's clock, None if the instance did not die, so that no client is to blame.
        """


class Scheduler(BatchSource, Protocol):
    """The scheduler of one model: requests in, batches out. Pure, and not thread-safe. Times are seconds of
    one monotonic clock. A ``draining`` scheduler refuses new requests, and still runs accepted ones.
    """

    draining: bool
    #: A sentence about batches that are small because requests differ in shape, or "".
    shapes_report: str = ""
    #: The client whose request the last instance that died had run alone; None if no client is to blame.
    blame: Blame | None = None
    _slots: InstanceTable[Any]

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request. Raises a ``RequestError`` if the request is refused."""

    def cancel(self, request: QueuedRequest) -> bool:
        """Cancel a request. Returns True if it was queued and will never run; False if it runs, so that its
        result is to be dropped (``request.cancelled``), or has finished.
        """

    def remove_all(self, device: str = "") -> list[QueuedRequest]:
        """Remove and return every queued request, or those that must run on a device."""

    def transfer(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        """Remove and return unbegun requests of about ``most_nbytes`` bytes, for scheduler ``to``."""

    def expire(self, now: float) -> list[QueuedRequest]:
        """Return the requests that were removed, or are due now, and still have to be answered."""

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch for the instance named, or for any instance."""

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """Return when time alone changes something, if batches can only run on the instances ``among``."""

    def with_room(self) -> list[str]:
        """Return the names of the instances that can take a batch, the one with the most room first."""
        return self._slots.with_room()

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        """Add an instance that runs ``slots`` batches at once. Raises ValueError if it is up already."""

    def retire(self, name: str) -> None:
        self._slots.retire(name)

    def is_idle(self, name: str) -> bool:
        return self._slots.is_idle(name)

    def began_at(self, name: str) -> float:
        return self._slots.began_at(name)

    def share(self, batch: Batch) -> None:
        """Let other batches run beside a batch that has run alone until now."""
        self._slots.share(batch)

    def computed(self, batch: Batch) -> None:
        """Free the slot of a batch whose call is over before its end. Sequences ignore this."""
        return

    def exceeded_memory(self, batch: Batch) -> None:
        """Form smaller batches after one that exceeded the memory of its device. Sequences ignore this."""
        return

    def statistics(self) -> SchedulerStatistics:
        """Return the current statistics."""


def full_batch_rows(max_batch_size: int, batching: BatchingSpec) -> int:
    """Return the rows of a batch if enough one-row requests wait; 0 if every request is a batch alone."""
    if not batching.merge or max_batch_size == 0:
        return 0
    if batching.max_queue_delay_us == 0:
        return max(batching.preferred_batch_sizes, default=max_batch_size)
    return max_batch_size


def saturation(spec: ModelSpec, counts: SchedulerStatistics) -> float | None:
    """Return queued and running work divided by the capacity of the running instances, for a scrape. None if
    no instance is up, and for ensembles.

    1.0 is a full batch in each slot and an empty queue, 0.0 is idle; the excess over 1.0 waits. Rows are
    counted if requests are merged, else requests. Batches that are only held (``prefetch``) occupy no slot:
    their requests count as waiting. An idle sequence still occupies its seat, so the saturation of sequences
    is the larger of this ratio and sequences per seat.
    """
    if not counts.slots:
        return None
    full = full_batch_rows(spec.max_batch_size, spec.batching)
    if full:
        work = (counts.queued_rows + counts.computing_rows) / (counts.slots * full)
    else:
        work = (counts.queued + counts.computing_requests) / counts.slots
    return max(work, counts.sequences / counts.seats) if counts.seats else work
