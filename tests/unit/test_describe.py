"""What callables say of themselves, and configurations that leave it to them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gpuserve.api.binding import model_spec
from gpuserve.config.load import Configuration, load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.repositories import FileRepository
from gpuserve.core.errors import BindError
from gpuserve.decorators import batch
from gpuserve.model.declaration import ModelConfig, Tensor
from gpuserve.model.describe import CallableQuestion, ask_callables
from gpuserve.model.self_description import declaration
from gpuserve.typed import Parameter
from gpuserve_worker.inference.call_check import call_problem
from gpuserve_worker.inference.callable_loading import LoadError
from gpuserve_worker.protocol.tensor import TensorSpec

MODELS = """\
import os
from gpuserve import Tensor

class Scaled:
    def __init__(self, width, factor=1.0):
        raise RuntimeError("describing makes no model")

    def __call__(self, requests):
        return requests

    @classmethod
    def declare(cls, width, factor=1.0):
        print("printed by user code")
        x = {"name": "x", "dtype": "float32", "shape": (width,)}
        return {
            "inputs": [x],
            "outputs": [Tensor((width,), "FP32", name="y", labels=["a", "b"])],
            "max_batch_size": 8,
            "batching": {"max_queue_delay_us": 100, "preferred_batch_sizes": [4]},
        }

class Half(Scaled):
    @classmethod
    def declare(cls, width):
        return {"inputs": [{"name": "x", "dtype": "floot32", "shape": [1]}], "outputs": []}

class Raising(Scaled):
    @classmethod
    def declare(cls, width):
        raise FileNotFoundError("no weights there")

def stream(requests):
    yield requests

stream.inputs = stream.outputs = [Tensor((1,), "FP32")]

def silent(requests):
    return requests

if os.environ.get("DIE"):
    os._exit(7)
