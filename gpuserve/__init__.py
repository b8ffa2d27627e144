"""gpuserve: Python inference callables behind the Open Inference Protocol v2.

The public names, imported on first use, so that ``import gpuserve`` costs next to nothing and a
worker that imports ``gpuserve.decorators`` does not pay for the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuserve.model import (
        DynamicBatcher,
        ModelConfig,
        RateLimiter,
        Resource,
        SequenceBatching,
        SequenceControl,
        Step,
        Tensor,
    )
    from gpuserve.server import Server
    from gpuserve_worker.calls import ModelCallError
    from gpuserve_worker.context import current_model
    from gpuserve_worker.failure import UnrecoverableError
    from gpuserve_worker.request import Request
    from gpuserve_worker.response import Response

__version__ = "0.1.0"

__all__ = [
    "DynamicBatcher",
    "ModelCallError",
    "ModelConfig",
    "RateLimiter",
    "Request",
    "Resource",
    "Response",
    "SequenceBatching",
    "SequenceControl",
    "Server",
    "Step",
    "Tensor",
    "UnrecoverableError",
    "__version__",
    "current_model",
]

_HOMES = {
    "DynamicBatcher": "gpuserve.model",
    "ModelCallError": "gpuserve_worker.calls",
    "ModelConfig": "gpuserve.model",
    "RateLimiter": "gpuserve.model",
    "Request": "gpuserve_worker.request",
    "Resource": "gpuserve.model",
    "Response": "gpuserve_worker.response",
    "SequenceBatching": "gpuserve.model",
    "SequenceControl": "gpuserve.model",
    "Server": "gpuserve.server",
    "Step": "gpuserve.model",
    "Tensor": "gpuserve.model",
    "UnrecoverableError": "gpuserve_worker.failure",
    "current_model": "gpuserve_worker.context",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
