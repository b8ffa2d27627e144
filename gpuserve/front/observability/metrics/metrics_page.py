"""The metrics page (Prometheus 0.0.4): our names, Triton's names, and CPU and memory of the machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from gpuserve.front.observability.metrics import model_metrics, prometheus
from gpuserve.front.observability.metrics.model_metrics import InstanceMetrics, ModelMetrics, StepMetrics
from gpuserve.front.observability.metrics.prometheus import (
    Family,
    Labels,
    family,
    histogram_family,
    labels_of,
)
from gpuserve.front.observability.time_slices import SlicedPage
from gpuserve.front.requests.statistics import Executions, total

T = TypeVar("T")

#: The number of instances in one step.
_SLICE_INSTANCES: Final = 16
# fmt: off
#: Counters of each model: name between "gpuserve_" and "_total", help text, and value.
_COUNTERS: Final[Sequence[tuple[str, str, Callable[[ModelMetrics], int]]]] = (
    ("requests_success", "Requests answered.",
     lambda one: one.statistics.executions().requests + one.statistics.cache_hits),
    ("inferences", "Rows (batch elements) inferred.", lambda one: one.statistics.executions().rows),
    ("cancelled", "Requests cancelled by their client.", lambda one: one.outcomes.cancellations),
    ("cache_hits", "Requests answered from the response cache.", lambda one: one.statistics.cache_hits),
    ("cache_misses", "Requests not in the response cache.", lambda one: one.outcomes.cache_misses or 0),
)
#: Counters of requests without an answer: name after "gpuserve_", label, help text, and counts by label
#: value.
_OUTCOMES: Final[Sequence[tuple[str, str, str, Callable[[ModelMetrics], Mapping[str, int]]]]] = (
    ("requests_failure_total", "code", "Requests that failed.", lambda one: one.outcomes.failures),
    ("rejected_total", "reason", "Requests that were not accepted.", lambda one: one.outcomes.rejections),
)
#: Counters of models with ragged inputs. Their ratio is the waste of padding.
_RAGGED_COUNTERS: Final[Sequence[tuple[str, str, Callable[[ModelMetrics], int | None]]]] = (
    ("ragged_elements_total", "Elements of requests in ragged batches.", lambda one: one.elements),
    ("ragged_padded_elements_total", "Elements of ragged batches whose rows are padded to one shape.",
     lambda one: one.padded_elements),
)
# fmt: on
#: Counters of stepped models.
_STEP_COUNTERS: Final[Sequence[tuple[str, str, Callable[[StepMetrics], int]]]] = (
    ("steps_total", "Steps of the callable.", lambda one: one.steps),
    ("step_requests_total", "Active requests of each step, in the sum.", lambda one: one.active),
    ("step_responses_total", "Responses of steps.", lambda one: one.responses),
)
#: Counters of each instance: name, help text, and value from its metrics and the sum of its executions.
_INSTANCE_COUNTERS: Final[Sequence[tuple[str, str, Callable[[InstanceMetrics, Executions], int]]]] = (
    ("worker_restarts", "Deaths of the instance's worker.", lambda one, _: one.restarts),
    ("execution_timeouts", "Calls that were ended at the execution timeout.", lambda one, _: one.timeouts),
    ("oom_splits", "Batches split because the device ran out of memory.", lambda one, _: one.oom_splits),
    ("instance_requests_success", "Requests that the instance answered.", lambda _, done: done.requests),
    ("instance_inferences", "Rows of those requests.", lambda _, done: done.rows),
    ("instance_executions", "Batches that succeeded.", lambda _, done: done.count),
    ("instance_failures", "Batches that failed as a whole.", lambda _, done: done.failures),
)
#: Gauges of a driver's scheduler and arena at the time of a scrape; see ``ModelMetrics.gauges``.
_GAUGES: Final = {
    "gpuserve_queue_requests": "Requests that wait for a worker.",
    "gpuserve_queue_shape_groups": "Groups of waiting requests that differ in shape; 0 if all are alike.",
    "gpuserve_running_requests": "Requests at a worker.",
    "gpuserve_saturation": "Queued and running work, as a fraction of what keeps all instances busy.",
    "gpuserve_arena_bytes": "Shared memory reserved for inputs.",
    "gpuserve_arena_blocks": "Input blocks in use.",
}


class MetricsPage:
    """The page of every model's metrics. ``cache_nbytes`` and ``gpus`` are read at the time of a scrape."""

    def __init__(
        self,
        models: Callable[[], Iterable[ModelMetrics]],
        version: str,
        cache_nbytes: Callable[[], int] = lambda: 0,
        gpus: Callable[[], Iterable[Family]] = tuple,
    ) -> None:
        self._models = models
        self._version = version
        self._cache_nbytes = cache_nbytes
        self._machine: list[Callable[[], Iterable[Family]]] = [CpuMetrics().families, gpus]
        self._weights: Sequence[tuple[Labels, int, int]] = ()
        self._sliced = SlicedPage(lambda: self._rendering(self._machine))
        self._sliced_open = SlicedPage(lambda: self._rendering(self._machine, open_metrics=True))

    def show_weights(self, weights: Sequence[tuple[str, str, int, int]]) -> None:
        """Show the shared weights: name, device, bytes and number of instances of each."""
        nbytes, users = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for name, device, size, n_instances in weights:  # several versions may have one name
            nbytes[name, device] += size
            users[name, device] += n_instances
        self._weights = [
            ({"weights": key[0], "device": key[1]}, size, users[key]) for key, size in nbytes.items()
        ]

    def add(self, families: Callable[[], Iterable[Family]]) -> None:
        self._machine.append(families)

    async def page(self) -> bytes:
        """Render the page in time slices; concurrent callers share the next page."""
        return await self._sliced.page()

    async def open_metrics_page(self) -> bytes:
        """Render the page in OpenMetrics, as ``page``."""
        return await self._sliced_open.page()

    def _rendering(
        self, machine: Iterable[Callable[[], Iterable[Family]]], *, open_metrics: bool = False
    ) -> Generator[None, None, bytes]:
        """Render the page in short steps. The values of one model are of one moment."""
        page = prometheus.open_metrics_page if open_metrics else prometheus.page
        now = time.monotonic()
        own, instances = _Merged(_model_families), _Merged(_instance_families)
        present = _Merged(_present_families)
        at_triton = _Merged(partial(model_families, now=now))
        for model in list(self._models()):
            labels, shown = labels_of(model), dict(model.present())
            own.add((labels, model))
            at_triton.add(model)
            for number, (name, one) in enumerate(sorted(model.instances.items()), 1):
                each = ({**labels, "instance": name}, one)
                instances.add(each)
                if name in shown:  # accepts batches or should; the counts of others are shown all the same
                    present.add(each)
                if not number % _SLICE_INSTANCES:
                    yield
            yield
        parts: list[bytes] = []
        build = _family("build_info", "gauge", "The version that runs.", [({"version": self._version}, 1)])
        text = "Bytes in the response cache."
        cache = _family("cache_bytes", "gauge", text, [({}, self._cache_nbytes())])
        text = "Memory that instances share."
        shared = _family("shared_weights_bytes", "gauge", text, [one[:2] for one in self._weights])
        text = "Instances that use this memory."
        users = [(labels, count) for labels, _, count in self._weights]
        sharing = _family("shared_weights_instances", "gauge", text, users)
        for listed in (build, cache, shared, sharing, *own.families, *instances.families, *present.families):
            parts.append(page([listed], also_empty=True))
            yield  # with hundreds of models, all families at once would delay other tasks too long
        for listed in at_triton.families:
            parts.append(page([listed]))
            yield
        for families_of in machine:
            yield
            for listed in families_of():
                parts.append(page([listed]))
                yield
        if open_metrics:
            parts.append(prometheus.OPEN_METRICS_END)
        return b"".join(parts)


