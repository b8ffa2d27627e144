"""How far one request of an ensemble has come. Pure: no request is sent here.

::

    step     WAITING ──all it reads is there──► RUNNING ──answered──► DONE
    request  RUNNING ──every step is DONE──► COMPLETE
                └──a step failed, or nobody waits──► ENDED
"""

from __future__ import annotations

import enum
from typing import Final

from gpuserve.front.ensemble.plan import Plan, PlannedStep


class StepState(enum.Enum):
    """Where a step stands."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    DONE = "DONE"


class RequestState(enum.Enum):
    """Where the whole request stands."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    ENDED = "ENDED"


STEP_TRANSITIONS: Final[dict[StepState, StepState]] = {
    StepState.WAITING: StepState.RUNNING,
    StepState.RUNNING: StepState.DONE,
}
REQUEST_TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    RequestState.RUNNING: frozenset({RequestState.COMPLETE, RequestState.ENDED}),
    RequestState.COMPLETE: frozenset(),
    RequestState.ENDED: frozenset(),
}


class IllegalTransition(Exception):
    """An event that cannot happen in a state: a defect of the front."""


class Progress:
    """The steps of one request. No step waits for an input of the request, which is there or never comes."""

    def __init__(self, plan: Plan) -> None:
        self.state = RequestState.RUNNING
        made = {ours for step in plan.steps for _, ours in step.writes}
        self._states = dict.fromkeys((step.number for step in plan.steps), StepState.WAITING)
        self._steps = plan.steps
        #: What each step still waits for.
        self._missing = {step.number: {ours for _, ours in step.reads if ours in made} for step in plan.steps}

    def next_steps(self) -> list[PlannedStep]:
        """The steps that can run now; they count as running from here on."""
        ready = [step for step in self._steps if self._is_ready(step)]
        for step in ready:
            self._move(step, StepState.RUNNING)
        return ready

    def done(self, step: PlannedStep) -> None:
        """A step has its answer; with the last one the request is complete."""
        self._move(step, StepState.DONE)
        for missing in self._missing.values():
            missing.difference_update(ours for _, ours in step.writes)
        if all(state is StepState.DONE for state in self._states.values()):
            self._become(RequestState.COMPLETE)

    def end(self) -> None:
        """Nothing more is to be done."""
        self._become(RequestState.ENDED)

    def state_of(self, step: PlannedStep) -> StepState:
        """Where a step stands."""
        return self._states[step.number]

    def _is_ready(self, step: PlannedStep) -> bool:
        waits = self._states[step.number] is StepState.WAITING and not self._missing[step.number]
        return waits and self.state is RequestState.RUNNING

    def _move(self, step: PlannedStep, state: StepState) -> None:
        before = self._states[step.number]
        if self.state is not RequestState.RUNNING or STEP_TRANSITIONS.get(before) is not state:
            raise IllegalTransition(f"step {step.number} cannot go from {before.name} to {state.name}")
        self._states[step.number] = state

    def _become(self, state: RequestState) -> None:
        if state not in REQUEST_TRANSITIONS[self.state]:
            raise IllegalTransition(f"a request cannot go from {self.state.name} to {state.name}")
        self.state = state
