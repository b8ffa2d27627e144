"""The life of an instance: every step of the table, every other one refused, and the back-off."""

from __future__ import annotations

import itertools

import pytest

from gpuserve.core.states import IllegalTransition
from gpuserve.supervisor.processes.lifecycle import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    STEADY_S,
    InstanceEvent,
    InstanceLifecycle,
    InstanceState,
)

S, E = InstanceState, InstanceEvent
LEGAL = {
    (S.DOWN, E.SPAWNED): S.LOADING,
    (S.DOWN, E.DIED): S.WAITING,
    (S.DOWN, E.FENCE): S.FENCED,
    (S.DOWN, E.STOP): S.STOPPED,
    (S.LOADING, E.LOADED): S.READY,
    (S.LOADING, E.DIED): S.WAITING,
    (S.LOADING, E.STOP): S.STOPPING,
    (S.READY, E.DIED): S.WAITING,
    (S.READY, E.STOP): S.STOPPING,
    (S.READY, E.HANG): S.HUNG,
    (S.READY, E.SLEEP): S.ASLEEP,
    (S.ASLEEP, E.WAKE): S.LOADING,
    (S.ASLEEP, E.DIED): S.WAITING,
    (S.ASLEEP, E.STOP): S.STOPPING,
    (S.HUNG, E.DIED): S.WAITING,
    (S.HUNG, E.STOP): S.STOPPING,
    (S.WAITING, E.DUE): S.DOWN,
    (S.WAITING, E.FENCE): S.FENCED,
    (S.WAITING, E.STOP): S.STOPPED,
    (S.FENCED, E.RELEASE): S.DOWN,
    (S.FENCED, E.STOP): S.STOPPED,
    (S.STOPPING, E.DIED): S.STOPPED,
    (S.STOPPING, E.STOP): S.STOPPING,
    (S.STOPPED, E.STOP): S.STOPPED,
}
ILLEGAL = [pair for pair in itertools.product(S, E) if pair not in LEGAL]


def life_in(state: InstanceState) -> InstanceLifecycle:
    life = InstanceLifecycle("m/0")
    life.state = state
    return life


def death(life: InstanceLifecycle, now: float, *, ready_for_s: float | None) -> float:
    """Start, live and die; the back-off. ``ready_for_s`` None: it died while it loaded."""
    if life.state is S.WAITING:
        life.apply(E.DUE, now)
    life.apply(E.SPAWNED, now)
    if ready_for_s is not None:
        life.apply(E.LOADED, now)
        now += ready_for_s
    life.apply(E.DIED, now)
    return life.restart_in_s(now)


@pytest.mark.parametrize(("before", "event"), LEGAL)
def test_a_legal_step(before: InstanceState, event: InstanceEvent) -> None:
    life = life_in(before)
    life.apply(event, 0.0)
    assert life.state is LEGAL[before, event]


@pytest.mark.parametrize(("before", "event"), ILLEGAL)
def test_an_illegal_step_names_instance_event_and_state(before: InstanceState, event: InstanceEvent) -> None:
    life = life_in(before)
    with pytest.raises(IllegalTransition, match=f"m/0 is {before.name}, where {event.name} cannot happen"):
        life.apply(event, 0.0)
    assert life.state is before


def test_the_first_restart_is_due_at_once() -> None:
    assert death(InstanceLifecycle("m"), 0.0, ready_for_s=1.0) == 0.0


def test_one_that_dies_young_again_waits_twice_as_long_each_time_up_to_a_limit() -> None:
    life, now, waits = InstanceLifecycle("m"), 0.0, []
    for _ in range(8):
        waits.append(death(life, now, ready_for_s=0.0))
        now += waits[-1]
    assert waits == [0.0, FIRST_BACKOFF_S, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_a_death_while_loading_counts_as_young() -> None:
    life = InstanceLifecycle("m")
    assert [death(life, 0.0, ready_for_s=None) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_steady_life_starts_the_back_off_afresh() -> None:
    life = InstanceLifecycle("m")
    for _ in range(4):
        death(life, 0.0, ready_for_s=0.0)
    assert death(life, 100.0, ready_for_s=STEADY_S) == 0.0
    assert death(life, 200.0, ready_for_s=STEADY_S - 0.1) == FIRST_BACKOFF_S


def test_the_back_off_runs_out() -> None:
    life = InstanceLifecycle("m")
    death(life, 0.0, ready_for_s=0.0)
    death(life, 0.0, ready_for_s=0.0)
    assert (life.restart_in_s(0.25), life.restart_in_s(1.0), life.restart_in_s(9.0)) == (0.75, 0.0, 0.0)


def test_restarts_and_was_ready_are_remembered() -> None:
    life = InstanceLifecycle("m")
    assert not life.was_ready
    death(life, 0.0, ready_for_s=0.0)
    death(life, 0.0, ready_for_s=None)
    assert (life.was_ready, life.restarts) == (True, 2)


def test_a_stopped_instance_plans_no_restart() -> None:
    life = life_in(S.STOPPING)
    life.apply(E.DIED, 5.0)
    assert (life.state, life.restarts, life.restart_at) == (S.STOPPED, 0, 0.0)


@pytest.mark.parametrize("told_first", [True, False])
def test_a_death_that_is_excused_raises_no_back_off(told_first: bool) -> None:
    """Whoever hears of the death first: the front, which excuses it, or the supervisor."""
    life = InstanceLifecycle("m/0")
    assert [death(life, now, ready_for_s=0.0) for now in (0.0, 1.0)] == [0.0, FIRST_BACKOFF_S]
    for now in (10.0, 20.0, 30.0):
        life.apply(E.DUE, now)
        life.apply(E.SPAWNED, now)
        life.apply(E.LOADED, now)
        if told_first:
            life.excuse(now)
        life.apply(E.DIED, now)
        if not told_first:
            life.excuse(now)
        assert life.restart_in_s(now) == 0.0
    assert death(life, 40.0, ready_for_s=0.0) == 2 * FIRST_BACKOFF_S  # as if those had not been


def test_an_excuse_is_for_one_worker() -> None:
    life = InstanceLifecycle("m/0")
    death(life, 0.0, ready_for_s=0.0)
    life.apply(E.DUE, 1.0)
    life.apply(E.SPAWNED, 1.0)
    life.apply(E.LOADED, 1.0)
    life.excuse(1.0)
    life.apply(E.DIED, 1.0)
    assert death(life, 2.0, ready_for_s=0.0) == FIRST_BACKOFF_S


def test_a_successor_that_has_started_meanwhile_goes_on() -> None:
    life = InstanceLifecycle("m/0")
    assert death(life, 0.0, ready_for_s=0.0) == 0.0
    life.apply(E.DUE, 0.0)
    life.apply(E.SPAWNED, 0.0)
    life.excuse(0.0)
    assert life.state is S.LOADING
    life.apply(E.LOADED, 1.0)
    life.apply(E.DIED, 1.0)
    assert life.restart_in_s(1.0) == 0.0
