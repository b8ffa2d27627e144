"""What the driver of a model needs of its scheduler, whichever it has, and the counts that each of them
keeps. ``model_scheduler.py`` says when what is called.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from gpuserve.front.batching.slots import Batch, Places
from gpuserve.front.queueing.queue import QueuedRequest, WaitingRoom
from gpuserve.front.queueing.suspects import Blame


class SchedulerStatistics(NamedTuple):
    """A moment of a scheduler: what there is now, then what there has been since its start.

    ``slots`` is how many batches the instances run at once, without those that they only hold; ``computing``
    are the requests and rows of batches that run or are held, and whose call is not over. Of sequences only:
    how many there are, with a seat or without, and how many seats there are.

    ``rejected`` requests were never accepted. ``finished`` ones were in a batch that came to its end,
    well or badly; ``cancelled`` ones were taken back before that, whether queued or running; ``expired`` ones
    were taken out of the queue, for their time or for others; ``lost`` ones ended with their worker.
    ``retried`` counts second runs, not requests that ended.
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


@dataclass(slots=True)
class RequestCounts:
    """What has become of the requests of a scheduler since its start, as ``SchedulerStatistics`` calls it."""

    finished: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    retried: int = 0
    lost: int = 0


def statistics_of(queue: WaitingRoom, counts: RequestCounts, slots: Places[Any]) -> SchedulerStatistics:
    """The statistics of a scheduler, from what waits, what has been, and what runs."""
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


#: A request costs a hand-over as much as so many bytes do.
HANDED_NBYTES: Final = 64 << 10


class BatchSource(Protocol):
    """Who forms the batches of a model: its scheduler itself, or ``RateLimits`` around it."""

    def next_batch(self, now: float) -> Batch | None:
        """Form one batch for any instance; None: nothing can or should run now."""

    def next_wakeup(self, now: float) -> float | None:
        """When time alone changes something, in seconds of the clock; None: only another event can."""

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        """Free the slot of a batch that has just ended: well, and its worker took so long, or badly. Raises
        KeyError where no such batch runs.
        """

    def retire(self, name: str) -> None:
        """Give an instance nothing new; once it is idle, ``instance_down`` takes it out for good."""

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        """Take an instance out that died; the requests that are lost with it. ``died_at`` is when, on the
        scheduler's clock; None if the instance did not die, so that no client is to blame.
        """


class Scheduler(BatchSource, Protocol):
    """Requests in, batches out; pure, and not thread-safe. Times are seconds of one monotonic clock. While it
    is ``draining``, new requests are refused; what was accepted is still run.
    """

    draining: bool
    #: Whose request the last instance that went down had run alone; None if nobody is to blame.
    blame: Blame | None = None
    _slots: Places[Any]

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request; raises a ``RequestError`` where it is refused."""

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back. True: it was queued and will never run. False: it runs, and its result is to
        be dropped (``request.cancelled``), or it has finished.
        """

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        """Take every queued request out, or those that must run on a device."""

    def hand_over(self, to: Scheduler, most_nbytes: int) -> list[QueuedRequest]:
        """Take requests out that no instance has begun, about so many bytes, for another scheduler."""

    def expire(self, now: float) -> list[QueuedRequest]:
        """The requests that were, or are now, taken out of the queue and are still to be answered."""

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch, for the instance named or for any."""

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something, where nothing can run but on some instances."""

    def with_room(self) -> list[str]:
        """The names of the instances that can take a batch, the one with the most room first."""
        return self._slots.with_room()

    def instance_up(self, name: str, slots: int = 1, device: str = "") -> None:
        """Add an instance on a device, of which it runs ``slots`` at once; ValueError: it is up already."""

    def retire(self, name: str) -> None:
        self._slots.retire(name)

    def is_idle(self, name: str) -> bool:
        return self._slots.is_idle(name)

    def began_at(self, name: str) -> float:
        return self._slots.began_at(name)

    def computed(self, batch: Batch) -> None:
        """The call of a batch is over; another may run in its place before its end, but in sequences."""
        return

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
