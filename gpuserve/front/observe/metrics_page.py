"""The metrics page (Prometheus 0.0.4) under our own names, then Triton's. Nothing is counted here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from gpuserve.front.observe import triton_metrics
from gpuserve.front.observe.machine_metrics import CpuMetrics
from gpuserve.front.observe.metrics import InstanceMetrics, ModelMetrics
from gpuserve.front.observe.sliced_page import SlicedPage
from gpuserve.front.observe.triton_metrics import Family, Labels, family, histogram_family, labels_of
from gpuserve.front.v2.statistics import Executions, total

T = TypeVar("T")

#: So many instances are one step.
_SLICE_INSTANCES: Final = 16
#: A counter of each model: its name after "gpuserve_" and before "_total", what it is, and its value.
_COUNTERS: Final[Sequence[tuple[str, str, Callable[[ModelMetrics], int]]]] = (
    (
        "requests_success",
        "Requests answered.",
        lambda one: one.statistics.executions().requests + one.statistics.cache_hits,
    ),
    ("inferences", "Rows (batch elements) inferred.", lambda one: one.statistics.executions().rows),
    ("cancelled", "Requests their client took back.", lambda one: one.outcomes.cancellations),
    ("cache_hits", "Requests answered from the response cache.", lambda one: one.statistics.cache_hits),
    ("cache_misses", "Requests not in the response cache.", lambda one: one.outcomes.cache_misses or 0),
)
#: What became of requests instead of an answer: the metric after "gpuserve_", its label, and its counts.
_OUTCOMES: Final[Sequence[tuple[str, str, str, Callable[[ModelMetrics], Mapping[str, int]]]]] = (
    ("requests_failure_total", "code", "Requests that failed.", lambda one: one.outcomes.failures),
    ("rejected_total", "reason", "Requests that were not accepted.", lambda one: one.outcomes.rejections),
)
#: A counter of each instance, by what it is and by all that it has done.
_OF_INSTANCES: Final[Sequence[tuple[str, str, Callable[[InstanceMetrics, Executions], int]]]] = (
    ("worker_restarts", "Deaths of the instance's worker.", lambda one, _: one.restarts),
    ("execution_timeouts", "Calls that were not back in time, and ended.", lambda one, _: one.timeouts),
    ("oom_splits", "Batches run in halves for want of memory on the device.", lambda one, _: one.oom_splits),
    ("instance_requests_success", "Requests that it answered.", lambda _, done: done.requests),
    ("instance_inferences", "Rows of those requests.", lambda _, done: done.rows),
    ("instance_executions", "Batches that went well.", lambda _, done: done.count),
    ("instance_failures", "Batches that failed as a whole.", lambda _, done: done.failures),
)
#: What a driver knows of its scheduler and arena at the time of a scrape; see ``ModelMetrics.gauges``.
_GAUGES: Final = {
    "gpuserve_queue_requests": "Requests that wait for a worker.",
    "gpuserve_running_requests": "Requests at a worker.",
    "gpuserve_saturation": "Work at hand, as a part of what keeps all instances that are up fully busy.",
    "gpuserve_arena_bytes": "Shared memory reserved for inputs.",
    "gpuserve_arena_blocks": "Input blocks in use.",
}


class MetricsPage:
    """The text of every model's metrics; ``cache_nbytes`` and ``gpus`` are read at the time of a scrape."""

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
        self._sliced = SlicedPage(lambda: self._rendering(self._machine))

    def add(self, families: Callable[[], Iterable[Family]]) -> None:
        self._machine.append(families)

    async def page(self) -> bytes:
        """The page, made in slices between which others have their turn; who ask meanwhile share the next."""
        return await self._sliced.page()

    def render(self) -> bytes:
        """The page without the machine's metrics, in one go."""
        rendering = self._rendering(())
        while True:
            try:
                next(rendering)
            except StopIteration as end:
                return bytes(end.value)

    def _rendering(self, machine: Iterable[Callable[[], Iterable[Family]]]) -> Generator[None, None, bytes]:
        """Make the page in short steps; what is said of a model, and of some instances, is of one moment."""
        now = time.monotonic()
        own, instances, present = _Merged(_of_models), _Merged(_of_instances), _Merged(_of_present)
        at_triton = _Merged(partial(triton_metrics.model_families, now=now))
        for model in list(self._models()):
            labels, shown = labels_of(model), dict(model.present())
            own.add((labels, model))
            at_triton.add(model)
            for number, (name, one) in enumerate(sorted(model.instances.items()), 1):
                each = ({**labels, "instance": name}, one)
                instances.add(each)
                if name in shown:  # what takes batches or should; what others have done counts all the same
                    present.add(each)
                if not number % _SLICE_INSTANCES:
                    yield
            yield
        parts: list[bytes] = []
        for listed in (*self._of_server(), *own.families, *instances.families, *present.families):
            parts.append(triton_metrics.page([listed], also_empty=True))
            yield  # of hundreds of models, all families at once take longer than others are to wait
        for listed in at_triton.families:
            parts.append(triton_metrics.page([listed]))
            yield
        for families_of in machine:
            yield
            for listed in families_of():
                parts.append(triton_metrics.page([listed]))
                yield
        return b"".join(parts)

    def _of_server(self) -> Iterator[Family]:
        yield _family("build_info", "gauge", "The version that runs.", [({"version": self._version}, 1)])
        yield _family("cache_bytes", "gauge", "What the response cache holds.", [({}, self._cache_nbytes())])


