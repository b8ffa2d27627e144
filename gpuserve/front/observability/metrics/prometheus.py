"""Metric families in the Prometheus text format. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from gpuserve.front.observability.metrics.model_metrics import Histogram, ModelMetrics

Labels: TypeAlias = Mapping[str, str]


class Family(NamedTuple):
    """One metric. Each of its ``samples`` is the text of one or several lines."""

    name: str
    kind: str
    text: str
    samples: list[str]


def family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    return Family(name, kind, text, [sample(name, labels, value) for labels, value in values])


def histogram_family(
    name: str, text: str, found: Iterable[tuple[Labels, Histogram]], *, whole: bool = False
) -> Family:
    """Return a metric of one histogram for each set of labels. ``whole`` writes integers."""
    lines: list[str] = []
    for labels, one in found:
        pairs = one.cumulative()
        if whole:
            pairs = [(bound.removesuffix(".0"), int(count)) for bound, count in pairs]
        lines += [sample(f"{name}_bucket", {**labels, "le": bound}, count) for bound, count in pairs]
        lines += [sample(f"{name}_count", labels, pairs[-1][1]), sample(f"{name}_sum", labels, one.total)]
    return Family(name, "histogram", text, lines)


def sample(name: str, labels: Labels, value: float) -> str:
    pairs = []
    for key in sorted(labels):
        escaped = labels[key].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{key}="{escaped}"')
    inside = ",".join(pairs)
    number = "NaN" if math.isnan(value) else repr(value)
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def page(families: Iterable[Family], *, also_empty: bool = False) -> bytes:
    lines: list[str] = []
    for one in families:
        if one.samples or also_empty:
            lines += [f"# HELP {one.name} {one.text}", f"# TYPE {one.name} {one.kind}", *one.samples]
    return "\n".join([*lines, ""]).encode()


def labels_of(one: ModelMetrics) -> dict[str, str]:
    return {"model": one.model, "version": one.version}
