"""The compiled module of Triton's stub, which some ``model.py`` files import: the same classes."""

from gpuserve.backends.python_backend.importable.triton_python_backend_utils import *  # noqa: F403
from gpuserve.backends.python_backend.inference_requests import MemoryType, ResponseIterator  # noqa: F401
from gpuserve_worker.inference.callable_metrics import MetricKind

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
