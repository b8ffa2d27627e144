"""``MetricFamily``: what user code makes metrics with, in the worker of the model that is served here, or
without any server, where it counts for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpuserve_worker.calling.context import current_metrics
from gpuserve_worker.calling.metrics import Metric, MetricKind


class MetricFamily:
    """Metrics of one name on the server's metrics page. All instances of all models share it.

    ``kind`` is ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``. Make it in the callable's own thread,
    best while the model loads; any thread may count.

    Raises:
        MetricError: no metric may be called that, or it is there and of another kind.
    """

    COUNTER: Final = MetricKind.COUNTER
    GAUGE: Final = MetricKind.GAUGE
    HISTOGRAM: Final = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._registry = current_metrics()
        self._family = self._registry.family(name, description, kind)

    def metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The metric with these labels, the same for whoever asks for it again.

        ``buckets`` are the upper bounds of a histogram's, in ascending order; one without a bound follows
        them.

        Raises:
            MetricError: labels or buckets cannot be these, or the instance has as many metrics as it may.
        """
        return self._registry.series(self._family, labels, buckets)
