"""Rates of models are the differences of what is counted, and quantiles those of the time between."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import Code, QueueFull, RequestError
from gpuserve.front.observability.metrics.model_metrics import DURATION_BUCKETS, Histogram, ModelMetrics
from gpuserve.front.observability.metrics.rates import RateMeter, counts_of, quantile
from gpuserve.front.requests.statistics import FailureReason


def account(name: str = "echo") -> ModelMetrics:
    return ModelMetrics(name, "1", dict)


def answer(metrics: ModelMetrics, n_requests: int, rows: int = 1, busy_s: float = 0.0) -> None:
    """One batch of requests that were answered at once."""
    requests = [SimpleNamespace(counted=False, rows=rows, enqueued_at=0.0) for _ in range(n_requests)]
    phases = (0, round(busy_s * 1e9), 0)
    metrics.executed("echo-0", n_requests * rows, 0.0, phases, requests, [None] * n_requests)


def test_what_happens_between_two_readings_is_told_by_the_second() -> None:
    metrics, meter = account(), RateMeter()
    answer(metrics, 7)
    rates = meter.read(metrics, 10.0)
    assert rates[:6] == (0.0, 0.0, 0.0, None, None, None)
    assert rates.instances["echo-0"] == (0.0, 0.0)
    answer(metrics, 4, rows=2, busy_s=0.5)
    answer(metrics, 2, rows=1, busy_s=0.5)
    for code in (Code.INTERNAL.value, "NEW_CODE"):  # which are counted together
        metrics.failed(code, FailureReason.BACKEND, 0.1)
    metrics.refused(QueueFull("full"))
    rates = meter.read(metrics, 12.0)
    assert (rates.requests_per_s, rates.failures_per_s, rates.rejections_per_s) == (3.0, 1.0, 0.5)
    assert (rates.batch_size, rates.instances["echo-0"]) == (5.0, (1.0, 0.5))
    assert meter.read(metrics, 13.0)[:6] == (0.0, 0.0, 0.0, None, None, None)


def test_steps_of_a_stepped_callable() -> None:
    metrics, meter = account(), RateMeter()
    metrics.stepped(5, 10_000_000, 20, 20)
    meter.read(metrics, 10.0)
    answer(metrics, 1)
    for since_s in (0.003, 0.004, 0.003):
        metrics.responded(since_s, is_first=True)
    metrics.stepped(10, 20_000_000, 80, 60)
    rates = meter.read(metrics, 12.0)
    assert (rates.steps_per_s, rates.batch_size, rates.responses_per_s) == (5.0, 8.0, 30.0)
    assert rates.first_p50_s is not None
    assert 0.001 <= rates.first_p50_s <= 0.01
    assert meter.read(metrics, 13.0).steps_per_s is None


def test_an_account_that_begins_anew_has_no_negative_rate() -> None:
    meter = RateMeter()
    first, second = account(), account()
    answer(first, 100)
    first.refused(RequestError("no"))
    meter.read(first, 1.0)
    answer(second, 4)
    rates = meter.read(second, 2.0)
    assert (rates.requests_per_s, rates.rejections_per_s, rates.batch_size) == (4.0, 0.0, 4.0)


def test_a_model_that_went_is_forgotten() -> None:
    meter, metrics = RateMeter(), account()
    meter.read(metrics, 1.0)
    meter.retain([("other", "1")])
    answer(metrics, 4)
    assert meter.read(metrics, 2.0).requests_per_s == 0.0  # its first reading once more


def test_what_is_cached_is_a_request_and_no_batch() -> None:
    metrics, meter = account(), RateMeter()
    meter.read(metrics, 1.0)
    metrics.cache_hit(None, 0.0001)
    rates = meter.read(metrics, 2.0)
    assert (rates.requests_per_s, rates.batch_size) == (1.0, None)
    assert counts_of(metrics).batches == 0


@given(st.lists(st.floats(0.00001, 59.0), min_size=1), st.sampled_from([0.5, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], part: float) -> None:
    histogram = Histogram(DURATION_BUCKETS)
    for value in values:
        histogram.observe(value)
    found = quantile(histogram.counts, part)
    true = sorted(values)[max(0, -int(-part * len(values) // 1) - 1)]
    upper = next(bound for bound in DURATION_BUCKETS if true <= bound)
    lower = max((bound for bound in DURATION_BUCKETS if bound < true), default=0.0)
    assert found is not None
    assert lower <= found <= upper * (1 + 1e-9)


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_quantiles_of_even_values_are_near(n: int) -> None:
    histogram = Histogram([1.0, 2.0, 4.0])
    values = [2.0 + 2.0 * one / n for one in range(1, n + 1)]
    histogram.observe_all(values)
    found = quantile(histogram.counts, 0.5, [1.0, 2.0, 4.0])
    assert found == pytest.approx(statistics.median(values), rel=0.5 / n + 1e-9)


def test_a_quantile_of_what_is_over_the_last_bound_is_that_bound() -> None:
    assert quantile([0] * len(DURATION_BUCKETS) + [3], 0.5) == 60.0
