"""The life of an instance: every step of its table, every other one refused, and the back-off."""

from __future__ import annotations

import enum
import itertools

import pytest

from gpuserve.core.states import EventTable, IllegalTransition, StepTable
from gpuserve.supervisor.processes.lifecycle import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    STEADY_S,
    InstanceEvent,
    InstanceLifecycle,
    InstanceState,
)

S, E = InstanceState, InstanceEvent
STEPS = {
    S.DOWN: {E.SPAWNED: S.LOADING, E.DIED: S.WAITING, E.FENCE: S.FENCED, E.STOP: S.STOPPED},
    S.LOADING: {E.LOADED: S.READY, E.DIED: S.WAITING, E.STOP: S.STOPPING},
    S.READY: {E.DIED: S.WAITING, E.STOP: S.STOPPING, E.HANG: S.HUNG, E.SLEEP: S.ASLEEP},
    S.ASLEEP: {E.WAKE: S.LOADING, E.DIED: S.WAITING, E.STOP: S.STOPPING},
    S.HUNG: {E.DIED: S.WAITING, E.STOP: S.STOPPING},
    S.WAITING: {E.DUE: S.DOWN, E.FENCE: S.FENCED, E.STOP: S.STOPPED},
    S.FENCED: {E.RELEASE: S.DOWN, E.STOP: S.STOPPED},
    S.STOPPING: {E.DIED: S.STOPPED, E.STOP: S.STOPPING},
    S.STOPPED: {E.STOP: S.STOPPED},
}


def life_in(state: InstanceState) -> InstanceLifecycle:
    life = InstanceLifecycle("m/0")
    life.state = state
    return life


def live(life: InstanceLifecycle, now: float, *events: InstanceEvent) -> None:
    for event in events:
        life.apply(event, now)


def death(life: InstanceLifecycle, now: float, *, ready_for_s: float | None = 0.0) -> float:
    """Start, live and die; the back-off. ``ready_for_s`` None: it died while it loaded."""
    if life.state is S.WAITING:
        life.apply(E.DUE, now)
    life.apply(E.SPAWNED, now)
    if ready_for_s is not None:
        life.apply(E.LOADED, now)
        now += ready_for_s
    life.apply(E.DIED, now)
    return life.restart_in_s(now)


@pytest.mark.parametrize(("before", "event"), [*itertools.product(S, E)])
def test_a_step_of_the_table_or_none(before: InstanceState, event: InstanceEvent) -> None:
    life = life_in(before)
    after = STEPS[before].get(event)
    if after is None:
        with pytest.raises(
            IllegalTransition, match=f"m/0 is {before.name}, where {event.name} cannot happen"
        ):
            life.apply(event, 0.0)
    else:
        life.apply(event, 0.0)
    assert life.state is (after or before)


def test_one_that_dies_young_again_waits_twice_as_long_each_time_up_to_a_limit() -> None:
    life, now, waits = InstanceLifecycle("m"), 0.0, []
    for _ in range(8):
        waits.append(death(life, now))
        now += waits[-1]
    assert waits == [0.0, FIRST_BACKOFF_S, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert death(life, now, ready_for_s=STEADY_S) == 0.0, "a steady life starts the back-off afresh"
    assert death(life, now, ready_for_s=STEADY_S - 0.1) == FIRST_BACKOFF_S


def test_a_death_while_loading_counts_as_young_and_the_back_off_runs_out() -> None:
    life = InstanceLifecycle("m")
    assert [death(life, 0.0, ready_for_s=None) for _ in range(2)] == [0.0, 1.0]
    assert (life.restart_in_s(0.25), life.restart_in_s(1.0), life.restart_in_s(9.0)) == (0.75, 0.0, 0.0)
    assert (life.was_ready, life.restarts) == (False, 2)
    death(life, 0.0)
    assert death(life, 0.0, ready_for_s=None) == 4.0
    assert (life.was_ready, life.restarts) == (True, 4)


def test_a_stopped_instance_plans_no_restart() -> None:
    life = life_in(S.STOPPING)
    life.apply(E.DIED, 5.0)
    assert (life.state, life.restarts, life.restart_at) == (S.STOPPED, 0, 0.0)


@pytest.mark.parametrize("told_first", [True, False])
def test_a_death_that_is_excused_raises_no_back_off(told_first: bool) -> None:
    """Whoever hears of the death first: the front, which excuses it, or the supervisor."""
    life = InstanceLifecycle("m/0")
    assert [death(life, now) for now in (0.0, 1.0)] == [0.0, FIRST_BACKOFF_S]
    for now in (10.0, 20.0, 30.0):
        live(life, now, E.DUE, E.SPAWNED, E.LOADED)
        if told_first:
            life.excuse(now)
        life.apply(E.DIED, now)
        if not told_first:
            life.excuse(now)
        assert life.restart_in_s(now) == 0.0
    assert death(life, 40.0) == 2 * FIRST_BACKOFF_S  # as if those had not been


def test_an_excuse_is_for_one_worker() -> None:
    life = InstanceLifecycle("m/0")
    death(life, 0.0)
    live(life, 1.0, E.DUE, E.SPAWNED, E.LOADED)
    life.excuse(1.0)
    life.apply(E.DIED, 1.0)
    assert death(life, 2.0) == FIRST_BACKOFF_S


def test_a_successor_that_has_started_meanwhile_goes_on() -> None:
    life = InstanceLifecycle("m/0")
    assert death(life, 0.0) == 0.0
    live(life, 0.0, E.DUE, E.SPAWNED)
    life.excuse(0.0)
    assert life.state is S.LOADING
    live(life, 1.0, E.LOADED, E.DIED)
    assert life.restart_in_s(1.0) == 0.0


# ---- tables of states ----


class Light(enum.Enum):
    OFF = enum.auto()
    ON = enum.auto()
    BROKEN = enum.auto()


class Touch(enum.Enum):
    PRESS = enum.auto()
    DROP = enum.auto()


LIGHT_STEPS = StepTable("light", {Light.OFF: {Light.ON, Light.BROKEN}, Light.ON: {Light.OFF}})
LIGHT_EVENTS = EventTable("light", {(Light.OFF, Touch.PRESS): Light.ON, (Light.ON, Touch.PRESS): Light.OFF})


def test_a_step_that_the_table_does_not_have_names_who_and_both_states() -> None:
    assert LIGHT_STEPS.step(Light.OFF, Light.ON) is Light.ON
    with pytest.raises(IllegalTransition, match="light 7 is ON and cannot become BROKEN"):
        LIGHT_STEPS.step(Light.ON, Light.BROKEN, 7)
    with pytest.raises(IllegalTransition, match="light is BROKEN and cannot become OFF"):
        LIGHT_STEPS.step(Light.BROKEN, Light.OFF)  # a state without a row is final


def test_an_event_that_cannot_happen_names_who_the_state_and_the_event() -> None:
    assert LIGHT_EVENTS.after(LIGHT_EVENTS.after(Light.OFF, Touch.PRESS), Touch.PRESS) is Light.OFF
    with pytest.raises(IllegalTransition, match="light kitchen is OFF, where DROP cannot happen"):
        LIGHT_EVENTS.after(Light.OFF, Touch.DROP, "kitchen")
