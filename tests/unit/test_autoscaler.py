"""The simulated HorizontalPodAutoscaler: what its documentation says, and what holds for all readings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulations.autoscaling.controller import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    Autoscaler,
    Kind,
    Policy,
    Rules,
    Scaling,
    recommend,
)

FREE = Scaling(0.5, Rules(0), Rules(0))
READINGS = st.lists(st.floats(0, 100), min_size=1, max_size=64)


def decided(scaling: Scaling, pods: int, *readings: tuple[float, float]) -> list[int]:
    """The number of pods after each reading (time, of every pod), where new pods say the same at once."""
    autoscaler, found = Autoscaler(scaling), []
    for at, value in readings:
        pods = autoscaler.decide(at, pods, [value] * pods)
        found.append(pods)
    return found


# ---- how many are wanted --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "wanted"),
    [
        ([1.0, 1.0], 4),
        ([0.25, 0.25], 1),
        ([0.0, 0.0], 0),
        ([0.55, 0.55], 2),  # within a tenth of the target
        ([0.45, 0.45], 2),
        ([0.6, 0.6], 3),
        ([1.0, 0.0], 2),
        ([0.3] * 10, 6),  # the ratio is 0.6 but for rounding, and is not rounded up to 7
    ],
)
def test_the_mean_over_the_target_says_how_many(readings: list[float], wanted: int) -> None:
    assert recommend(len(readings), readings, FREE) == wanted


@pytest.mark.parametrize(
    ("pods", "readings", "wanted"),
    [
        (4, [2.0, 2.0], 8),  # the two others are taken to be idle: 4 x (4.0 / 4) / 0.5
        (8, [1.0, 1.0, 1.0, 1.0], 8),  # with idle ones it is the target: nothing
        (8, [0.6, 0.6], 8),  # with idle ones it would be fewer, which turns the direction: nothing
        (4, [0.1, 0.1], 3),  # the others are taken to be at the target: (0.2 + 1.0) / 0.5
        (10, [0.45], 10),  # within the tolerance with them
    ],
)
def test_pods_that_say_nothing_slow_it_down_in_either_direction(
    pods: int, readings: list[float], wanted: int
) -> None:
    assert recommend(pods, readings, FREE) == wanted


def test_where_no_pod_says_anything_nothing_is_done() -> None:
    assert recommend(3, [], FREE) is None
    assert Autoscaler(FREE).decide(0.0, 3, []) == 3


@given(READINGS, st.integers(0, 64))
def test_missing_pods_never_turn_the_direction_nor_add_to_the_change(
    readings: list[float], missing: int
) -> None:
    pods = len(readings) + missing
    alone, wanted = recommend(len(readings), readings, FREE), recommend(pods, readings, FREE)
    assert alone is not None
    assert wanted is not None
    ratio = math.fsum(readings) / len(readings) / FREE.target
    assert wanted >= pods if ratio > 1 else wanted <= pods
    if ratio > 1:
        assert wanted <= max(pods, alone)
    else:
        assert wanted >= min(pods, alone)


# ---- windows and policies -------------------------------------------------------------------


def test_down_goes_no_lower_than_the_most_that_was_recommended_within_the_window() -> None:
    scaling = replace(FREE, down=Rules(60))
    assert decided(scaling, 8, (0, 0.5), (15, 0.25), (45, 0.25), (60, 0.25), (75, 0.25)) == [8, 8, 8, 8, 4]


def test_up_goes_no_higher_than_the_least_that_was_recommended_within_the_window() -> None:
    scaling = replace(FREE, up=Rules(30))
    assert decided(scaling, 2, (0, 0.5), (15, 1.0), (30, 1.0), (45, 1.0)) == [2, 2, 2, 4]


def test_a_change_back_within_the_window_is_none() -> None:
    scaling = replace(FREE, up=Rules(0), down=Rules(300))
    assert decided(scaling, 2, (0, 1.0), (15, 0.25), (30, 0.5), (45, 0.25)) == [4, 4, 4, 4]


def test_policies_count_what_came_within_their_period_and_the_most_generous_holds() -> None:
    up = Rules(0, (Policy(Kind.PERCENT, 100, 60), Policy(Kind.PODS, 4, 60)))
    scaling = replace(FREE, up=up)
    assert decided(scaling, 1, (0, 9.0), (15, 9.0), (45, 9.0), (60, 9.0), (75, 9.0)) == [5, 5, 5, 10, 10]


def test_down_by_policies_rounds_towards_fewer_pods() -> None:
    scaling = replace(FREE, down=Rules(0, (Policy(Kind.PERCENT, 10, 60),)))
    assert decided(scaling, 64, (0, 0.0), (30, 0.0), (60, 0.0)) == [57, 57, 51]
    assert decided(scaling, 1, (0, 0.0)) == [1]
    scaling = replace(FREE, down=Rules(0, (Policy(Kind.PODS, 1, 120),)))
    assert decided(scaling, 9, (0, 0.0), (60, 0.0), (120, 0.0)) == [8, 8, 7]


def test_an_hpa_that_says_nothing_of_its_behaviour_doubles_in_15_s_and_waits_5_minutes_to_shrink() -> None:
    assert (DEFAULT_UP.window_s, DEFAULT_DOWN.window_s) == (0, 300)
    scaling = Scaling(0.5)
    assert decided(scaling, 1, (0, 9.0), (15, 9.0), (30, 9.0)) == [5, 10, 20]
    calm = [(float(at), 0.0) for at in range(45, 400, 15)]
    pods = decided(scaling, 20, (30, 0.5), *calm)
    assert pods[:21] == [20] * 21  # until 330 s, 300 s after it wanted 20
    assert pods[21] == 1


@given(
    st.lists(READINGS, min_size=1, max_size=30),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(1, 200),
    st.integers(1, 8),
)
def test_bounds_hold_and_no_policy_is_broken(
    scrapes: list[list[float]], up_s: int, down_s: int, percent: int, most_down: int
) -> None:
    up, down = Policy(Kind.PERCENT, percent, 60), Policy(Kind.PODS, most_down, 60)
    scaling = Scaling(0.5, Rules(up_s, (up,)), Rules(down_s, (down,)), least=2, most=40)
    autoscaler, pods, history = Autoscaler(scaling), 7, [7]
    for number, readings in enumerate(scrapes):
        pods = autoscaler.decide(number * 60.0, pods, readings[:pods])
        assert 2 <= pods <= 40
        assert history[-1] - most_down <= pods <= math.ceil(history[-1] * (100 + percent) / 100)
        history.append(pods)