class _Merged(Generic[T]):
    """Families of several models or instances, merged as if they had been rendered together."""

    def __init__(self, families_of: Callable[[Sequence[T]], Iterable[Family]]) -> None:
        self._families_of = families_of
        self.families = [one._replace(samples=[], exemplars={}) for one in families_of(())]

    def add(self, one: T) -> None:
        for merged, more in zip(self.families, self._families_of([one]), strict=True):
            if more.samples:
                merged.samples.append("\n".join(more.samples))
                merged.exemplars.update(more.exemplars)


def _family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    return family(f"gpuserve_{name}", kind, text, [(labels, float(value)) for labels, value in values])


def _model_families(each: Sequence[tuple[Labels, ModelMetrics]]) -> Iterator[Family]:
    for name, text, value in _COUNTERS:
        yield _family(f"{name}_total", "counter", text, [(labels, value(one)) for labels, one in each])
    for name, label, text, counts in _OUTCOMES:
        by_key = [(labels, key, n) for labels, one in each for key, n in sorted(counts(one).items())]
        yield _family(name, "counter", text, [({**labels, label: key}, n) for labels, key, n in by_key])
    device = [(labels, one.device_nbytes) for labels, one in each if one.device_nbytes is not None]
    text = "Bytes between steps that stayed on GPUs."
    yield _family("ensemble_device_bytes_total", "counter", text, device)
    for name, text, amount in _RAGGED_COUNTERS:
        counted = [(labels, n) for labels, one in each if (n := amount(one)) is not None]
        yield _family(name, "counter", text, counted)
    stepped = [(labels, one.steps) for labels, one in each if one.steps is not None]
    for name, text, count in _STEP_COUNTERS:
        yield _family(name, "counter", text, [(labels, count(one)) for labels, one in stepped])
    durations = [(labels, one.duration) for labels, one in stepped]
    yield histogram_family("gpuserve_step_duration_seconds", "A step of the callable.", durations)
    come_and_go = [(labels, one.on_demand) for labels, one in each if one.on_demand is not None]
    waits = [(labels, one.cold_starts) for labels, one in come_and_go]
    text = "From the first request that waits for instances to start, to the first instance."
    yield histogram_family("gpuserve_cold_start_duration_seconds", text, waits)
    gone = [({**labels, "reason": key}, n) for labels, one in come_and_go for key, n in one.evictions.items()]
    yield _family("evictions_total", "counter", "Ends of the instances of a model on demand.", gone)
    text = "Memory of the instances of a model on demand; that of the host is on device cpu."
    taken = [({**labels, "device": key}, n) for labels, one in come_and_go for key, n in one.nbytes.items()]
    yield _family("resident_memory_bytes", "gauge", text, taken)
    text = "1 while the instances of a model on demand sleep: their processes stay."
    yield _family("asleep", "gauge", text, [(labels, int(one.is_asleep)) for labels, one in come_and_go])
    streams = [(labels, one) for labels, one in each if one.statistics.responses]
    firsts = [(labels, one.to_first) for labels, one in streams]
    text = "From acceptance to the first response of decoupled models."
    yield histogram_family("gen_ai_server_time_to_first_token_seconds", text, firsts)
    text = "Between two responses of decoupled models."
    between = [(labels, one.between_responses) for labels, one in streams]
    yield histogram_family("gen_ai_server_time_per_output_token_seconds", text, between)
    gauges = [(labels, one.gauges()) for labels, one in each]
    for name, text in _GAUGES.items():
        values = [(labels, now[name]) for labels, now in gauges if name in now]
        yield family(name, "gauge", text, [(labels, float(value)) for labels, value in values])
    requests = [(labels, one.request_duration) for labels, one in each]
    yield histogram_family("gpuserve_request_duration_seconds", "From acceptance to the answer.", requests)
    queues = [(labels, one.queue_duration) for labels, one in each]
    yield histogram_family("gpuserve_queue_duration_seconds", "From acceptance to a worker.", queues)


