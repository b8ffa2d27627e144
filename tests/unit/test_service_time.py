"""How long a batch is expected to take, by those before."""

from __future__ import annotations

from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import Model

from gpuserve.front.scheduling.slots import ServiceTime


def known(*observed: tuple[int, float]) -> ServiceTime:
    """What is known after each of these was observed three times."""
    time = ServiceTime()
    for rows, seconds in observed:
        for _ in range(3):
            time.observe(rows, seconds)
    return time


def test_nothing_is_known_before_a_second_batch_which_need_not_be_as_slow_as_the_first() -> None:
    time = ServiceTime()
    assert time.estimate(8) is None
    time.observe(8, 30.0)
    assert time.estimate(8) is None
    time.observe(8, 0.005)
    assert time.estimate(8) == 0.005


def test_two_outliers_change_nothing_and_a_new_time_is_known_after_three() -> None:
    time = known((32, 0.005), (32, 0.005))
    time.observe(32, 9.0)
    time.observe(32, 0.0)
    assert time.estimate(32) == 0.005
    for _ in range(3):
        time.observe(32, 0.05)
    assert time.estimate(32) == 0.05


def test_an_unknown_size_takes_the_least_that_it_can() -> None:
    time = known((16, 0.016), (64, 0.064))
    assert time.estimate(4) == 0.004
    assert time.estimate(40) == 0.04
    assert time.estimate(512) == 0.064
    assert known((32, 0.005)).estimate(64) == 0.005


@settings(max_examples=examples(200), deadline=None)
@given(
    fixed=st.floats(0, 1), each=st.floats(0, 1), seen=st.lists(st.integers(1, 512)), rows=st.integers(1, 512)
)
def test_where_more_rows_take_more_time_no_estimate_is_far_above_it(
    fixed: float, each: float, seen: list[int], rows: int
) -> None:
    estimate = known(*((one, fixed + each * one) for one in seen)).estimate(rows)
    assert (estimate is None) is (not seen)
    if estimate is not None:  # 25 % is the width of a size
        assert 0 <= estimate <= (fixed + each * rows) * 1.25 + 1e-9


def test_a_scheduler_learns_from_batches_that_ended_well() -> None:
    model = Model()
    for took_s in (0.004, None, 0.004):
        model.submit(rows=8)
        model.scheduler.complete(model.must_next().batch_id, took_s)
    assert model.scheduler._slots.service_time.estimate(8) == 0.004
