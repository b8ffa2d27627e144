"""Probes of the stand-in kubelet: thresholds, and when the next question is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rollout.probes import Probe, ProbeRun, TcpAction


def probe(*, period_s: float = 2.0, failures: int = 3, successes: int = 1, delay_s: float = 0.0) -> Probe:
    return Probe(TcpAction(80), delay_s, period_s, 1.0, failures, successes)


def test_it_is_asked_after_its_delay_and_then_from_period_to_period() -> None:
    run = ProbeRun(probe(delay_s=4.0), now=100.0, passing=False)
    assert run.due == 104.0
    run.asked()
    assert run.due == math.inf
    run.answered(True, 104.3)
    assert run.due == 106.0
    run.asked()
    run.answered(True, 109.0)  # later than the next question should have been
    assert run.due == 110.0


def test_a_result_counts_when_there_are_as_many_in_a_row_as_the_threshold_says() -> None:
    run = ProbeRun(probe(failures=3, successes=2), now=0.0, passing=True)
    seen = []
    for second, good in enumerate([False, False, True, False, False, False, True, True]):
        run.asked()
        run.answered(good, float(second))
        seen.append(run.passing)
    assert seen == [True, True, True, True, True, False, False, True]


@pytest.mark.parametrize("passing", [True, False])
def test_it_is_decided_when_a_threshold_was_reached(passing: bool) -> None:
    run = ProbeRun(probe(failures=2), now=0.0, passing=passing)
    run.asked()
    run.answered(False, 0.0)
    assert (run.decided, run.passing) == (False, passing)
    run.asked()
    run.answered(False, 2.0)
    assert (run.decided, run.passing) == (True, False)


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.integers(1, 4))
def test_it_passes_exactly_as_the_last_long_enough_row_says(
    results: list[bool], failures: int, successes: int
) -> None:
    run = ProbeRun(probe(failures=failures, successes=successes), now=0.0, passing=True)
    expected = True
    for at, good in enumerate(results):
        run.asked()
        run.answered(good, 2.0 * at)
        needed = successes if good else failures
        if results[max(0, at + 1 - needed) : at + 1] == [good] * needed:
            expected = good
        assert run.passing is expected


@given(st.lists(st.integers(0, 240), min_size=1, max_size=20))
def test_the_next_question_is_on_the_beat_and_not_in_the_past(eighths: list[int]) -> None:
    run = ProbeRun(probe(period_s=2.0), now=0.0, passing=False)
    for delay in eighths:
        asked_at = run.due
        answered_at = asked_at + delay / 8
        run.asked()
        run.answered(True, answered_at)
        assert run.due % 2.0 == 0.0
        assert max(answered_at, asked_at + 2.0) <= run.due
        assert run.due < answered_at + 2.0 or delay == 0
