"""The plan of an ensemble request: its steps, the route of each tensor, and the progress of one request.
Pure.

A plan depends on the requested outputs: steps that only other outputs need are not run. In a request::

    step     WAITING ──all inputs are there──► RUNNING ──answered──► DONE
    request  RUNNING ──every step is DONE──► COMPLETE
                └──a step failed, or the request was cancelled──► ENDED
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

from gpuserve.core.states import IllegalTransition, StepTable
from gpuserve.model.rules import needed_steps
from gpuserve.model.spec import ModelSpec, StepSpec


class PlannedStep(NamedTuple):
    """A step of a plan: ``reads`` are pairs (input of its model, tensor), ``writes`` (output, tensor)."""

    number: int
    model: str
    version: str
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]


class EnsemblePlan:
    """The steps that certain outputs need. ``readers`` counts the steps' inputs of each tensor."""

    def __init__(self, spec: ModelSpec, outputs: Sequence[str]) -> None:
        self.outputs = tuple(outputs) or tuple(one.name for one in spec.outputs)
        numbers = needed_steps(spec.steps, self.outputs)
        read = [ours for number in numbers for _, ours in spec.steps[number].inputs]
        self.readers = Counter(read)
        wanted = {*self.outputs, *read}
        self.steps = tuple(_planned(number, spec.steps[number], wanted) for number in numbers)

    def is_shared(self, tensor: str) -> bool:
        return self.readers[tensor] + (tensor in self.outputs) > 1


def plans_of(spec: ModelSpec) -> Callable[[tuple[str, ...]], EnsemblePlan]:
    """Return a function from requested outputs to plans of one ensemble; no names means all outputs."""
    return lru_cache(maxsize=1024)(partial(EnsemblePlan, spec))


def _planned(number: int, step: StepSpec, wanted: set[str]) -> PlannedStep:
    writes = tuple((theirs, ours) for theirs, ours in step.outputs if ours in wanted)
    return PlannedStep(number, step.model, str(step.version or ""), step.inputs, writes)


class RunState(enum.Enum):
    """The state of a whole request: running, complete, or cancelled."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    ENDED = "ENDED"


_RUNS: Final = StepTable("ensemble request", {RunState.RUNNING: {RunState.COMPLETE, RunState.ENDED}})


class RunProgress:
    """The progress of one request. No step waits for an input of the request itself."""

    def __init__(self, plan: EnsemblePlan) -> None:
        self.state = RunState.RUNNING
        made = {ours for step in plan.steps for _, ours in step.writes}
        #: The waiting steps, each with the missing tensors.
        self._waiting = {step: {ours for _, ours in step.reads if ours in made} for step in plan.steps}
        self._running: set[PlannedStep] = set()

    def next_steps(self) -> list[PlannedStep]:
        """Return the steps that can run now, and count them as running."""
        if self.state is not RunState.RUNNING:
            return []
        ready = [step for step, missing in self._waiting.items() if not missing]
        for step in ready:
            del self._waiting[step]
        self._running.update(ready)
        return ready

    def done(self, step: PlannedStep) -> None:
        """Count a step as answered; the last one completes the request. Raises IllegalTransition."""
        if self.state is not RunState.RUNNING or step not in self._running:
            raise IllegalTransition(f"step {step.number} of a request that is {self.state.name} does not run")
        self._running.remove(step)
        made = {ours for _, ours in step.writes}
        for missing in self._waiting.values():
            missing.difference_update(made)
        if not (self._running or self._waiting):
            self.state = _RUNS.step(self.state, RunState.COMPLETE)

    def end(self) -> None:
        self.state = _RUNS.step(self.state, RunState.ENDED)
