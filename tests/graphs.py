"""Random ensembles for tests: steps over models that add their inputs up."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gpuserve.model.rules import needed_steps
from gpuserve.model.spec import InstanceSpec, ModelSpec, StepSpec
from gpuserve_worker.protocol.tensor import TensorSpec

#: Every tensor has it, behind the batch axis.
SHAPE = (-1,)
INPUTS = ("x0", "x1")


def tensors(names: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "FP32", SHAPE) for name in names)


def member(inputs: int, outputs: int, **more: Any) -> ModelSpec:
    """The model with so many inputs and outputs: output n is the sum of all inputs, plus 1 and n."""
    return ModelSpec(
        f"m{inputs}{outputs}",
        tensors(f"i{n}" for n in range(inputs)),
        tensors(f"o{n}" for n in range(outputs)),
        4,
        (InstanceSpec("a", "cpu", {}),),
        **more,
    )


MEMBERS = {one.name: one for one in [member(i, o) for i in (1, 2) for o in (1, 2)]}


@st.composite
def ensembles(draw: st.DrawFn) -> ModelSpec:
    """One whose steps are a graph without cycles, in any order; all of it is needed for its outputs."""
    there = list(INPUTS)
    steps = []
    for number in range(draw(st.integers(1, 6))):
        read = draw(st.lists(st.sampled_from(there), min_size=1, max_size=2))
        made = [f"t{number}{n}" for n in range(draw(st.integers(1, 2)))]
        inputs = tuple((f"i{n}", name) for n, name in enumerate(read))
        outputs = tuple((f"o{n}", name) for n, name in enumerate(made))
        steps.append(StepSpec(f"m{len(read)}{len(made)}", 0, inputs, outputs))
        there += made
    outputs = draw(st.lists(st.sampled_from(there[len(INPUTS) :]), min_size=1, max_size=3, unique=True))
    needed = [steps[number] for number in needed_steps(steps, outputs)]
    read = {ours for step in needed for _, ours in step.inputs}
    return ModelSpec(
        "ensemble",
        tensors(name for name in INPUTS if name in read),
        tensors(outputs),
        4,
        (),
        steps=tuple(draw(st.permutations(needed))),
    )


def expected(spec: ModelSpec, given: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of an ensemble, in the plainest way."""
    found = dict(given)
    left = list(spec.steps)
    while left:
        step = next(one for one in left if all(ours in found for _, ours in one.inputs))
        left.remove(step)
        total = sum(found[ours] for _, ours in step.inputs)
        for theirs, ours in step.outputs:
            found[ours] = total + 1 + int(theirs[1:])
    return found
