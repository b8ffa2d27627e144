"""Triton's Python backend: ``pb_utils.Tensor`` and its kin, ``pb_utils.ModelConfig``, and ``model.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve.backends.python_backend import tensors
from gpuserve.backends.python_backend.errors import TritonError, TritonModelException
from gpuserve.backends.python_backend.responses import InferenceResponse, get_output_tensor_by_name
from gpuserve.backends.python_backend.tensors import Tensor
from gpuserve.backends.python_backend.triton_model import (
    ModelConfig,
    TritonModel,
    config_entry,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from gpuserve_worker.inference.callable_loading import LoadError
from gpuserve_worker.protocol.tensor import ITEMSIZE, numpy_dtype

WORDS = np.array([[b"a", "é"]], np.object_)


class Lent:
    """An array of a library that numpy knows nothing of, but that speaks DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **more: Any) -> Any:
        return self._array.__dlpack__(**more)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_a_tensor_is_its_array_and_elements_that_are_no_strings_become_their_texts() -> None:
    array = np.ones((2, 3), np.float32)
    tensor = Tensor("x", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("x", [2, 3], 11, True)
    assert Tensor("x", WORDS).as_numpy() is WORDS
    assert Tensor("x", np.array([1, "b", b"c"], object)).as_numpy().tolist() == ["1", "b", b"c"]


@pytest.mark.parametrize(
    ("name", "array", "error"),
    [
        ("", np.ones(1), "Tensor name cannot be an empty string."),
        ("x", [1.0], "Tensor 'x' is made of a numpy array, but list was given"),
        (3, np.ones(1), "the name of a Tensor is a str, but int was given"),
    ],
)
def test_what_is_no_tensor_is_refused(name: Any, array: Any, error: str) -> None:
    with pytest.raises((TritonModelException, TypeError)) as refused:
        Tensor(name, array)
    assert str(refused.value) == error


def test_dlpack_shares_the_memory() -> None:
    array = np.arange(4, dtype=np.int64)
    given = Tensor("x", array)
    for taken in (
        Tensor.from_dlpack("y", given.to_dlpack()),
        Tensor.from_dlpack("y", given),
        Tensor.from_dlpack("y", Lent(array)),
        Tensor("y", np.from_dlpack(given)),
    ):
        assert np.shares_memory(taken.as_numpy(), array)
    assert given.__dlpack_device__() == (1, 0)


def test_torch_takes_a_tensor_and_gives_one() -> None:
    torch = pytest.importorskip("torch")
    array = np.ones((2, 2), np.float32)
    assert torch.from_dlpack(Tensor("x", array)).sum() == 4
    assert torch.utils.dlpack.from_dlpack(Tensor("x", array).to_dlpack()).shape == (2, 2)
    brain = torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
    for given in (brain, torch.utils.dlpack.to_dlpack(brain)):
        taken = Tensor.from_dlpack("y", given)
        assert (taken.triton_dtype(), taken.as_numpy().astype(np.float32).tolist()) == (14, [1.5, 2.0])
    back = torch.from_dlpack(Tensor("x", np.array([1.5], numpy_dtype("BF16"))))
    assert (back.dtype, back.tolist()) == (torch.bfloat16, [1.5])


def test_strings_are_nothing_for_dlpack_and_what_is_no_dlpack_is_refused() -> None:
    for call in (Tensor.to_dlpack, Tensor.__dlpack__):
        with pytest.raises(TritonModelException, match="DLPack does not have support for string tensors"):
            call(Tensor("x", WORDS))
    with pytest.raises(TritonModelException, match="a DLPack capsule or an array that has __dlpack__"):
        Tensor.from_dlpack("x", [1])
    used = np.ones(1).__dlpack__()
    Tensor.from_dlpack("x", used)
    with pytest.raises(TritonModelException, match="was used by another array already"):
        Tensor.from_dlpack("x", used)


def test_strings_travel_as_triton_writes_them() -> None:
    written = tensors.serialize_byte_tensor(np.array(["a", b"", "é", 3], object))
    assert written == b"\x01\0\0\0a\0\0\0\0\x02\0\0\0\xc3\xa9\x01\0\0\x003"
    read = tensors.deserialize_bytes_tensor(written)
    assert (read.dtype, read.tolist()) == (np.object_, [b"a", b"", "é".encode(), b"3"])
    assert tensors.serialize_byte_tensor(np.array([], object)) == ()
    assert tensors.serialize_byte_tensor(np.ones(1)) is None
    with pytest.raises(ValueError, match="ends in the middle of an element"):
        tensors.deserialize_bytes_tensor(written[:-1])


def test_numbers_and_types_go_both_ways() -> None:
    assert set(tensors.DATATYPE_NUMBERS) == set(ITEMSIZE)
    for number in range(1, 14):
        assert tensors.numpy_to_triton_type(tensors.triton_to_numpy_type(number)) == number
    assert [tensors.triton_to_numpy_type(number) for number in (0, 14, 15)] == [None] * 3
    assert tensors.numpy_to_triton_type(np.str_) is None
    assert tensors.triton_string_to_numpy("TYPE_STRING") is np.object_


def test_an_error_has_a_code_and_a_message() -> None:
    error = TritonError("gone", TritonError.NOT_FOUND)
    assert (error.message(), error.code(), str(error)) == ("gone", TritonError.NOT_FOUND, "gone")
    assert TritonError("x").code() == TritonError.INTERNAL
    with pytest.raises(TypeError, match="not 99"):
        TritonError("x", 99)


def test_a_response_has_outputs_or_an_error() -> None:
    tensor = Tensor("y", np.ones(1))
    response = InferenceResponse([tensor], parameters={"a": 1})
    assert (response.output_tensors(), response.has_error(), response.error()) == ([tensor], False, None)
    assert response.parameters() == '{"a": 1}'
    assert get_output_tensor_by_name(response, "y") is tensor
    assert get_output_tensor_by_name(response, "z") is None
    assert InferenceResponse(error=TritonError("no")).has_error()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"output_tensors": [np.ones(1)]}, "pb_utils.Tensor objects, but one is ndarray"),
        ({"error": "no"}, "a pb_utils.TritonError, but str was given"),
        ({"parameters": {"a": [1]}}, "Expect parameters values to have type bool/int/float/str, found type"),
    ],
)
def test_what_is_no_response_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, TritonModelException), match=error):
        InferenceResponse(**arguments)


