"""The search: the latency limit, how good measured points are, and which settings are tried next. Pure.

It goes along one axis at a time, from the best settings so far, until no step is better. The throughput of a
server over one setting mostly has one hill: larger batches pay until they do not. Steps go to the neighbours
on an axis, so that few trials are wasted far from the top. The same scores lead to the same trials.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve.bench.reports.latencies import LatencySummary
from gpuserve.bench.reports.results import LevelResult
from gpuserve.model.options import DURATION_PATTERN, MICROSECONDS, parse_duration
from gpuserve.tune.axes import Settings

_FIELDS: Final = {
    "mean": "mean_ms",
    "p50": "p50_ms",
    "p90": "p90_ms",
    "p95": "p95_ms",
    "p99": "p99_ms",
    "p99.9": "p999_ms",
    "max": "max_ms",
}


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """A figure of the latencies, such as p99, and what it may be at most."""

    figure: str = "p99"
    most_ms: float = float("inf")

    def of(self, latency: LatencySummary) -> float:
        found: float = getattr(latency, _FIELDS[self.figure])
        return found

    def holds(self, latency: LatencySummary) -> bool:
        return self.of(latency) <= self.most_ms


def parse_limit(text: str) -> LatencyLimit:
    """The limit that a text such as ``p99=50ms`` stands for; BenchOptionError: it has another form."""
    figure, _, time = text.partition("=")
    try:
        if figure in _FIELDS and time[-1:].isalpha():  # which unit a bare number is in, nobody can know
            return LatencyLimit(figure, parse_duration(time) * 1e3)
    except ValueError:
        pass
    raise BenchOptionError(
        "--latency-limit",
        f"expected one of {', '.join(_FIELDS)} with a time, such as p99=50ms, given {text!r}",
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One level of load on a server with these settings; ``latency_ms`` is the figure of the limit."""

    settings: Settings
    concurrency: float
    throughput: float
    latency_ms: float


def points_of(settings: Settings, levels: Iterable[LevelResult], limit: LatencyLimit) -> list[Point]:
    """The points of the levels in which every request was answered."""
    return [
        Point(settings, one.level.value, one.throughput, limit.of(one.latency))
        for one in levels
        if one.completed and not one.failed
    ]


def score(points: Sequence[Point], limit: LatencyLimit) -> float:
    """The highest throughput under the limit; where there is none, the lowest latency, negative."""
    within = [one.throughput for one in points if one.latency_ms <= limit.most_ms]
    if within:
        return max(within)
    return -min((one.latency_ms for one in points), default=float("inf"))


def best(points: Iterable[Point], limit: LatencyLimit) -> Point | None:
    within = [one for one in points if one.latency_ms <= limit.most_ms]
    return max(within, key=lambda one: (one.throughput, -one.latency_ms), default=None)


def front(points: Iterable[Point]) -> list[Point]:
    """The points to which no other is at least as good in both, by ascending throughput."""
    found: list[Point] = []
    for one in sorted(points, key=lambda one: (-one.throughput, one.latency_ms)):
        if not found or one.latency_ms < found[-1].latency_ms:
            found.append(one)
    return found[::-1]


#: A position on each axis.
Position: TypeAlias = tuple[int, ...]

#: A step is better when it gives so much more: less is noise.
MARGIN: Final = 1.03


def coordinate_search(sizes: Sequence[int], start: Position) -> Generator[Position, float, Position]:
    """Yields positions to try and is sent scores; returns the best. ``sizes``: the values of each axis."""
    known: dict[Position, float] = {}

    def score(position: Position) -> Generator[Position, float, float]:
        if position not in known:
            known[position] = yield position
        return known[position]

    best = start
    yield from score(start)
    moved = True
    while moved:
        moved = False
        for axis, size in enumerate(sizes):
            for step in (1, -1):
                while 0 <= best[axis] + step < size:
                    tried = (*best[:axis], best[axis] + step, *best[axis + 1 :])
                    yield from score(tried)
                    if not is_better(known[tried], known[best]):
                        break
                    best, moved = tried, True
    return best


def is_better(new: float, old: float) -> bool:
    """Whether a score is above another by more than noise. Scores below 0 are of settings over the limit."""
    return new > old * MARGIN if old > 0 else new > old / MARGIN
