"""The figures of one level, made of what the processes counted, and what is to be said about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpuserve.bench.calls.samples import Interval
from gpuserve.bench.plan.plan import LoadKind, LoadLevel
from gpuserve.bench.reports.latencies import LatencyHistogram, LatencySummary
from gpuserve.bench.server.server_time import ServerTime

#: So many stretches of so many seconds must agree.
WINDOWS: Final = 3
WINDOW_S: Final = 1.0
_TOLERANCE: Final = 0.10


class Window(NamedTuple):
    """The figures of a short stretch of a level."""

    throughput: float
    p50_ms: float
    p99_ms: float


def is_stable(windows: Sequence[Window], tolerance: float = _TOLERANCE) -> bool:
    """Whether throughput, median and p99 of the last windows are each within this part of their mean."""
    last = windows[-WINDOWS:]
    return len(last) == WINDOWS and all(_agree(values, tolerance) for values in zip(*last, strict=True))


def _agree(values: Sequence[float], tolerance: float) -> bool:
    mean = sum(values) / len(values)
    return mean > 0 and all(abs(value - mean) <= tolerance * mean for value in values)


_SATURATED: Final = 0.9
_LATE_PART: Final = 0.2
_LATE_MS: Final = 0.2
_REACHED: Final = 0.95


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One level, in milliseconds and requests a second. ``latency`` counts from the due time, also of the
    ``unanswered``; ``first`` and ``gaps`` are of streams; ``client_cpu`` is the largest part of a core of a
    process.
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
class _Process:
    """The sums of one process over a level."""

    duration_s: float = 0.0
    cpu_s: float = 0.0
    completed: int = 0
    responses: int = 0

    def throughput(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0


@dataclass
class Tally:
    """Sums over all processes, of a level or of a stretch of it."""

    latencies: LatencyHistogram = field(default_factory=LatencyHistogram)
    first: LatencyHistogram = field(default_factory=LatencyHistogram)
    gaps: LatencyHistogram = field(default_factory=LatencyHistogram)
    lags: LatencyHistogram = field(default_factory=LatencyHistogram)
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    sent: int = 0
    unanswered: int = 0
    processes: dict[int, _Process] = field(default_factory=dict)

    def add(self, process: int, interval: Interval) -> None:
        one = self.processes.setdefault(process, _Process())
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
            tuple(warnings(level, self.throughput, latency, self.unanswered, lag_ms, cpu)),
        )


def warnings(
    level: LoadLevel, throughput: float, latency: LatencySummary, unanswered: int, lag_ms: float, cpu: float
) -> Sequence[str]:
    """What keeps the figures from being those of the server alone, a sentence each."""
    found = []
    if cpu > _SATURATED:
        found.append(
            f"the load generator used {cpu:.0%} of a core and may be the limit; try more --processes"
        )
    if level.kind is LoadKind.RATE:
        if throughput < _REACHED * level.value:
            found.append(f"of {level.value:g} requests a second {throughput:.0f} were answered")
        if lag_ms > max(_LATE_MS, _LATE_PART * latency.p50_ms):
            found.append(
                f"1 % of the requests were sent {lag_ms:.2f} ms or more after they were due: the load "
                "generator or its connections were busy; the latencies count that time"
            )
    if unanswered:
        found.append(
            f"{unanswered} requests had no answer when the level ended; they count with what they waited"
        )
    return found
