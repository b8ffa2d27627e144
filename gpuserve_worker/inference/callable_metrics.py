"""The counters, gauges and histograms of user code in a worker. Any thread may update them. ``MetricPort``
collects the changes and sends them to the front, which sums the values of all instances.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpuserve_worker.protocol.metric_changes import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    MAX_SERIES,
    MetricChange,
    check_family,
    check_series,
    is_number,
)


class MetricKind(enum.Enum):
    """The kind of a metric: a value that only grows, a value that can be set, or a distribution of values."""

    COUNTER = COUNTER
    GAUGE = GAUGE
    HISTOGRAM = HISTOGRAM


class MetricError(ValueError):
    """A metric cannot be created or updated in this way."""


class Metric:
    """One time series: a family's metric with certain labels."""

    __slots__ = (
        "_bounds", "_family", "_is_changed", "_is_set", "_labels", "_registry", "_sent", "_values",
        "_was_set",
    )  # fmt: skip

    def __init__(
        self, registry: MetricRegistry, family: FamilyName, labels: dict[str, str], bounds: tuple[float, ...]
    ) -> None:
        self._registry = registry
        self._family = family
        self._labels = labels
        self._bounds = bounds
        n = len(bounds) + 2 if family.kind is MetricKind.HISTOGRAM else 1
        self._values = [0.0] * n
        self._sent = [0.0] * n
        #: For gauges: whether the gauge was ever set, and whether it was set since the last collection.
        self._was_set = False
        self._is_set = False
        self._is_changed = False

    def increment(self, value: float = 1.0) -> None:
        """Add to a counter or a gauge. Only a gauge can decrease."""
        if self._family.kind is MetricKind.HISTOGRAM:
            raise MetricError(
                f"metric {self._family.name!r} is a histogram, which is not incremented: observe()"
            )
        self._check(value)
        if value < 0 and self._family.kind is MetricKind.COUNTER:
            raise MetricError(
                f"metric {self._family.name!r} is a counter, which never becomes less, incremented by {value}"
            )
        with self._registry.lock:
            self._values[0] += value
            self._changed()

    def set(self, value: float) -> None:
        """Set a gauge to this value."""
        if self._family.kind is not MetricKind.GAUGE:
            raise MetricError(
                f"metric {self._family.name!r} is a {self._family.kind.value}: only a gauge can be set"
            )
        self._check(value)
        with self._registry.lock:
            self._values[0] = float(value)
            self._was_set = self._is_set = True
            self._changed()

    def observe(self, value: float) -> None:
        """Count a value in its bucket of a histogram."""
        if self._family.kind is not MetricKind.HISTOGRAM:
            raise MetricError(
                f"metric {self._family.name!r} is a {self._family.kind.value}: only a histogram observes"
            )
        self._check(value)
        with self._registry.lock:
            self._values[0] += value
            self._values[1 + bisect_left(self._bounds, value)] += 1
            self._changed()

    def value(self) -> float:
        """Return the sum of this instance's increments, or the last set value."""
        if self._family.kind is MetricKind.HISTOGRAM:
            raise MetricError(f"metric {self._family.name!r} is a histogram, which has no single value")
        return self._values[0]

    def collect(self) -> MetricChange:
        """Return the change since the last call. The caller holds the registry's lock."""
        name, text, kind = self._family
        now, sent = tuple(self._values), self._sent
        is_set = self._is_set
        values = now if is_set else tuple(a - b for a, b in zip(now, sent, strict=True))
        self._sent = list(now)
        self._is_changed = self._is_set = False
        return MetricChange(name, kind.value, text, self._labels, self._bounds, is_set, values)

    def start_over(self) -> None:
        """Make the whole value count as a change. The caller holds the registry's lock."""
        self._sent = [0.0] * len(self._values)
        self._is_set = self._was_set
        self._changed()

    def _check(self, value: float) -> None:
        if not is_number(value):
            raise MetricError(f"metric {self._family.name!r}: expected a finite number, given {value!r}")

    def _changed(self) -> None:
        if not self._is_changed:
            self._is_changed = True
            self._registry.changed(self)


class FamilyName(NamedTuple):
    """The common attributes of a family's series."""

    name: str
    text: str
    kind: MetricKind


class MetricRegistry:
    """The metrics of one worker. ``wake`` is called at the first change after a collection."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._families: dict[str, FamilyName] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}
        self._changes: list[Metric] = []
        self._wake: Callable[[], None] = _nothing

    def family(self, name: str, text: str, kind: MetricKind) -> FamilyName:
        """Return the family of a name, perhaps new; raise ``MetricError`` if its kind differs."""
        try:
            check_family(name, text, kind.value if isinstance(kind, MetricKind) else kind)
        except ValueError as error:
            raise MetricError(str(error)) from None
        with self.lock:
            found = self._families.setdefault(name, FamilyName(name, text, kind))
        if found.kind is not kind:
            raise MetricError(f"metric {name!r} is a {found.kind.value} already, and now a {kind.value}")
        return found

    def series(
        self, family: FamilyName, labels: Mapping[str, str] | None, bounds: Sequence[float] | None
    ) -> Metric:
        """Return the series of a family with these labels, created at the first call."""
        if family.kind is MetricKind.HISTOGRAM and bounds is None:
            raise MetricError(
                f"metric {family.name!r} is a histogram: expected the upper bounds of its buckets"
            )
        found = dict(labels) if isinstance(labels, Mapping) else {} if labels is None else labels
        try:
            check_series(family.name, family.kind.value, found, bounds)
        except ValueError as error:
            raise MetricError(str(error)) from None
        key = (family.name, tuple(sorted(found.items())))
        with self.lock:
            metric = self._series.get(key)
            if metric is None:
                if len(self._series) >= MAX_SERIES:
                    raise MetricError(
                        f"metric {family.name!r}: an instance may have {MAX_SERIES} series, which it "
                        "has; labels should not tell requests apart"
                    )
                limits = tuple(map(float, bounds or ()))
                metric = self._series[key] = Metric(self, family, found, limits)
                metric.start_over()  # the series appears on the metrics page at once
        return metric

    def changed(self, metric: Metric) -> None:
        self._changes.append(metric)
        if len(self._changes) == 1:
            self._wake()

    def follow(self, wake: Callable[[], None]) -> None:
        """Set the function that is called at changes, and call it now if there are uncollected changes."""
        with self.lock:
            self._wake = wake
            if self._changes:
                wake()

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def collect(self) -> tuple[MetricChange, ...]:
        """Return the changes since the last call."""
        with self.lock:
            changes, self._changes = self._changes, []
            return tuple([metric.collect() for metric in changes])

    def start_over(self) -> None:
        """Make all values count as changes again, because their receiver is gone."""
        with self.lock:
            for metric in self._series.values():
                metric.start_over()


def _nothing() -> None: ...
