"""The scheduler of one model, rule by rule, with figures. Time is a number that the test writes.

B-1 … B-8 are the rules of Triton's dynamic batcher in the order of the requirements; what holds for every
sequence of events is in ``test_batcher_properties.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import Model, model_spec

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
def test_b1_without_merging_every_request_is_alone_in_order_and_at_once(
    max_batch_size: int, merge: bool
) -> None:
    model = Model(max_batch_size=max_batch_size, merge=merge, delay_us=1000, instances=3)
    first, second, third = (model.submit(rows) for rows in (1, 3, 2))
    batches = [model.must_next() for _ in range(3)]
    assert [batch.requests for batch in batches] == [[first], [second], [third]]
    assert [batch.rows for batch in batches] == [1, 3, 2]
    assert [batch.instance for batch in batches] == ["i0", "i1", "i2"]
    assert all(batch.alone for batch in batches)


def test_b2_the_default_preferred_size_is_max_batch_size() -> None:
    model = Model(max_batch_size=4, delay_us=1000)
    model.submit_many(3)
    assert model.next() is None
    model.submit()
    assert model.run_all() == [4]


def test_b3_no_batch_is_formed_without_a_free_slot() -> None:
    model = Model(instances=0)
    model.submit_many(3)
    assert model.next() is None
    model.scheduler.instance_up("late")
    assert model.must_next().rows == 3


def test_b3_rows_never_exceed_max_batch_size_and_no_request_is_cut() -> None:
    model = Model(max_batch_size=8)
    for rows in (3, 4, 2, 8, 1):
        model.submit(rows)
    assert model.run_all() == [7, 2, 8, 1]


def test_b3_what_would_exceed_max_batch_size_sends_what_is_there_now() -> None:
    model = Model(max_batch_size=8, delay_us=1000)
    model.submit(5)
    assert model.next() is None
    model.submit(4)
    assert model.run_all() == [5]
    assert model.count("queued_rows") == 4


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


def test_b4_the_largest_preferred_size_that_the_walk_hits_is_best() -> None:
    model = Model(max_batch_size=16, preferred=(2, 4, 8), delay_us=1000)
    model.submit_many(7)
    assert model.must_next().rows == 4


def test_b4_going_over_the_largest_preferred_size_makes_what_came_before_best() -> None:
    model = Model(max_batch_size=8, preferred=(4,), delay_us=1000)
    model.submit(3)
    model.submit(3)
    assert model.must_next().rows == 3
    model.scheduler.complete(0)
    assert model.next() is None, "three rows alone wait for a fourth"


def test_b5_1_best_is_sent_although_more_is_queued() -> None:
    model = Model(max_batch_size=16, preferred=(8,), delay_us=1000)
    model.submit_many(10)
    assert model.must_next().rows == 8


def test_b5_2_a_single_request_over_every_preferred_size_does_not_wait() -> None:
    model = Model(max_batch_size=8, preferred=(4,), delay_us=1000)
    model.submit(5)
    assert model.must_next().rows == 5


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


def test_b5_4_an_arrival_that_meets_a_preferred_size_ends_the_wait() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    model.submit_many(3)
    assert model.next() is None
    model.at_us = 10
    model.submit()
    assert model.run_all() == [4]


def test_b6_without_delay_six_go_as_four_and_two() -> None:
    model = Model(preferred=(4, 8))
    model.submit_many(6)
    assert model.run_all() == [4, 2]


def test_b6_without_delay_three_go_at_once() -> None:
    model = Model(preferred=(4, 8))
    model.submit_many(3)
    assert model.run_all() == [3]


def test_b7_with_delay_six_at_once_send_four_and_two_start_anew() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    requests = model.submit_many(6)
    assert model.run_all() == [4]
    assert model.wakeup_us() == 1000
    late = model.submit_many(2)
    batch = model.must_next()
    assert batch.requests == requests[4:] + late


def test_b8_when_the_delay_has_run_out_everything_walked_goes() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    model.submit_many(3)
    assert model.run_all() == []
    model.at_us = 1000
    assert model.run_all() == [3]


def test_b8_when_the_delay_has_run_out_best_does_not_count() -> None:
    model = Model(instances=0, preferred=(4, 8), delay_us=1000)
    model.submit_many(6)
    model.at_us = 1500
    model.scheduler.instance_up("late")
    assert model.run_all() == [6]


def test_b8_when_the_delay_has_run_out_max_batch_size_still_counts() -> None:
    model = Model(instances=0, delay_us=1000)
    model.submit(5)
    model.submit(4)
    model.at_us = 1000
    model.scheduler.instance_up("late")
    assert model.run_all() == [5, 4]


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
    model.submit_many(2)
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size of 2 requests$") as caught:
        model.submit()
    assert caught.value.code is Code.UNAVAILABLE
    assert (model.count("queued"), model.count("accepted"), model.count("rejected")) == (2, 2, 1)


def test_running_requests_do_not_count_towards_the_limit() -> None:
    model = Model(max_requests=1)
    model.submit()
    model.must_next()
    model.submit()
    with pytest.raises(QueueFull):
        model.submit()


def test_the_queue_is_limited_in_bytes() -> None:
    model = Model(instances=0, max_nbytes=100)
    model.submit(nbytes=60)
    model.submit(nbytes=40)
    with pytest.raises(QueueFull, match="of 100 bytes: 100 bytes are queued and the request has 1"):
        model.submit(nbytes=1)
    assert model.count("queued_nbytes") == 100


def test_an_empty_queue_takes_a_request_larger_than_the_limit() -> None:
    model = Model(max_nbytes=100)
    model.submit(nbytes=1000)
    with pytest.raises(QueueFull):
        model.submit(nbytes=1)
    assert model.run_all() == [1]
    assert model.submit(nbytes=1000).state is RequestState.QUEUED


def test_a_cancelled_request_makes_room_at_once() -> None:
    model = Model(instances=0, max_requests=1)
    assert model.scheduler.cancel(model.submit())
    assert model.submit().state is RequestState.QUEUED


def test_a_rejected_request_is_untouched() -> None:
    model = Model(instances=0, max_requests=1)
    model.submit()
    rejected = QueuedRequest(1, 1, "")
    with pytest.raises(QueueFull):
        model.scheduler.submit(rejected, 0.0)
    assert rejected.state is RequestState.NEW


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
    busy = model.scheduler.next_batch(model.now, "i1")
    assert busy is not None
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
        batch = scheduler.next_batch(0.0)
        assert batch is not None
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
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=20),
    st.sampled_from([0, 100]),
    st.integers(0, 6),
)
def test_a_batch_never_exceeds_the_limit_of_bytes_and_is_not_smaller_than_need_be(
    sizes: list[int], limit: int, before: int
) -> None:
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
