"""Counters of models and instances, and latencies for quantiles. Hot: plain numbers and a bisect."""

from __future__ import annotations

import functools
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import Code, QueueFull, RequestError
from gpuserve.front.requests.statistics import BySize, FailureReason, ModelStatistics, Phases, StatisticsEntry
from gpuserve.front.scheduling.request_queue import EMPTY_ROW, PaddedRow
from gpuserve.model.spec import InstanceSpec

#: Upper bounds in seconds: 100 µs to 60 s. The last bucket is +Inf.
DURATION_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
BATCH_SIZE_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Up to this many values are counted one by one.
_FEW: Final = 3
#: Upper bounds in milliseconds.
FIRST_RESPONSE_BUCKETS: Final = (100, 500, 2000, 5000)
#: Upper bounds in seconds, those of OpenTelemetry's conventions for generative AI.
TO_FIRST_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
BETWEEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
#: Refusals of requests that reached the scheduler.
_REFUSED_BY_SCHEDULER: Final = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
#: Requests older than this, or before the latest so many, leave the window.
WINDOW_S: Final = 60.0
WINDOW_REQUESTS: Final = 8192


class Exemplar(NamedTuple):
    """A traced request in a bucket of a histogram, at a Unix time in seconds."""

    trace_id: str
    value: float
    at: float


class Histogram:
    """Counts of values by bucket, and their sum. ``exemplars`` has the latest exemplar of some buckets."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def keep_exemplars(self, requests: Iterable[Any], values: Iterable[float]) -> None:
        """Keep the requests (``PendingRequest``) that are traced, with the values that were observed."""
        for request, value in zip(requests, values, strict=True):
            trace = getattr(request, "trace", None)
            if trace is not None and trace.context:
                exemplar = Exemplar(trace.otel_trace_id, value, time.time())
                self.exemplars[bisect_left(self.bounds, value)] = exemplar

    def observe_all(self, values: Sequence[float]) -> None:
        """Count several values, most of which are in the same bucket."""
        bounds, counts = self.bounds, self.counts
        if len(values) > _FEW:
            lowest = bisect_left(bounds, min(values))
            if lowest == bisect_left(bounds, max(values)):
                counts[lowest] += len(values)
                self.total += sum(values)
                return
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        pairs, running = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


@dataclass(eq=False, slots=True)
class InstanceMetrics:
    """One instance: its batches, rotation, load time, and batches split for lack of device memory."""

    executions: BySize
    compute: Histogram = field(default_factory=lambda: Histogram(DURATION_BUCKETS))
    restarts: int = 0
    oom_splits: int = 0
    #: Count of workers ended because their callable exceeded the execution timeout.
    timeouts: int = 0
    load_s: float = 0.0
    #: The number of workers of this name in rotation: two while one replaces another.
    up: int = 0

    def batch_failed(self, rows: int, duration_s: float) -> None:
        self.executions[rows].failures += 1
        self.compute.observe(duration_s)

    def set_up(self, up: bool) -> None:
        self.up += 1 if up else -1

    def batch_sizes(self) -> Histogram:
        sizes = Histogram(BATCH_SIZE_BUCKETS)
        for rows, one in self.executions.items():
            sizes.observe(rows, one.count + one.failures)
        return sizes


class RequestLatencies(NamedTuple):
    """The parts of one request's duration, in nanoseconds."""

    request: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float


#: Latencies of the response cache: of the latest requests that it contained, or did not contain.
CACHE_LATENCIES: Final = ("cache_hit", "cache_miss")


class LatencyWindow:
    """The latencies of one model's latest requests. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._requests = _Latest(len(RequestLatencies._fields))
        self._cached = {name: _Latest(1) for name in CACHE_LATENCIES}

    def observe(self, now: float, latencies: RequestLatencies) -> None:
        self._requests.entries.append((now, latencies))

    def observe_cache(self, now: float, name: str, duration_s: float) -> None:
        self._cached[name].entries.append((now, (duration_s * 1e9,)))

    def quantiles(self, now: float) -> dict[str, list[float]]:
        """Return the ``QUANTILES`` of each latency in nanoseconds; NaN if no request is in the window."""
        names, found = RequestLatencies._fields, self._requests.quantiles(now)
        of_requests = dict(zip(names, found, strict=True))
        return of_requests | {name: one.quantiles(now)[0] for name, one in self._cached.items()}


class _Latest:
    """The latest entries of ``width`` values each, with their times."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.entries: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=WINDOW_REQUESTS)

    def quantiles(self, now: float) -> list[list[float]]:
        entries = self.entries
        while entries and entries[0][0] < now - WINDOW_S:
            entries.popleft()
        if not entries:
            return [[math.nan] * len(QUANTILES) for _ in range(self._width)]
        columns = map(sorted, zip(*[one for _, one in entries], strict=True))
        places = [math.ceil(quantile * len(entries)) - 1 for quantile in QUANTILES]
        return [[column[place] for place in places] for column in columns]


