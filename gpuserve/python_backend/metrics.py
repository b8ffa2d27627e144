"""``MetricFamily`` and ``Metric`` as a ``model.py`` knows them, over the metrics of its worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from gpuserve.python_backend.errors import TritonModelException
from gpuserve.python_backend.model_file import context
from gpuserve_worker.calling import metrics
from gpuserve_worker.calling.metrics import MetricError, MetricKind

T = TypeVar("T")


class MetricFamily:
    """Metrics of one name, which all instances and models of the server share."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._registry = context().metrics
        self._family = _tried(self._registry.family, name, description, kind)

    def Metric(  # noqa: N802  # it is called that
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The metric with these labels; a histogram has buckets, given by their upper bounds."""
        return Metric(_tried(self._registry.series, self._family, labels, buckets))


class Metric:
    """One series of a family of metrics, told from the others by its labels."""

    __slots__ = ("_series",)

    def __init__(self, series: metrics.Metric) -> None:
        self._series = series

    def increment(self, value: float) -> None:
        _tried(self._series.increment, value)

    def set(self, value: float) -> None:
        _tried(self._series.set, value)

    def observe(self, value: float) -> None:
        _tried(self._series.observe, value)

    def value(self) -> float:
        """What this instance has made of it."""
        return _tried(self._series.value)


def _tried(call: Callable[..., T], *arguments: Any) -> T:
    try:
        return call(*arguments)
    except MetricError as error:
        raise TritonModelException(str(error)) from None
