"""Rates of models as differences between two readings of their metrics, and the history of rates. Pure.

Latency quantiles are computed from the differences of histogram buckets, so they concern exactly the time
between the readings. The history has a point every few seconds in arrays of fixed length
(``NBYTES_OF_MODEL``).
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.front.observability.metrics.model_metrics import (
    DURATION_BUCKETS,
    TO_FIRST_BUCKETS,
    ModelMetrics,
    StepMetrics,
)

#: The name and the version of a model.
ModelKey: TypeAlias = tuple[str, str]


class InstanceCounts(NamedTuple):
    """Counts of one instance: batches, and seconds in its callable."""

    batches: int
    busy_s: float


class ModelCounts(NamedTuple):
    """Counts of a model: ``latencies`` by duration bucket, ``rows`` of ``batches``. Of a stepped callable:
    ``steps``, ``active`` requests of the steps in the sum, ``responses``, times to the ``first`` response.
    """

    latencies: Sequence[int]
    failures: int
    rejections: int
    batches: int
    rows: int
    steps: int
    active: int
    responses: int
    first: Sequence[int]
    instances: Mapping[str, InstanceCounts]


class InstanceRates(NamedTuple):
    """Rates of one instance. ``busy`` is the time in the callable, over 1 if batches run concurrently."""

    batches_per_s: float
    busy: float


class ModelRates(NamedTuple):
    """Rates of a model. ``requests_per_s`` counts successful requests; ``batch_size`` is the mean number of
    rows of a batch, or of active requests of a step. Unknown values are None, as are rates of steps for
    other callables.
    """

    requests_per_s: float
    failures_per_s: float
    rejections_per_s: float
    batch_size: float | None
    p50_s: float | None
    p99_s: float | None
    steps_per_s: float | None
    responses_per_s: float | None
    first_p50_s: float | None
    instances: Mapping[str, InstanceRates]


NO_COUNTS: Final = ModelCounts(
    (0,) * (len(DURATION_BUCKETS) + 1), *(0,) * 7, (0,) * (len(TO_FIRST_BUCKETS) + 1), {}
)
_IDLE: Final = InstanceCounts(0, 0.0)
_NO_STEPS: Final = StepMetrics()
_RESTS: Final = InstanceRates(0.0, 0.0)


def counts_of(metrics: ModelMetrics) -> ModelCounts:
    """Return the counts of a model up to now."""
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
    outcomes, steps = metrics.outcomes, metrics.steps or _NO_STEPS
    return ModelCounts(
        tuple(metrics.request_duration.counts),
        sum(outcomes.failures.values()),
        sum(outcomes.rejections.values()),
        batches,
        rows,
        steps.steps,
        steps.active,
        steps.responses,
        tuple(metrics.to_first.counts),
        instances,
    )


def subtract_counts(before: ModelCounts, now: ModelCounts) -> ModelCounts:
    """Return the counts between two readings. A count below the earlier one was restarted from zero."""
    if now == before:  # true for most models of a large server most of the time
        return NO_COUNTS._replace(instances=dict.fromkeys(now.instances, _IDLE))
    shrunk = now.batches < before.batches or now.steps < before.steps
    if shrunk or sum(now.latencies) < sum(before.latencies):
        before = NO_COUNTS
    instances = {
        name: InstanceCounts(max(0, one.batches - old.batches), max(0.0, one.busy_s - old.busy_s))
        for name, one in now.instances.items()
        for old in (before.instances.get(name, _IDLE),)
    }
    return _combined(now, before, lambda new, old: max(0, new - old))._replace(instances=instances)


def add_counts(one: ModelCounts, other: ModelCounts) -> ModelCounts:
    """Return the sum of two models' counts, without instances."""
    return one if other[:-1] == NO_COUNTS[:-1] else _combined(one, other, operator.add)


def _combined(one: ModelCounts, other: ModelCounts, combine: Callable[[int, int], int]) -> ModelCounts:
    """Return two models' counts combined number by number, without instances."""
    pairs: Iterable[Any] = zip(one[:-1], other[:-1], strict=True)
    values: list[Any] = [
        [*map(combine, *pair)] if isinstance(pair[0], Sequence) else combine(*pair) for pair in pairs
    ]
    return ModelCounts._make([*values, {}])


