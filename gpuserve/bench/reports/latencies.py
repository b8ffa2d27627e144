"""Durations in an HdrHistogram: three digits from a microsecond to an hour, whatever their number. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gpuserve.bench.calls.samples import CountedDurations
from gpuserve.bench.plan.errors import MissingPackage

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
_LONGEST_NS: Final = 3_600_000_000_000
_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Figures of some durations, in milliseconds; all are 0 where ``count`` is."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


class LatencyHistogram:
    """A histogram of durations; MissingPackage: hdrhistogram is not installed."""

    def __init__(self) -> None:
        self._histogram = histogram_type()(1, _LONGEST_NS, _DIGITS)

    def add(self, counted: CountedDurations) -> None:
        for ns, count in zip(*counted, strict=True):
            self._histogram.record_value(min(ns, _LONGEST_NS), count)

    def summary(self) -> LatencySummary:
        histogram = self._histogram
        count = int(histogram.get_total_count())
        if not count:
            return LatencySummary(0, 0, 0, 0, 0, 0, 0, 0)
        at = histogram.get_percentile_to_value_dict(list(PERCENTILES))
        p50, p90, p95, p99, p999 = (at[percentile] / 1e6 for percentile in PERCENTILES)
        mean, longest = histogram.get_mean_value() / 1e6, histogram.get_max_value() / 1e6
        return LatencySummary(count, mean, p50, p90, p95, p99, p999, longest)

    def percentile_ms(self, percentile: float) -> float:
        """One percentile in milliseconds; 0 where nothing was recorded."""
        return float(self._histogram.get_value_at_percentile(percentile)) / 1e6

    def encoded(self) -> str:
        """The histogram in the text format that other tools of HdrHistogram read."""
        text: str = self._histogram.encode().decode()
        return text


def histogram_type() -> Any:
    """The class ``HdrHistogram``; MissingPackage: it is not installed."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        raise MissingPackage("hdrhistogram") from None
    return HdrHistogram


def percentile_curve(encoded: str) -> list[tuple[float, float]]:
    """(percentile, milliseconds) of a histogram, closer together towards 100, for a plot."""
    histogram = histogram_type().decode(encoded)
    found = []
    beyond = 100.0
    while beyond > 0.001:
        percentile = 100.0 - beyond
        found.append((percentile, histogram.get_value_at_percentile(percentile) / 1e6))
        beyond *= 0.8
    return found
