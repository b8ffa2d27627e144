"""The counters, gauges and histograms that user code keeps in a worker. Any thread may count. What has
changed is taken from here now and then by whoever sends it to the front (``running/metric_port.py``), which
adds up what all instances have counted. Nothing is sent here.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpuserve_worker.protocol.metrics import (
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
    """What a metric is: only ever more, now more and now less, or how many values were how large."""

    COUNTER = COUNTER
    GAUGE = GAUGE
    HISTOGRAM = HISTOGRAM


class MetricError(ValueError):
    """A metric cannot be made, or not be counted in that way."""


class Metric:
    """One series: a family's metric with certain labels. ``value`` is what this instance has made of it."""

    __slots__ = (
        "_bounds",
        "_family",
        "_is_changed",
        "_is_set",
        "_labels",
        "_registry",
        "_sent",
        "_values",
        "_was_set",
    )

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
        #: Of a gauge: whether it was ever set, and not only added to, and whether that is a change.
        self._was_set = False
        self._is_set = False
        self._is_changed = False

    def increment(self, value: float = 1.0) -> None:
        """Add to a counter or a gauge; only a gauge can become less."""
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
        """Let a gauge be this value."""
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
        """What this instance has counted, or set last."""
        if self._family.kind is MetricKind.HISTOGRAM:
            raise MetricError(f"metric {self._family.name!r} is a histogram, which has no single value")
        return self._values[0]

    def take(self) -> MetricChange:
        """What has become of it since the last time; the registry's lock is held."""
        name, text, kind = self._family
        now, sent = tuple(self._values), self._sent
        is_set = self._is_set
        values = now if is_set else tuple(a - b for a, b in zip(now, sent, strict=True))
        self._sent = list(now)
        self._is_changed = self._is_set = False
        return MetricChange(name, kind.value, text, self._labels, self._bounds, is_set, values)

    def start_over(self) -> None:
        """Let all of it count as a change; the registry's lock is held."""
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
    """What the series of a family have in common."""

    name: str
    text: str
    kind: MetricKind


class MetricRegistry:
    """The metrics of one worker. ``wake`` is called when something changes and nothing had before."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._families: dict[str, FamilyName] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}
        self._changes: list[Metric] = []
        self._wake: Callable[[], None] = _nothing

    def family(self, name: str, text: str, kind: MetricKind) -> FamilyName:
        """Declare a family, or find it again. Raises ``MetricError``: it is there, of another kind."""
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
        """The series of a family with these labels, which is made when it is first asked for."""
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
                metric.start_over()  # it is shown from now on
        return metric

    def changed(self, metric: Metric) -> None:
        self._changes.append(metric)
        if len(self._changes) == 1:
            self._wake()

    def follow(self, wake: Callable[[], None]) -> None:
        """Have it told when something changes, also if that was before."""
        with self.lock:
            self._wake = wake
            if self._changes:
                wake()

    def take(self) -> tuple[MetricChange, ...]:
        """What has changed since the last time."""
        with self.lock:
            changes, self._changes = self._changes, []
            return tuple([metric.take() for metric in changes])

    def start_over(self) -> None:
        """Let all that was ever counted be taken once more: whoever took it is gone."""
        with self.lock:
            for metric in self._series.values():
                metric.start_over()


def _nothing() -> None: ...
