"""A report beside an earlier one: the ratios of the levels that both have. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpuserve.bench.report import Report
from gpuserve.bench.results import LevelResult


@dataclass(frozen=True, slots=True)
class Ratios:
    """New over old, of one level; None where there is nothing to divide by."""

    throughput: float | None
    p50: float | None
    p99: float | None


def compared(report: Report, baseline: Report | None) -> list[Ratios | None]:
    """For each level of the report; None where the baseline has no such level."""
    earlier = {one.level: one for one in baseline.levels} if baseline else {}
    return [_ratios(one, earlier.get(one.level)) for one in report.levels]


def _ratios(new: LevelResult, old: LevelResult | None) -> Ratios | None:
    if old is None:
        return None
    return Ratios(
        _ratio(new.throughput, old.throughput),
        _ratio(new.latency.p50_ms, old.latency.p50_ms),
        _ratio(new.latency.p99_ms, old.latency.p99_ms),
    )


def _ratio(new: float, old: float) -> float | None:
    return new / old if new and old else None
