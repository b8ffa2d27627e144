"""The scheduler of a model whose instances need resources to run: any other scheduler, asked for a batch only
for an instance that the ``RateLimiter`` lets run. Pure. Where rates are not limited, none of this is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gpuserve.front.scheduler.interface import Scheduler, SchedulerStatistics
from gpuserve.front.scheduler.queue import QueuedRequest
from gpuserve.front.scheduler.rate_limiter import RateLimiter
from gpuserve.front.scheduler.slots import Batch
from gpuserve.spec import InstanceSpec, ModelSpec


class LimitedScheduler:
    """``scheduler`` under ``limiter``; ``wake`` is called when ``next_batch`` may have one it had not."""

    def __init__(
        self, scheduler: Scheduler, spec: ModelSpec, limiter: RateLimiter, wake: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._limiter = limiter
        self._wake = wake
        self._rates = limiter.add(spec.instances, wake)
        #: Instances that go for good when they go down.
        self._retired: set[str] = set()
        #: The instances of the batches that have resources.
        self._running: dict[int, str] = {}
        #: Instances that wait for resources.
        self._refused: set[str] = set()

    # ---- under the limits -----------------------------------------------------------------

    def next_batch(self, now: float, instance: str | None = None) -> Batch | None:
        """Form one batch for an instance that may run. Call it until it gives None."""
        self._refused.clear()
        if self._scheduler.statistics().queued:
            for name in self._scheduler.with_room() if instance is None else [instance]:
                batch = self._try(name, now)
                if batch is not None:
                    return batch
        for name, rate in self._rates.items():
            if name not in self._refused:
                self._limiter.withdraw(rate)
        return None

    def _try(self, name: str, now: float) -> Batch | None:
        rate = self._rates[name]
        if not self._limiter.acquire(rate):
            self._refused.add(name)
            return None
        batch = self._scheduler.next_batch(now, name)
        if batch is None:
            self._limiter.release(rate, unused=True)
            return None
        self._running[batch.batch_id] = name
        return batch

    def next_wakeup(self, now: float, among: Collection[str] | None = None) -> float | None:
        """When time alone changes something; an instance that waits for resources is woken by itself."""
        open_to = self._scheduler.with_room() if among is None else among
        return self._scheduler.next_wakeup(now, [one for one in open_to if one not in self._refused])

    def computed(self, batch: Batch) -> None:
        """The call of a batch is over; its resources it keeps until it has ended."""
        self._scheduler.computed(batch)

    def complete(self, batch_id: int) -> Batch:
        """A batch ended, well or badly, and with it its hold on resources.

        Raises:
            KeyError: no such batch runs.
        """
        batch = self._scheduler.complete(batch_id)
        self._limiter.release(self._rates[self._running.pop(batch_id)])
        return batch

    def instance_down(self, name: str) -> list[QueuedRequest]:
        """An instance died: the requests that are lost with it."""
        lost = self._scheduler.instance_down(name)
        for batch_id in [n for n, instance in self._running.items() if instance == name]:
            del self._running[batch_id]
            self._limiter.release(self._rates[name])
        if name in self._rates:
            self._limiter.withdraw(self._rates[name])
        if name in self._retired:
            self._retired.remove(name)
            self._limiter.remove([self._rates.pop(name)])
        return lost

    def resize(self, instances: Sequence[InstanceSpec]) -> None:
        """The model has these instances from now on: those that are new take part."""
        self._scheduler.resize(instances)
        new = [one for one in instances if one.name not in self._rates]
        self._rates |= self._limiter.add(new, self._wake)

    def retire(self, name: str) -> None:
        """An instance takes nothing new, and has its resources as long as it has something to finish."""
        self._scheduler.retire(name)
        self._retired.add(name)
        self._limiter.withdraw(self._rates[name])

    def close(self) -> None:
        """The model is no more; its instances are down."""
        self._limiter.remove(self._rates.values())

    # ---- as without limits ----------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._scheduler.draining

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; what was accepted is still run."""
        self._scheduler.stop_accepting()

    def submit(self, request: QueuedRequest, now: float) -> None:
        """Queue a new request; raises a ``RequestError`` where it is refused."""
        self._scheduler.submit(request, now)

    def cancel(self, request: QueuedRequest) -> bool:
        """Take a request back. True: it was queued and will never run."""
        return self._scheduler.cancel(request)

    def take_all(self, device: str = "") -> list[QueuedRequest]:
        """Take every queued request out, or those that must run on a device."""
        return self._scheduler.take_all(device)

    def expire(self, now: float) -> list[QueuedRequest]:
        """The requests that were, or are now, taken out of the queue and are still to be answered."""
        return self._scheduler.expire(now)

    def with_room(self) -> list[str]:
        """The instances that could take a batch."""
        return self._scheduler.with_room()

    def instance_up(self, name: str, slots: int = 1) -> None:
        """An instance is ready for batches, of which it runs ``slots`` at once."""
        self._scheduler.instance_up(name, slots)

    def is_idle(self, name: str) -> bool:
        """Whether nothing is left for an instance that was retired to do."""
        return self._scheduler.is_idle(name)

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
        return self._scheduler.statistics()
