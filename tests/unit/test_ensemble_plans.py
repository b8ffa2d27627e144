"""What holds for the plans of ensembles and for the way through them, whatever the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from case_tables import cases
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
            n for n, one in enumerate(spec.steps) if any(ours in tensors_behind for _, ours in one.inputs)
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
    names = st.sampled_from([one.name for one in spec.outputs])
    outputs = data.draw(st.lists(names, min_size=1, unique=True))
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


def step(text: str) -> StepSpec:
    """Return a step from the form ``model[@version] reads > writes``."""
    before, _, writes = text.partition(" > ")
    model, *reads = before.split()
    name, _, version = model.partition("@")
    inputs = tuple((f"i{n}", one) for n, one in enumerate(reads))
    outputs = tuple((f"o{n}", one) for n, one in enumerate(writes.split()))
    return StepSpec(name, int(version or 0), inputs, outputs)


def spec(text: str, inputs: str = "x", **options: Any) -> ModelSpec:
    """Return an ensemble in the form ``model[@version] reads > writes; … = outputs``."""
    steps, _, outputs = text.partition(" = ")
    made = tuple(step(one) for one in steps.split("; "))
    options = {"max_batch_size": 4, "instances": (), "steps": made, **options}
    return ModelSpec("e", tensors(inputs.split()), tensors((outputs or "y").split()), **options)


def told(faults: Iterable[tuple[tuple[Any, ...], str]]) -> list[str]:
    return [f"{'/'.join(map(str, place))}: {text}" for place, text in faults]


def test_a_tensor_for_two_is_shared() -> None:
    plan = EnsemblePlan(spec("m11 x > a; m21 a a > y"), ["y"])
    assert (plan.is_shared("x"), plan.is_shared("a"), plan.is_shared("y")) == (False, True, False)
    both = spec("m11 x > a; m11 a > y = y a")
    assert EnsemblePlan(both, ["y", "a"]).is_shared("a")
    assert not EnsemblePlan(both, ["y"]).is_shared("a")


def test_outputs_that_nobody_wants_are_not_asked_for() -> None:
    plan = plans_of(spec("m12 x > a b; m11 a > y"))
    first, _ = plan(()).steps
    assert first.writes == (("o0", "a"),)
    assert plan(()) is plan(())


@pytest.mark.parametrize(
    ("wrong", "fault"),
    cases("""\
m11 x > y; m11 x > y
-> steps/1/outputs/o0: tensor 'y' is made by steps[0] already
m11 x > x
-> steps/0/outputs/o0: tensor 'x' is an input of the ensemble, which no step may make
m11 imagine > y
-> steps/0/inputs/i0: tensor 'imagine' is no input of the ensemble, and no step makes it;
-> did you mean 'image'?
m11 image > a
-> outputs/0: output 'y' is made by no step
m11 x > y
-> inputs/0: input 'image' is read by no step
m11 x > y; m11 y > a
-> steps/1: no output of the ensemble needs anything that model 'm11' makes here
m21 x b > a; m11 a > b = b
-> steps/0: these steps wait for one another in a cycle: steps[0] (model 'm21'), steps[1] (model 'm11')
"""),
)
def test_a_fault_is_told_with_its_place(wrong: str, fault: str) -> None:
    assert fault in told(ensemble_faults(spec(wrong, "image" if "image" in fault else "x")))


FLAT = ModelSpec("flat", tensors(["i0"]), tensors(["o0"]), 0, ())
DECOUPLED = dataclasses.replace(MEMBERS["m11"], name="stream", decoupled=True)
WHOLE = dataclasses.replace(
    MEMBERS["m11"], name="whole", outputs=(MEMBERS["m11"].outputs[0]._replace(datatype="INT32"),)
)
BACK = spec("e x > y")
MANY = {
    **KNOWN,
    **{one.name: [one] for one in (FLAT, DECOUPLED, WHOLE)},
    "back": [dataclasses.replace(BACK, name="back")],
    "e": [BACK],
}


@pytest.mark.parametrize(
    ("wrong", "fault"),
    cases("""\
flet x > y
-> steps/0/model: there is no model 'flet'; did you mean 'flat'?
m11@3 x > y
-> steps/0/model: model 'm11' has no version 3, but 1
m11 x x > y
-> steps/0/inputs/i1: model 'm11' has no input 'i1'; its inputs are 'i0'
m11 x > a y
-> steps/0/outputs/o1: model 'm11' has no output 'o1'; its outputs are 'o0'
m21 x > y
-> steps/0/inputs: model 'm21' needs the input 'i1', which it is not given here
max_batch_size m11 x > y
-> steps/0/model: the ensemble has a max_batch_size of 8, model 'm11' one of 4
stream x > y
-> steps/0/model: model 'stream' is decoupled, and a step gives one response to a request,
-> unless the ensemble is decoupled too
decoupled stream x > a; m11 a > y
-> steps/0/model: model 'stream' is decoupled, so it can only be the last step, but a step reads 'a'
decoupled stream x > y; m11 x > z = y z
-> steps/0/model: model 'stream' is decoupled, so it must make all outputs of the ensemble,
-> but does not make 'z'
back x > y
-> steps/0/model: model 'back' leads back to the ensemble itself
whole x > a; m11 a > y
-> steps/1/inputs/i0: tensor 'a' is INT32, input 'i0' of model 'm11' is FP32
whole x > y
-> outputs/0: tensor 'y' is INT32, the output of the ensemble is FP32
flat x > y
-> steps/0/inputs/i0: tensor 'x' has shape [-1, -1], input 'i0' of model 'flat' has [-1]
-> (with the batch axis where there is one)
"""),
)
def test_a_model_that_does_not_fit_is_told_with_its_place(wrong: str, fault: str) -> None:
    options = {"max_batch_size": 8, "decoupled": True}
    named = {name: options[name] for name in options if wrong.startswith(name)}
    made = spec(wrong.removeprefix(next(iter(named), "")).lstrip(), **named)
    assert fault in told(member_faults(made, MANY))


def test_an_optional_input_goes_to_an_optional_one() -> None:
    optional = (tensors(["x"])[0]._replace(optional=True),)
    wrong = dataclasses.replace(spec("m11 x > y"), inputs=optional)
    assert told(member_faults(wrong, KNOWN)) == [
        "steps/0/inputs/i0: tensor 'x' is optional, input 'i0' of model 'm11' is not"
    ]
