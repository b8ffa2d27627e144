"""What an ensemble has to do for a request: which steps, and where each of their tensors goes. Pure.

It depends on the outputs that are asked for: steps that only others need are not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpuserve.ensemble_spec import StepSpec
from gpuserve.ensembles import needed_steps
from gpuserve.spec import ModelSpec

#: Lists of outputs that are remembered.
_REMEMBERED: Final = 1024


class PlannedStep(NamedTuple):
    """A step of a plan. ``number`` is its place in the declaration; ``version`` is "" for the latest.

    ``reads`` are pairs of an input of its model and the tensor that it gets; ``writes`` of an output of its
    model and the tensor that it makes, of those that somebody wants.
    """

    number: int
    model: str
    version: str
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]


class Plan:
    """All that a request for certain outputs needs.

    ``readers`` counts, for each tensor, how many inputs of steps it is.
    """

    def __init__(self, spec: ModelSpec, outputs: Sequence[str]) -> None:
        self.outputs = tuple(outputs)
        numbers = needed_steps(spec.steps, outputs)
        read = [ours for number in numbers for _, ours in spec.steps[number].inputs]
        self.readers = Counter(read)
        wanted = {*outputs, *read}
        self.steps = tuple(_planned(number, spec.steps[number], wanted) for number in numbers)

    def is_shared(self, tensor: str) -> bool:
        """Whether more than one wants it: steps, or the client."""
        return self.readers[tensor] + (tensor in self.outputs) > 1


class Plans:
    """The plans of one ensemble."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._all = tuple(one.name for one in spec.outputs)
        self._known: dict[tuple[str, ...], Plan] = {}

    def plan(self, outputs: tuple[str, ...]) -> Plan:
        """The plan for these outputs, which the ensemble has; none named is all of them."""
        known = self._known.get(outputs)
        if known is None:
            known = Plan(self._spec, outputs or self._all)
            if len(self._known) < _REMEMBERED:
                self._known[outputs] = known
        return known


def _planned(number: int, step: StepSpec, wanted: set[str]) -> PlannedStep:
    writes = tuple((theirs, ours) for theirs, ours in step.outputs if ours in wanted)
    return PlannedStep(number, step.model, str(step.version or ""), step.inputs, writes)