# ---- pb_utils.ModelConfig ----


X = {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}


def config(**said: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **said}))


def test_an_empty_configuration_is_completed() -> None:
    made = config()
    made.set_max_batch_size(8)
    made.add_input(X)
    made.add_optional_input({"name": "t", "data_type": "TYPE_STRING", "dims": [1]})
    made.add_output({"name": "y", "data_type": "TYPE_BF16", "dims": [-1]})
    made.set_dynamic_batching()
    made.set_model_transaction_policy({"decoupled": True})
    said = made.as_dict()
    assert get_input_config_by_name(said, "x") == X
    assert get_output_config_by_name(said, "z") is None
    assert using_decoupled_model_transaction_policy(said)
    assert config_entry(json.dumps(said)) == {
        "inputs": [
            {"name": "x", "dtype": "FP32", "shape": [3]},
            {"name": "t", "dtype": "BYTES", "shape": [1], "optional": True},
        ],
        "outputs": [{"name": "y", "dtype": "BF16", "shape": [-1]}],
        "max_batch_size": 8,
        "decoupled": True,
        "batching": {"merge": True},
        "request_details": True,
        "strict": False,
    }


def test_what_is_configured_may_be_said_again_and_what_is_missing_is_filled_in() -> None:
    made = config(input=[X], max_batch_size=4, dynamic_batching={"preferred_batch_size": [2]})
    made.add_input(X)
    made.set_max_batch_size(4)
    made.set_dynamic_batching()
    assert made.as_dict()["input"] == [X]
    assert made.as_dict()["dynamic_batching"] == {"preferred_batch_size": [2]}
    made = config(input=[{"name": "x", "data_type": "TYPE_INVALID", "dims": []}])
    made.add_input(X)
    assert made.as_dict()["input"] == [X]


