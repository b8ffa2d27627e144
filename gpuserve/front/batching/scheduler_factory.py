"""Which scheduler a model has. Pure."""

from __future__ import annotations

import math
from functools import partial

from gpuserve.front.batching.device_scheduler import DeviceScheduler
from gpuserve.front.batching.interface import Scheduler
from gpuserve.front.batching.model_scheduler import ModelScheduler
from gpuserve.front.batching.sequence_scheduler import SequenceScheduler
from gpuserve.model.spec import ModelSpec


def scheduler_of(spec: ModelSpec, front_lost_at: float = -math.inf) -> Scheduler:
    """It has sequences, or instances on several devices, or neither; a front before this died then."""
    if spec.in_sequences:
        return SequenceScheduler(spec, front_lost_at)
    if len({one.device for one in spec.instances}) > 1:
        return DeviceScheduler(partial(ModelScheduler, spec))
    return ModelScheduler(spec)
