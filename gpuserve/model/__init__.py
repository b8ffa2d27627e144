"""The declaration of a model: public classes, option tables, rules and ``ModelSpec``, imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuserve.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gpuserve.model.declaration import (
        DynamicBatcher,
        ModelConfig,
        ModelWarmup,
        QueuePolicy,
        Step,
        Tensor,
        TimeoutAction,
        WarmupInput,
    )
    from gpuserve.model.spec import BatchingSpec as Batching
    from gpuserve.model.spec import PolicySpec as Policy
    from gpuserve.model.spec import QueueSpec as Queue
    from gpuserve.model.spec import RateLimiter, Resource, SequenceBatching, SequenceControl

__all__ = [
    "Batching", "DynamicBatcher", "ModelConfig", "ModelWarmup", "Policy", "Queue", "QueuePolicy",
    "RateLimiter", "Resource", "SequenceBatching", "SequenceControl", "Step", "Tensor", "TimeoutAction",
    "WarmupInput",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gpuserve.model.declaration": "DynamicBatcher ModelConfig ModelWarmup QueuePolicy Step Tensor "
        "TimeoutAction WarmupInput",
        "gpuserve.model.spec": "Batching=BatchingSpec Policy=PolicySpec Queue=QueueSpec "
        "RateLimiter Resource SequenceBatching SequenceControl",
    },
)
