"""What has become of the requests of one model: the one account that the statistics endpoints and the metrics
page are both made from. Whatever runs requests can keep it: the batches of instances, or an ensemble.

Pure: durations go in as seconds or, where they come from a worker, as nanoseconds. No clock is read here, and
nothing is written or rendered.

What is counted, with the words of Triton's statistics::

    a request that reached the scheduler  -> succeeded | failed, once it is through
    succeeded                             -> from the response cache | from an execution
    an execution                          =  one call of the callable that did not fail as a whole

An execution is written once, into the cell of its instance and of its merged batch size; every sum over
executions is made from the cells when it is asked for. So at any time, ``success.count == queue.count ==
compute_*.count + cache_hit.count``, and ``execution_count`` is what the batch sizes have together. A request
takes on the whole duration of its execution, however many share it.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

#: Responses of one request from this index on are counted together: a stream may have millions of them.
MAX_RESPONSE_INDEX: Final = 1023
_NS: Final = 1_000_000_000

#: Nanoseconds that an execution took before, in, and after the callable.
Phases: TypeAlias = tuple[int, int, int]


class FailureReason(enum.Enum):
    """Why a request that reached the scheduler got no answer; the words are Triton's."""

    #: It never ran: the queue was full or closed, or its time ran out there.
    REJECTED = "REJECTED"
    #: Its client took it back.
    CANCELED = "CANCELED"
    #: The callable failed, answered nonsense, or its worker died.
    BACKEND = "BACKEND"
    #: Anything else: no memory for its inputs, its deadline while it ran, its model without an instance.
    OTHER = "OTHER"


class Duration(NamedTuple):
    """How many times something happened, and how many nanoseconds it took in total."""

    times: int
    ns: int


class Executions:
    """The executions of one merged batch size on one instance; or sums of such. ``requests`` and ``rows`` are
    those that were answered; the fields that begin with ``request_`` have each execution's duration as often
    as it answered requests. ``queue_s`` is from acceptance to the worker, ``elapsed_s`` from there to the
    answer. ``failures`` are calls that failed as a whole, no executions.
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


#: The executions of one instance: merged batch size -> its cell, there from its first mention on.
BySize: TypeAlias = defaultdict[int, Executions]


class ResponseFate(enum.Enum):
    """What a decoupled model's request was given at one index."""

    SUCCESS = "success"
    FAIL = "fail"
    #: The end of its stream, without a tensor.
    EMPTY = "empty_response"
    #: Its client was gone.
    CANCEL = "cancel"


class ResponsesOfIndex:
    """The responses of one index over all requests: times since the one before, and until the door."""

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
        """The durations by the field names of ``InferResponseStatistics``."""
        fates = {fate.value: Duration(times, _ns(time_s)) for fate, (times, time_s) in self._fates.items()}
        computed = fates["success"].times + fates["fail"].times
        return {
            "compute_infer": Duration(computed, _ns(self._infer_s)),
            "compute_output": Duration(computed, _ns(self._output_s)),
            **fates,
        }


class ModelStatistics:
    """The account of one version of a model."""

    def __init__(self) -> None:
        self.instances: dict[str, BySize] = {}
        self.failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self.cache_hits = 0
        self.cache_misses = 0
        #: By index.
        self.responses: list[ResponsesOfIndex] = []
        #: When the latest request was answered, in seconds since 1970; 0 before the first.
        self.last_answer_at = 0.0
        self._fail_s = 0.0
        self._cache_hit_s = 0.0
        self._cache_miss_s = 0.0

    # ---- what happens; executions are added to their cells -----------------------------------

    def instance(self, name: str) -> BySize:
        return self.instances.setdefault(name, defaultdict(Executions))

    def failed(self, reason: FailureReason, duration_s: float) -> None:
        self.failures[reason] += 1
        self._fail_s += duration_s

    def cache_hit(self, lookup_s: float, time_of_day: float) -> None:
        """A request was answered from the response cache, at this time since 1970."""
        self.cache_hits += 1
        self._cache_hit_s += lookup_s
        self.last_answer_at = time_of_day

    def cache_searched(self, lookup_s: float) -> None:
        """A request was not found in the response cache; it counts once it is answered."""
        self._cache_miss_s += lookup_s

    def cache_missed(self, insertion_s: float) -> None:
        """Such a request was answered, and its answer given to the cache."""
        self.cache_misses += 1
        self._cache_miss_s += insertion_s

    def responded(self, index: int, fate: ResponseFate, infer_s: float, output_s: float) -> None:
        """A request of a decoupled model was given something at this index."""
        index = min(index, MAX_RESPONSE_INDEX)
        while len(self.responses) <= index:
            self.responses.append(ResponsesOfIndex())
        self.responses[index].add(fate, infer_s, output_s)

    # ---- what has happened ----------------------------------------------------------------

    def executions(self) -> Executions:
        """All executions together: ``count`` is ``execution_count``, ``rows`` is ``inference_count``."""
        return total(self._cells())

    def by_size(self) -> dict[int, Executions]:
        """The executions of each merged batch size, over all instances, the smallest first."""
        sizes = sorted({size for one in self.instances.values() for size, cell in one.items() if cell.count})
        return {size: total(one[size] for one in self.instances.values() if size in one) for size in sizes}

    def durations(self) -> dict[str, Duration]:
        """The durations by the field names of ``InferStatistics``."""
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

    def _cells(self) -> Iterator[Executions]:
        for one in self.instances.values():
            yield from one.values()


class StatisticsEntry(NamedTuple):
    """One version of a model: its account, and the GPU memory of its workers in bytes by GPU number."""

    name: str
    version: str
    statistics: ModelStatistics
    memory_nbytes: int
    gpu_memory_nbytes: Mapping[int, int] = MappingProxyType({})


def _ns(time_s: float) -> int:
    return round(time_s * _NS)