def _instance_families(each: Sequence[tuple[Labels, InstanceMetrics]]) -> Iterator[Family]:
    """Yield the metrics of instances, whose sums are the statistics of their models."""
    computes = [(labels, one.compute) for labels, one in each]
    yield histogram_family(
        "gpuserve_compute_duration_seconds", "A batch in the inference callable.", computes
    )
    sizes = [(labels, one.batch_sizes()) for labels, one in each]
    yield histogram_family("gpuserve_batch_size", "Rows a batch.", sizes)
    works = [(labels, one, total(one.executions.values())) for labels, one in each]
    for name, text, value in _INSTANCE_COUNTERS:
        samples = [(labels, value(one, done)) for labels, one, done in works]
        yield _family(f"{name}_total", "counter", text, samples)
    spent = [
        ({**labels, "phase": phase}, getattr(done, f"compute_{phase}_ns") / 1e9)
        for labels, _, done in works
        for phase in ("input", "infer", "output")
    ]
    text = "Time before, in and after the callable."
    yield _family("instance_compute_seconds_total", "counter", text, spent)


def _present_families(each: Sequence[tuple[Labels, InstanceMetrics]]) -> Iterator[Family]:
    ups = [(labels, int(one.up > 0)) for labels, one in each]
    yield _family("worker_up", "gauge", "1 when the instance takes batches.", ups)
    loads = [(labels, one.load_s) for labels, one in each]
    yield _family("worker_load_seconds", "gauge", "How long the callable took to load.", loads)


# ---- models under Triton's names -----------------------------------------------------------------

_Value: TypeAlias = Callable[[ModelMetrics], float]


def _count_of(field: str) -> _Value:
    return lambda one: one.statistics.durations()[field].times


def _microseconds_of(field: str) -> _Value:
    return lambda one: one.statistics.durations()[field].ns // 1000


