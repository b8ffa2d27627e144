"""``Tensor``: one named array of a request or a response, on the host or on a device, of whichever library it
is. No copy is made here but of what is not contiguous. Nothing of requests.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.python_backend.datatypes import NUMBERS
from gpuserve.python_backend.errors import TritonModelException
from gpuserve_worker.calling.outputs import is_on_device
from gpuserve_worker.protocol.tensor import datatype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CAPSULE: Final = "PyCapsule"
_HOST: Final = (1, 0)
_WORDS: Final = frozenset({bytes, str})


class Tensor:
    """A name and an array. What is made of DLPack keeps the array of the library that it came from."""

    __slots__ = ("__weakref__", "_name", "_value")

    def __init__(self, name: str, numpy_array: Any) -> None:
        if not isinstance(numpy_array, np.ndarray):
            given = type(numpy_array).__name__
            raise TypeError(f"Tensor {name!r} is made of a numpy array, but {given} was given")
        if numpy_array.dtype.kind == "O":
            numpy_array = _strings(numpy_array)
        self._name = _checked(name)
        self._value: Any = numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        """The array; ``TritonModelException``: it is on a GPU."""
        value = self._value
        if type(value) is np.ndarray:
            return value
        if is_on_device(value):
            raise TritonModelException(
                f"Tensor {self._name!r} is stored in GPU and cannot be converted to NumPy: expected "
                "to_dlpack(), or a Tensor for which is_cpu() is true"
            )
        array: NDArray[Any] = _on_host(value)
        return array

    def triton_dtype(self) -> int:
        """The number of its datatype, as ``numpy_to_triton_type`` gives them."""
        value = self._value
        if not isinstance(value, np.ndarray):
            return NUMBERS[datatype_of(str(value.dtype).rpartition(".")[2])]
        return NUMBERS["BYTES" if value.dtype.kind in "OSU" else datatype_of(value.dtype)]

    def shape(self) -> list[int]:
        return list(self._value.shape)

    def is_cpu(self) -> bool:
        return isinstance(self._value, np.ndarray) or not is_on_device(self._value)

    def to_dlpack(self) -> Any:
        """The array as a DLPack capsule, which shares its memory."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        value = self._exported()
        return value.__dlpack__(**more) if stream is None else value.__dlpack__(stream=stream, **more)

    def __dlpack_device__(self) -> tuple[int, int]:
        if isinstance(self._value, np.ndarray):
            return _HOST
        kind, number = self._value.__dlpack_device__()
        return int(kind), int(number)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of an array of any library, or of a DLPack capsule of it."""
        _checked(name)
        if type(tensor).__name__ == _CAPSULE:
            from gpuserve.python_backend.capsules import array_of_capsule

            return received_tensor(name, array_of_capsule(tensor))
        if isinstance(tensor, Tensor):
            return received_tensor(name, tensor._value)
        if not hasattr(tensor, "__dlpack__"):
            raise TritonModelException(
                f"Tensor {name!r} is made of a DLPack capsule or an array that has __dlpack__, but "
                f"{type(tensor).__name__} was given"
            )
        return received_tensor(name, tensor if _is_kept(tensor) else np.from_dlpack(tensor))

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, shape={self.shape()}, dtype={self._value.dtype})"

    def _exported(self) -> Any:
        """The array as its library exports it; numpy does not know of BF16."""
        value = self._value
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind in "OSU":
            raise TritonModelException(
                f"Tensor {self._name!r} has strings, and DLPack does not have support for string tensors"
            )
        if value.dtype.name == "bfloat16":
            from gpuserve_worker.calling.torch_tensors import as_tensor

            return as_tensor(value)
        return value


def received_tensor(name: str, value: Any) -> Tensor:
    """A tensor over what is known to be an array, with a name that is known to be one."""
    tensor = Tensor.__new__(Tensor)
    tensor._name = name
    tensor._value = value
    return tensor


def value_of(tensor: Tensor) -> Any:
    """The array of a tensor, of whichever library it is."""
    return tensor._value


def get_input_tensor_by_name(inference_request: Any, name: str) -> Tensor | None:
    """The input of a request; None where it has none of this name."""
    return named(inference_request.inputs(), name)


def named(tensors: Any, name: str) -> Tensor | None:
    """The first of some tensors that has a name; None where none has."""
    for tensor in tensors:
        if tensor._name == name:
            found: Tensor = tensor
            return found
    return None


def _checked(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a Tensor is a str, but {type(name).__name__} was given")
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def _strings(array: NDArray[Any]) -> NDArray[Any]:
    """The elements as bytes or str: of anything else, the text that it prints as."""
    elements = array.ravel().tolist()
    if set(map(type, elements)) <= _WORDS:
        return array
    texts = np.empty(array.size, dtype=object)
    texts[:] = [one if type(one) in _WORDS else str(one) for one in elements]
    return texts.reshape(array.shape)


def _is_kept(value: Any) -> bool:
    """Whether an array stays with its library: on a device, or of a type that numpy does not have."""
    return is_on_device(value) or str(getattr(value, "dtype", "")) == "torch.bfloat16"


def _on_host(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from gpuserve_worker.calling.torch_tensors import bfloat16_array

        return bfloat16_array(value) if value.dtype == torch.bfloat16 else value.detach().numpy()
    return np.asarray(value)
