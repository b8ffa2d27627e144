"""What was measured, how good settings are, and which points no other beats. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuserve.bench.results import LevelResult
from gpuserve.tune.axes import Settings
from gpuserve.tune.limits import LatencyLimit


@dataclass(frozen=True, slots=True)
class Point:
    """One level of load on a server with these settings; ``latency_ms`` is the figure of the limit."""

    settings: Settings
    concurrency: float
    throughput: float
    latency_ms: float


def points_of(settings: Settings, levels: Iterable[LevelResult], limit: LatencyLimit) -> list[Point]:
    """The levels in which every request was answered."""
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
    """The point of the highest throughput under the limit."""
    within = [one for one in points if one.latency_ms <= limit.most_ms]
    return max(within, key=lambda one: (one.throughput, -one.latency_ms), default=None)


def front(points: Iterable[Point]) -> list[Point]:
    """The points to which no other is at least as good in both, by ascending throughput."""
    found: list[Point] = []
    for one in sorted(points, key=lambda one: (-one.throughput, one.latency_ms)):
        if not found or one.latency_ms < found[-1].latency_ms:
            found.append(one)
    return found[::-1]
