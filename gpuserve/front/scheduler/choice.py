"""Which scheduler a model has. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuserve.front.scheduler.batcher import ModelScheduler
from gpuserve.front.scheduler.devices import DeviceScheduler
from gpuserve.front.scheduler.interface import Scheduler
from gpuserve.front.scheduler.limited import LimitedScheduler
from gpuserve.front.scheduler.rate_limiter import RateLimiter
from gpuserve.front.scheduler.sequences import SequenceScheduler
from gpuserve.spec import ModelSpec


def scheduler_of(spec: ModelSpec, limiter: RateLimiter | None, wake: Callable[[], None]) -> Scheduler:
    """The scheduler for a model; ``wake`` is called when it may have a batch that it had not."""
    scheduler = _scheduler(spec)
    return scheduler if limiter is None else LimitedScheduler(scheduler, spec, limiter, wake)


def _scheduler(spec: ModelSpec) -> Scheduler:
    if spec.in_sequences:
        return SequenceScheduler(
            spec.name,
            max_batch_size=spec.max_batch_size,
            sequence=spec.sequence,
            batching=spec.batching,
            queue=spec.queue,
            prefetch=spec.prefetch,
        )
    options: dict[str, Any] = {
        "max_batch_size": spec.max_batch_size,
        "batching": spec.batching,
        "queue": spec.queue,
        "prefetch": spec.prefetch,
        "retry_on_death": spec.retry_on_worker_death,
    }
    devices = {one.name: one.device for one in spec.instances}
    if len(set(devices.values())) > 1:
        return DeviceScheduler(devices, **options)
    return ModelScheduler(**options)
