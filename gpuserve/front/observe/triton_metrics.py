"""The metrics of models under Triton's names, so that boards and alerts made for it go on working; and the
text of any metric in the Prometheus format 0.0.4. Pure; nothing is counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from gpuserve.front.observe.metrics import QUANTILES, ModelMetrics, RequestLatencies

#: name -> field of ``ModelStatistics.durations``, and what it is.
_LATENCIES: Final = {
    "request": ("success", "inference request duration in microseconds (includes cached requests)"),
    "queue": ("queue", "time in the queue in microseconds (includes cached requests)"),
    "compute_input": ("compute_input", "time to prepare inputs in microseconds (no cached requests)"),
    "compute_infer": ("compute_infer", "time in the model in microseconds (no cached requests)"),
    "compute_output": ("compute_output", "time to take outputs in microseconds (no cached requests)"),
}
_Value: TypeAlias = Callable[[ModelMetrics], float]


class Family(NamedTuple):
    """One metric; its samples are lines of text."""

    name: str
    kind: str
    text: str
    samples: Sequence[str]


def sample(name: str, labels: dict[str, str], value: float) -> str:
    """The line of one value, with the labels in alphabetical order."""
    inside = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
    number = "NaN" if math.isnan(value) else repr(value)
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def page(families: Iterable[Family], *, also_empty: bool = False) -> bytes:
    """The text of all of them. One without samples is only there where ``also_empty``."""
    lines: list[str] = []
    for one in families:
        if one.samples or also_empty:
            lines += [f"# HELP {one.name} {one.text}", f"# TYPE {one.name} {one.kind}", *one.samples]
    return "".join(f"{line}\n" for line in lines).encode()


def buckets(
    name: str, labels: dict[str, str], pairs: Sequence[tuple[str, float]], total: float
) -> Iterator[str]:
    """The lines of one histogram; ``pairs`` are upper bounds and how many values are not above them."""
    for bound, count in pairs:
        yield sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield sample(f"{name}_count", labels, pairs[-1][1])
    yield sample(f"{name}_sum", labels, total)


def labels_of(one: ModelMetrics) -> dict[str, str]:
    """The labels of a version of a model."""
    return {"model": one.model, "version": one.version}


def model_families(models: Sequence[ModelMetrics], now: float) -> Iterator[Family]:
    """The metrics of models. ``now`` is the time of the monotonic clock, for what has a window."""
    yield from _requests(models)
    for name, (field, text) in _LATENCIES.items():
        full = f"nv_inference_{name}_duration_us"
        yield _of_each(full, "counter", f"Cumulative {text}", models, partial(_us, field))
    yield from _summaries(models, now)
    yield _first_responses([one for one in models if one.statistics.responses])
    yield from _cache(models)
    text = "Number of requests that wait for an instance"
    yield _of_each("nv_inference_pending_request_count", "gauge", text, models, _pending)
    text = "Seconds that the model took to load, the longest of its instances"
    loaded = [one for one in models if one.instances]
    yield _of_each("nv_model_load_duration_secs", "gauge", text, loaded, _load_s)


def _requests(models: Sequence[ModelMetrics]) -> Iterator[Family]:
    text = "Number of successful inference requests, all batch sizes"
    yield _of_each("nv_inference_request_success", "counter", text, models, partial(_times, "success"))
    name = "nv_inference_request_failure"
    samples = [
        sample(name, {**labels_of(one), "reason": reason.value}, count)
        for one in models
        for reason, count in one.statistics.failures.items()
    ]
    yield Family(name, "counter", "Number of failed inference requests, all batch sizes", samples)
    text = "Number of inferences performed (does not include cached requests)"
    yield _of_each("nv_inference_count", "counter", text, models, _rows)
    text = "Number of model executions performed (does not include cached requests)"
    yield _of_each("nv_inference_exec_count", "counter", text, models, _executions)


def _summaries(models: Sequence[ModelMetrics], now: float) -> Iterator[Family]:
    """Quantiles of what is in the window, count and sum since the start."""
    windows = [(one, one.window.quantiles(now)) for one in models if one.window is not None]
    for name in RequestLatencies._fields:
        full, (field, text) = f"nv_inference_{name}_summary_us", _LATENCIES[name]
        samples: list[str] = []
        for one, quantiles in windows:
            for quantile, value in zip(QUANTILES, quantiles[name], strict=True):
                samples.append(sample(full, {**labels_of(one), "quantile": str(quantile)}, value / 1000))
            samples.append(sample(f"{full}_count", labels_of(one), _times(field, one)))
            samples.append(sample(f"{full}_sum", labels_of(one), _us(field, one)))
        yield Family(full, "summary", f"Summary of {text}", samples)


def _first_responses(models: Sequence[ModelMetrics]) -> Family:
    name = "nv_inference_first_response_histogram_ms"
    samples: list[str] = []
    for one in models:
        pairs = [(bound.removesuffix(".0"), int(count)) for bound, count in one.first_response.cumulative()]
        samples += buckets(name, labels_of(one), pairs, one.first_response.total)
    return Family(name, "histogram", "Milliseconds from a request to its first response", samples)


def _cache(models: Sequence[ModelMetrics]) -> Iterator[Family]:
    for one in ("hit", "miss"):
        field, plural = f"cache_{one}", "hits" if one == "hit" else "misses"
        text, name = f"Number of cache {plural} per model", f"nv_cache_num_{plural}_per_model"
        yield _of_each(name, "counter", text, models, partial(_times, field))
        text, name = f"Total cache {one} duration in microseconds", f"nv_cache_{one}_duration_per_model"
        yield _of_each(name, "counter", text, models, partial(_us, field))


def _of_each(name: str, kind: str, text: str, models: Sequence[ModelMetrics], value: _Value) -> Family:
    return Family(name, kind, text, [sample(name, labels_of(one), value(one)) for one in models])


def _times(field: str, one: ModelMetrics) -> int:
    return one.statistics.durations()[field].times


def _us(field: str, one: ModelMetrics) -> int:
    return one.statistics.durations()[field].ns // 1000


def _rows(one: ModelMetrics) -> int:
    return one.statistics.executions().rows


def _executions(one: ModelMetrics) -> int:
    return one.statistics.executions().count


def _pending(one: ModelMetrics) -> float:
    return one.gauges().get("gpuserve_queue_requests", 0)


def _load_s(one: ModelMetrics) -> float:
    return max(instance.load_s for instance in one.instances.values())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
