"""gpuserve: Python inference callables behind the Open Inference Protocol v2.

Public names are imported on first use, so that ``import gpuserve`` is cheap, and a worker that imports
``gpuserve.decorators`` does not import the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuserve.api.server import Server
    from gpuserve.cli.live.event_client import EventStream, events
    from gpuserve.model.declaration import DynamicBatcher, ModelConfig, Step, Tensor
    from gpuserve.model.spec import RateLimiter, Resource, SequenceBatching, SequenceControl
    from gpuserve_worker.inference.failure import UnrecoverableError
    from gpuserve_worker.inference.inference_request import Request, Response
    from gpuserve_worker.inference.model_calls import ModelCallError
    from gpuserve_worker.inference.model_context import current_model
    from gpuserve_worker.inference.running_requests import current_request_ids, current_traces
    from gpuserve_worker.inference.stepping import Last, Later, SteppedCallable, StepResult

from gpuserve.core.lazy_names import lazy_names
from gpuserve.core.version import VERSION

__version__ = VERSION

__all__ = [
    "DynamicBatcher", "EventStream", "Last", "Later", "ModelCallError", "ModelConfig", "RateLimiter",
    "Request", "Resource", "Response", "SequenceBatching", "SequenceControl", "Server", "Step",
    "StepResult", "SteppedCallable", "Tensor", "UnrecoverableError", "__version__", "current_model",
    "current_request_ids", "current_traces", "events",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gpuserve.api.server": "Server",
        "gpuserve.model.declaration": "DynamicBatcher ModelConfig Step Tensor",
        "gpuserve.model.spec": "RateLimiter Resource SequenceBatching SequenceControl",
        "gpuserve.cli.live.event_client": "EventStream events",
        "gpuserve_worker.inference.model_calls": "ModelCallError",
        "gpuserve_worker.inference.model_context": "current_model",
        "gpuserve_worker.inference.running_requests": "current_request_ids current_traces",
        "gpuserve_worker.inference.stepping": "Last Later StepResult SteppedCallable",
        "gpuserve_worker.inference.failure": "UnrecoverableError",
        "gpuserve_worker.inference.inference_request": "Request Response",
    },
)
