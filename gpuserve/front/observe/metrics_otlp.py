"""The metrics page as OpenTelemetry's metrics, sent by OTLP over HTTP: counters are cumulative sums,
histograms keep their buckets, names and labels are those of the page. OpenTelemetry is an extra:
``pip install gpuserve[otel]``. The SDK's variables (``OTEL_EXPORTER_OTLP_…``) hold.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gpuserve.version import VERSION

#: Which only say under Triton's names what is there under ours.
_REPEATED: Final = ("nv_inference_", "nv_cache_", "nv_model_")
_EXPORTERS_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
#: After each metric others in this process have their turn, as after a page's slice.
_REST_S: Final = 0.001
_HELP: Final = "# HELP "
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LE: Final = re.compile(r'\ble="([^"]*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


class OtlpMetrics:
    """Sends pages of one front, which counts since this was made; no longer than ``timeout_s`` each."""

    def __init__(
        self, url: str, resource: Mapping[str, str], timeout_s: float, since_ns: int | None = None
    ) -> None:
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("gpuserve", VERSION)
        self._words = _LastWords()
        said = logging.getLogger(_EXPORTERS_LOGGER)
        said.handlers, said.propagate = [self._words], False  # it says each failure several times
        self._exporter = OTLPMetricExporter(endpoint=url, timeout=timeout_s)

    def send(self, page: bytes) -> None:
        found = list(metrics_of(page.decode(), self._since_ns, time.time_ns(), lambda: time.sleep(_REST_S)))
        scope = ScopeMetrics(self._scope, found, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise OSError(self._words.text or "the collector did not take them")

    def close(self) -> None:
        self._exporter.shutdown()


class _LastWords(logging.Handler):
    """Keeps what the exporter said last."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def metrics_of(
    page: str, since_ns: int, now_ns: int, rest: Callable[[], None] = lambda: None
) -> Iterator[Metric]:
    """The metrics of a page, counted since then; ``rest`` is called after each. Summaries are left out."""
    times = since_ns, now_ns
    for part in page.removeprefix(_HELP).split(f"\n{_HELP}"):
        head, kind, *samples = part.rstrip("\n").split("\n")
        name, _, text = head.partition(" ")
        if samples and not name.startswith(_REPEATED):
            yield from _metric(name, text, kind.rpartition(" ")[2], samples, times)
        rest()


def _metric(
    name: str, text: str, kind: str, samples: Sequence[str], times: tuple[int, int]
) -> Iterator[Metric]:
    if kind == "histogram":
        yield Metric(name, text, "", Histogram(list(_histograms(name, samples, times)), _CUMULATIVE))
    elif kind in {"counter", "gauge"}:
        numbers = []
        for line in samples:
            told, _, value = line.rpartition(" ")
            numbers.append(NumberDataPoint(_labels(told[len(name) :]), *times, float(value)))
        data = Gauge(numbers) if kind == "gauge" else Sum(numbers, _CUMULATIVE, is_monotonic=True)
        yield Metric(name, text, "", data)


def _histograms(name: str, samples: Sequence[str], times: tuple[int, int]) -> Iterator[HistogramDataPoint]:
    """One point for each set of labels, of lines in the page's order; each bucket is without those below."""
    bounds: list[float] = []
    counts: list[int] = [0]
    labels: dict[str, str] = {}
    for line in samples:
        told, _, value = line.rpartition(" ")
        if told.startswith("_bucket", len(name)):
            bounds.append(float(_LE.search(told)[1]))  # type: ignore[index]
            counts.append(int(float(value)))
        elif told.startswith("_count", len(name)):
            labels = _labels(told[len(name) + len("_count") :])
        else:
            alone = [count - before for before, count in itertools.pairwise(counts)]
            # The page knows neither the least nor the greatest value; the last bucket has no bound.
            point: Any = partial(HistogramDataPoint, min=None, max=None)  # type: ignore[arg-type]
            yield point(labels, *times, counts[-1], float(value), alone, bounds[:-1])
            bounds, counts = [], [0]


def _labels(text: str) -> dict[str, str]:
    """The labels in a pair of braces, or in nothing."""
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]
