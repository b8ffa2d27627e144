"""The request statistics of one model, the single source of the statistics endpoints and the metrics page.
Whatever runs requests can record them: the batches of instances, or an ensemble.

Pure: durations are seconds, or nanoseconds if a worker reports them. Nothing reads a clock here, and nothing
is rendered.

The counts, in the terms of Triton's statistics::

    a request that reached the scheduler  -> succeeded | failed, once it is complete
    succeeded                             -> from the response cache | from an execution
    an execution                          =  one call of the callable that did not fail as a whole

An execution is recorded once, in the cell of its instance and of its merged batch size. Sums over executions
are computed from the cells on demand. So at any time ``success.count == queue.count == compute_*.count +
cache_hit.count``, and ``execution_count`` is the sum over all batch sizes. Each request counts the whole
duration of its execution, however many requests share it.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

#: Responses of one request from this index on are counted together: a stream may have millions of responses.
MAX_RESPONSE_INDEX: Final = 1023
_NS: Final = 1_000_000_000

#: Nanoseconds of an execution before, in, and after the callable.
Phases: TypeAlias = tuple[int, int, int]


class FailureReason(enum.Enum):
    """Why a request that reached the scheduler got no answer. The values are Triton's."""

    #: The request never ran: the queue was full or closed, or the request expired in the queue.
    REJECTED = "REJECTED"
    #: The client cancelled the request.
    CANCELED = "CANCELED"
    #: The callable failed, returned an invalid answer, or its worker died.
    BACKEND = "BACKEND"
    #: Any other reason: no memory for inputs, a deadline passed during execution, a model without an
    #: instance.
    OTHER = "OTHER"


class Duration(NamedTuple):
    """A count of events, and their total duration in nanoseconds."""

    times: int
    ns: int


