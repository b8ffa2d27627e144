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


def test_the_largest_come_first() -> None:
    found = top_classes(output([[0.5, 3, -1, 2.25]]), 3, True, ("cat", "dog", "bird"))
    assert texts(found) == ((1, 3), ["3.000000:1:dog", "2.250000:3", "0.500000:0:cat"])


def test_each_row_has_its_own() -> None:
    found = top_classes(output([[[1, 2], [4, 3]], [[9, 8], [7, 6]]]), 2, True, ())
    assert texts(found) == ((2, 2), ["4.000000:2", "3.000000:3", "9.000000:0", "8.000000:1"])


def test_without_a_batch_all_is_one_row() -> None:
    assert texts(top_classes(output([[1, 2], [4, 3]]), 9, False, ())) == (
        (4,),
        ["4.000000:2", "3.000000:3", "2.000000:1", "1.000000:0"],
    )
    assert texts(top_classes(output(5), 1, False, ())) == ((1,), ["5.000000:0"])


def test_a_single_element_of_a_model_that_batches_is_its_only_class() -> None:
    assert texts(top_classes(output(5), 2, True, ("cat",))) == ((1,), ["5.000000:0:cat"])


def test_integers_are_plain() -> None:
    largest = (1 << 64) - 1
    found = top_classes(output([[0, largest, 5]], "UINT64", np.uint64), 2, True, ())
    assert texts(found) == ((1, 2), [f"{largest}:1", "5:2"])
    least = -(1 << 63)
    assert texts(top_classes(output([[least, -1]], "INT64", np.int64), 2, True, ()))[1] == [
        "-1:1",
        f"{least}:0",
    ]


def test_equals_come_in_their_order_and_nan_last() -> None:
    found = top_classes(output([[1, np.nan, 2, 2, -np.inf, np.inf]]), 6, True, ())
    assert texts(found)[1] == ["inf:5", "2.000000:2", "2.000000:3", "1.000000:0", "nan:1", "-inf:4"]


def test_nothing_to_choose_from() -> None:
    assert texts(top_classes(output(np.zeros((2, 0))), 3, True, ())) == ((2, 0), [])
    assert texts(top_classes(output(np.zeros((0, 3))), 3, True, ())) == ((0, 3), [])


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(1, 45))
def test_it_is_a_sorted_list_cut(values: list[int], count: int) -> None:
    found = texts(top_classes(output([values], "INT32", np.int32), count, True, ()))[1]
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    assert found == [f"{values[index]}:{index}" for index in order][:count]


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_what_has_no_order(datatype: str) -> None:
    text = f"class result not available for output due to unsupported type '{datatype}'"
    with pytest.raises(InvalidArgument, match=text):
        top_classes(OutputTensor("y", datatype, (1, 1), b"\0"), 1, True, ())


def test_too_large() -> None:
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        top_classes(OutputTensor("y", "INT8", (1, MAX_ELEMENTS + 1), b""), 1, True, ())


def spec(*labels: LabelSpec) -> ModelSpec:
    outputs = (TensorSpec("y", "FP32", (3,)), TensorSpec("z", "FP32", (3,)))
    return ModelSpec("m", (), outputs, 4, (InstanceSpec("cpu#0", "cpu", {}),), labels=labels)


def no_member(step: StepSpec) -> ModelSpec | None:
    return None


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


def test_only_the_outputs_that_were_asked_so() -> None:
    closed: list[int] = []
    one, other = output([[1, 3, 2]]), output([[4, 5, 6]], name="z")
    response = InferResponse("m", "1", "", {}, [one, other], lambda: closed.append(1))
    classify(response, {"y": 1}, spec(LabelSpec("y", ("a", "b", "c"))), no_member)
    assert texts(response.outputs[0]) == ((1, 1), ["3.000000:1:b"])
    assert response.outputs[1] is other
    assert not closed


def test_a_response_without_classes_is_closed() -> None:
    closed: list[int] = []
    wrong = OutputTensor("y", "BOOL", (1, 1), b"\1")
    response = InferResponse("m", "1", "", {}, [wrong], lambda: closed.append(1))
    with pytest.raises(InvalidArgument):
        classify(response, {"y": 1}, spec(), no_member)
    assert closed == [1]


# ---- labels ------------------------------------------------------------------------------


def test_the_model_config_names_the_file() -> None:
    config = model_config(spec(LabelSpec("z", ("a",), "labels.txt"), LabelSpec("y", ("a",))))
    assert [one.label_filename for one in config.output] == ["", "labels.txt"]


def test_labels_cross_to_another_process() -> None:
    made = spec(LabelSpec("y", ("a", "b"), "labels.txt"))
    assert ModelSpec.from_wire(made.to_wire()).labels == made.labels


def test_labels_of_a_bound_model() -> None:
    outputs = [Tensor((3,), np.float32, labels=["a", "b"]), Tensor((3,), np.float32)]
    assert label_specs(outputs, tensor_specs(outputs, "OUTPUT")) == (LabelSpec("OUTPUT_1", ("a", "b")),)


@pytest.mark.parametrize("labels", ["ab", [1], 5])
def test_labels_are_a_list_of_texts(labels: Any) -> None:
    outputs = [Tensor((3,), np.float32, name="y", labels=labels)]
    with pytest.raises(BindError, match=r"Tensor 'y': labels must be"):
        label_specs(outputs, tensor_specs(outputs, "OUTPUT"))


def test_inputs_have_none() -> None:
    with pytest.raises(BindError, match="only output tensors have labels"):
        tensor_specs([Tensor((3,), np.float32, labels=["a"])], "INPUT")
