"""Schedulers with instances and a clock that only moves when told, for their tests."""

from __future__ import annotations

from typing import Any

from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.scheduler import Scheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, ModelSpec, QueueSpec

#: Divided by, as the scheduler does: a product would be rounded otherwise.
US_A_SECOND = 1e6


def model_spec(**options: Any) -> ModelSpec:
    """A model with these options and no tensors."""
    return ModelSpec("m", (), (), **options)


class Watchable(QueuedRequest):
    """A request whose life can be watched."""

    __slots__ = ("__weakref__",)


def must_next(scheduler: Scheduler, *now: Any) -> Batch:
    """Return the batch that the scheduler forms now."""
    batch = scheduler.next_batch(*now)
    assert batch is not None
    return batch


class Clocked:
    """A scheduler, its instances, and a clock that only moves when told."""

    def __init__(self, scheduler: Scheduler, instances: int) -> None:
        self.scheduler = scheduler
        for number in range(instances):
            scheduler.instance_up(f"i{number}")
        self.now = 0.0

    @property
    def at_us(self) -> int:
        return round(self.now * US_A_SECOND)

    @at_us.setter
    def at_us(self, at_us: int) -> None:
        self.now = at_us / US_A_SECOND

    def next(self) -> Batch | None:
        return self.scheduler.next_batch(self.now)

    def must_next(self) -> Batch:
        return must_next(self.scheduler, self.now)

    def expire_at(self, at_us: int) -> list[QueuedRequest]:
        self.at_us = at_us
        return self.scheduler.expire(self.now)

    def wakeup_us(self) -> int | None:
        wakeup = self.scheduler.next_wakeup(self.now)
        return None if wakeup is None else round(wakeup * US_A_SECOND)

    def count(self, name: str) -> int:
        value: int = getattr(self.scheduler.statistics(), name)
        return value


class Model(Clocked):
    """The scheduler of a model without sequences."""

    def __init__(
        self,
        *,
        instances: int = 1,
        max_batch_size: int = 8,
        delay_us: int = 0,
        preferred: tuple[int, ...] = (),
        merge: bool = True,
        max_requests: int = 0,
        max_nbytes: int = 0,
        prefetch: int = 0,
        retry_on_death: bool = True,
    ) -> None:
        spec = model_spec(
            max_batch_size=max_batch_size,
            batching=BatchingSpec(delay_us, preferred, merge),
            queue=QueueSpec(max_requests, max_nbytes),
            prefetch=prefetch,
            retry_on_worker_death=retry_on_death,
        )
        super().__init__(ModelScheduler(spec), instances)

    def submit(
        self,
        rows: int = 1,
        *,
        key: str = "",
        nbytes: int = 1,
        timeout_us: int | None = None,
        retriable: bool = True,
    ) -> QueuedRequest:
        deadline = None if timeout_us is None else (self.at_us + timeout_us) / US_A_SECOND
        request = Watchable(rows, nbytes, key, deadline, retriable)
        self.scheduler.submit(request, self.now)
        return request

    def submit_many(self, count: int, **kwargs: Any) -> list[QueuedRequest]:
        return [self.submit(**kwargs) for _ in range(count)]

    def run_all(self) -> list[int]:
        """Rows of every batch that goes now, each ending before the next is formed."""
        sizes = []
        while (batch := self.next()) is not None:
            sizes.append(batch.rows)
            self.scheduler.complete(batch.batch_id)
        return sizes
