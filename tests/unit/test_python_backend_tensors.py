"""``pb_utils.Tensor`` and what belongs to it: numpy, DLPack, strings, Triton's numbers and words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuserve.backends.python_backend import tensors
from gpuserve.backends.python_backend.errors import TritonError, TritonModelException
from gpuserve.backends.python_backend.responses import InferenceResponse, get_output_tensor_by_name
from gpuserve.backends.python_backend.tensors import Tensor
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


def test_a_tensor_is_its_array() -> None:
    array = np.ones((2, 3), np.float32)
    tensor = Tensor("x", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("x", [2, 3], 11, True)


def test_elements_that_are_no_strings_become_their_texts() -> None:
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
    for taken in (
        Tensor.from_dlpack("y", brain),
        Tensor.from_dlpack("y", torch.utils.dlpack.to_dlpack(brain)),
    ):
        assert (taken.triton_dtype(), taken.as_numpy().astype(np.float32).tolist()) == (14, [1.5, 2.0])
    back = torch.from_dlpack(Tensor("x", np.array([1.5], numpy_dtype("BF16"))))
    assert (back.dtype, back.tolist()) == (torch.bfloat16, [1.5])


@pytest.mark.parametrize("call", [lambda t: t.to_dlpack(), lambda t: t.__dlpack__()])
def test_strings_are_nothing_for_dlpack(call: Any) -> None:
    with pytest.raises(TritonModelException, match="DLPack does not have support for string tensors"):
        call(Tensor("x", WORDS))


def test_what_is_no_dlpack_is_refused() -> None:
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