"""


def loaded(folder: Path, *models: str, environ: Mapping[str, str] | None = None) -> Configuration:
    (folder / "models.py").write_text(MODELS)
    (folder / "config.yaml").write_text("models:\n" + "".join(f"  - {{{one}}}\n" for one in models))
    return load_file(str(folder / "config.yaml"), environ or {})


def test_a_file_may_leave_the_tensors_to_the_callable(tmp_path: Path) -> None:
    told = loaded(tmp_path, "name: s, callable: 'models.py:Scaled', kwargs: {width: 3}")
    (spec,) = told.models
    assert spec.inputs == (TensorSpec("x", "FP32", (3,)),)
    assert spec.outputs == (TensorSpec("y", "FP32", (3,)),)
    assert spec.labels[0].labels == ("a", "b")
    assert (spec.max_batch_size, spec.batching.max_queue_delay_us) == (8, 100)
    assert told.described == {0}


def test_what_the_file_and_the_environment_say_wins_key_by_key(tmp_path: Path) -> None:
    environ = {"GPUSERVE_MODELS__S__MAX_BATCH_SIZE": "16"}
    entry = (
        "name: s, callable: 'models.py:Scaled', kwargs: {width: 3}, batching: {max_queue_delay_us: 5}, "
        "outputs: [{name: z, dtype: int8, shape: [1]}]"
    )
    (spec,) = loaded(tmp_path, entry, environ=environ).models
    assert spec.inputs == (TensorSpec("x", "FP32", (3,)),)
    assert spec.outputs == (TensorSpec("z", "INT8", (1,)),)
    assert (spec.max_batch_size, spec.batching.max_queue_delay_us) == (16, 5)
    assert spec.batching.preferred_batch_sizes == (4,)


def test_nothing_is_asked_where_nothing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIE", "1")
    tensors = "inputs: [{name: x, dtype: FP32, shape: []}], outputs: []"
    told = loaded(tmp_path, f"name: s, callable: 'models.py:Scaled', {tensors}")
    assert (told.described, told.models[0].max_batch_size) == (frozenset(), 0)


def test_a_generator_is_decoupled_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    (spec,) = loaded(tmp_path, "name: s, callable: 'models.py:stream'").models
    assert spec.decoupled
    with pytest.raises(ConfigProblems, match="give the model `decoupled: true`"):
        loaded(tmp_path, "name: s, callable: 'models.py:stream', decoupled: false")


def test_every_callable_that_says_too_little_is_told(tmp_path: Path) -> None:
    entries = [
        (
            "silent",
            "",
            "its outputs are not known: give the callable types (gpuserve.typed) or an attribute outputs = ",
        ),
        ("absent", "", "has no attribute 'absent'"),
        ("Scaled", "", "cannot be made with these kwargs: missing a required argument: 'width'"),
        ("Raising", "width: 1", "declare() raised FileNotFoundError: no weights there"),
    ]
    lines = [
        f"name: m{number}, callable: 'models.py:{name}', kwargs: {{{kwargs}}}"
        for number, (name, kwargs, _) in enumerate(entries)
    ]
    with pytest.raises(ConfigProblems) as caught:
        loaded(tmp_path, *lines)
    told = [str(one).splitlines()[0] for one in caught.value.problems]
    assert len(told) == len(entries) + 1  # inputs of the first are told as well
    for position, (_, _, text) in enumerate(entries):
        assert any(f"config.yaml:{position + 2}:" in one and text in one for one in told), text


def test_a_mistake_in_what_a_callable_says_is_told_of_the_callable(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblems) as caught:
        loaded(tmp_path, "name: h, callable: 'models.py:Half', kwargs: {width: 1}")
    (problem,) = caught.value.problems
    assert str(problem).startswith("models.py:Half: models[0].inputs[0].dtype: expected a dtype such as")
    assert "given 'floot32'" in str(problem)


def test_children_answer_in_order_and_may_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    asked = {"models.py:stream": {}, "dies.py:x": {}, "models.py:Scaled": {"width": 2}}
    questions = [CallableQuestion(path, str(tmp_path), kwargs) for path, kwargs in asked.items()]
    first, second, third = ask_callables(questions)
    assert first.declared["decoupled"] is True
    assert second.problem == "importing 'dies.py:x' ended the process with exit status 7"
    assert third.declared["max_batch_size"] == 8


@pytest.mark.thorough
def test_the_load_of_one_model_asks_no_other(tmp_path: Path) -> None:
    entries = ["name: a, callable: 'models.py:stream'", "name: b, callable: 'others.py:plain'"]
    tensors = "plain.inputs = plain.outputs = [Tensor(({size},), 'FP32')]"
    source = f"from gpuserve import Tensor\ndef plain(requests):\n    return requests\n{tensors}\n"
    (tmp_path / "others.py").write_text(source.format(size=1))
    start = loaded(tmp_path, *entries)
    repository = FileRepository(str(tmp_path / "config.yaml"), {}, (), start)
    (tmp_path / "models.py").write_text("raise SystemExit\n")
    (tmp_path / "others.py").write_text(
        source.format(size=22)
    )  # byte code tells sources apart by their length, too
    (spec,) = repository.read("b")
    assert spec.inputs[0].shape == (22,)
    with pytest.raises(ConfigProblems, match=r"importing models\.py raised SystemExit"):
        repository.read_all()
    with pytest.raises(ConfigProblems, match=r"importing models\.py raised SystemExit"):
        repository.read("a")


class Instance:
    inputs: ClassVar = (Tensor((2,), np.float32, name="x", optional=True),)
    outputs: ClassVar = [Tensor((1,), bytes)]
    max_batch_size = 16

    def __call__(self, requests: Any) -> Any:
        return requests


def test_bind_takes_what_the_object_says() -> None:
    spec = model_spec("m", Instance(), None, None, 1, None, False, "thread")
    assert spec.inputs == (TensorSpec("x", "FP32", (2,), True),)
    assert spec.outputs == (TensorSpec("OUTPUT_1", "BYTES", (1,)),)
    assert spec.max_batch_size == 16
    given = ModelConfig(batching=False)
    spec = model_spec("m", Instance(), None, [Tensor((1,), "FP32")], 1, given, False, "thread")
    assert (spec.max_batch_size, spec.outputs[0].datatype) == (0, "FP32")
    with pytest.raises(BindError, match=r"the inputs of the callable 'test_bind_takes.*are not known"):
        model_spec("m", lambda requests: requests, None, [], 1, None, False, "thread")


class Wrong:
    answer: Any = None

    @classmethod
    def declare(cls) -> Any:
        return cls.answer

    def __call__(self, requests: Any) -> Any:
        return requests


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (["x"], "must return a mapping such as {'inputs': […], 'outputs': […]}, it returned list"),
        ({"inputs": [3]}, "inputs must be a list of Tensor"),
        ({"inputs": [Tensor((1,), "floot")]}, "floot"),
    ],
)
def test_what_declare_returns_is_looked_at(answer: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "answer", answer)
    with pytest.raises(LoadError, match=re.escape(told)):
        declaration(Wrong, "m.py:Wrong", {})


@pytest.mark.thorough
def test_who_never_answers_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "hangs.py").write_text(f"open({str(tmp_path / 'gate')!r}).read()\n\ndef hangs(x): ...\n")
    (answer,) = ask_callables([CallableQuestion("hangs.py:hangs", str(tmp_path), {})], timeout_s=5)
    assert answer.problem == "'hangs.py:hangs' did not return its declaration within 5 s"
    assert caplog.messages[0].startswith("importing hangs.py:hangs to learn the tensors of its model")
    assert 'hangs.py", line 1 in <module>' in capfd.readouterr().err, "the stack of the import"


def test_a_decorator_from_elsewhere_may_change_the_call() -> None:
    def one_by_one(function: Any) -> Any:
        @functools.wraps(function)
        def call(requests: list[Any]) -> list[Any]:
            return [{"y": function(one["x"], 2)} for one in requests]

        return call

    @one_by_one
    def power(x: Any, exponent: int) -> Any:
        return x**exponent

    assert call_problem(power, "m.py:power", {}, ["x"]) is None


def test_objects_and_methods_are_called_with_the_declared_inputs() -> None:
    class Scale:
        @batch
        def __call__(self, x: Any) -> Any:
            return {"y": x}

    for one in (Scale, Scale(), Scale().__call__):
        assert call_problem(one, "Scale", {}, ["x"]) is None
        assert "parameter 'x' is no input" in str(call_problem(one, "Scale", {}, ["z"]))


def test_a_callable_may_be_given_controls_of_sequences_besides_its_inputs() -> None:
    @batch
    def count(x: Any, start: Any) -> Any:
        return {"y": x + start}

    assert "parameter 'start' is no input" in str(call_problem(count, "count", {}, ["x"]))
    assert call_problem(count, "count", {}, ["x"], all_inputs=False) is None
    assert "no parameter takes 'z'" in str(call_problem(count, "count", {}, ["x", "z"], all_inputs=False))


def test_a_parameter_that_no_request_can_carry_is_an_error() -> None:
    @batch
    def call(x: Any, top: Parameter[list]) -> Any:  # type: ignore[type-arg]
        return {"y": x}

    expected = "m.py:call: Parameter 'top' must be an int, float, bool or str, but its type is <class 'list'>"
    assert call_problem(call, "m.py:call", {}, ["x"]) == expected


def test_lengths_of_rows_are_no_input() -> None:
    @batch(pad=0, lengths="n")
    def encode(ids: Any, n: Any) -> Any:
        return {"y": ids + n}

    assert call_problem(encode, "m.py:encode", {}, ["ids"]) is None


def test_a_call_without_self_is_no_mistake() -> None:
    class Static:
        @staticmethod
        def __call__(requests: list[Any]) -> list[Any]:
            return requests

    class Bare:
        def __call__(self) -> None: ...

    assert call_problem(Static, "m.py:Static", {}, ["x"]) is None
    assert "the call fails" in str(call_problem(Bare, "m.py:Bare", {}, ["x"]))
