"""Metric families in the Prometheus text format, and in OpenMetrics, which has exemplars. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from gpuserve.front.observability.metrics.model_metrics import Exemplar, Histogram, ModelMetrics

Labels: TypeAlias = Mapping[str, str]
TEXT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE: Final = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
OPEN_METRICS_END: Final = b"# EOF\n"
_TOTAL: Final = "_total"
_INTEGER_BOUND: Final = re.compile(r'(?<=[{,])le="(\d+)"')


class Family(NamedTuple):
    """One metric. Each of its ``samples`` is the text of one or several lines."""

    name: str
    kind: str
    text: str
    samples: list[str]
    #: Exemplars by the series of their samples, for OpenMetrics.
    exemplars: dict[str, Exemplar] = {}  # noqa: RUF012


def family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    return Family(name, kind, text, [sample(name, labels, value) for labels, value in values])


def histogram_family(
    name: str, text: str, found: Iterable[tuple[Labels, Histogram]], *, whole: bool = False
) -> Family:
    """Return a metric of one histogram for each set of labels. ``whole`` writes integers."""
    lines: list[str] = []
    exemplars: dict[str, Exemplar] = {}
    for labels, one in found:
        pairs = one.cumulative()
        if whole:
            pairs = [(bound.removesuffix(".0"), int(count)) for bound, count in pairs]
        buckets = [sample(f"{name}_bucket", {**labels, "le": bound}, count) for bound, count in pairs]
        lines += buckets
        exemplars |= {series_of(buckets[bucket]): exemplar for bucket, exemplar in one.exemplars.items()}
        lines += [sample(f"{name}_count", labels, pairs[-1][1]), sample(f"{name}_sum", labels, one.total)]
    return Family(name, "histogram", text, lines, exemplars)


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


def open_metrics_page(families: Iterable[Family], *, also_empty: bool = False) -> bytes:
    """Return families in OpenMetrics, without the line at the end of a page. A counter whose name lacks
    ``_total`` is of unknown type there.
    """
    lines: list[str] = []
    for one in families:
        if not (one.samples or also_empty):
            continue
        name, kind = one.name, one.kind
        if kind == "counter":
            name, kind = (name.removesuffix(_TOTAL), kind) if name.endswith(_TOTAL) else (name, "unknown")
        text = one.text.replace('"', '\\"')
        lines += [f"# TYPE {name} {kind}", f"# HELP {name} {text}"]
        for line in filter(None, "\n".join(one.samples).split("\n")):
            exemplar = one.exemplars.get(series_of(line)) if one.exemplars else None
            line = _INTEGER_BOUND.sub(r'le="\1.0"', line) if kind == "histogram" else line
            if exemplar is not None:
                trace_id, value, at = exemplar
                line = f'{line} # {{trace_id="{trace_id}"}} {value!r} {at:.3f}'
            lines.append(line)
    return "\n".join([*lines, ""]).encode()


def series_of(sample: str) -> str:
    return sample.rpartition(" ")[0]


def labels_of(one: ModelMetrics) -> dict[str, str]:
    return {"model": one.model, "version": one.version}
