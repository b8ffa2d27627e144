"""The metrics of models under Triton's names, and any metric's text in the Prometheus format. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from gpuserve.front.observe.metrics import QUANTILES, Histogram, ModelMetrics, RequestLatencies

Labels: TypeAlias = Mapping[str, str]
_Value: TypeAlias = Callable[[ModelMetrics], float]


class Family(NamedTuple):
    """One metric; its samples are text, of a line each or of several."""

    name: str
    kind: str
    text: str
    samples: list[str]


def family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    return Family(name, kind, text, [sample(name, labels, value) for labels, value in values])


def histogram_family(
    name: str, text: str, found: Iterable[tuple[Labels, Histogram]], *, whole: bool = False
) -> Family:
    """A metric of one histogram for each set of labels; ``whole``: bounds and counts without a fraction."""
    lines: list[str] = []
    for labels, one in found:
        pairs = one.cumulative()
        if whole:
            pairs = [(bound.removesuffix(".0"), int(count)) for bound, count in pairs]
        lines += [sample(f"{name}_bucket", {**labels, "le": bound}, count) for bound, count in pairs]
        lines += [sample(f"{name}_count", labels, pairs[-1][1]), sample(f"{name}_sum", labels, one.total)]
    return Family(name, "histogram", text, lines)


def sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
    number = "NaN" if math.isnan(value) else repr(value)
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def page(families: Iterable[Family], *, also_empty: bool = False) -> bytes:
    lines: list[str] = []
    for one in families:
        if one.samples or also_empty:
            lines += [f"# HELP {one.name} {one.text}", f"# TYPE {one.name} {one.kind}", *one.samples]
    return "\n".join([*lines, ""]).encode()


def labels_of(one: ModelMetrics) -> dict[str, str]:
    return {"model": one.model, "version": one.version}


def _times(field: str) -> _Value:
    return lambda one: one.statistics.durations()[field].times


def _us(field: str) -> _Value:
    return lambda one: one.statistics.durations()[field].ns // 1000


#: name -> field of ``ModelStatistics.durations``, and what it is.
_LATENCIES: Final = {
    "request": ("success", "inference request duration in microseconds (includes cached requests)"),
    "queue": ("queue", "time in the queue in microseconds (includes cached requests)"),
    "compute_input": ("compute_input", "time to prepare inputs in microseconds (no cached requests)"),
    "compute_infer": ("compute_infer", "time in the model in microseconds (no cached requests)"),
    "compute_output": ("compute_output", "time to take outputs in microseconds (no cached requests)"),
}
_CACHE_LATENCIES: Final = {
    "cache_hit": "cache hits per model in microseconds",
    "cache_miss": "cache misses per model in microseconds, to look and to keep the answer",
}
#: A counter of each model: its name after "nv_", what it is, and its value.
_COUNTERS: Final[Sequence[tuple[str, str, _Value]]] = (
    (
        "inference_request_success",
        "Number of successful inference requests, all batch sizes",
        _times("success"),
    ),
    (
        "inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda one: one.statistics.executions().rows,
    ),
    (
        "inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda one: one.statistics.executions().count,
    ),
    *(
        (f"inference_{name}_duration_us", f"Cumulative {text}", _us(field))
        for name, (field, text) in _LATENCIES.items()
    ),
)
#: The same of each model that has a response cache.
_CACHE_COUNTERS: Final[Sequence[tuple[str, str, _Value]]] = (
    ("cache_num_hits_per_model", "Number of cache hits per model", _times("cache_hit")),
    ("cache_num_misses_per_model", "Number of cache misses per model", _times("cache_miss")),
    ("cache_hit_duration_per_model", "Total cache hit duration in microseconds", _us("cache_hit")),
    ("cache_miss_duration_per_model", "Total cache miss duration in microseconds", _us("cache_miss")),
)


def model_families(models: Sequence[ModelMetrics], now: float) -> Iterator[Family]:
    """The metrics of models. ``now`` is the time of the monotonic clock, for what has a window."""
    with_cache = [one for one in models if one.outcomes.cache_misses is not None]
    for counters, counted in ((_COUNTERS, models), (_CACHE_COUNTERS, with_cache)):
        for name, text, value in counters:
            yield family(f"nv_{name}", "counter", text, [(labels_of(one), value(one)) for one in counted])
    failures = [
        ({**labels_of(one), "reason": reason.value}, count)
        for one in models
        for reason, count in one.statistics.failures.items()
    ]
    text = "Number of failed inference requests, all batch sizes"
    yield family("nv_inference_request_failure", "counter", text, failures)
    yield from _summaries(models, now)
    text = "Milliseconds from a request to its first response"
    first = [(labels_of(one), one.first_response) for one in models if one.statistics.responses]
    yield histogram_family("nv_inference_first_response_histogram_ms", text, first, whole=True)
    text = "Number of requests that wait for an instance"
    pending = [(labels_of(one), one.gauges().get("gpuserve_queue_requests", 0)) for one in models]
    yield family("nv_inference_pending_request_count", "gauge", text, pending)
    text = "Seconds that the model took to load, the longest of its instances"
    loads = [(labels_of(m), max(one.load_s for one in m.instances.values())) for m in models if m.instances]
    yield family("nv_model_load_duration_secs", "gauge", text, loads)


def _summaries(models: Sequence[ModelMetrics], now: float) -> Iterator[Family]:
    """Quantiles of what is in the window, count and sum since the start."""
    windows = [(one, one.window.quantiles(now)) for one in models if one.window is not None]
    series = [
        (f"nv_inference_{name}_summary_us", name, *_LATENCIES[name]) for name in RequestLatencies._fields
    ]
    for name, text in _CACHE_LATENCIES.items():
        series.append((f"nv_{name}_summary_per_model", name, name, text))
    for full, name, field, text in series:
        samples: list[str] = []
        for one, quantiles in windows:
            if name in _CACHE_LATENCIES and one.outcomes.cache_misses is None:
                continue
            for quantile, value in zip(QUANTILES, quantiles[name], strict=True):
                samples.append(sample(full, {**labels_of(one), "quantile": str(quantile)}, value / 1000))
            samples.append(sample(f"{full}_count", labels_of(one), _times(field)(one)))
            samples.append(sample(f"{full}_sum", labels_of(one), _us(field)(one)))
        yield Family(full, "summary", f"Summary of {text}", samples)