DECOUPLED = {"model_transaction_policy": {"decoupled": False}}


@pytest.mark.parametrize(
    ("said", "call", "argument", "text"),
    [
        ({"max_batch_size": 4}, "set_max_batch_size", 2, "specified max_batch_size 4, but"),
        ({"sequence_batching": {}}, "set_dynamic_batching", None, "'sequence_batching', but"),
        ({"input": [X]}, "add_input", {**X, "data_type": "TYPE_INT8"}, "expects datatype TYPE_FP32"),
        ({"input": [X]}, "add_input", {**X, "dims": [4]}, r"the model expects dims \[4\] but"),
        ({"input": [{**X, "optional": False}]}, "add_optional_input", X, "optional True but"),
        ({}, "add_input", {**X, "label": "l"}, "contains property 'label'"),
        ({}, "add_output", {**X, "optional": True}, "contains property 'optional'"),
        ({}, "add_output", {"name": "y", "dims": [1]}, "output 'y' .* is missing 'data_type'"),
        ({}, "add_input", {"dims": [1]}, "input in auto-complete-config .* is missing 'name'"),
        (DECOUPLED, "set_model_transaction_policy", {"decoupled": True}, "already set to 'False'"),
        ({}, "set_model_transaction_policy", {"order": 1}, "contains property 'order'"),
    ],
)
def test_a_contradiction_is_refused(said: dict[str, Any], call: str, argument: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        getattr(config(**said), call)(*([] if argument is None else [argument]))


# ---- a model.py that cannot be loaded ----


RIGHT = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    {execute}
"""
EXECUTE = "def execute(self, requests): pass"
COMPLETE = "def auto_complete_config(config): return None"
NO_CLASS = "which is what a model of Triton's Python backend is"


@pytest.fixture(autouse=True)
def _no_traces() -> Iterator[None]:
    """A process has one such model: what it imports is for the next one to import anew."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in [one for one in sys.modules if one.partition(".")[0] == "1" and one not in modules]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "there is no file "),
        ("class Model: pass", f"model.py has no class TritonPythonModel, {NO_CLASS}; it defines 'Model'"),
        ("import nothing_like_it", "importing model.py raised ModuleNotFoundError: No module named"),
        ("def f(:", "importing model.py raised SyntaxError"),
        (RIGHT.format(initialize="pass", execute=""), "has no method execute(self, requests)"),
        (
            RIGHT.format(initialize="raise ValueError('no weights')", execute=EXECUTE),
            "initialize of model.py raised ValueError: no weights",
        ),
        (
            RIGHT.format(initialize="pass", execute=f"{EXECUTE}\n    @staticmethod\n    {COMPLETE}"),
            "auto_complete_config must return the pb_utils.ModelConfig that it was given, but returned None",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, source: str | None, text: str) -> None:
    (tmp_path / "1").mkdir()
    if source is not None:
        (tmp_path / "1" / "model.py").write_text(source)
    with pytest.raises(LoadError) as refused:
        TritonModel(str(tmp_path))
    assert text in str(refused.value)


def test_neighbours_of_the_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "near_1.py").write_text("WORD = 'near'")
    (tmp_path / "1" / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "above_1.py").write_text("WORD = 'above'")
    imports = "import near_1, above_1\nfrom . import beside\nWORDS = near_1.WORD, beside.WORD, above_1.WORD\n"
    tell = "raise ValueError(WORDS)"
    (tmp_path / "1" / "model.py").write_text(imports + RIGHT.format(initialize=tell, execute=EXECUTE))
    with pytest.raises(LoadError, match="'near', 'beside', 'above'"):
        TritonModel(str(tmp_path))
