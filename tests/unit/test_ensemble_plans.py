"""What holds for the plans of ensembles and for the way through them, whatever the graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from graphs import MEMBERS, ensembles, tensors
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.states import IllegalTransition
from gpuserve.front.models.ensemble_plan import EnsemblePlan, RunProgress, RunState, plans_of
from gpuserve.model.rules import ensemble_faults, member_faults
from gpuserve.model.spec import ModelSpec, StepSpec

KNOWN = {name: [spec] for name, spec in MEMBERS.items()}


@given(ensembles())
def test_a_graph_without_cycles_has_no_fault(spec: ModelSpec) -> None:
    assert list(ensemble_faults(spec)) == []
    assert list(member_faults(spec, KNOWN)) == []
    assert ModelSpec.from_wire(spec.to_wire()) == spec


@given(ensembles(), st.data())
def test_a_step_that_waits_for_itself_is_found(spec: ModelSpec, data: st.DataObject) -> None:
    """One input of a step becomes what that step, or one behind it, makes."""
    number = data.draw(st.integers(0, len(spec.steps) - 1))
    behind, tensors_behind = {number}, {ours for _, ours in spec.steps[number].outputs}
    while True:
        more = {
            n for n, step in enumerate(spec.steps) if any(ours in tensors_behind for _, ours in step.inputs)
        }
        if more <= behind:
            break
        behind |= more
        tensors_behind |= {ours for n in more for _, ours in spec.steps[n].outputs}
    step = spec.steps[number]
    looped = dataclasses.replace(
        step, inputs=((step.inputs[0][0], data.draw(st.sampled_from(sorted(tensors_behind)))),)
    )
    steps = (*spec.steps[:number], looped, *spec.steps[number + 1 :])
    found = list(ensemble_faults(dataclasses.replace(spec, steps=steps)))
    assert any("in a cycle" in text for _, text in found)


@given(ensembles(), st.data())
def test_every_step_runs_once_when_all_it_reads_is_there(spec: ModelSpec, data: st.DataObject) -> None:
    outputs = data.draw(
        st.lists(st.sampled_from([one.name for one in spec.outputs]), min_size=1, unique=True)
    )
    plan = EnsemblePlan(spec, outputs)
    progress = RunProgress(plan)
    there = {one.name for one in spec.inputs}
    running, ran = progress.next_steps(), []
    while running:
        assert progress.state is RunState.RUNNING
        assert all(ours in there for step in running for _, ours in step.reads)
        done = running.pop(data.draw(st.integers(0, len(running) - 1)))
        there.update(ours for _, ours in done.writes)
        ran.append(done.number)
        progress.done(done)
        with pytest.raises(IllegalTransition):
            progress.done(done)
        running += progress.next_steps()
    assert progress.state is RunState.COMPLETE
    assert sorted(ran) == [step.number for step in plan.steps]
    assert set(outputs) <= there
    wanted = {ours for step in plan.steps for _, ours in step.writes}
    assert all(plan.readers[ours] or ours in outputs for ours in wanted)


@given(ensembles())
def test_nothing_runs_once_a_request_has_ended(spec: ModelSpec) -> None:
    progress = RunProgress(EnsemblePlan(spec, [one.name for one in spec.outputs]))
    first, *_ = progress.next_steps()
    progress.end()
    assert progress.next_steps() == []
    with pytest.raises(IllegalTransition):
        progress.done(first)
    with pytest.raises(IllegalTransition):
        progress.end()


def step(model: str, reads: str, writes: str, version: int = 0) -> StepSpec:
    inputs = tuple((f"i{n}", name) for n, name in enumerate(reads.split()))
    return StepSpec(model, version, inputs, tuple((f"o{n}", name) for n, name in enumerate(writes.split())))


def spec(*steps: StepSpec, inputs: str = "x", outputs: str = "y", **options: Any) -> ModelSpec:
    options = {"max_batch_size": 4, **options}
    return ModelSpec(
        "e", tensors(inputs.split()), tensors(outputs.split()), instances=(), steps=steps, **options
    )


def test_a_tensor_for_two_is_shared() -> None:
    plan = EnsemblePlan(spec(step("m11", "x", "a"), step("m21", "a a", "y")), ["y"])
    assert (plan.is_shared("x"), plan.is_shared("a"), plan.is_shared("y")) == (False, True, False)
    plan = EnsemblePlan(spec(step("m11", "x", "a"), step("m11", "a", "y"), outputs="y a"), ["y", "a"])
    assert plan.is_shared("a")
    plan = EnsemblePlan(spec(step("m11", "x", "a"), step("m11", "a", "y"), outputs="y a"), ["y"])
    assert not plan.is_shared("a")


def test_outputs_that_nobody_wants_are_not_asked_for() -> None:
    plan = plans_of(spec(step("m12", "x", "a b"), step("m11", "a", "y"), outputs="y"))
    first, _ = plan(()).steps
    assert first.writes == (("o0", "a"),)
    assert plan(()) is plan(())


@pytest.mark.parametrize(
    ("wrong", "place", "text"),
    [
        (
            spec(step("m11", "x", "y"), step("m11", "x", "y")),
            ("steps", 1, "outputs", "o0"),
            "tensor 'y' is made by steps[0] already",
        ),
        (
            spec(step("m11", "x", "x")),
            ("steps", 0, "outputs", "o0"),
            "tensor 'x' is an input of the ensemble, which no step may make",
        ),
        (
            spec(step("m11", "imagine", "y"), inputs="image"),
            ("steps", 0, "inputs", "i0"),
            "tensor 'imagine' is no input of the ensemble, and no step makes it; did you mean 'image'?",
        ),
        (spec(step("m11", "x", "a")), ("outputs", 0), "output 'y' is made by no step"),
        (spec(step("m11", "x", "y"), inputs="x z"), ("inputs", 1), "input 'z' is read by no step"),
        (
            spec(step("m11", "x", "y"), step("m11", "y", "a")),
            ("steps", 1),
            "no output of the ensemble needs anything that model 'm11' makes here",
        ),
        (
            spec(step("m21", "x b", "a"), step("m11", "a", "b"), outputs="b"),
            ("steps", 0),
            "these steps wait for one another in a cycle: steps[0] (model 'm21'), steps[1] (model 'm11')",
        ),
    ],
)
def test_a_fault_is_told_with_its_place(wrong: ModelSpec, place: object, text: str) -> None:
    assert (place, text) in list(ensemble_faults(wrong))


MODEL = ("steps", 0, "model")
FLAT = ModelSpec("flat", tensors(["i0"]), tensors(["o0"]), 0, ())
DECOUPLED = dataclasses.replace(MEMBERS["m11"], name="stream", decoupled=True)
WHOLE = dataclasses.replace(
    MEMBERS["m11"], name="whole", outputs=(MEMBERS["m11"].outputs[0]._replace(datatype="INT32"),)
)
BACK = spec(step("e", "x", "y"))
MANY = {
    **KNOWN,
    **{one.name: [one] for one in (FLAT, DECOUPLED, WHOLE)},
    "back": [dataclasses.replace(BACK, name="back")],
    "e": [BACK],
}


@pytest.mark.parametrize(
    ("wrong", "place", "text"),
    [
        (spec(step("flet", "x", "y")), MODEL, "there is no model 'flet'; did you mean 'flat'?"),
        (spec(step("m11", "x", "y", 3)), MODEL, "model 'm11' has no version 3, but 1"),
        (
            spec(step("m11", "x x", "y")),
            ("steps", 0, "inputs", "i1"),
            "model 'm11' has no input 'i1'; its inputs are 'i0'",
        ),
        (
            spec(step("m11", "x", "a y")),
            ("steps", 0, "outputs", "o1"),
            "model 'm11' has no output 'o1'; its outputs are 'o0'",
        ),
        (
            spec(step("m21", "x", "y")),
            ("steps", 0, "inputs"),
            "model 'm21' needs the input 'i1', which it is not given here",
        ),
        (
            spec(step("m11", "x", "y"), max_batch_size=8),
            MODEL,
            "the ensemble has a max_batch_size of 8, model 'm11' one of 4",
        ),
        (
            spec(step("stream", "x", "y")),
            MODEL,
            "model 'stream' is decoupled, and a step gives one response to a request, unless the ensemble is "
            "decoupled too",
        ),
        (
            spec(step("stream", "x", "a"), step("m11", "a", "y"), decoupled=True),
            MODEL,
            "model 'stream' is decoupled, so it can only be the last step, but a step reads 'a'",
        ),
        (
            spec(step("stream", "x", "y"), step("m11", "x", "z"), outputs="y z", decoupled=True),
            MODEL,
            "model 'stream' is decoupled, so it must make all outputs of the ensemble, but does not make 'z'",
        ),
        (spec(step("back", "x", "y")), MODEL, "model 'back' leads back to the ensemble itself"),
        (
            spec(step("whole", "x", "a"), step("m11", "a", "y")),
            ("steps", 1, "inputs", "i0"),
            "tensor 'a' is INT32, input 'i0' of model 'm11' is FP32",
        ),
        (
            spec(step("whole", "x", "y")),
            ("outputs", 0),
            "tensor 'y' is INT32, the output of the ensemble is FP32",
        ),
        (
            spec(step("flat", "x", "y")),
            ("steps", 0, "inputs", "i0"),
            "tensor 'x' has shape [-1, -1], input 'i0' of model 'flat' has [-1] (with the batch axis where "
            "there is one)",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_with_its_place(wrong: ModelSpec, place: object, text: str) -> None:
    assert (place, text) in list(member_faults(wrong, MANY))


def test_an_optional_input_goes_to_an_optional_one() -> None:
    optional = (tensors(["x"])[0]._replace(optional=True),)
    wrong = dataclasses.replace(spec(step("m11", "x", "y")), inputs=optional)
    (found,) = member_faults(wrong, KNOWN)
    assert found == (("steps", 0, "inputs", "i0"), "tensor 'x' is optional, input 'i0' of model 'm11' is not")
