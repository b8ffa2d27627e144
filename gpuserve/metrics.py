"""Custom metrics of inference callables, shown on the server's metrics page."""

from gpuserve_worker.inference.callable_metrics import Metric, MetricError, MetricKind
from gpuserve_worker.inference.model_context import MetricFamily

__all__ = ["Metric", "MetricError", "MetricFamily", "MetricKind"]