class _Merged(Generic[T]):
    """The families of one thing after the other, as if they had been asked of all at once."""

    def __init__(self, families_of: Callable[[Sequence[T]], Iterable[Family]]) -> None:
        self._families_of = families_of
        self.families = [one._replace(samples=[]) for one in families_of(())]

    def add(self, one: T) -> None:
        for merged, more in zip(self.families, self._families_of([one]), strict=True):
            if more.samples:
                merged.samples.append("\n".join(more.samples))


def _family(name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> Family:
    return family(f"gpuserve_{name}", kind, text, [(labels, float(value)) for labels, value in values])


def _of_models(each: Sequence[tuple[Labels, ModelMetrics]]) -> Iterator[Family]:
    for name, text, value in _COUNTERS:
        yield _family(f"{name}_total", "counter", text, [(labels, value(one)) for labels, one in each])
    for name, label, text, counts in _OUTCOMES:
        found = [
            ({**labels, label: key}, n) for labels, one in each for key, n in sorted(counts(one).items())
        ]
        yield _family(name, "counter", text, found)
    device = [(labels, one.device_nbytes) for labels, one in each if one.device_nbytes is not None]
    text = "Bytes between steps that stayed on GPUs."
    yield _family("ensemble_device_bytes_total", "counter", text, device)
    gauges = [(labels, one.gauges()) for labels, one in each]
    for name, text in _GAUGES.items():
        values = [(labels, now[name]) for labels, now in gauges if name in now]
        yield family(name, "gauge", text, [(labels, float(value)) for labels, value in values])
    requests = [(labels, one.request_duration) for labels, one in each]
    yield histogram_family("gpuserve_request_duration_seconds", "From acceptance to the answer.", requests)
    queues = [(labels, one.queue_duration) for labels, one in each]
    yield histogram_family("gpuserve_queue_duration_seconds", "From acceptance to a worker.", queues)


def _of_instances(each: Sequence[tuple[Labels, InstanceMetrics]]) -> Iterator[Family]:
    """What each instance has done: the parts that the statistics of its model are made of."""
    computes = [(labels, one.compute) for labels, one in each]
    yield histogram_family(
        "gpuserve_compute_duration_seconds", "A batch in the inference callable.", computes
    )
    sizes = [(labels, one.batch_sizes()) for labels, one in each]
    yield histogram_family("gpuserve_batch_size", "Rows a batch.", sizes)
    works = [(labels, one, total(one.executions.values())) for labels, one in each]
    for name, text, value in _OF_INSTANCES:
        samples = [(labels, value(one, done)) for labels, one, done in works]
        yield _family(f"{name}_total", "counter", text, samples)
    spent = [
        ({**labels, "phase": phase}, getattr(done, f"compute_{phase}_ns") / 1e9)
        for labels, _, done in works
        for phase in ("input", "infer", "output")
    ]
    text = "Time before, in and after the callable."
    yield _family("instance_compute_seconds_total", "counter", text, spent)


def _of_present(each: Sequence[tuple[Labels, InstanceMetrics]]) -> Iterator[Family]:
    ups = [(labels, int(one.up > 0)) for labels, one in each]
    yield _family("worker_up", "gauge", "1 when the instance takes batches.", ups)
    loads = [(labels, one.load_s) for labels, one in each]
    yield _family("worker_load_seconds", "gauge", "How long the callable took to load.", loads)
