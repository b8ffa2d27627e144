"""What ``bind()`` is given becomes a ``ModelSpec``, or one sentence that says what is wrong with it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import cloudpickle  # noqa: F401 - a test takes the path to it away
import numpy as np
import pytest

from gpuserve import DynamicBatcher, ModelConfig, Tensor
from gpuserve.api.binding import model_spec
from gpuserve.core.errors import BindError
from gpuserve.model.declaration import tensor_specs
from gpuserve.model.spec import BatchingSpec, InstanceSpec, ModelSpec, QueueSpec
from gpuserve_worker.protocol.tensor import TensorSpec


def infer(requests: Any) -> Any:
    return requests


class Locked:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def __call__(self, requests: Any) -> Any:
        return requests


def spec(**changes: Any) -> ModelSpec:
    given = {
        "model_name": "m",
        "infer_func": infer,
        "inputs": [Tensor((1,), np.float32)],
        "outputs": [Tensor((1,), np.float32)],
        "model_version": 1,
        "config": None,
        "strict": False,
        "isolation": "thread",
    }
    return model_spec(**{**given, **changes})


def complaint(**changes: Any) -> str:
    with pytest.raises(BindError) as error:
        spec(**changes)
    return str(error.value)


# ---- tensors ------------------------------------------------------------------------------------


def test_names_are_by_position_where_there_are_none_as_arguments_of_a_tensor_are() -> None:
    tensor = Tensor((2, -1), np.int8, "mask", True)
    assert tensor == Tensor(shape=(2, -1), dtype=np.int8, name="mask", optional=True)
    assert tensor_specs([tensor], "INPUT") == (TensorSpec("mask", "INT8", (2, -1), True),)
    tensors = [Tensor((1,), bool), Tensor((1,), bool, name="mask"), Tensor((1,), bool)]
    assert [one.name for one in tensor_specs(tensors, "INPUT")] == ["INPUT_1", "mask", "INPUT_3"]
    assert [one.name for one in tensor_specs(tensors, "OUTPUT")] == ["OUTPUT_1", "mask", "OUTPUT_3"]


DTYPES: dict[str, list[Any]] = {
    "FP32": [np.float32, np.dtype("float32"), np.float32().dtype, "float32", "FP32", "TYPE_FP32"],
    "FP64": [float],
    "INT64": [int],
    "UINT8": [np.uint8],
    "BOOL": [bool, np.bool_],
    "BF16": ["bf16"],
    "BYTES": [bytes, np.bytes_, object, np.object_, np.dtype("S8"), "bytes"],
}


@pytest.mark.parametrize("datatype", DTYPES)
def test_dtypes(datatype: str) -> None:
    specs = [tensor_specs([Tensor((1,), dtype)], "INPUT")[0] for dtype in DTYPES[datatype]]
    assert {one.datatype for one in specs} == {datatype}


def test_shapes_are_any_sequence_of_integers() -> None:
    shapes: list[Any] = [(), [2, 3], (np.int64(2), np.int32(-1)), (0,)]
    specs = [tensor_specs([Tensor(shape, "FP32")], "INPUT")[0].shape for shape in shapes]
    assert specs == [(), (2, 3), (2, -1), (0,)]
    assert all(type(dim) is int for shape in specs for dim in shape)


def dtype(given: Any) -> list[Tensor]:
    return [Tensor((1,), given)]


def shape(given: Any) -> list[Tensor]:
    return [Tensor(given, "FP32")]


def names(*given: Any) -> list[Tensor]:
    return [Tensor((1,), "FP32", name) for name in given]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (dtype("float33"), "Tensor 'INPUT_1': 'float33' is no tensor datatype"),
        (dtype(np.complex64), "use two float tensors"),
        (dtype(np.str_), 'str_ has no v2 datatype: use bytes ("BYTES")'),
        (dtype(str), 'str has no v2 datatype: use bytes ("BYTES")'),
        (dtype("U8"), 'use bytes ("BYTES")'),
        (dtype(np.timedelta64), 'use int64 ("INT64")'),
        (dtype("datetime64[s]"), 'use int64 ("INT64")'),
        (dtype(None), "None is no tensor datatype"),
        (dtype(dict), "dict is no tensor datatype"),
        (dtype([1]), "is no tensor datatype"),
        (dtype(np.dtype(">f4")), "has no v2 datatype"),
        (shape((-2,)), "-1 for any size, got (-2,)"),
        (shape((1.5,)), "got (1.5,)"),
        (shape(("a",)), "got ('a',)"),
        (shape(3), "must be a tuple of integers"),
        (names(""), "non-empty string, got ''"),
        (names(3), "string, got 3"),
        (names("a", "a"), "'a' is declared twice"),
        (names(None, "INPUT_1"), "'INPUT_1' is declared twice"),
        (Tensor((1,), "FP32"), "inputs must be a list of Tensor, got Tensor("),
        (["FP32"], "inputs must be a list of Tensor, got ['FP32']"),
        (None, "the inputs of the callable 'infer' are not known: say inputs=["),
        ("", "inputs must be a list of Tensor, got ''"),
    ],
)
def test_tensors_that_cannot_be(inputs: Any, text: str) -> None:
    assert text in complaint(inputs=inputs)


def test_outputs_cannot_be_optional_and_a_model_may_have_no_tensors() -> None:
    assert "output tensors cannot be optional" in complaint(outputs=[Tensor((1,), "FP32", optional=True)])
    made = spec(inputs=[], outputs=[])
    assert (made.inputs, made.outputs) == ((), ())


# ---- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "Linear-2.5_b", "0", "a" * 128])
def test_names_that_can_be(name: str) -> None:
    assert spec(model_name=name).name == name


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-x", "a b", "a\0", "a\n", "ä", "a" * 129])
def test_names_that_cannot_be(name: str) -> None:
    assert "is not allowed: it can only contain alphanumeric characters" in complaint(model_name=name)


VERSION = "model_version must be an integer of at least 1, got {!r}"
CALLABLE = "infer_func must be a callable or a non-empty sequence of callables, got "


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("model_name", "", "Model name cannot be empty"),
        ("model_name", None, "Model name cannot be empty"),
        ("model_name", 3, "Model name must be a string, got an object of type int"),
        *(("model_version", value, VERSION.format(value)) for value in (0, -1, "1", 1.0, True, None)),
        ("isolation", "fiber", "isolation must be 'process' or 'thread', got 'fiber'"),
        ("infer_func", None, CALLABLE + "an object of type NoneType"),
        ("infer_func", "module:function", CALLABLE + "an object of type str"),
        ("infer_func", [], CALLABLE + "a list of nothing"),
        ("infer_func", (), CALLABLE + "a tuple of nothing"),
        ("infer_func", [infer, 3], CALLABLE + "a list of function, int"),
    ],
)
def test_arguments_that_cannot_be(argument: str, value: Any, text: str) -> None:
    assert complaint(**{argument: value}) == text


# ---- how it batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "max_batch_size", "batching"),
    [
        (None, 4, BatchingSpec()),
        (ModelConfig(), 4, BatchingSpec()),
        (ModelConfig(max_batch_size=16), 16, BatchingSpec()),
        (ModelConfig(batching=False), 0, BatchingSpec()),
        (ModelConfig(batching=False, max_batch_size=-1), 0, BatchingSpec()),
        (ModelConfig(batcher=None), 4, BatchingSpec(merge=False)),
        (ModelConfig(batcher=DynamicBatcher(500, [2, 4])), 4, BatchingSpec(500, (2, 4))),
        (ModelConfig(batcher=DynamicBatcher(preferred_batch_size=[])), 4, BatchingSpec()),
    ],
)
def test_batching(config: Any, max_batch_size: int, batching: BatchingSpec) -> None:
    made = spec(config=config)
    assert (made.max_batch_size, made.batching) == (max_batch_size, batching)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ModelConfig(max_batch_size=0), "max_batch_size must be an integer of at least 1, got 0"),
        (ModelConfig(max_batch_size="8"), "max_batch_size must be an integer of at least 0, got '8'"),
        (ModelConfig(max_batch_size=2.0), "got 2.0"),
        (ModelConfig(batcher=DynamicBatcher(-1)), "of at least 0, got -1"),
        (ModelConfig(batcher=DynamicBatcher(0.5)), "of at least 0, got 0.5"),
        (ModelConfig(batcher=DynamicBatcher(0, [5])), "of at most max_batch_size, which is 4, given 5"),
        (ModelConfig(batcher=DynamicBatcher(0, [0])), "must be a list of integers of at least 1, got [0]"),
        (ModelConfig(batcher=DynamicBatcher(0, ["2"])), "got ['2']"),
        (ModelConfig(batcher=DynamicBatcher(0, 2)), "got 2"),
        (ModelConfig(batcher="dynamic"), "must be a DynamicBatcher or None, got an object of type str"),
        ({"max_batch_size": 8}, "config must be a ModelConfig, got an object of type dict"),
    ],
)  # fmt: skip
def test_batching_that_cannot_be(config: Any, text: str) -> None:
    assert text in complaint(config=config)


# ---- what a worker process is sent --------------------------------------------------------------


def test_a_pickle_brings_the_import_path_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", "/absolute", "/absolute"])
    (instance,) = spec(isolation="process").instances
    assert instance.source["sys_path"] == [str(tmp_path), str(tmp_path / "relative"), "/absolute"]
    assert isinstance(instance.source["pickle"], bytes)


def test_a_callable_that_is_listed_twice_is_pickled_once() -> None:
    first, second, other = spec(infer_func=[infer, infer, closes_over(1)], isolation="process").instances
    assert first.source["pickle"] is second.source["pickle"]
    assert first.source["pickle"] != other.source["pickle"]


def closes_over(value: Any) -> Any:
    def inner(requests: Any) -> Any:
        return value

    return inner


def test_each_element_is_an_instance_and_what_a_thread_serves_is_not_pickled() -> None:
    locked = Locked()
    instances = spec(infer_func=(infer, locked)).instances
    assert instances == (
        InstanceSpec("0", "cpu", {"object": infer}),
        InstanceSpec("1", "cpu", {"object": locked}),
    )


def test_no_callable_goes_to_the_front() -> None:
    made = spec(infer_func=[infer, infer], strict=True, inputs=[Tensor((1,), bytes, optional=True)])
    again = ModelSpec.from_wire(made.to_wire())
    assert [one.source for one in again.instances] == [{}, {}]
    assert (again.inputs, again.batching, again.queue) == (made.inputs, BatchingSpec(), QueueSpec())
    assert again.strict
