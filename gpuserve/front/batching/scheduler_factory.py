"""Which scheduler a model has. Pure."""

from __future__ import annotations

from functools import partial

from gpuserve.declare.spec import ModelSpec
from gpuserve.front.batching.device_scheduler import DeviceScheduler
from gpuserve.front.batching.interface import Scheduler
from gpuserve.front.batching.model_scheduler import ModelScheduler
from gpuserve.front.batching.sequence_scheduler import SequenceScheduler
from gpuserve.front.batching.slots import InstanceSlots


def scheduler_of(spec: ModelSpec) -> Scheduler:
    if spec.in_sequences:
        return SequenceScheduler(
            spec.name,
            max_batch_size=spec.max_batch_size,
            sequence=spec.sequence,
            batching=spec.batching,
            queue=spec.queue,
            prefetch=spec.prefetch,
        )
    if len({one.device for one in spec.instances}) > 1:
        return DeviceScheduler(partial(_model_scheduler, spec))
    return _model_scheduler(spec)


def _model_scheduler(spec: ModelSpec, slots: InstanceSlots | None = None) -> ModelScheduler:
    return ModelScheduler(
        max_batch_size=spec.max_batch_size,
        batching=spec.batching,
        queue=spec.queue,
        prefetch=spec.prefetch,
        retry_on_death=spec.retry_on_worker_death,
        slots=slots,
    )