class StepMetrics:
    """The steps of a stepped callable: their number, requests and responses in the sum, and durations."""

    __slots__ = ("active", "duration", "responses", "steps")

    def __init__(self) -> None:
        self.steps = self.active = self.responses = 0
        self.duration = Histogram(DURATION_BUCKETS)


class OnDemandMetrics:
    """The coming and going of a model with ``on_demand``: for how long requests waited for its instances to
    start, evictions by reason, the bytes that the instances take now, by device, and whether they sleep.
    """

    __slots__ = ("cold_starts", "evictions", "is_asleep", "nbytes")

    def __init__(self) -> None:
        self.cold_starts = Histogram(DURATION_BUCKETS)
        self.evictions: dict[str, int] = {"idle": 0, "memory": 0}
        self.nbytes: Mapping[str, int] = {}
        self.is_asleep = False


class OutcomeCounts:
    """Counts of requests that no instance answered: accepted ``failures`` by error code, ``rejections`` by
    reason, ``cancellations`` by clients, and ``cache_misses`` that ran, None without a response cache.
    """

    __slots__ = ("cache_misses", "cancellations", "failures", "rejections")

    def __init__(self) -> None:
        self.failures: dict[str, int] = dict.fromkeys(("INTERNAL", "DEADLINE_EXCEEDED", "UNAVAILABLE"), 0)
        self.rejections: dict[str, int] = {"queue_full": 0, "invalid": 0, "unavailable": 0}
        self.cancellations = 0
        self.cache_misses: int | None = None


