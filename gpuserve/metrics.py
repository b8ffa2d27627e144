"""Custom metrics of inference callables, shown on the server's metrics page."""

from gpuserve_worker.calling.metric_family import MetricFamily
from gpuserve_worker.calling.metrics import Metric, MetricError, MetricKind

__all__ = ["Metric", "MetricError", "MetricFamily", "MetricKind"]
