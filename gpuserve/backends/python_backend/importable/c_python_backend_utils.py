"""The compiled module of Triton's stub, which some ``model.py`` files import: the same classes."""

from gpuserve.backends.python_backend.errors import TritonError, TritonModelException
from gpuserve.backends.python_backend.inference_requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    ResponseIterator,
)
from gpuserve.backends.python_backend.model_server import (
    Logger,
    Metric,
    MetricFamily,
    is_model_ready,
    load_model,
    unload_model,
)
from gpuserve.backends.python_backend.responses import InferenceResponse, InferenceResponseSender
from gpuserve.backends.python_backend.tensors import Tensor
from gpuserve_worker.inference.callable_metrics import MetricKind

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "unload_model",
]
