"""The scheduler of one model, rule by rule, with figures. Time is a number that the test writes.

B-1 … B-8 are the rules of Triton's dynamic batcher in the order of the requirements; what holds for every
sequence of events is in ``test_batcher_properties.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import Model, model_spec, must_next

from gpuserve.core.errors import Code, QueueFull, Unavailable
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.front.requests.validation import ModelCheck
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec
from gpuserve_worker.protocol.tensor import TensorSpec

# ---- B-1 … B-8 ------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_batch_size", "merge"), [(0, True), (8, False), (0, False)])
def test_b1_without_merging_requests_run_alone_in_order_and_at_once(max_batch_size: int, merge: bool) -> None:
    model = Model(max_batch_size=max_batch_size, merge=merge, delay_us=1000, instances=3)
    first, second, third = (model.submit(rows) for rows in (1, 3, 2))
    batches = [model.must_next() for _ in range(3)]
    assert [batch.requests for batch in batches] == [[first], [second], [third]]
    assert [batch.rows for batch in batches] == [1, 3, 2]
    assert [batch.instance for batch in batches] == ["i0", "i1", "i2"]
    assert all(batch.alone for batch in batches)


@pytest.mark.parametrize(
    ("options", "rows", "at_once", "after_the_delay"),
    [
        # B-3: rows never exceed max_batch_size, and no request is cut.
        ({}, (3, 4, 2, 8, 1), [7, 2, 8, 1], []),
        # B-3: a request that would exceed max_batch_size sends the rows before it.
        ({"delay_us": 1000}, (5, 4), [5], [4]),
        # B-4: the best size is the largest preferred size that the walk hits.
        ({"max_batch_size": 16, "preferred": (2, 4, 8), "delay_us": 1000}, (1,) * 7, [4, 2], [1]),
        # B-4: if the walk goes over the largest preferred size, the rows before are best.
        ({"preferred": (4,), "delay_us": 1000}, (3, 3), [3], [3]),
        # B-5.1: the best size is sent although more is queued.
        ({"max_batch_size": 16, "preferred": (8,), "delay_us": 1000}, (1,) * 10, [8], [2]),
        # B-5.2: a single request over every preferred size does not wait.
        ({"preferred": (4,), "delay_us": 1000}, (5,), [5], []),
        # B-6: without a delay nothing waits.
        ({"preferred": (4, 8)}, (1,) * 6, [4, 2], []),
        ({"preferred": (4, 8)}, (1,) * 3, [3], []),
        # B-8: everything that was walked goes when the delay has run out.
        ({"preferred": (4, 8), "delay_us": 1000}, (1,) * 3, [], [3]),
    ],
)
def test_sizes_of_batches(
    options: dict[str, Any], rows: tuple[int, ...], at_once: list[int], after_the_delay: list[int]
) -> None:
    model = Model(**options)
    for number in rows:
        model.submit(number)
    assert model.run_all() == at_once
    assert model.count("queued_rows") == sum(after_the_delay)
    model.at_us = 1000
    assert model.run_all() == after_the_delay


@pytest.mark.parametrize("options", [{"max_batch_size": 4}, {"preferred": (4, 8)}])
def test_b2_b5_4_an_arrival_that_meets_a_preferred_size_ends_the_wait(options: dict[str, Any]) -> None:
    """The default preferred size is max_batch_size."""
    model = Model(delay_us=1000, **options)
    model.submit_many(3)
    assert model.next() is None
    model.at_us = 10
    model.submit()
    assert model.run_all() == [4]


def test_requests_of_another_shape_do_not_end_the_delay() -> None:
    model = Model(delay_us=1000)
    same = model.submit_many(2, key="a")
    other = model.submit(key="b")
    assert model.next() is None
    assert model.wakeup_us() == 1000
    same += model.submit_many(1, key="a")
    model.at_us = 1000
    assert model.must_next().requests == same
    model.scheduler.complete(0)
    assert model.must_next().requests == [other]


def test_a_batch_takes_requests_of_its_shape_from_behind_others() -> None:
    model = Model()
    requests = [model.submit(key=key) for key in "aabcab"]
    for expected in ((0, 1, 4), (2, 5), (3,)):
        batch = model.must_next()
        assert batch.requests == [requests[number] for number in expected]
        model.scheduler.complete(batch.batch_id)


def test_a_full_batch_of_another_shape_goes_while_the_first_waits() -> None:
    model = Model(max_batch_size=4, delay_us=1000)
    first = model.submit(key="a")
    model.submit_many(5, key="b")
    assert model.must_next().requests[0].merge_key == "b"
    model.scheduler.complete(0)
    assert model.next() is None
    model.at_us = 1000
    assert model.must_next().requests == [first]


def test_a_rare_shape_goes_next_once_its_delay_is_over_beside_full_batches_of_another() -> None:
    model = Model(max_batch_size=4, delay_us=1000)
    model.submit_many(4, key="b")
    rare = model.submit(key="a")
    for _ in range(3):
        model.submit_many(4, key="b")
        batch = model.must_next()
        assert batch.requests[0].merge_key == "b"
        model.scheduler.complete(batch.batch_id)
        model.at_us += 300
    model.at_us = 1000
    assert model.must_next().requests == [rare]


@pytest.mark.parametrize("delay_us", [0, 1000])
def test_a_rare_shape_is_not_passed_by_batches_that_an_instance_holds(delay_us: int) -> None:
    model = Model(max_batch_size=4, prefetch=1, delay_us=delay_us)
    model.submit_many(8, key="b")
    running = [model.must_next(), model.must_next()]
    rare = model.submit(key="a")
    model.at_us = delay_us
    for _ in range(2):
        model.submit_many(4, key="b")
        model.scheduler.complete(running.pop(0).batch_id)
        running.append(model.must_next())
        model.at_us += 300
    assert rare in [one for batch in running for one in batch.requests]


def test_b5_2_best_goes_beside_another_shape() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    model.submit_many(6, key="a")
    model.submit(key="b")
    assert model.run_all() == [4]
    assert model.count("queued") == 3


def test_b5_3_and_4_wait_is_what_the_oldest_has_left_of_the_delay() -> None:
    model = Model(delay_us=1000)
    model.submit()
    model.at_us = 400
    model.submit()
    assert model.next() is None
    assert model.wakeup_us() == 1000
    model.at_us = 999
    assert model.next() is None
    model.at_us = 1000
    assert model.run_all() == [2]
    assert model.wakeup_us() is None


def test_b5_4_the_nearest_deadline_of_a_waiting_request_wakes_earlier() -> None:
    model = Model(delay_us=1000)
    model.submit(timeout_us=5000)
    model.submit(timeout_us=300)
    assert model.next() is None
    assert model.wakeup_us() == 300


def test_b7_with_delay_six_at_once_send_four_and_two_start_anew() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    requests = model.submit_many(6)
    assert model.run_all() == [4]
    assert model.wakeup_us() == 1000
    late = model.submit_many(2)
    batch = model.must_next()
    assert batch.requests == requests[4:] + late


@pytest.mark.parametrize(
    ("options", "rows", "sizes"),
    [
        ({}, (1, 1, 1), [3]),  # B-3: no batch is formed without a free slot
        ({"preferred": (4, 8), "delay_us": 1000}, (1,) * 6, [6]),  # B-8: the best size does not count
        ({"delay_us": 1000}, (5, 4), [5, 4]),  # B-8: max_batch_size still counts
    ],
)
def test_b3_b8_batches_of_an_instance_that_comes_after_the_delay(
    options: dict[str, Any], rows: tuple[int, ...], sizes: list[int]
) -> None:
    model = Model(instances=0, **options)
    for number in rows:
        model.submit(number)
    assert model.next() is None
    model.at_us = 1500
    model.scheduler.instance_up("late")
    assert model.run_all() == sizes


# ---- late binding ---------------------------------------------------------------------------


def test_a_backlog_becomes_one_batch_when_a_slot_comes_free() -> None:
    model = Model()
    model.submit()
    running = model.must_next()
    model.submit_many(5)
    assert model.next() is None
    assert model.wakeup_us() is None, "only the end of the batch can change anything"
    model.scheduler.complete(running.batch_id)
    assert model.must_next().rows == 5


def test_batches_go_where_the_fewest_run_then_where_the_last_use_is_longest_ago() -> None:
    model = Model(instances=3, merge=False, prefetch=1)
    model.submit_many(6)
    placed = [model.must_next() for _ in range(6)]
    assert [batch.instance for batch in placed] == ["i0", "i1", "i2", "i0", "i1", "i2"]
    model.submit_many(3)
    assert model.next() is None
    for batch in (placed[2], placed[5], placed[1]):
        model.scheduler.complete(batch.batch_id)
    assert [model.must_next().instance for _ in range(3)] == ["i2", "i1", "i2"]


def test_prefetch_is_room_for_more_than_the_running_batch() -> None:
    model = Model(prefetch=2, max_batch_size=1)
    model.submit_many(4)
    assert [model.must_next().instance for _ in range(3)] == ["i0"] * 3
    assert model.next() is None
    assert (model.count("room"), model.count("running_batches"), model.count("queued")) == (0, 3, 1)


def test_the_delay_is_no_reason_to_wake_without_room() -> None:
    model = Model(instances=0, delay_us=1000)
    model.submit()
    assert model.wakeup_us() is None
    model.scheduler.instance_up("i0")
    assert model.wakeup_us() == 1000


def test_an_instance_cannot_be_up_twice() -> None:
    model = Model()
    with pytest.raises(ValueError, match="'i0' is up already"):
        model.scheduler.instance_up("i0")
    assert model.count("room") == 1


# ---- the limits of the queue ----------------------------------------------------------------


def test_the_queue_is_limited_in_requests() -> None:
    model = Model(instances=0, max_requests=2)
    first, _ = model.submit_many(2)
    rejected = QueuedRequest(1, 1, "")
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size of 2 requests$") as caught:
        model.scheduler.submit(rejected, model.now)
    assert (caught.value.code, rejected.state) == (Code.UNAVAILABLE, RequestState.NEW)
    assert (model.count("queued"), model.count("accepted"), model.count("rejected")) == (2, 2, 1)
    assert model.scheduler.cancel(first)
    assert model.submit().state is RequestState.QUEUED, "a cancelled request makes room at once"
    model.scheduler.instance_up("i0")
    assert model.must_next().rows == 2
    model.submit_many(2)  # running requests do not count
    with pytest.raises(QueueFull):
        model.submit()


def test_the_queue_is_limited_in_bytes_but_an_empty_queue_takes_any_request() -> None:
    model = Model(max_nbytes=100)
    model.submit(nbytes=60)
    model.submit(nbytes=40)
    with pytest.raises(QueueFull, match="of 100 bytes: 100 bytes are queued and the request has 1"):
        model.submit(nbytes=1)
    assert model.count("queued_nbytes") == 100
    for _ in range(2):
        assert sum(model.run_all())
        assert model.submit(nbytes=1000).state is RequestState.QUEUED
        with pytest.raises(QueueFull):
            model.submit(nbytes=1)


def test_a_draining_scheduler_refuses_the_new_and_runs_the_queued() -> None:
    model = Model()
    model.submit_many(2)
    model.scheduler.draining = True
    assert model.scheduler.draining
    with pytest.raises(Unavailable, match="has stopped accepting new inference requests"):
        model.submit()
    assert model.run_all() == [2]
    assert model.count("rejected") == 1


def test_an_instance_that_holds_all_it_may_has_no_room_under_its_name() -> None:
    model = Model(instances=2, max_batch_size=1)
    model.submit_many(3)
    assert model.scheduler.with_room() == ["i0", "i1"]
    busy = must_next(model.scheduler, model.now, "i1")
    assert model.scheduler.with_room() == ["i0"]
    assert model.scheduler.next_batch(model.now, "i1") is None
    model.scheduler.complete(busy.batch_id)
    assert model.scheduler.next_batch(model.now, "i1") is not None


def test_batches_are_bounded_in_elements_and_learn_what_the_memory_holds() -> None:
    scheduler = ModelScheduler(model_spec(max_batch_size=64, batching=BatchingSpec(max_batch_elements=800)))
    scheduler.instance_up("i0")

    def rows_of_next(*lengths: int) -> int:
        for length in lengths:
            scheduler.submit(QueuedRequest(1, 1, "", row_elements=length), 0.0)
        batch = must_next(scheduler, 0.0)
        scheduler.complete(batch.batch_id)
        if batch.rows == 8:
            scheduler.exceeded_memory(batch)
        return batch.rows

    assert rows_of_next(*[100] * 8, 1) == 8
    assert rows_of_next() == 1
    assert rows_of_next(*[100] * 8) == 4, "the half of what was too much"
    assert rows_of_next() == 4
    for _ in range(1024):
        assert rows_of_next(1) == 1
    assert rows_of_next(*[100] * 8) == 8, "tried again after a while"
    assert rows_of_next(500) == 1
    assert rows_of_next(500) == 1, "a request over the limit runs alone"


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=20), st.sampled_from([0, 100]), st.integers(0, 6))
def test_batches_are_as_large_as_the_limit_of_bytes_allows(sizes: list[int], limit: int, before: int) -> None:
    """``before`` requests arrive and are looked at before the others do."""
    batching = BatchingSpec(max_batch_nbytes=limit, max_queue_delay_us=1000)
    scheduler = ModelScheduler(model_spec(max_batch_size=64, batching=batching))
    scheduler.instance_up("i0")
    batches: list[list[int]] = []

    def form(now: float) -> None:
        while (batch := scheduler.next_batch(now)) is not None:
            batches.append([one.nbytes for one in batch.requests])
            scheduler.complete(batch.batch_id)

    for number, nbytes in enumerate(sizes):
        scheduler.submit(QueuedRequest(1, nbytes, ""), 0.0)
        if number < before:
            form(0.0)
    form(1.0)
    assert list(itertools.chain.from_iterable(batches)) == sizes
    for batch, following in itertools.pairwise(batches):
        assert not limit or len(batch) == 1 or sum(batch) <= limit
        assert sum(batch) + following[0] > (limit or math.inf)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), *[st.integers(0, 9)] * 3), min_size=1, max_size=20),
    st.sampled_from([20, 100, 400]),
    st.integers(0, 6),
)
def test_a_padded_batch_never_exceeds_the_limit_of_elements_and_is_not_smaller_than_need_be(
    sizes: list[tuple[int, int, int, int]], limit: int, before: int
) -> None:
    """``before`` requests arrive and are looked at before the others do."""
    inputs = (
        TensorSpec("image", "INT8", (-1, 2, -1), ragged=True),
        TensorSpec("text", "INT8", (-1,), ragged=True),
        TensorSpec("label", "INT8", (-1,)),
    )
    batching = BatchingSpec(max_batch_elements=limit, max_queue_delay_us=1000)
    spec = dataclasses.replace(model_spec(max_batch_size=64, batching=batching), inputs=inputs)
    check, model = ModelCheck(spec), ModelScheduler(spec)
    model.instance_up("i0")
    made = {}
    batches: list[Batch] = []

    def form(now: float) -> None:
        while (batch := model.next_batch(now)) is not None:
            batches.append(model.complete(batch.batch_id))

    def padded_elements(rows: list[tuple[int, int, int, int]]) -> int:
        counts, *axes = zip(*rows, strict=True)
        height, width, length = map(max, axes)
        elements: int = sum(counts) * max(height * 2 * width, length)
        return elements

    for number, (rows, height, width, length) in enumerate(sizes):
        shapes = (rows, height, 2, width), (rows, length), (rows, 5)
        tensors = [
            InputTensor(one.name, one.datatype, shape, bytes(math.prod(shape)))
            for one, shape in zip(inputs, shapes, strict=True)
        ]
        checked = check.check(InferRequest("m", "", "", {}, tensors, (), None))
        request = QueuedRequest(rows, checked.nbytes, checked.merge_key)
        request.row_elements, request.row_shapes = checked.row_elements, checked.row_shapes
        made[request] = sizes[number]
        model.submit(request, 0.0)
        if number < before:
            form(0.0)
    form(1.0)
    ran = [[made[one] for one in batch.requests] for batch in batches]
    assert list(itertools.chain(*ran)) == sizes
    for batch, follower in itertools.pairwise([*ran, []]):
        assert len(batch) == 1 or padded_elements(batch) <= limit
        if follower:
            larger = [*batch, follower[0]]
            assert padded_elements(larger) > limit or sum(one[0] for one in larger) > 64


@pytest.mark.parametrize("delay_us", [0, 1000])
def test_a_request_costs_the_same_with_thousands_of_shapes(delay_us: int) -> None:
    def calls_per_request(n_shapes: int) -> float:
        model = Model(max_batch_size=2, delay_us=delay_us)
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in {"call", "c_call"}

        sys.setprofile(count)
        try:
            for number in range(3 * n_shapes):
                model.submit(key=str(number % n_shapes))
            model.at_us = 1000
            assert sum(model.run_all()) == 3 * n_shapes
        finally:
            sys.setprofile(None)
        return calls / (3 * n_shapes)

    assert calls_per_request(2_000) < 1.3 * calls_per_request(100)
