"""What the front counts, and the Prometheus text of it.

Counting is on the hot path: plain integers and a bisect. Rendering is not: ``prometheus_client``
does it, imported at the first scrape.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from gpuserve.errors import QueueFull, RequestError

#: Upper bounds in seconds: 100 µs to 60 s. The last bucket is +Inf.
DURATION_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
BATCH_SIZE_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts by bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not above it), as Prometheus wants them."""
        pairs, running = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


class InstanceMetrics:
    """One instance: its batches, and whether it is up."""

    __slots__ = ("batch_sizes", "compute", "restarts", "up")

    def __init__(self) -> None:
        self.batch_sizes = Histogram(BATCH_SIZE_BUCKETS)
        self.compute = Histogram(DURATION_BUCKETS)
        self.restarts = 0
        self.up = False

    def batch(self, rows: int, compute_s: float) -> None:
        """A batch came back."""
        self.batch_sizes.observe(rows)
        self.compute.observe(compute_s)

    def set_up(self, up: bool) -> None:
        """It is in rotation, or not."""
        self.up = up


class ModelMetrics:
    """One model. ``gauges`` reads what the scheduler and the arena know at the time of a scrape."""

    def __init__(self, model: str, version: str, gauges: Callable[[], dict[str, float]]) -> None:
        self.model = model
        self.version = version
        self.gauges = gauges
        self.successes = 0
        self.rows = 0
        #: By code. Those that any model may meet are there from the start, so that a rate can be told.
        self.failures: dict[str, int] = dict.fromkeys(("INTERNAL", "DEADLINE_EXCEEDED", "UNAVAILABLE"), 0)
        self.rejections: dict[str, int] = {"queue_full": 0, "invalid": 0, "unavailable": 0}
        self.cancellations = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self.request_duration = Histogram(DURATION_BUCKETS)
        self.queue_duration = Histogram(DURATION_BUCKETS)
        self.instances: dict[str, InstanceMetrics] = {}

    def instance(self, name: str) -> InstanceMetrics:
        """The instance of that name, known from its first mention on."""
        found = self.instances.get(name)
        if found is None:
            found = self.instances[name] = InstanceMetrics()
        return found

    def succeeded(self, duration_s: float, rows: int) -> None:
        """A request was answered."""
        self.successes += 1
        self.rows += rows
        self.request_duration.observe(duration_s)

    def queued(self, durations_s: Iterable[float]) -> None:
        """Requests left the queue for a worker."""
        observe = self.queue_duration.observe
        for duration_s in durations_s:
            observe(duration_s)

    def failed(self, count: int, code: str) -> None:
        """Requests that were accepted failed."""
        self.failures[code] = self.failures.get(code, 0) + count

    def refused(self, error: RequestError) -> None:
        """A request was not accepted."""
        reason = "queue_full" if isinstance(error, QueueFull) else "unavailable"
        if error.code.value == "INVALID_ARGUMENT":
            reason = "invalid"
        self.rejections[reason] += 1

    def cache_hit(self, duration_s: float) -> None:
        """A request was answered from the response cache: no instance had it, so no rows were inferred."""
        self.cache_hits += 1
        self.successes += 1
        self.request_duration.observe(duration_s)

    def cache_missed(self) -> None:
        """A request was not in the response cache, and goes its way."""
        self.cache_misses += 1

    def cancelled(self) -> None:
        """A client took its request back."""
        self.cancellations += 1


class MetricsPage:
    """The text of every model's metrics; a collector in the sense of ``prometheus_client``.

    ``cache_nbytes`` reads what the response cache holds at the time of a scrape.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ModelMetrics]],
        version: str,
        cache_nbytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._models = models
        self._version = version
        self._cache_nbytes = cache_nbytes

    def render(self) -> bytes:
        """The page in the Prometheus text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

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
        success.add_metric(at, one.successes)
        rows.add_metric(at, one.rows)
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
        hits.add_metric([one.model, one.version], one.cache_hits)
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
            size.add_metric([*at, name], instance.batch_sizes.cumulative(), instance.batch_sizes.total)
    yield from (request, queue, compute, size)


def _instances(models: Sequence[ModelMetrics], gauge: Any, counter: Any) -> Iterator[Any]:
    labels = ["model", "version", "instance"]
    up = gauge("gpuserve_worker_up", "1 when the instance takes batches.", labels=labels)
    restarts = counter("gpuserve_worker_restarts", "Deaths of the instance's worker.", labels=labels)
    for one in models:
        for name, instance in sorted(one.instances.items()):
            at = [one.model, one.version, name]
            up.add_metric(at, int(instance.up))
            restarts.add_metric(at, instance.restarts)
    yield from (up, restarts)


def _gauges(models: Sequence[ModelMetrics], gauge: Any) -> Iterator[Any]:
    texts = {
        "gpuserve_queue_requests": "Requests that wait for a worker.",
        "gpuserve_running_requests": "Requests at a worker.",
        "gpuserve_arena_bytes": "Shared memory reserved for inputs.",
        "gpuserve_arena_blocks": "Input blocks in use.",
    }
    families = {name: gauge(name, text, labels=["model", "version"]) for name, text in texts.items()}
    for one in models:
        for name, value in one.gauges().items():
            families[name].add_metric([one.model, one.version], value)
    yield from families.values()