class Executions:
    """The executions of one merged batch size on one instance, or a sum of such cells.

    ``requests`` and ``rows`` count answered requests. Fields that begin with ``request_`` sum each
    execution's duration once for each answered request. ``queue_s`` is the time from acceptance to the
    worker, ``elapsed_s`` from there to the answer. ``failures`` counts calls that failed as a whole, which
    are not executions.
    """

    __slots__ = (
        "compute_infer_ns", "compute_input_ns", "compute_output_ns", "count", "elapsed_s", "failures",
        "queue_s", "request_infer_ns", "request_input_ns", "request_output_ns", "requests", "rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count = self.failures = self.requests = self.rows = 0
        self.queue_s = self.elapsed_s = 0.0
        self.compute_input_ns = self.compute_infer_ns = self.compute_output_ns = 0
        self.request_input_ns = self.request_infer_ns = self.request_output_ns = 0

    def add(self, phases: Phases, requests: int, rows: int, queue_s: float, elapsed_s: float) -> None:
        input_ns, infer_ns, output_ns = phases
        self.count += 1
        self.requests += requests
        self.rows += rows
        self.queue_s += queue_s
        self.elapsed_s += elapsed_s
        self.compute_input_ns += input_ns
        self.compute_infer_ns += infer_ns
        self.compute_output_ns += output_ns
        self.request_input_ns += requests * input_ns
        self.request_infer_ns += requests * infer_ns
        self.request_output_ns += requests * output_ns


def total(cells: Iterable[Executions]) -> Executions:
    found = Executions()
    for one in cells:
        for field in Executions.__slots__:
            setattr(found, field, getattr(found, field) + getattr(one, field))
    return found


#: The executions of one instance: merged batch size -> its cell, created at its first use.
BySize: TypeAlias = defaultdict[int, Executions]


class ResponseFate(enum.Enum):
    """The outcome of a decoupled model's request at one response index."""

    SUCCESS = "success"
    FAIL = "fail"
    #: The end of the stream, without a tensor.
    EMPTY = "empty_response"
    #: The client had left.
    CANCEL = "cancel"


class ResponsesOfIndex:
    """The responses at one index over all requests: compute time and output time."""

    __slots__ = ("_fates", "_infer_s", "_output_s")

    def __init__(self) -> None:
        self._infer_s = self._output_s = 0.0
        self._fates = dict.fromkeys(ResponseFate, (0, 0.0))

    def add(self, fate: ResponseFate, infer_s: float, output_s: float) -> None:
        count, time_s = self._fates[fate]
        self._fates[fate] = count + 1, time_s + infer_s + output_s
        if fate is ResponseFate.SUCCESS or fate is ResponseFate.FAIL:
            self._infer_s += infer_s
            self._output_s += output_s

    def durations(self) -> dict[str, Duration]:
        """Return the durations by the field names of ``InferResponseStatistics``."""
        fates = {fate.value: Duration(times, _ns(time_s)) for fate, (times, time_s) in self._fates.items()}
        computed = fates["success"].times + fates["fail"].times
        return {
            "compute_infer": Duration(computed, _ns(self._infer_s)),
            "compute_output": Duration(computed, _ns(self._output_s)),
            **fates,
        }


class ModelStatistics:
    """The statistics of one version of a model."""

    def __init__(self) -> None:
        self.instances: dict[str, BySize] = {}
        self.failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self.cache_hits = 0
        self.cache_misses = 0
        #: Responses by index.
        self.responses: list[ResponsesOfIndex] = []
        #: Time of the latest answer, in seconds since 1970; 0 before the first.
        self.last_answer_at = 0.0
        self._fail_s = 0.0
        self._cache_hit_s = 0.0
        self._cache_miss_s = 0.0

    # ---- recording; executions are added to their cells ---------------------------------------

    def instance(self, name: str) -> BySize:
        return self.instances.setdefault(name, defaultdict(Executions))

    def failed(self, reason: FailureReason, duration_s: float) -> None:
        self.failures[reason] += 1
        self._fail_s += duration_s

    def cache_hit(self, lookup_s: float, time_of_day: float) -> None:
        """Count a request that was answered from the response cache at this time since 1970."""
        self.cache_hits += 1
        self._cache_hit_s += lookup_s
        self.last_answer_at = time_of_day

    def cache_searched(self, lookup_s: float) -> None:
        """Add the lookup time of a request that is not in the cache; it counts once it is answered."""
        self._cache_miss_s += lookup_s

    def cache_missed(self, insertion_s: float) -> None:
        """Count such a request, which was answered and whose answer was added to the cache."""
        self.cache_misses += 1
        self._cache_miss_s += insertion_s

    def responded(self, index: int, fate: ResponseFate, infer_s: float, output_s: float) -> None:
        """Count a response of a decoupled model's request at this index."""
        index = min(index, MAX_RESPONSE_INDEX)
        while len(self.responses) <= index:
            self.responses.append(ResponsesOfIndex())
        self.responses[index].add(fate, infer_s, output_s)

    # ---- reading --------------------------------------------------------------------------

    def executions(self) -> Executions:
        """Return the sum of executions: Triton's ``execution_count`` and ``inference_count``."""
        return total(cell for one in self.instances.values() for cell in one.values())

    def by_size(self) -> dict[int, Executions]:
        """Return the executions of each merged batch size over all instances, the smallest size first."""
        sizes = sorted({size for one in self.instances.values() for size, cell in one.items() if cell.count})
        return {size: total(one[size] for one in self.instances.values() if size in one) for size in sizes}

    def durations(self) -> dict[str, Duration]:
        """Return the durations by the field names of ``InferStatistics``."""
        ran = self.executions()
        succeeded = ran.requests + self.cache_hits
        return {
            "success": Duration(succeeded, _ns(ran.queue_s + ran.elapsed_s + self._cache_hit_s)),
            "fail": Duration(sum(self.failures.values()), _ns(self._fail_s)),
            "queue": Duration(succeeded, _ns(ran.queue_s)),
            "compute_input": Duration(ran.requests, ran.request_input_ns),
            "compute_infer": Duration(ran.requests, ran.request_infer_ns),
            "compute_output": Duration(ran.requests, ran.request_output_ns),
            "cache_hit": Duration(self.cache_hits, _ns(self._cache_hit_s)),
            "cache_miss": Duration(self.cache_misses, _ns(self._cache_miss_s)),
        }


class StatisticsEntry(NamedTuple):
    """One version of a model: its statistics, and the GPU memory of its workers in bytes by GPU number."""

    name: str
    version: str
    statistics: ModelStatistics
    memory_nbytes: int
    gpu_memory_nbytes: Mapping[int, int] = MappingProxyType({})


def _ns(time_s: float) -> int:
    return round(time_s * _NS)
