"""The account of a model's requests adds up, whatever becomes of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import Internal, InvalidArgument, QueueFull, RequestError, Unavailable
from gpuserve.front.observability.metrics.model_metrics import (
    DURATION_BUCKETS,
    Histogram,
    LatencyWindow,
    ModelMetrics,
    RequestLatencies,
)
from gpuserve.front.requests.statistics import (
    MAX_RESPONSE_INDEX,
    Duration,
    FailureReason,
    ModelStatistics,
    ResponseFate,
    total,
)

NS = st.integers(0, 10**12)


class Request:
    """As the scheduler accepted it."""

    def __init__(self, rows: int, enqueued_at: float = 0.0) -> None:
        self.rows = rows
        self.enqueued_at = enqueued_at
        self.counted = False


class TracedRequest(Request):
    """Accepted ``duration_s`` before the time 0 of the clock, by a client that traces it."""

    def __init__(self, duration_s: float) -> None:
        super().__init__(1, -duration_s)
        self.trace = SimpleNamespace(context=("traceparent", ""), otel_trace_id=f"{1:032x}")


class Ran(NamedTuple):
    """An execution on an instance: its phases, and for each request its rows and whether it failed alone."""

    instance: str
    phases: tuple[int, int, int]
    requests: list[tuple[int, bool]]


RUNS = st.builds(
    Ran,
    st.sampled_from(["cpu#0", "cpu#1"]),
    st.tuples(NS, NS, NS),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5),
)
REFUSALS = st.sampled_from([QueueFull("full"), Unavailable("no"), InvalidArgument("wrong")])


def execute(metrics: ModelMetrics, run: Ran) -> list[Request]:
    requests = [Request(rows) for rows, _ in run.requests]
    answers: list[RequestError | None] = [Internal("no") if failed else None for _, failed in run.requests]
    size = sum(request.rows for request in requests)
    metrics.executed(run.instance, size, 0.0, run.phases, requests, answers)
    return requests


@given(
    runs=st.lists(RUNS),
    failures=st.lists(st.sampled_from(FailureReason)),
    refusals=st.lists(REFUSALS),
    hits=st.integers(0, 3),
)
def test_every_request_is_counted_once(
    runs: list[Ran], failures: list[FailureReason], refusals: list[RequestError], hits: int
) -> None:
    metrics = ModelMetrics("m", "1", dict, LatencyWindow())
    for run in runs:
        requests = execute(metrics, run)
        assert [not one.counted for one in requests] == [failed for _, failed in run.requests]
    for reason in failures:
        metrics.failed("INTERNAL", reason, 0.25)
    for error in refusals:
        metrics.refused(error)
    for _ in range(hits):
        metrics.cache_hit(None, 0.125)

    statistics = metrics.statistics
    durations, executions, by_size = statistics.durations(), statistics.executions(), statistics.by_size()
    answered = [rows for run in runs for rows, failed in run.requests if not failed]
    reached = [error for error in refusals if not isinstance(error, InvalidArgument)]
    assert durations["success"].times == len(answered) + hits
    assert durations["fail"].times == len(failures) + len(reached)
    assert durations["fail"].ns == len(failures) * 250_000_000
    assert sum(statistics.failures.values()) == durations["fail"].times
    assert durations["queue"].times == durations["success"].times
    assert durations["cache_hit"] == Duration(hits, hits * 125_000_000)
    for number, phase in enumerate(("compute_input", "compute_infer", "compute_output")):
        each = [run.phases[number] * sum(not failed for _, failed in run.requests) for run in runs]
        assert durations[phase] == Duration(len(answered), sum(each))
        once = [getattr(one, f"{phase}_ns") for one in by_size.values()]
        assert sum(once) == sum(run.phases[number] for run in runs)
    assert (executions.count, executions.rows) == (len(runs), sum(answered))
    assert sum(one.count for one in by_size.values()) == executions.count
    assert sorted(by_size) == sorted({sum(rows for rows, _ in run.requests) for run in runs})
    per_instance = [total(one.executions.values()) for one in metrics.instances.values()]
    assert sum(one.count for one in per_instance) == executions.count
    assert sum(one.rows for one in per_instance) == executions.rows


def test_what_is_counted_once_or_not_at_all() -> None:
    metrics, request = ModelMetrics("m", "1", dict), Request(1)
    metrics.instance("cpu#0").batch_failed(4, 0.5)
    assert metrics.instance("cpu#0").batch_sizes().total == 4
    statistics = metrics.statistics
    assert (statistics.executions().count, statistics.by_size()) == (0, {}), "a failed batch is no execution"
    request.counted = True
    metrics.executed("cpu#0", 1, 0.0, (1, 2, 3), [request], [None])
    assert (statistics.executions().count, statistics.durations()["success"].times) == (1, 0)
    statistics.cache_searched(0.5)
    assert statistics.durations()["cache_miss"].times == 0, "a miss counts when it is answered"
    statistics.cache_missed(0.25)
    assert statistics.durations()["cache_miss"] == Duration(1, 750_000_000)


@given(st.lists(st.sampled_from([*DURATION_BUCKETS, *(one + 1e-9 for one in DURATION_BUCKETS)]), min_size=1))
def test_an_exemplar_is_counted_in_its_bucket(durations_s: list[float]) -> None:
    metrics = ModelMetrics("m", "1", dict)
    metrics.keeps_exemplars = True
    requests = [TracedRequest(duration_s) for duration_s in durations_s]
    metrics.queued(requests, 0.0)
    metrics.executed("cpu#0", len(requests), 0.0, (0, 0, 0), requests, [None] * len(requests))
    for histogram in (metrics.queue_duration, metrics.request_duration):
        assert histogram.exemplars
        for bucket, exemplar in histogram.exemplars.items():
            assert histogram.counts[bucket] > 0
            bounds = (0.0, *histogram.bounds, math.inf)
            assert bounds[bucket] < exemplar.value <= bounds[bucket + 1]


@given(values=st.lists(st.floats(0.0, 100.0), max_size=20))
def test_values_that_are_counted_together_are_as_those_counted_one_by_one(values: list[float]) -> None:
    together, apart = Histogram(DURATION_BUCKETS), Histogram(DURATION_BUCKETS)
    together.observe_all(values)
    for value in values:
        apart.observe(value)
    assert together.cumulative() == apart.cumulative()
    assert math.isclose(together.total, apart.total, abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2 * MAX_RESPONSE_INDEX), st.sampled_from(ResponseFate))))
def test_responses_are_kept_by_index_up_to_a_limit(given_out: list[tuple[int, ResponseFate]]) -> None:
    statistics = ModelStatistics()
    for index, fate in given_out:
        statistics.responded(index, fate, 0.5, 0.25)
    assert len(statistics.responses) <= MAX_RESPONSE_INDEX + 1
    of_each: dict[str, Any] = dict.fromkeys((one.value for one in ResponseFate), 0)
    for one in statistics.responses:
        durations = one.durations()
        computed = durations["success"].times + durations["fail"].times
        assert durations["compute_infer"] == Duration(computed, computed * 500_000_000)
        assert durations["compute_output"] == Duration(computed, computed * 250_000_000)
        for fate in of_each:
            of_each[fate] += durations[fate].times
    assert of_each == {one.value: sum(fate is one for _, fate in given_out) for one in ResponseFate}


def test_quantiles_are_those_of_the_window() -> None:
    window = LatencyWindow()
    window.observe(0.0, RequestLatencies(10**9, 0, 0, 0, 0))
    for number in range(1, 101):
        window.observe(100.0, RequestLatencies(number, 0, 0, 0, 0))
    assert window.quantiles(101.0)["request"] == [50, 90, 95, 99, 100]
    assert all(map(math.isnan, window.quantiles(200.0)["request"]))
