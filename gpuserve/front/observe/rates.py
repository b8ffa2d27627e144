"""Rates of models: differences between what their metrics had counted at two times. Quantiles of latencies
come from the differences of the histogram's buckets, so they are of that very time. Pure: times come in, and
nothing is counted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from gpuserve.front.observe.metrics import DURATION_BUCKETS, ModelMetrics

#: The name and the version of a model.
Of: TypeAlias = tuple[str, str]


class InstanceCounts(NamedTuple):
    """What one instance has done: its batches, and the seconds in its callable."""

    batches: int
    busy_s: float


class ModelCounts(NamedTuple):
    """What a model has counted. ``latencies`` are the answered requests by bucket of their duration, ``rows``
    those of all ``batches`` together.
    """

    latencies: Sequence[int]
    failures: int
    rejections: int
    batches: int
    rows: int
    instances: Mapping[str, InstanceCounts]


class InstanceRates(NamedTuple):
    """``busy``: the part of the time in the callable; more than 1 where several batches run at once."""

    batches_per_s: float
    busy: float


class ModelRates(NamedTuple):
    """``requests_per_s`` are those that were answered well. What there is nothing to tell of is None."""

    requests_per_s: float
    failures_per_s: float
    rejections_per_s: float
    batch_size: float | None
    p50_s: float | None
    p99_s: float | None
    instances: Mapping[str, InstanceRates]


NOTHING: Final = ModelCounts((0,) * (len(DURATION_BUCKETS) + 1), 0, 0, 0, 0, {})
_IDLE: Final = InstanceCounts(0, 0.0)
_RESTS: Final = InstanceRates(0.0, 0.0)


def counts_of(metrics: ModelMetrics) -> ModelCounts:
    """What a model has counted up to now."""
    batches = rows = 0
    instances = {}
    for name, by_size in metrics.statistics.instances.items():
        ran = failed = 0
        for size, cell in by_size.items():
            ran += cell.count
            failed += cell.failures
            rows += size * cell.count
        batches += ran
        compute = metrics.instances.get(name)
        instances[name] = InstanceCounts(ran + failed, compute.compute.total if compute else 0.0)
    outcomes = metrics.outcomes
    return ModelCounts(
        tuple(metrics.request_duration.counts),
        sum(outcomes.failures.values()),
        sum(outcomes.rejections.values()),
        batches,
        rows,
        instances,
    )


def difference(before: ModelCounts, now: ModelCounts) -> ModelCounts:
    """What was counted between two readings; what counts less than before was counted anew from nothing."""
    if now == before:  # as most models of a large server at most times
        return NOTHING._replace(instances=dict.fromkeys(now.instances, _IDLE))
    if sum(now.latencies) < sum(before.latencies) or now.batches < before.batches:
        before = NOTHING
    return ModelCounts(
        [new - old for old, new in zip(before.latencies, now.latencies, strict=True)],
        max(0, now.failures - before.failures),
        max(0, now.rejections - before.rejections),
        now.batches - before.batches,
        now.rows - before.rows,
        {name: _less(one, before.instances.get(name, _IDLE)) for name, one in now.instances.items()},
    )


def _less(now: InstanceCounts, before: InstanceCounts) -> InstanceCounts:
    return InstanceCounts(max(0, now.batches - before.batches), max(0.0, now.busy_s - before.busy_s))


def together(one: ModelCounts, other: ModelCounts) -> ModelCounts:
    """What two models have counted, as if they were one; their instances are left out."""
    if other[:5] == NOTHING[:5]:
        return one
    return ModelCounts(
        [a + b for a, b in zip(one.latencies, other.latencies, strict=True)],
        one.failures + other.failures,
        one.rejections + other.rejections,
        one.batches + other.batches,
        one.rows + other.rows,
        {},
    )


def rates_of(counted: ModelCounts, elapsed_s: float) -> ModelRates:
    """The rates of what was counted in so many seconds."""
    if counted[:5] == NOTHING[:5]:
        return ModelRates(0.0, 0.0, 0.0, None, None, None, dict.fromkeys(counted.instances, _RESTS))
    return ModelRates(
        sum(counted.latencies) / elapsed_s,
        counted.failures / elapsed_s,
        counted.rejections / elapsed_s,
        counted.rows / counted.batches if counted.batches else None,
        quantile(counted.latencies, 0.5),
        quantile(counted.latencies, 0.99),
        {
            name: InstanceRates(one.batches / elapsed_s, one.busy_s / elapsed_s)
            for name, one in counted.instances.items()
        },
    )


def quantile(counts: Sequence[int], part: float, bounds: Sequence[float] = DURATION_BUCKETS) -> float | None:
    """The quantile of a histogram, where values are spread evenly over their bucket; None: it is empty. What
    is over the last bound counts as that.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = part * total, 0
    for number, count in enumerate(counts):
        if count and below + count >= rank:
            if number == len(bounds):
                break
            lowest = bounds[number - 1] if number else 0.0
            return lowest + (bounds[number] - lowest) * (rank - below) / count
        below += count
    return float(bounds[-1])


class RateMeter:
    """The rates of models since each was read here the last time."""

    def __init__(self, read: Mapping[Of, tuple[float, ModelCounts]] | None = None) -> None:
        self._read = dict(read or {})

    def counted(self, metrics: ModelMetrics, now: float) -> tuple[ModelCounts, float]:
        """What a model has counted since its last reading, and in how many seconds; at the first one nothing
        has happened yet.
        """
        counts, of = counts_of(metrics), (metrics.model, metrics.version)
        read_at, before = self._read.get(of, (-math.inf, counts))
        self._read[of] = now, counts
        return difference(before, counts), now - read_at

    def read(self, metrics: ModelMetrics, now: float) -> ModelRates:
        return rates_of(*self.counted(metrics, now))

    def keep(self, those: Iterable[Of]) -> None:
        """Forget all models but these."""
        kept = set(those)
        self._read = {of: one for of, one in self._read.items() if of in kept}

    def copy(self) -> RateMeter:
        """Another one that goes on from the same readings."""
        return RateMeter(self._read)
