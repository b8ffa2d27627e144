"""The declaration of a model: public classes, option tables, rules and ``ModelSpec``, imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

#: Public names that the module defines under another name.
_SPEC_NAMES = {"Batching": "BatchingSpec", "Policy": "PolicySpec", "Queue": "QueueSpec"}
_IN_SPEC = frozenset({*_SPEC_NAMES, "RateLimiter", "Resource", "SequenceBatching", "SequenceControl"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"gpuserve.model.{'spec' if name in _IN_SPEC else 'declaration'}")
    value = globals()[name] = getattr(module, _SPEC_NAMES.get(name, name))
    return value
