"""What the driver of a model needs of its scheduler, whichever it has. ``batcher.py`` says when what is
called.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from gpuserve.front.scheduler.queue import QueuedRequest
from gpuserve.front.scheduler.slots import Batch
from gpuserve.spec import InstanceSpec


class SchedulerStatistics(NamedTuple):
    """A moment of a scheduler: what there is now, then what there has been since its start.

    ``slots`` is how many batches the instances run at once, without those that they only hold; ``computing``
    are the requests and rows of batches that run or are held, and whose call is not over. Of sequences only:
    how many there are, with a seat or without, and how many seats there are.

    ``rejected`` requests were never accepted. ``finished`` ones were in a batch that came to its end,
    well or badly; ``cancelled`` ones were taken back before that, whether queued or running; ``lost``
    ones ended with their worker. ``retried`` counts second runs, not fates.
    """

    queued: int
    queued_rows: int
    queued_nbytes: int
    running_batches: int
    running_requests: int
    computing_requests: int
    computing_rows: int
    instances: int
    slots: int
    room: int
    accepted: int
    finished: int
    rejected: int
    cancelled: int
    expired: int
    retried: int
    lost: int
    sequences: int = 0
    seats: int = 0


class Scheduler(Protocol):
    """Requests in, batches out; pure, and not thread-safe. Times are seconds of one monotonic clock."""

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; what was accepted is still run."""

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request; raises a ``RequestError`` where it is refused."""

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back. True: it was queued and will never run."""

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        """Take every queued request out, or those that must run on a device."""

    def expire(self, now: float) -> list[QueuedRequest]:
        """The requests that were, or are now, taken out of the queue and are still to be answered."""

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch, for the instance named or for any."""

    def with_room(self) -> list[str]:
        """The instances that can take a batch, the one with the most room first."""

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something, where nothing can run but on some instances."""

    def instance_up(self, name: str, slots: int = 1) -> None:
        """An instance is ready for batches, of which it runs ``slots`` at once."""

    def resize(self, instances: Sequence[InstanceSpec]) -> None:
        """The model has these instances from now on, on the devices that it had. New ones come up later, and
        those that are not among them are retired.
        """

    def retire(self, name: str) -> None:
        """An instance gets nothing new; once it is idle, ``instance_down`` takes it out for good."""

    def is_idle(self, name: str) -> bool:
        """Whether nothing is left for an instance that was retired to do."""

    def instance_down(self, name: str) -> list[QueuedRequest]:
        """An instance died: the requests that are lost with it."""

    def computed(self, batch: Batch) -> None:
        """The call of a batch that runs is over, and another may run in its place before it has ended."""

    def complete(self, batch_id: int) -> Batch:
        """A batch ended, well or badly."""

    def close(self) -> None:
        """Nothing more will be asked of it: the model is no more, and its instances are down."""

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
