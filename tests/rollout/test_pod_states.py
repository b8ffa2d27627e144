"""A pod in the hands of the stand-in kubelet, on a clock of the test."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pods import GRACE_S, PERIOD_S, PRE_STOP_S, answer, started, template

from benchmarks.rollout.pod import BACKOFF_S, LEAST_GRACE_S, Order, Pod, PodState, ProbeKind

LIVENESS_GRACE_S = 10.0


def test_a_new_pod_is_started_and_asked_whether_it_has_started() -> None:
    pod = Pod("p", template(), 5.0)
    assert pod.due == 5.0
    assert pod.orders(5.0) == [Order.START]
    assert (pod.state, pod.ready) == (PodState.STARTING, False)
    assert pod.questions(5.0) == [ProbeKind.STARTUP]
    pod.answered(ProbeKind.STARTUP, 1, False, 5.1)
    assert pod.due == 5.0 + PERIOD_S


def test_it_is_ready_after_the_startup_and_the_readiness_probe() -> None:
    pod = started(7.0)
    assert pod.takes_requests
    assert not pod.available(16.9, 10.0)
    assert pod.available(17.0, 10.0)


def test_readiness_is_lost_after_two_bad_answers_and_comes_back_after_a_good_one() -> None:
    pod, seen = started(), []
    for second, good in ((2.0, False), (4.0, False), (6.0, True)):
        answer(pod, ProbeKind.READINESS, good, second)
        seen.append(pod.ready_since)
    assert seen == [0.0, None, 6.0]


def test_a_deleted_pod_gets_no_requests_and_serves_until_its_pre_stop_is_over() -> None:
    pod = started()
    pod.delete(20.0)
    assert not pod.takes_requests
    assert pod.questions(100.0) == []
    assert pod.orders(20.0 + PRE_STOP_S - 0.1) == []
    assert pod.orders(20.0 + PRE_STOP_S) == [Order.TERM]
    pod.exited(31.0)
    assert (pod.state, pod.due, pod.n_killed) == (PodState.GONE, math.inf, 0)


def test_who_outlives_the_grace_period_is_killed_and_it_is_counted() -> None:
    pod = started()
    pod.delete(0.0)
    assert pod.orders(PRE_STOP_S) == [Order.TERM]
    assert pod.orders(GRACE_S - 0.1) == []
    assert pod.orders(GRACE_S) == [Order.KILL]
    assert pod.n_killed == 1


def test_three_bad_answers_about_liveness_end_the_container_by_its_own_grace() -> None:
    pod = started()
    for second in (0.0, 2.0, 4.0):
        pod.questions(second)
        pod.answered(ProbeKind.LIVENESS, 1, False, second)
    assert (pod.state, pod.ready, pod.n_failed) == (PodState.ENDING, False, 1)
    assert pod.orders(4.0 + PRE_STOP_S) == [Order.TERM]
    # The preStop took all of it: two seconds are left nevertheless.
    assert pod.due == 4.0 + LIVENESS_GRACE_S + LEAST_GRACE_S
    pod.exited(15.0)
    assert (pod.state, pod.due) == (PodState.WAITING, 15.0)


def test_a_container_that_never_starts_is_ended_too() -> None:
    pod = Pod("p", template(pre_stop_s=0.0), 0.0)
    pod.orders(0.0)
    for n_asked in range(30):
        answer(pod, ProbeKind.STARTUP, False, n_asked * PERIOD_S)
    assert pod.state is PodState.ENDING
    assert pod.orders(29 * PERIOD_S) == [Order.TERM]


def test_restarts_come_at_once_and_then_later_and_later() -> None:
    pod, now, pauses_s = Pod("p", template(), 0.0), 0.0, []
    for _ in range(8):
        assert pod.orders(now) == [Order.START]
        pod.exited(now + 1.0)
        pauses_s.append(pod.due - now - 1.0)
        now = pod.due
    assert pauses_s == [0.0, BACKOFF_S, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


def test_an_answer_about_an_earlier_container_is_of_no_interest() -> None:
    pod = started()
    pod.questions(2.0)
    pod.exited(2.1)
    pod.orders(2.1)
    pod.questions(2.1)
    pod.answered(ProbeKind.READINESS, 1, True, 2.2)
    pod.answered(ProbeKind.STARTUP, 1, True, 2.2)
    assert (pod.state, pod.ready, pod.n_starts) == (PodState.STARTING, False, 2)


@pytest.mark.parametrize("began", [False, True])
def test_a_pod_without_a_container_is_gone_at_once(began: bool) -> None:
    pod = Pod("p", template(), 0.0)
    if began:
        pod.orders(0.0)
        pod.exited(1.0)
    pod.delete(1.0)
    assert (pod.state, pod.orders(100.0)) == (PodState.GONE, [])


def test_a_pod_that_ends_by_a_probe_and_is_deleted_does_not_come_back() -> None:
    pod = started()
    for second in (0.0, 2.0, 4.0):
        pod.questions(second)
        pod.answered(ProbeKind.LIVENESS, 1, False, second)
    pod.delete(5.0)
    pod.exited(6.0)
    assert pod.state is PodState.GONE


class AnyLife(RuleBasedStateMachine):
    """Whatever happens to a pod: its container is started, told and killed in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pod = Pod("p", template(), 0.0)
        self.running = False
        self.told = False
        self.told_at = 0.0

    @rule(by_s=st.floats(0.0, 30.0))
    def time_goes_on(self, by_s: float) -> None:
        self.now += by_s

    @rule()
    def the_shell_looks(self) -> None:
        for order in self.pod.orders(self.now):
            if order is Order.START:
                assert not self.running
                assert not self.pod.deleted
                self.running, self.told = True, False
            elif order is Order.TERM:
                assert self.running
                assert not self.told
                self.told, self.told_at = True, self.now
            else:
                assert self.told
                self.exit()

    @rule(good=st.booleans())
    def a_probe_is_answered(self, good: bool) -> None:
        for kind in self.pod.questions(self.now):
            assert self.running
            self.pod.answered(kind, self.pod.n_starts, good, self.now)

    @precondition(lambda self: self.running)
    @rule()
    def exit(self) -> None:
        self.running = False
        self.pod.exited(self.now)

    @rule()
    def delete(self) -> None:
        self.pod.delete(self.now)

    @invariant()
    def it_is_what_it_says(self) -> None:
        assert self.running is (self.pod.state in {PodState.STARTING, PodState.STARTED, PodState.ENDING})
        assert not (self.pod.takes_requests and self.pod.state is not PodState.STARTED)
        assert self.pod.state is not PodState.GONE or self.pod.due == math.inf


TestAnyLife = AnyLife.TestCase