#: Name -> field of ``ModelStatistics.durations``, and help text.
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
# fmt: off
#: Triton's counters of each model: name after "nv_", help text, and value.
_TRITON_COUNTERS: Final[Sequence[tuple[str, str, _Value]]] = (
    ("inference_request_success", "Number of successful inference requests, all batch sizes",
     _count_of("success")),
    ("inference_count", "Number of inferences performed (does not include cached requests)",
     lambda one: one.statistics.executions().rows),
    ("inference_exec_count", "Number of model executions performed (does not include cached requests)",
     lambda one: one.statistics.executions().count),
    *(
        (f"inference_{name}_duration_us", f"Cumulative {text}", _microseconds_of(field))
        for name, (field, text) in _LATENCIES.items()
    ),
)
#: Triton's counters of each model with a response cache.
_TRITON_CACHE_COUNTERS: Final[Sequence[tuple[str, str, _Value]]] = (
    ("cache_num_hits_per_model", "Number of cache hits per model", _count_of("cache_hit")),
    ("cache_num_misses_per_model", "Number of cache misses per model", _count_of("cache_miss")),
    ("cache_hit_duration_per_model", "Total cache hit duration in microseconds",
     _microseconds_of("cache_hit")),
    ("cache_miss_duration_per_model", "Total cache miss duration in microseconds",
     _microseconds_of("cache_miss")),
)
# fmt: on


def model_families(models: Sequence[ModelMetrics], now: float) -> Iterator[Family]:
    """Yield the metrics of models under Triton's names. ``now`` is monotonic time, for latency windows."""
    with_cache = [one for one in models if one.outcomes.cache_misses is not None]
    for counters, counted in ((_TRITON_COUNTERS, models), (_TRITON_CACHE_COUNTERS, with_cache)):
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
    """Yield summaries: quantiles over the window, count and sum since the start."""
    windows = [(one, one.window.quantiles(now)) for one in models if one.window is not None]
    names = model_metrics.RequestLatencies._fields
    series = [(f"nv_inference_{name}_summary_us", name, *_LATENCIES[name]) for name in names]
    for name, text in _CACHE_LATENCIES.items():
        series.append((f"nv_{name}_summary_per_model", name, name, text))
    for full, name, field, text in series:
        samples: list[str] = []
        for one, quantiles in windows:
            if name in _CACHE_LATENCIES and one.outcomes.cache_misses is None:
                continue
            sample = prometheus.sample
            for quantile, value in zip(model_metrics.QUANTILES, quantiles[name], strict=True):
                samples.append(sample(full, {**labels_of(one), "quantile": str(quantile)}, value / 1000))
            samples.append(sample(f"{full}_count", labels_of(one), _count_of(field)(one)))
            samples.append(sample(f"{full}_sum", labels_of(one), _microseconds_of(field)(one)))
        yield Family(full, "summary", f"Summary of {text}", samples)


# ---- the machine ---------------------------------------------------------------------------------

#: Columns of the first line of /proc/stat that count no work: idle, and waiting for a disk.
_IDLE_COLUMNS: Final = (3, 4)
#: Later columns are parts of earlier ones.
_CPU_COLUMNS: Final = 8


class CpuTime(NamedTuple):
    """Ticks of all CPUs together since the machine's start."""

    busy: int
    total: int


def cpu_time(stat: str) -> CpuTime:
    ticks = [int(one) for one in stat.split("\n", 1)[0].split()[1:][:_CPU_COLUMNS]]
    total = sum(ticks)
    return CpuTime(total - sum(ticks[column] for column in _IDLE_COLUMNS), total)


def utilization(before: CpuTime, now: CpuTime) -> float:
    """Return the fraction of time between two readings in which the CPUs worked, 0 to 1."""
    ticks = now.total - before.total
    return (now.busy - before.busy) / ticks if ticks > 0 else 0.0


def memory_nbytes(meminfo: str) -> tuple[int, int]:
    """Return total and used bytes from ``/proc/meminfo``; available memory is not used."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    # The file counts in KiB.
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return total, total - available


class CpuMetrics:
    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = CpuTime(0, 0)

    def families(self) -> Iterator[Family]:
        try:
            stat, meminfo = (self._proc / "stat").read_text(), (self._proc / "meminfo").read_text()
        except OSError:  # some sandboxes have neither file
            return
        now = cpu_time(stat)
        busy, self._before = utilization(self._before, now), now
        total, used = memory_nbytes(meminfo)
        yield family(
            "nv_cpu_utilization", "gauge", "Part of the CPUs' time that they worked, 0 to 1", [({}, busy)]
        )
        yield family("nv_cpu_memory_total_bytes", "gauge", "Memory of the machine in bytes", [({}, total)])
        yield family("nv_cpu_memory_used_bytes", "gauge", "Memory in use in bytes", [({}, used)])
