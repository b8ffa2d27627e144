"""The metrics page: what ``metrics.py`` counts under our own names, then under Triton's, and the machine.

``prometheus_client`` renders our own, imported at the first scrape. Nothing is counted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpuserve.front import triton_metrics
from gpuserve.front.machine_metrics import CpuMetrics
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.statistics import total
from gpuserve.front.triton_metrics import Family


class MetricsPage:
    """The text of every model's metrics; a collector in the sense of ``prometheus_client``.

    ``cache_nbytes`` reads what the response cache holds at the time of a scrape, ``gpus`` what is known of
    the GPUs.
    """

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

    def add(self, families: Callable[[], Iterable[Family]]) -> None:
        """Have these on every page from now on."""
        self._machine.append(families)

    def page(self) -> bytes:
        """The whole page as it is now, in the Prometheus text format."""
        return self.render(family for families in self._machine for family in families())

    def render(self, machine: Iterable[Family] = ()) -> bytes:
        """The page, with these metrics of the machine and of the server as a whole."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        of_models = triton_metrics.model_families(list(self._models()), time.monotonic())
        return generate_latest(registry) + triton_metrics.page([*of_models, *machine])

    def collect(self) -> Iterator[Any]:
        """The metric families at this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        models = list(self._models())
        build = GaugeMetricFamily("gpuserve_build_info", "The version that runs.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        yield from _requests(models, CounterMetricFamily)
        yield from _cache(models, CounterMetricFamily)
        yield GaugeMetricFamily(
            "gpuserve_cache_bytes", "What the response cache holds.", value=self._cache_nbytes()
        )
        yield from _durations(models, HistogramMetricFamily)
        yield from _instances(models, GaugeMetricFamily, CounterMetricFamily)
        yield from _work(models, CounterMetricFamily)
        yield _between_steps(models, CounterMetricFamily)
        yield from _gauges(models, GaugeMetricFamily)


def _requests(models: Sequence[ModelMetrics], counter: Any) -> Iterator[Any]:
    labels = ["model", "version"]
    success = counter("gpuserve_requests_success", "Requests answered.", labels=labels)
    rows = counter("gpuserve_inferences", "Rows (batch elements) inferred.", labels=labels)
    cancelled = counter("gpuserve_cancelled", "Requests their client took back.", labels=labels)
    failure = counter("gpuserve_requests_failure", "Requests that failed.", labels=[*labels, "code"])
    rejected = counter("gpuserve_rejected", "Requests that were not accepted.", labels=[*labels, "reason"])
    for one in models:
        at = [one.model, one.version]
        executions = one.statistics.executions()
        success.add_metric(at, executions.requests + one.statistics.cache_hits)
        rows.add_metric(at, executions.rows)
        cancelled.add_metric(at, one.cancellations)
        for code, count in sorted(one.failures.items()):
            failure.add_metric([*at, code], count)
        for reason, count in sorted(one.rejections.items()):
            rejected.add_metric([*at, reason], count)
    yield from (success, rows, cancelled, failure, rejected)


def _cache(models: Sequence[ModelMetrics], counter: Any) -> Iterator[Any]:
    labels = ["model", "version"]
    hits = counter("gpuserve_cache_hits", "Requests answered from the response cache.", labels=labels)
    misses = counter("gpuserve_cache_misses", "Requests not in the response cache.", labels=labels)
    for one in models:
        hits.add_metric([one.model, one.version], one.statistics.cache_hits)
        misses.add_metric([one.model, one.version], one.cache_misses)
    yield from (hits, misses)


def _durations(models: Sequence[ModelMetrics], histogram: Any) -> Iterator[Any]:
    labels = ["model", "version"]
    request = histogram("gpuserve_request_duration_seconds", "From acceptance to the answer.", labels=labels)
    queue = histogram("gpuserve_queue_duration_seconds", "From acceptance to a worker.", labels=labels)
    compute = histogram(
        "gpuserve_compute_duration_seconds",
        "A batch in the inference callable.",
        labels=[*labels, "instance"],
    )
    size = histogram("gpuserve_batch_size", "Rows a batch.", labels=[*labels, "instance"])
    for one in models:
        at = [one.model, one.version]
        request.add_metric(at, one.request_duration.cumulative(), one.request_duration.total)
        queue.add_metric(at, one.queue_duration.cumulative(), one.queue_duration.total)
        for name, instance in sorted(one.instances.items()):
            compute.add_metric([*at, name], instance.compute.cumulative(), instance.compute.total)
            sizes = instance.batch_sizes()
            size.add_metric([*at, name], sizes.cumulative(), sizes.total)
    yield from (request, queue, compute, size)


def _instances(models: Sequence[ModelMetrics], gauge: Any, counter: Any) -> Iterator[Any]:
    labels = ["model", "version", "instance"]
    up = gauge("gpuserve_worker_up", "1 when the instance takes batches.", labels=labels)
    restarts = counter("gpuserve_worker_restarts", "Deaths of the instance's worker.", labels=labels)
    loads = gauge("gpuserve_worker_load_seconds", "How long the callable took to load.", labels=labels)
    splits = counter(
        "gpuserve_oom_splits", "Batches run in halves for want of memory on the device.", labels=labels
    )
    for one in models:
        for name, instance in one.present():
            up.add_metric([one.model, one.version, name], int(instance.up > 0))
            loads.add_metric([one.model, one.version, name], instance.load_s)
        for name, instance in sorted(one.instances.items()):
            restarts.add_metric([one.model, one.version, name], instance.restarts)
            splits.add_metric([one.model, one.version, name], instance.oom_splits)
    yield from (up, restarts, loads, splits)


def _work(models: Sequence[ModelMetrics], counter: Any) -> Iterator[Any]:
    """What each instance has done: the parts that the statistics of its model are made of."""
    labels = ["model", "version", "instance"]
    requests = counter("gpuserve_instance_requests_success", "Requests that it answered.", labels=labels)
    rows = counter("gpuserve_instance_inferences", "Rows of those requests.", labels=labels)
    batches = counter("gpuserve_instance_executions", "Batches that went well.", labels=labels)
    failed = counter("gpuserve_instance_failures", "Batches that failed as a whole.", labels=labels)
    spent = counter(
        "gpuserve_instance_compute_seconds",
        "Time before, in and after the callable.",
        labels=[*labels, "phase"],
    )
    for one in models:
        for name, instance in sorted(one.instances.items()):
            at, done = [one.model, one.version, name], total(instance.executions.values())
            requests.add_metric(at, done.requests)
            rows.add_metric(at, done.rows)
            batches.add_metric(at, done.count)
            failed.add_metric(at, done.failures)
            spent.add_metric([*at, "input"], done.compute_input_ns / 1e9)
            spent.add_metric([*at, "infer"], done.compute_infer_ns / 1e9)
            spent.add_metric([*at, "output"], done.compute_output_ns / 1e9)
    yield from (requests, rows, batches, failed, spent)


def _between_steps(models: Sequence[ModelMetrics], counter: Any) -> Any:
    passed = counter(
        "gpuserve_ensemble_device_bytes",
        "Bytes between steps that stayed on GPUs.",
        labels=["model", "version"],
    )
    for one in models:
        if one.device_nbytes is not None:
            passed.add_metric([one.model, one.version], one.device_nbytes)
    return passed


def _gauges(models: Sequence[ModelMetrics], gauge: Any) -> Iterator[Any]:
    texts = {
        "gpuserve_queue_requests": "Requests that wait for a worker.",
        "gpuserve_running_requests": "Requests at a worker.",
        "gpuserve_saturation": "Work at hand, as a part of what keeps all instances that are up fully busy.",
        "gpuserve_arena_bytes": "Shared memory reserved for inputs.",
        "gpuserve_arena_blocks": "Input blocks in use.",
    }
    families = {name: gauge(name, text, labels=["model", "version"]) for name, text in texts.items()}
    for one in models:
        for name, value in one.gauges().items():
            families[name].add_metric([one.model, one.version], value)
    yield from families.values()