def rates_of(counted: ModelCounts, elapsed_s: float) -> ModelRates:
    """Return the rates of counts over ``elapsed_s`` seconds."""
    if counted[:-1] == NO_COUNTS[:-1]:
        return ModelRates(0.0, 0.0, 0.0, *(None,) * 6, dict.fromkeys(counted.instances, _RESTS))
    batches, rows = counted.batches, counted.rows
    if counted.steps:  # its batches have one request
        batches, rows = counted.steps, counted.active
    return ModelRates(
        sum(counted.latencies) / elapsed_s,
        counted.failures / elapsed_s,
        counted.rejections / elapsed_s,
        rows / batches if batches else None,
        quantile(counted.latencies, 0.5),
        quantile(counted.latencies, 0.99),
        counted.steps / elapsed_s if counted.steps else None,
        counted.responses / elapsed_s if counted.steps else None,
        quantile(counted.first, 0.5, TO_FIRST_BUCKETS) if counted.steps else None,
        {
            name: InstanceRates(one.batches / elapsed_s, one.busy_s / elapsed_s)
            for name, one in counted.instances.items()
        },
    )


def quantile(counts: Sequence[int], part: float, bounds: Sequence[float] = DURATION_BUCKETS) -> float | None:
    """Return an interpolated quantile of a histogram, at most the last bound; None if empty."""
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
    """A meter of model rates since the last reading of each model."""

    def __init__(self, read: Mapping[ModelKey, tuple[float, ModelCounts]] | None = None) -> None:
        self._read = dict(read or {})

    def counted(self, metrics: ModelMetrics, now: float) -> tuple[ModelCounts, float]:
        """Return the counts of a model since its last reading, and the seconds in between."""
        counts, of = counts_of(metrics), (metrics.model, metrics.version)
        read_at, before = self._read.get(of, (-math.inf, counts))
        self._read[of] = now, counts
        return subtract_counts(before, counts), now - read_at

    def read(self, metrics: ModelMetrics, now: float) -> ModelRates:
        return rates_of(*self.counted(metrics, now))

    def retain(self, those: Iterable[ModelKey]) -> None:
        """Drop the readings of all models but these."""
        kept = set(those)
        self._read = {of: one for of, one in self._read.items() if of in kept}

    def copy(self) -> RateMeter:
        """Return a meter that continues from the same readings."""
        return RateMeter(self._read)


# ---- history -------------------------------------------------------------------------------------

#: The values of a point in this order; unknown values are NaN.
FIELDS: Final = ("requests_per_s", "failures_per_s", "batch_size", "queued", "saturation", "p50_s", "p99_s")
INTERVAL_S: Final = 5.0
POINTS: Final = 180
NBYTES_OF_MODEL: Final = POINTS * len(FIELDS) * array("f").itemsize
#: The document of a model without points.
_NO_SERIES: Final[dict[str, list[float]]] = {field: [] for field in FIELDS}
NO_POINTS: Final[dict[str, Any]] = {"interval_s": INTERVAL_S, "times": [], "series": _NO_SERIES}
_NOT_KNOWN: Final = (math.nan,) * len(FIELDS)


class History:
    """The last points of each present model. Points of absent models are dropped at once."""

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._times = array("d", [0.0] * points)
        self._columns: dict[ModelKey, array[float]] = {}
        #: The number of points so far.
        self._n = 0

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, time_s: float, rows: Mapping[ModelKey, Sequence[float | None]]) -> None:
        """Add a point for each of these models, at a time in seconds since 1970."""
        at, width = self._n % self._points, len(FIELDS)
        self._n += 1
        self._times[at] = time_s
        for gone in self._columns.keys() - rows.keys():
            del self._columns[gone]
        for of, row in rows.items():
            column = self._columns.get(of)
            if column is None:
                column = self._columns[of] = array("f", _NOT_KNOWN * self._points)
            values = [math.nan if one is None else one for one in row]
            column[at * width : (at + 1) * width] = array("f", values)

    def document(self, of: ModelKey) -> dict[str, Any] | None:
        """Return the points of a model by field, the oldest first, or None for an unknown model."""
        column = self._columns.get(of)
        if column is None:
            return None
        n, first = self._n, self._n % self._points
        order = range(n) if n <= self._points else (*range(first, self._points), *range(first))
        return {
            "interval_s": INTERVAL_S,
            "times": [round(self._times[at], 1) for at in order],
            "series": {
                field: [
                    None if math.isnan(value) else float(f"{value:.4g}")
                    for value in (column[at * len(FIELDS) + place] for at in order)
                ]
                for place, field in enumerate(FIELDS)
            },
        }
