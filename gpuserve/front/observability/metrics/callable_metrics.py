"""Metrics that inference callables define, summed over all instances of a server.

A worker sends the changes since its last message; the values of a dead worker stay. A family is shared by all
models with it, as in Triton. Messages of workers are checked like a client's. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from gpuserve.config.settings.logs import RateLimitedLog
from gpuserve.front.observability.metrics.prometheus import Family, sample
from gpuserve_worker.protocol import metric_changes
from gpuserve_worker.protocol.metric_changes import GAUGE, HISTOGRAM, MetricChange

logger = logging.getLogger(__name__)

#: Limit of series of all models together: each is some lines of every page.
MAX_SERIES: Final = 4000
_OF_HISTOGRAM: Final = ("_bucket", "_count", "_sum")

#: The name and the version of a model.
Owner: TypeAlias = tuple[str, int]


@dataclass(eq=False, slots=True)
class _Series:
    """One line of the page, or the lines of a histogram. ``owners`` are the models that contribute."""

    labels: dict[str, str]
    bounds: tuple[float, ...]
    values: list[float]
    owners: set[Owner] = field(default_factory=set)


class _Family(NamedTuple):
    kind: str
    text: str
    series: dict[tuple[tuple[str, str], ...], _Series]


class CallableMetrics:
    """The families of all models. ``max_series`` limits their series together."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._families: dict[str, _Family] = {}
        #: Every name on the page, and the family that uses it.
        self._names: dict[str, str] = {}
        self._max_series = max_series
        self._n_series = 0
        self._refusal_log = RateLimitedLog(logger)

    def apply(self, owner: Owner, changes: Sequence[MetricChange]) -> None:
        """Apply an instance's changes. Raise ``ValueError`` or ``TypeError`` if they are invalid."""
        for fields in changes:
            change = MetricChange(*fields)
            _check(change)
            series = self._series(owner, change)
            if series is None:
                continue
            series.owners.add(owner)
            if change.is_set:
                series.values = list(change.values)
            else:
                series.values = [a + b for a, b in zip(series.values, change.values, strict=True)]

    def forget(self, owner: Owner) -> None:
        """Drop the series of a model that is served no more, unless other models contribute."""
        for name, family in list(self._families.items()):
            for key, series in list(family.series.items()):
                series.owners.discard(owner)
                if not series.owners:
                    del family.series[key]
                    self._n_series -= 1
            if not family.series:
                del self._families[name]
                self._names = {taken: of for taken, of in self._names.items() if of != name}

    def families(self) -> Iterator[Family]:
        for name, family in sorted(self._families.items()):
            samples: list[str] = []
            for _, series in sorted(family.series.items()):
                is_histogram = family.kind == HISTOGRAM
                line = sample(name, series.labels, series.values[0])
                samples += _histogram_lines(name, series) if is_histogram else [line]
            text = family.text.replace("\\", "\\\\").replace("\n", "\\n")
            yield Family(name, family.kind, text, samples)

    def _series(self, owner: Owner, change: MetricChange) -> _Series | None:
        """Return the series of a change, or None, with a log line, if it cannot exist."""
        family = self._families.get(change.family)
        if family is None:
            family = self._new_family(owner, change)
        elif family.kind != change.kind:
            self._refuse(owner, change, f"it is a {family.kind} of another model, and here a {change.kind}")
            return None
        if family is None:
            return None
        key = tuple(sorted(change.labels.items()))
        series = family.series.get(key)
        if series is None:
            if self._n_series >= self._max_series:
                self._refuse(owner, change, f"all models together may have {self._max_series} series")
                return None
            self._n_series += 1
            zeros = [0.0] * len(change.values)
            series = family.series[key] = _Series(change.labels, tuple(change.bounds), zeros)
        elif series.bounds != tuple(change.bounds):
            self._refuse(owner, change, f"its buckets are {series.bounds} elsewhere, here {change.bounds}")
            return None
        return series

    def _new_family(self, owner: Owner, change: MetricChange) -> _Family | None:
        endings = _OF_HISTOGRAM if change.kind == HISTOGRAM else ("",)
        names = {change.family, *(change.family + ending for ending in endings)}
        if taken := sorted(names & self._names.keys()):
            of = self._names[taken[0]]
            self._refuse(owner, change, f"{taken[0]!r} on the page is of the metric {of!r}")
            return None
        self._names |= dict.fromkeys(names, change.family)
        family = self._families[change.family] = _Family(change.kind, change.text, {})
        return family

    def _refuse(self, owner: Owner, change: MetricChange, why: str) -> None:
        self._refusal_log.say("model %s: its metric %r is not shown: %s", owner[0], change.family, why)


def _check(change: MetricChange) -> None:
    metric_changes.check_family(change.family, change.text, change.kind)
    metric_changes.check_series(change.family, change.kind, change.labels, change.bounds)
    expected = len(change.bounds) + 2 if change.kind == HISTOGRAM else 1
    if len(change.values) != expected or not all(map(metric_changes.is_number, change.values)):
        raise ValueError(f"metric {change.family!r}: {change.values} are not {expected} numbers")
    if change.is_set and change.kind != GAUGE:
        raise ValueError(f"metric {change.family!r} is a {change.kind}, and was set")


def _histogram_lines(name: str, series: _Series) -> list[str]:
    total, *counts = series.values
    bounds = [*map(str, series.bounds), "+Inf"]
    running = list(accumulate(counts))
    buckets = zip(bounds, running, strict=True)
    lines = [sample(f"{name}_bucket", {**series.labels, "le": bound}, count) for bound, count in buckets]
    lines.append(sample(f"{name}_count", series.labels, running[-1]))
    lines.append(sample(f"{name}_sum", series.labels, total))
    return lines
