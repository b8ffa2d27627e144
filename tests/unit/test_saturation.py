"""How much a model has to do of what its instances do at once, on schedulers with a clock of the test's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import Model
from sequenced import Sequenced

from gpuserve.front.observability.metrics.metrics_page import MetricsPage
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.scheduling.scheduler import saturation
from gpuserve.model.spec import BatchingSpec, ModelSpec


def spec(max_batch_size: int = 8, **batching: Any) -> ModelSpec:
    return ModelSpec("m", (), (), max_batch_size, (), batching=BatchingSpec(**batching))


def of(model: Model | Sequenced, what: ModelSpec) -> float | None:
    return saturation(what, model.scheduler.statistics())


def test_idle_is_nothing_and_full_batches_everywhere_are_one() -> None:
    model, what = Model(instances=2), spec()
    assert of(model, what) == 0.0
    model.submit_many(16)
    assert of(model, what) == 1.0  # the same whether they wait or run
    first, second = model.must_next(), model.must_next()
    assert of(model, what) == 1.0
    model.submit_many(4)
    assert of(model, what) == 1.25
    model.scheduler.complete(first.batch_id)
    assert of(model, what) == 0.75
    model.scheduler.complete(second.batch_id)
    assert of(model, what) == 0.25


def test_a_batch_that_is_not_full_leaves_the_instance_unsaturated_and_one_that_is_over_counts_no_more() -> (
    None
):
    model = Model()
    model.submit()
    batch = model.must_next()
    assert of(model, spec()) == 1 / 8
    model.scheduler.computed(batch)
    assert of(model, spec()) == 0.0
    model.scheduler.complete(batch.batch_id)
    assert of(model, spec()) == 0.0


def test_what_is_held_ahead_takes_no_slot_and_calls_under_way_at_once_are_slots() -> None:
    model = Model(max_batch_size=2, prefetch=1)
    model.submit_many(4)
    assert [model.must_next().rows, model.must_next().rows] == [2, 2]
    assert of(model, spec(2)) == 2.0
    model = Model(instances=0)
    model.scheduler.instance_up("awaits", slots=16)
    model.submit_many(64)
    assert of(model, spec()) == 0.5


def test_a_cancelled_request_leaves_a_dead_instance_weighs_and_none_is_no_answer() -> None:
    model, what = Model(instances=2), spec()
    first, *_ = model.submit_many(8)
    assert of(model, what) == 0.5
    model.scheduler.cancel(first)
    assert of(model, what) == 7 / 16
    model.scheduler.instance_down("i0")
    assert of(model, what) == 7 / 8
    model.scheduler.instance_down("i1")
    assert of(model, what) is None


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_where_nothing_is_merged_requests_count_and_not_their_rows(max_batch_size: int) -> None:
    model = Model(max_batch_size=max_batch_size, merge=False, instances=2)
    model.submit(rows=7)
    model.must_next()
    assert of(model, spec(max_batch_size, merge=False)) == 0.5


@pytest.mark.parametrize(("delay_us", "full"), [(0, 4), (1000, 8)])
def test_a_preferred_size_is_a_full_batch_where_there_is_no_delay(delay_us: int, full: int) -> None:
    model = Model(delay_us=delay_us, preferred=(2, 4))
    model.submit_many(8)
    model.at_us = delay_us
    what = spec(max_queue_delay_us=delay_us, preferred_batch_sizes=(2, 4))
    assert of(model, what) == 8 / full
    assert model.must_next().rows == full


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_a_sequence_that_is_idle_takes_a_seat_all_the_same(strategy: str) -> None:
    model, what = Sequenced(strategy), spec(4)
    seats = model.count("seats")
    for name in range(seats):
        model.submit(name, "s")
        model.step()
    assert (model.count("queued"), model.count("running_requests")) == (0, 0)
    assert of(model, what) == 1.0
    model.submit("one more", "s")
    assert of(model, what) == (seats + 1) / seats


@given(st.lists(st.integers(1, 8), max_size=40), st.integers(1, 4), st.integers(0, 2))
def test_it_is_the_rows_over_those_of_full_batches_wherever_they_are(
    rows: list[int], instances: int, prefetch: int
) -> None:
    model, what = Model(instances=instances, prefetch=prefetch), spec()
    for one in rows:
        model.submit(one)
    expected = pytest.approx(sum(rows) / (8 * instances))
    assert of(model, what) == expected
    while model.next() is not None:
        assert of(model, what) == expected
    assert (of(model, what) == 0.0) == (not rows)


def test_the_page_has_a_sample_where_there_is_a_value_and_none_where_not() -> None:
    busy = ModelMetrics("busy", "1", lambda: {"gpuserve_saturation": 0.25})
    loading = ModelMetrics("loading", "2", dict)
    text = asyncio.run(MetricsPage(lambda: [busy, loading], "0").page()).decode()
    samples = [line for line in text.splitlines() if line.startswith("gpuserve_saturation")]
    assert samples == ['gpuserve_saturation{model="busy",version="1"} 0.25']
