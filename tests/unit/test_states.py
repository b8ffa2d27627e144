"""Tables of states: the steps that they have, and the error for all others."""

from __future__ import annotations

import enum

import pytest

from gpuserve.core.states import EventTable, IllegalTransition, StepTable


class Light(enum.Enum):
    OFF = enum.auto()
    ON = enum.auto()
    BROKEN = enum.auto()


class Touch(enum.Enum):
    PRESS = enum.auto()
    DROP = enum.auto()


STEPS = StepTable("light", {Light.OFF: {Light.ON, Light.BROKEN}, Light.ON: {Light.OFF}})
EVENTS = EventTable("light", {(Light.OFF, Touch.PRESS): Light.ON, (Light.ON, Touch.PRESS): Light.OFF})


def test_a_step_of_the_table_gives_the_state_after_it() -> None:
    assert STEPS.step(Light.OFF, Light.ON) is Light.ON


def test_a_step_that_the_table_does_not_have_names_who_and_both_states() -> None:
    with pytest.raises(IllegalTransition, match="light 7 is ON and cannot become BROKEN"):
        STEPS.step(Light.ON, Light.BROKEN, 7)


def test_a_state_without_a_row_is_final() -> None:
    with pytest.raises(IllegalTransition, match="light is BROKEN and cannot become OFF"):
        STEPS.step(Light.BROKEN, Light.OFF)


def test_an_event_leads_to_the_state_of_the_table() -> None:
    assert EVENTS.after(EVENTS.after(Light.OFF, Touch.PRESS), Touch.PRESS) is Light.OFF


def test_an_event_that_cannot_happen_names_who_the_state_and_the_event() -> None:
    with pytest.raises(IllegalTransition, match="light kitchen is OFF, where DROP cannot happen"):
        EVENTS.after(Light.OFF, Touch.DROP, "kitchen")
