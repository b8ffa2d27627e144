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


def test_positional_arguments_of_a_tensor_are_shape_dtype_name_optional() -> None:
    tensor = Tensor((2, -1), np.int8, "mask", True)
    assert tensor == Tensor(shape=(2, -1), dtype=np.int8, name="mask", optional=True)
    assert tensor_specs([tensor], "INPUT") == (TensorSpec("mask", "INT8", (2, -1), True),)


def test_names_are_by_position_where_there_are_none() -> None:
    tensors = [Tensor((1,), bool), Tensor((1,), bool, name="mask"), Tensor((1,), bool)]
    assert [one.name for one in tensor_specs(tensors, "INPUT")] == ["INPUT_1", "mask", "INPUT_3"]
    assert [one.name for one in tensor_specs(tensors, "OUTPUT")] == ["OUTPUT_1", "mask", "OUTPUT_3"]


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        (np.float32, "FP32"),
        (np.dtype("float32"), "FP32"),
        (np.float32().dtype, "FP32"),
        ("float32", "FP32"),
        ("FP32", "FP32"),
        ("TYPE_FP32", "FP32"),
        (float, "FP64"),
        (int, "INT64"),
        (np.uint8, "UINT8"),
        (bool, "BOOL"),
        (np.bool_, "BOOL"),
        ("bf16", "BF16"),
        (bytes, "BYTES"),
        (np.bytes_, "BYTES"),
        (object, "BYTES"),
        (np.object_, "BYTES"),
        (np.dtype("S8"), "BYTES"),
        ("bytes", "BYTES"),
    ],
)
def test_dtypes(dtype: Any, datatype: str) -> None:
    assert tensor_specs([Tensor((1,), dtype)], "INPUT")[0].datatype == datatype


def test_shapes_are_any_sequence_of_integers() -> None:
    shapes: list[Any] = [(), [2, 3], (np.int64(2), np.int32(-1)), (0,)]
    specs = [tensor_specs([Tensor(shape, "FP32")], "INPUT")[0].shape for shape in shapes]
    assert specs == [(), (2, 3), (2, -1), (0,)]
    assert all(type(dim) is int for shape in specs for dim in shape)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        pytest.param(
            [Tensor((1,), "float33")], "Tensor 'INPUT_1': 'float33' is no tensor datatype", id="word"
        ),
        pytest.param([Tensor((1,), np.complex64)], "use two float tensors", id="complex"),
        pytest.param([Tensor((1,), np.str_)], 'str_ has no v2 datatype: use bytes ("BYTES")', id="str_"),
        pytest.param([Tensor((1,), str)], 'str has no v2 datatype: use bytes ("BYTES")', id="str"),
        pytest.param([Tensor((1,), "U8")], 'use bytes ("BYTES")', id="U8"),
        pytest.param([Tensor((1,), np.timedelta64)], 'use int64 ("INT64")', id="timedelta"),
        pytest.param([Tensor((1,), None)], "None is no tensor datatype", id="no-dtype"),
        pytest.param([Tensor((1,), dict)], "dict is no tensor datatype", id="class"),
        pytest.param([Tensor((1,), np.dtype(">f4"))], "has no v2 datatype", id="big-endian"),
        pytest.param([Tensor((1,), "datetime64[s]")], 'use int64 ("INT64")', id="datetime"),
        pytest.param([Tensor((1,), [1])], "is no tensor datatype", id="list"),
        pytest.param([Tensor((-2,), "FP32")], "-1 for any size, got (-2,)", id="negative"),
        pytest.param([Tensor((1.5,), "FP32")], "got (1.5,)", id="float"),  # type: ignore[arg-type]
        pytest.param([Tensor(("a",), "FP32")], "got ('a',)", id="str"),  # type: ignore[arg-type]
        pytest.param([Tensor(3, "FP32")], "must be a tuple of integers", id="int"),  # type: ignore[arg-type]
        pytest.param([Tensor((1,), "FP32", name="")], "non-empty string, got ''", id="empty-name"),
        pytest.param([Tensor((1,), "FP32", name=3)], "string, got 3", id="name"),  # type: ignore[arg-type]
        pytest.param(
            [Tensor((1,), "FP32", "a"), Tensor((1,), "FP32", "a")], "'a' is declared twice", id="twice"
        ),
        pytest.param(
            [Tensor((1,), "FP32"), Tensor((1,), "FP32", "INPUT_1")],
            "'INPUT_1' is declared twice",
            id="default",
        ),
        pytest.param(Tensor((1,), "FP32"), "inputs must be a list of Tensor, got Tensor(", id="no-list"),
        pytest.param(["FP32"], "inputs must be a list of Tensor, got ['FP32']", id="no-tensor"),
        pytest.param(None, "the inputs of the callable 'infer' are not known: say inputs=[", id="none"),
        pytest.param("", "inputs must be a list of Tensor, got ''", id="string"),
    ],
)
def test_tensors_that_cannot_be(inputs: Any, text: str) -> None:
    assert text in complaint(inputs=inputs)


def test_outputs_cannot_be_optional() -> None:
    assert "output tensors cannot be optional" in complaint(outputs=[Tensor((1,), "FP32", optional=True)])


def test_a_model_may_have_no_tensors() -> None:
    made = spec(inputs=[], outputs=[])
    assert (made.inputs, made.outputs) == ((), ())


# ---- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "Linear-2.5_b", "0", "a" * 128])
def test_names_that_can_be(name: str) -> None:
    assert spec(model_name=name).name == name


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-x", "a b", "a\0", "a\n", "ä", "a" * 129])
def test_names_that_cannot_be(name: str) -> None:
    assert "is not allowed: it can only contain alphanumeric characters" in complaint(model_name=name)


@pytest.mark.parametrize("name", ["", None])
def test_names_that_are_none(name: Any) -> None:
    assert complaint(model_name=name) == "Model name cannot be empty"


def test_a_name_that_is_no_text() -> None:
    assert complaint(model_name=3) == "Model name must be a string, got an object of type int"


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_versions_that_cannot_be(version: Any) -> None:
    assert (
        complaint(model_version=version) == f"model_version must be an integer of at least 1, got {version!r}"
    )


def test_isolation_is_one_of_two() -> None:
    assert complaint(isolation="fiber") == "isolation must be 'process' or 'thread', got 'fiber'"


@pytest.mark.parametrize(
    ("infer_func", "got"),
    [
        (None, "an object of type NoneType"),
        ("module:function", "an object of type str"),
        ([], "a list of nothing"),
        ((), "a tuple of nothing"),
        ([infer, 3], "a list of function, int"),
    ],
)
def test_what_cannot_be_called(infer_func: Any, got: str) -> None:
    text = complaint(infer_func=infer_func)
    assert text == f"infer_func must be a callable or a non-empty sequence of callables, got {got}"


def test_an_instance_an_element() -> None:
    instances = spec(infer_func=(infer, infer)).instances
    assert instances == tuple(InstanceSpec(name, "cpu", {"object": infer}) for name in ("0", "1"))


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


def test_what_a_thread_serves_is_not_pickled() -> None:
    locked = Locked()
    assert spec(infer_func=locked).instances[0].source == {"object": locked}


def test_no_callable_goes_to_the_front() -> None:
    made = spec(infer_func=[infer, infer], strict=True, inputs=[Tensor((1,), bytes, optional=True)])
    again = ModelSpec.from_wire(made.to_wire())
    assert [one.source for one in again.instances] == [{}, {}]
    assert (again.inputs, again.batching, again.queue) == (made.inputs, BatchingSpec(), QueueSpec())
    assert again.strict
