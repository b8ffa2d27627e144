"""The names by which users declare a model. What they are is in ``gpuserve/declare``."""

from gpuserve.declare.model import (
    DynamicBatcher,
    ModelConfig,
    ModelWarmup,
    QueuePolicy,
    Step,
    Tensor,
    TimeoutAction,
    WarmupInput,
)
from gpuserve.declare.spec import BatchingSpec as Batching
from gpuserve.declare.spec import PolicySpec as Policy
from gpuserve.declare.spec import QueueSpec as Queue
from gpuserve.declare.spec import RateLimiter, Resource, SequenceBatching, SequenceControl

__all__ = [
    "Batching",
    "DynamicBatcher",
    "ModelConfig",
    "ModelWarmup",
    "Policy",
    "Queue",
    "QueuePolicy",
    "RateLimiter",
    "Resource",
    "SequenceBatching",
    "SequenceControl",
    "Step",
    "Tensor",
    "TimeoutAction",
    "WarmupInput",
]
