"""What the server says of its own time: the statistics extension, before and after a level. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Sums since the server started, over all versions of the model that are asked for."""

    success_count: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    compute_count: int = 0
    cache_hit_count: int = 0
    inference_count: int = 0
    execution_count: int = 0

    def __add__(self, other: ServerTotals) -> ServerTotals:
        return ServerTotals(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class ServerTime:
    """Means over the requests of a level; ``rows_per_execution`` is the mean size of a merged batch."""

    requests: int
    queue_ms: float
    compute_input_ms: float
    compute_infer_ms: float
    compute_output_ms: float
    executions: int
    rows_per_execution: float
    cache_hits: int


def totals(statistics: Mapping[str, Any]) -> ServerTotals:
    """The sums in one entry of ``model_stats`` of the JSON form, whose fields may be missing or texts."""
    durations = statistics.get("inference_stats", {})

    def of(name: str, key: str) -> int:
        return int(durations.get(name, {}).get(key, 0))

    return ServerTotals(
        of("success", "count"),
        of("queue", "ns"),
        of("compute_input", "ns"),
        of("compute_infer", "ns"),
        of("compute_output", "ns"),
        of("compute_infer", "count"),
        of("cache_hit", "count"),
        int(statistics.get("inference_count", 0)),
        int(statistics.get("execution_count", 0)),
    )


def difference(before: ServerTotals | None, after: ServerTotals | None) -> ServerTime | None:
    """The means between two readings; None where the server does not count, or counted nothing."""
    if before is None or after is None:
        return None
    since = [getattr(after, one.name) - getattr(before, one.name) for one in fields(after)]
    found = ServerTotals(*since)
    if found.success_count <= 0 or min(since) < 0:  # the server was started anew
        return None
    computed = max(found.compute_count, 1)
    return ServerTime(
        found.success_count,
        found.queue_ns / found.success_count / 1e6,
        found.compute_input_ns / computed / 1e6,
        found.compute_infer_ns / computed / 1e6,
        found.compute_output_ns / computed / 1e6,
        found.execution_count,
        found.inference_count / max(found.execution_count, 1),
        found.cache_hit_count,
    )
