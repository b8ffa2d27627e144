"""Ensembles as users declare them, in a file and in a program, and every mistake at its place."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from bound import free_server
from case_tables import cases
from config_file import load_text, problems_of
from serving import GPUSERVE

from gpuserve import Server, Step, Tensor
from gpuserve.core.errors import BindError, InvalidArgument
from gpuserve.model.spec import StepSpec
from gpuserve.model.spec_changes import changed

MODEL = """\
models:
  - name: m
    callable: pkg.mod:f
    inputs: [{name: x, dtype: FP32, shape: [-1]}]
    outputs: [{name: y, dtype: FP32, shape: [-1]}]
  - name: e
    inputs: [{name: a, dtype: FP32, shape: [-1]}]
    outputs: [{name: b, dtype: FP32, shape: [-1]}]
"""
STEPS = """\
    ensemble:
      steps:
        - {model: m, inputs: {x: t}, outputs: {y: b}}
        - {model: m, version: 1, inputs: {x: a}, outputs: {y: t}}
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    return [one.splitlines()[0] for one in problems_of(tmp_path, text)]


def test_what_a_file_says(tmp_path: Path) -> None:
    _, made = load_text(tmp_path, MODEL + STEPS).models
    assert made.is_ensemble

    assert made.instances == ()
    assert made.steps == (
        StepSpec("m", 0, (("x", "t"),), (("y", "b"),)),
        StepSpec("m", 1, (("x", "a"),), (("y", "t"),)),
    )


def test_mistakes_are_told_where_they_are(tmp_path: Path) -> None:
    assert problems(tmp_path, MODEL + STEPS.replace("{x: t}", "{x: tt}")) == [
        "config.yaml:11:34: tensor 'tt' is no input of the ensemble, and no step makes it; did you mean 't'?",
        "config.yaml:12:11: no output of the ensemble needs anything that model 'm' makes here",
    ]
    wrong = STEPS.replace("{x: t}", "{z: t}").replace("model: m, version", "model: n, version")
    assert problems(tmp_path, MODEL + wrong) == [
        "config.yaml:11:30: model 'm' needs the input 'x', which it is not given here",
        "config.yaml:11:34: model 'm' has no input 'z'; its inputs are 'x'",
        "config.yaml:12:19: there is no model 'n'",
    ]


def test_what_goes_with_a_callable_does_not_go_with_steps(tmp_path: Path) -> None:
    keys = "    response_cache: true\n    callable: pkg.mod:f\n    instances: [{count: 2}]\n"
    assert problems(tmp_path, MODEL + STEPS + keys) == [
        f"config.yaml:{line}: {key} does not go with ensemble: it is for the models of the steps"
        for line, key in (("13:21", "response_cache"), ("14:15", "callable"), ("15:16", "instances"))
    ]


@pytest.mark.parametrize(
    ("steps", "told"),
    cases(f"""\

-> 6:5: missing key 'callable', or 'ensemble', in models[1]
    ensemble: {{steps: []}}
-> 9:23: models[1].ensemble.steps: expected at least one entry, given an empty list
{STEPS.replace("{x: t}", "{x: ''}")}
-> 11:34: models[1].ensemble.steps[0].inputs.x: expected a non-empty string, given the string ''
{STEPS.replace("{y: b}", "{y: ''}")}
-> 11:51: models[1].ensemble.steps[0].outputs.y: expected a non-empty string, given the string ''
"""),
)
def test_steps_or_names_that_are_missing(tmp_path: Path, steps: str, told: str) -> None:
    assert problems(tmp_path, MODEL + steps)[0] == f"config.yaml:{told}"


def test_check_says_what_an_ensemble_is_made_of(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(requests): return requests\n")
    (tmp_path / "config.yaml").write_text((MODEL + STEPS).replace("pkg.mod:f", "f.py:f"))
    command = [GPUSERVE, "check", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert heads[:2] == ["m: cpu#0", "e: ensemble of m, m"]


def test_changes_of_a_load_request(tmp_path: Path) -> None:
    specs = load_text(tmp_path, MODEL + STEPS).models[1:]
    (made,) = changed(specs, {"max_batch_size": 3, "decoupled": False, "response_cache": False})
    assert made.max_batch_size == 3
    for changes, text in (
        ({"instance_group": [(2, ())]}, "it is an ensemble, which has no instance_group"),
        ({"decoupled": True}, "it is an ensemble, which has no decoupled"),
        ({"input": [("z", "FP32", (-1,), False, False)]}, "tensor 'a' is no input of the ensemble"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            changed(specs, changes)


# ---- programs -------------------------------------------------------------------------------


X, Y = Tensor((-1,), "float32", "INPUT_1"), Tensor((-1,), "float32", "y")


def test_tensors_that_are_none() -> None:
    with pytest.raises(BindError, match="inputs must be a list of Tensor, got 5"):
        Server().ensemble("e", 5, [Y], [Step("m", {}, {})])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "steps must be a non-empty list of Step"),
        ([{"model": "m"}], "steps must be a non-empty list of Step"),
        ([Step("m", {}, {})], r"steps\[0\].outputs must be a non-empty mapping"),
        ([Step("m", {"x": 3}, {"y": "y"})], r"steps\[0\].inputs\[x\] must be a non-empty string, got 3"),  # type: ignore[dict-item]
        ([Step("m", {}, {"y": "y"}, 0)], r"steps\[0\].version must be an integer of at least 1, got 0"),
        ([Step("a/b", {}, {"y": "y"})], "Model name 'a/b' is not allowed"),
        ([Step("m", {"x": "INPUT_1"}, {"o": "z"})], r"outputs\[0\]: output 'y' is made by no step"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_where_it_is_made(steps: Any, text: str) -> None:
    with pytest.raises(BindError, match=text):
        free_server().ensemble("e", [X], [Y], steps)
