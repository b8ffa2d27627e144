"""The figures of a level, computed from the counts of all processes. Durations go into an HdrHistogram: three
digits from a microsecond to an hour, in constant memory. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpuserve.cli.bench.load_generator import CallCounts, CountedDurations
from gpuserve.cli.bench.load_plan import LoadKind, LoadLevel, MissingPackage
from gpuserve.cli.bench.server_control import ServerTime

PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
_LONGEST_NS: Final = 3_600_000_000_000
_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Figures of a set of durations in milliseconds; all are 0 if ``count`` is 0."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


class LatencyHistogram:
    """A histogram of durations. Raises MissingPackage if hdrhistogram is not installed."""

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
        """Return a percentile in milliseconds, or 0 without any duration."""
        return float(self._histogram.get_value_at_percentile(percentile)) / 1e6

    def encoded(self) -> str:
        """Return the histogram in the text format of HdrHistogram's tools."""
        text: str = self._histogram.encode().decode()
        return text


def histogram_type() -> Any:
    """Return the class ``HdrHistogram``; raise MissingPackage if it is not installed."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        raise MissingPackage("hdrhistogram") from None
    return HdrHistogram


def percentile_curve(encoded: str) -> list[tuple[float, float]]:
    """Return (percentile, milliseconds) pairs of a histogram for a plot, denser towards 100."""
    histogram = histogram_type().decode(encoded)
    found = []
    beyond = 100.0
    while beyond > 0.001:
        percentile = 100.0 - beyond
        found.append((percentile, histogram.get_value_at_percentile(percentile) / 1e6))
        beyond *= 0.8
    return found


#: A level is stable if this many windows in a row, each of this length, agree.
STABLE_WINDOWS: Final = 3
WINDOW_S: Final = 1.0
_TOLERANCE: Final = 0.10


class Window(NamedTuple):
    """The figures of a short part of a level."""

    throughput: float
    p50_ms: float
    p99_ms: float


def is_stable(windows: Sequence[Window]) -> bool:
    """Return whether throughput, median and p99 of the last windows differ little from their means."""
    last = windows[-STABLE_WINDOWS:]
    for values in zip(*last, strict=True):
        mean = sum(values) / len(values)
        if mean <= 0 or any(abs(value - mean) > _TOLERANCE * mean for value in values):
            return False
    return len(last) == STABLE_WINDOWS


_SATURATED_CPU: Final = 0.9
_LATE_PART: Final = 0.2
_LATE_MS: Final = 0.2
_MIN_REACHED_PART: Final = 0.95


@dataclass(frozen=True, slots=True)
class LevelResult:
    """The result of a level, in milliseconds and requests a second. ``latency`` counts from the due time and
    includes the ``unanswered``; ``client_cpu`` is the CPU use of the busiest process, 1 for a whole core.
    """

    level: LoadLevel
    duration_s: float
    sent: int
    completed: int
    throughput: float
    responses_per_s: float
    latency: LatencySummary
    first: LatencySummary
    gaps: LatencySummary
    failures: dict[str, tuple[int, str]]
    unanswered: int
    lag_p99_ms: float
    client_cpu: float
    server: ServerTime | None
    histogram: str
    warnings: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        return sum(count for count, _ in self.failures.values())


@dataclass
class _ProcessTally:
    """The sums of one process over a level."""

    duration_s: float = 0.0
    cpu_s: float = 0.0
    completed: int = 0
    responses: int = 0

    def throughput(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0


@dataclass
class LevelTally:
    """The sums over all processes, of a level or of a part of a level."""

    latencies: LatencyHistogram = field(default_factory=LatencyHistogram)
    first: LatencyHistogram = field(default_factory=LatencyHistogram)
    gaps: LatencyHistogram = field(default_factory=LatencyHistogram)
    lags: LatencyHistogram = field(default_factory=LatencyHistogram)
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    sent: int = 0
    unanswered: int = 0
    processes: dict[int, _ProcessTally] = field(default_factory=dict)

    def add(self, process: int, interval: CallCounts) -> None:
        one = self.processes.setdefault(process, _ProcessTally())
        one.duration_s += interval.duration_s
        one.cpu_s += interval.cpu_s
        one.completed += interval.completed
        one.responses += interval.responses
        self.sent += interval.sent
        self.latencies.add(interval.latencies)
        self.latencies.add(interval.waited)
        self.unanswered += sum(interval.waited[1])
        self.first.add(interval.first)
        self.gaps.add(interval.gaps)
        self.lags.add(interval.lags)
        for kind, (count, text) in interval.failures.items():
            before, first_text = self.failures.get(kind, (0, text))
            self.failures[kind] = before + count, first_text

    @property
    def throughput(self) -> float:
        return sum(one.throughput(one.completed) for one in self.processes.values())

    def window(self) -> Window:
        return Window(self.throughput, self.latencies.percentile_ms(50), self.latencies.percentile_ms(99))

    def result(self, level: LoadLevel, server: ServerTime | None) -> LevelResult:
        processes = self.processes.values()
        latency = self.latencies.summary()
        cpu = max((one.cpu_s / one.duration_s for one in processes if one.duration_s), default=0.0)
        lag_ms = self.lags.percentile_ms(99)
        return LevelResult(
            level,
            max((one.duration_s for one in processes), default=0.0),
            self.sent,
            sum(one.completed for one in processes),
            self.throughput,
            sum(one.throughput(one.responses) for one in processes),
            latency,
            self.first.summary(),
            self.gaps.summary(),
            dict(self.failures),
            self.unanswered,
            lag_ms,
            cpu,
            server,
            self.latencies.encoded(),
            tuple(result_warnings(level, self.throughput, latency, self.unanswered, lag_ms, cpu)),
        )


def result_warnings(
    level: LoadLevel, throughput: float, latency: LatencySummary, unanswered: int, lag_ms: float, cpu: float
) -> Sequence[str]:
    """Return a sentence for each reason why the figures may not be those of the server alone."""
    found = []
    if cpu > _SATURATED_CPU:
        text = f"the load generator used {cpu:.0%} of a core and may limit the results"
        found.append(f"{text}; try more --processes")
    if level.kind is LoadKind.RATE:
        if throughput < _MIN_REACHED_PART * level.value:
            found.append(f"of {level.value:g} requests a second {throughput:.0f} were answered")
        if lag_ms > max(_LATE_MS, _LATE_PART * latency.p50_ms):
            found.append(
                f"1 % of the requests were sent {lag_ms:.2f} ms or more after they were due: the load "
                "generator or its connections were busy; the latencies count that time"
            )
    if unanswered:
        text = f"{unanswered} requests had no answer when the level ended"
        found.append(f"{text}; the latencies count their wait")
    return found