class ModelMetrics:
    """The metrics of one version of a model. ``gauges`` reads the scheduler and the arena. ``window`` keeps
    the latest latencies if quantiles are wanted. ``declared`` returns the current instances; None: all known.
    """

    def __init__(
        self,
        model: str,
        version: str,
        gauges: Callable[[], dict[str, float]],
        window: LatencyWindow | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.gauges = gauges
        self.declared: Callable[[], Iterable[InstanceSpec]] | None = None
        self.window = window
        #: Whether requests may be traced: in mode opentelemetry they become exemplars of the histograms.
        self.keeps_exemplars = False
        self.statistics = ModelStatistics()
        self.outcomes = OutcomeCounts()
        #: Bytes that an ensemble's steps passed on without the host; None for other models.
        self.device_nbytes: int | None = None
        #: Elements of requests in batches with ragged inputs, and those of the batches if padded; None for
        #: other models.
        self.elements: int | None = None
        self.padded_elements: int | None = None
        self.request_duration = Histogram(DURATION_BUCKETS)
        self.queue_duration = Histogram(DURATION_BUCKETS)
        self.first_response = Histogram(FIRST_RESPONSE_BUCKETS)
        #: Of decoupled models, in seconds: to the first response, and between two responses.
        self.to_first = Histogram(TO_FIRST_BUCKETS)
        self.between_responses = Histogram(BETWEEN_BUCKETS)
        #: The steps of a stepped callable; None for other models.
        self.steps: StepMetrics | None = None
        #: The cold starts of a model with ``on_demand``; None for other models.
        self.on_demand: OnDemandMetrics | None = None
        self.instances: dict[str, InstanceMetrics] = {}

    def instance(self, name: str) -> InstanceMetrics:
        found = self.instances.get(name)
        if found is None:
            found = self.instances[name] = InstanceMetrics(self.statistics.instance(name))
        return found

    def present(self) -> list[tuple[str, InstanceMetrics]]:
        """Return the instances that are up or should be, by name. Counts of other instances are kept."""
        names = None if self.declared is None else {one.name for one in self.declared()}
        found = sorted(self.instances.items())
        return [(name, one) for name, one in found if one.up > 0 or names is None or name in names]

    def statistics_entry(self, gpu_memory_nbytes: Mapping[int, int]) -> StatisticsEntry:
        memory_nbytes = int(self.gauges().get("gpuserve_arena_bytes", 0))
        return StatisticsEntry(self.model, self.version, self.statistics, memory_nbytes, gpu_memory_nbytes)

    def queued(self, requests: Sequence[Any], now: float) -> None:
        """Count requests (``PendingRequest``) that left the queue for a worker at ``now``."""
        durations_s = [now - one.enqueued_at for one in requests]
        self.queue_duration.observe_all(durations_s)
        if self.keeps_exemplars:
            self.queue_duration.keep_exemplars(requests, durations_s)

    def count_elements(self, requests: Sequence[Any], rows: int) -> None:
        """Count the elements of a batch with ragged inputs, as sent and as padded to one shape."""
        padded = functools.reduce(PaddedRow.including, requests, EMPTY_ROW)
        self.elements = (self.elements or 0) + sum([one.rows * one.row_elements for one in requests])
        self.padded_elements = (self.padded_elements or 0) + rows * padded.elements

    def stepped(self, steps: int, busy_ns: int, active: int, responses: int) -> None:
        """Count ``steps`` steps that took ``busy_ns`` in all, with ``active`` requests in the sum."""
        counts = self.steps
        if counts is None:
            counts = self.steps = StepMetrics()
        counts.steps += steps
        counts.active += active
        counts.responses += responses
        if steps:
            counts.duration.observe(busy_ns / steps * 1e-9, steps)

    def responded(self, since_s: float, *, is_first: bool) -> None:
        """Count a response, ``since_s`` after its request was accepted or after the response before."""
        if is_first:
            self.first_response.observe(since_s * 1000)
            self.to_first.observe(since_s)
        else:
            self.between_responses.observe(since_s)

    def executed(
        self,
        instance: str,
        size: int,
        sent_at: float,
        phases: Phases,
        requests: Sequence[Any],
        answers: Sequence[object],
    ) -> None:
        """Count a successful batch of ``size`` rows with its answers; errors are not counted here."""
        ended_at = time.monotonic()
        ended: list[Any] = []
        durations_s: list[float] = []
        rows = 0
        for request, answer in zip(requests, answers, strict=True):
            if not (request.counted or isinstance(answer, RequestError)):
                request.counted = True
                rows += request.rows
                ended.append(request)
                durations_s.append(ended_at - request.enqueued_at)
        self.request_duration.observe_all(durations_s)
        if self.keeps_exemplars:
            self.request_duration.keep_exemplars(ended, durations_s)
        if self.window is not None:
            for duration_s in durations_s:
                self.window.observe(ended_at, _latencies(duration_s, ended_at - sent_at, phases))
        at = self.instance(instance)
        at.compute.observe(phases[1] / 1e9)
        answered, elapsed_s = len(durations_s), (ended_at - sent_at) * len(durations_s)
        at.executions[size].add(phases, answered, rows, sum(durations_s) - elapsed_s, elapsed_s)
        self.statistics.last_answer_at = time.time()

    def answered(self, request: Any) -> None:
        """Count a successful request (``PendingRequest``) of an ensemble, which has no instances."""
        rows, duration_s = request.rows, time.monotonic() - request.enqueued_at
        phases = (0, round(duration_s * 1e9), 0)
        self.statistics.instance("")[rows].add(phases, 1, rows, 0.0, duration_s)
        self.statistics.last_answer_at = time.time()
        self.request_duration.observe(duration_s)
        self.request_duration.keep_exemplars((request,), (duration_s,))
        if self.window is not None:
            self.window.observe(time.monotonic(), _latencies(duration_s, duration_s, phases))

    def failed(self, code: str, reason: FailureReason, duration_s: float) -> None:
        self.outcomes.failures[code] = self.outcomes.failures.get(code, 0) + 1
        self.statistics.failed(reason, duration_s)

    def refused(self, error: RequestError) -> None:
        reason = "queue_full" if isinstance(error, QueueFull) else "unavailable"
        if error.code is Code.INVALID_ARGUMENT:
            reason = "invalid"
        self.outcomes.rejections[reason] += 1
        if error.code in _REFUSED_BY_SCHEDULER:
            self.statistics.failed(FailureReason.REJECTED, 0.0)

    def cancelled(self, duration_s: float) -> None:
        self.outcomes.cancellations += 1
        self.statistics.failed(FailureReason.CANCELED, duration_s)

    def cache_hit(self, request: Any, duration_s: float) -> None:
        """Count an answer from the response cache. No instance ran the request, so no rows were inferred."""
        self.statistics.cache_hit(duration_s, time.time())
        self.request_duration.observe(duration_s)
        self.request_duration.keep_exemplars((request,), (duration_s,))
        if self.window is not None:
            self.window.observe_cache(time.monotonic(), "cache_hit", duration_s)

    def cache_missed(self, lookup_s: float) -> None:
        """Count a request that was not in the response cache and runs; the look-up took ``lookup_s``."""
        self.outcomes.cache_misses = (self.outcomes.cache_misses or 0) + 1
        self.statistics.cache_searched(lookup_s)

    def cache_kept(self, lookup_s: float, insertion_s: float) -> None:
        """Record the time to insert an answer into the response cache, after a look-up of ``lookup_s``."""
        self.statistics.cache_missed(insertion_s)
        if self.window is not None:
            self.window.observe_cache(time.monotonic(), "cache_miss", lookup_s + insertion_s)


def _latencies(request_s: float, elapsed_s: float, phases: Phases) -> RequestLatencies:
    return RequestLatencies(request_s * 1e9, (request_s - elapsed_s) * 1e9, *phases)
