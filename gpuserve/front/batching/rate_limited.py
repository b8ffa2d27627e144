"""The batches of a model whose instances need resources to run: its scheduler is asked for a batch only for
an instance that the ``SharedResources`` lets run. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpuserve.front.batching.interface import Scheduler
from gpuserve.front.batching.rate_limiter import SharedResources
from gpuserve.front.batching.slots import Batch
from gpuserve.front.queueing.queue import QueuedRequest
from gpuserve.model.spec import InstanceSpec


class RateLimits:
    """The ``BatchSource`` of a model under limits; ``wake`` is called when ``next_batch`` may have one."""

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Sequence[InstanceSpec],
        limiter: SharedResources,
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._limiter = limiter
        self._wake = wake
        self._rates = limiter.add(instances, wake)
        #: Instances that go for good when they go down.
        self._retired: set[str] = set()
        #: The instances of the batches that have resources.
        self._running: dict[int, str] = {}
        #: Instances that wait for resources.
        self._refused: set[str] = set()

    def next_batch(self, now: float) -> Batch | None:
        self._refused.clear()
        if self._scheduler.statistics().queued:
            for name in self._scheduler.with_room():
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

    def next_wakeup(self, now: float) -> float | None:
        """When time alone changes something; an instance that waits for resources is woken by itself."""
        open_to = [one for one in self._scheduler.with_room() if one not in self._refused]
        return self._scheduler.next_wakeup(now, open_to)

    def complete(self, batch_id: int, took_s: float | None = None, now: float = math.inf) -> Batch:
        batch = self._scheduler.complete(batch_id, took_s, now)
        self._limiter.release(self._rates[self._running.pop(batch_id)])
        return batch

    def instance_down(self, name: str, died_at: float | None = None) -> list[QueuedRequest]:
        lost = self._scheduler.instance_down(name, died_at)
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
        new = [one for one in instances if one.name not in self._rates]
        self._rates |= self._limiter.add(new, self._wake)

    def retire(self, name: str) -> None:
        """Give an instance nothing new; it has its resources as long as it has something to finish."""
        self._scheduler.retire(name)
        self._retired.add(name)
        self._limiter.withdraw(self._rates[name])

    def close(self) -> None:
        self._limiter.remove(self._rates.values())
