"""The largest elements of an output, and the labels that models declare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve import Tensor
from gpuserve.core.errors import BindError, InvalidArgument
from gpuserve.front.requests.classification import MAX_ELEMENTS, classify, labels_of, top_classes
from gpuserve.front.requests.inference import InferResponse, OutputTensor
from gpuserve.model.declaration import label_specs, tensor_specs
from gpuserve.model.spec import InstanceSpec, LabelSpec, ModelSpec, StepSpec
from gpuserve.model.triton_config import model_config
from gpuserve_worker.protocol.tensor import TensorSpec, bytes_array


def output(values: Any, datatype: str = "FP32", dtype: Any = np.float32, name: str = "y") -> OutputTensor:
    array = np.asarray(values, dtype=dtype)
    return OutputTensor(name, datatype, array.shape, array.tobytes())


def texts(found: OutputTensor) -> Any:
    assert found.datatype == "BYTES"
    decoded = [one.decode() for one in bytes_array(found.data, found.shape).reshape(-1)]
    return found.shape, decoded


LARGEST, LEAST = (1 << 64) - 1, -(1 << 63)
TOP: dict[str, tuple[OutputTensor, int, bool, tuple[int, ...], list[str]]] = {
    "the largest come first": (
        output([[0.5, 3, -1, 2.25]]), 3, True, (1, 3), ["3.000000:1:dog", "2.250000:3", "0.500000:0:cat"]
    ),
    "each row has its own": (
        output([[[1, 2], [4, 3]], [[9, 8], [7, 6]]]), 2, True, (2, 2),
        ["4.000000:2:bird", "3.000000:3", "9.000000:0:cat", "8.000000:1:dog"],
    ),
    "without a batch all is one row": (
        output([[1, 4], [2, 3]]), 9, False, (4,),
        ["4.000000:1:dog", "3.000000:3", "2.000000:2:bird", "1.000000:0:cat"],
    ),
    "one element": (output(5), 1, False, (1,), ["5.000000:0:cat"]),
    "one element of a model that batches": (output(5), 2, True, (1,), ["5.000000:0:cat"]),
    "integers are plain": (
        output([[0, LARGEST, 5]], "UINT64", np.uint64), 2, True, (1, 2), [f"{LARGEST}:1:dog", "5:2:bird"]
    ),
    "negative integers": (
        output([[LEAST, -1]], "INT64", np.int64), 2, True, (1, 2), ["-1:1:dog", f"{LEAST}:0:cat"]
    ),
    "equals come in their order and NaN last": (
        output([[1, np.nan, 2, 2, -np.inf, np.inf]]), 6, True, (1, 6),
        ["inf:5", "2.000000:2:bird", "2.000000:3", "1.000000:0:cat", "nan:1:dog", "-inf:4"],
    ),
    "no elements": (output(np.zeros((2, 0))), 3, True, (2, 0), []),
    "no rows": (output(np.zeros((0, 3))), 3, True, (0, 3), []),
}  # fmt: skip


@pytest.mark.parametrize(("values", "count", "batches", "shape", "classes"), TOP.values(), ids=TOP)
def test_the_largest_elements_of_each_row(
    values: OutputTensor, count: int, batches: bool, shape: tuple[int, ...], classes: list[str]
) -> None:
    assert texts(top_classes(values, count, batches, ("cat", "dog", "bird"))) == (shape, classes)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(1, 45))
def test_it_is_a_sorted_list_cut(values: list[int], count: int) -> None:
    found = texts(top_classes(output([values], "INT32", np.int32), count, True, ()))[1]
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    assert found == [f"{values[index]}:{index}" for index in order][:count]


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_what_has_no_order_or_is_too_large(datatype: str) -> None:
    text = f"class result not available for output due to unsupported type '{datatype}'"
    with pytest.raises(InvalidArgument, match=text):
        top_classes(OutputTensor("y", datatype, (1, 1), b"\0"), 1, True, ())
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        top_classes(OutputTensor("y", "INT8", (1, MAX_ELEMENTS + 1), b""), 1, True, ())


def spec(*labels: LabelSpec) -> ModelSpec:
    outputs = (TensorSpec("y", "FP32", (3,)), TensorSpec("z", "FP32", (3,)))
    return ModelSpec("m", (), outputs, 4, (InstanceSpec("cpu#0", "cpu", {}),), labels=labels)


def test_only_the_outputs_that_were_asked_so_and_a_response_without_classes_is_closed() -> None:
    closed: list[int] = []
    one, other, wrong = (
        output([[1, 3, 2]]),
        output([[4, 5, 6]], name="z"),
        OutputTensor("y", "BOOL", (1, 1), b"\1"),
    )
    response = InferResponse("m", "1", "", {}, [one, other], lambda: closed.append(1))
    classify(response, {"y": 1}, spec(LabelSpec("y", ("a", "b", "c"))), lambda step: None)
    assert texts(response.outputs[0]) == ((1, 1), ["3.000000:1:b"])
    assert response.outputs[1] is other
    assert not closed
    response = InferResponse("m", "1", "", {}, [wrong], lambda: closed.append(1))
    with pytest.raises(InvalidArgument):
        classify(response, {"y": 1}, spec(), lambda step: None)
    assert closed == [1]


def over(model: str, **more: Any) -> ModelSpec:
    """An ensemble whose output "out" is "y" of a model."""
    tensors = (TensorSpec("out", "FP32", (3,)),)
    steps = (StepSpec(model, 0, (), (("y", "out"),)),)
    return ModelSpec("e", (), tensors, 4, (), steps=steps, **more)


def test_an_ensemble_takes_the_labels_of_the_model_that_makes_the_output() -> None:
    models = {"m": spec(LabelSpec("y", ("a", "b")))}
    assert labels_of("out", over("m"), lambda step: models.get(step.model)) == ("a", "b")
    assert labels_of("out", over("unloaded"), lambda step: models.get(step.model)) == ()
    own = over("m", labels=(LabelSpec("out", ("c",)),))
    assert labels_of("out", own, lambda step: models.get(step.model)) == ("c",)


# ---- labels ------------------------------------------------------------------------------


def test_the_model_config_names_the_file_and_labels_cross_to_another_process() -> None:
    made = spec(LabelSpec("z", ("a",), "labels.txt"), LabelSpec("y", ("a",)))
    assert [one.label_filename for one in model_config(made).output] == ["", "labels.txt"]
    assert ModelSpec.from_wire(made.to_wire()).labels == made.labels


def test_labels_of_a_bound_model() -> None:
    outputs = [Tensor((3,), np.float32, labels=["a", "b"]), Tensor((3,), np.float32)]
    assert label_specs(outputs, tensor_specs(outputs, "OUTPUT")) == (LabelSpec("OUTPUT_1", ("a", "b")),)
    with pytest.raises(BindError, match="only output tensors have labels"):
        tensor_specs(outputs[:1], "INPUT")
    for labels in ("ab", [1], 5):
        wrong = [Tensor((3,), np.float32, name="y", labels=labels)]  # type: ignore[arg-type]
        with pytest.raises(BindError, match=r"Tensor 'y': labels must be"):
            label_specs(wrong, tensor_specs(wrong, "OUTPUT"))
