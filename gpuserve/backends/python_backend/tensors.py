"""``Tensor`` of any array library, on the host or a GPU; Triton's datatypes, string tensors, DLPack."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.backends.python_backend.errors import TritonModelException, text_of
from gpuserve_worker.inference.outputs import is_on_device
from gpuserve_worker.protocol.tensor import (
    BF16,
    as_tensor,
    bfloat16_array,
    datatype_of,
    encode_bytes,
    numpy_dtype,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CAPSULE: Final = "PyCapsule"
_HOST: Final = (1, 0)
_TEXT_TYPES: Final = frozenset({bytes, str})


class Tensor:
    """A name and an array. A tensor from DLPack keeps the array of its library."""

    __slots__ = ("__weakref__", "_name", "_value")

    def __init__(self, name: str | bytes, numpy_array: Any) -> None:
        if not isinstance(numpy_array, np.ndarray):
            given = type(numpy_array).__name__
            raise TypeError(f"Tensor {name!r} is made of a numpy array, but {given} was given")
        if numpy_array.dtype.kind == "O":
            numpy_array = _string_array(numpy_array)
        self._name = _checked_name(name)
        self._value: Any = numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        """Return the array. Raise ``TritonModelException`` if the array is on a GPU."""
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
        """Return Triton's number of the datatype, as ``numpy_to_triton_type`` does."""
        value = self._value
        if not isinstance(value, np.ndarray):
            return DATATYPE_NUMBERS[datatype_of(str(value.dtype).rpartition(".")[2])]
        return DATATYPE_NUMBERS["BYTES" if value.dtype.kind in "OSU" else datatype_of(value.dtype)]

    def shape(self) -> list[int]:
        return list(self._value.shape)

    def is_cpu(self) -> bool:
        return isinstance(self._value, np.ndarray) or not is_on_device(self._value)

    def to_dlpack(self) -> Any:
        """Return the array as a DLPack capsule, which shares its memory."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        value = self._value
        if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
            raise TritonModelException(
                f"Tensor {self._name!r} has strings, and DLPack does not have support for string tensors"
            )
        if isinstance(value, np.ndarray) and value.dtype.name == "bfloat16":
            value = as_tensor(value)  # numpy cannot export BF16, so torch does
        return value.__dlpack__(**more) if stream is None else value.__dlpack__(stream=stream, **more)

    def __dlpack_device__(self) -> tuple[int, int]:
        if isinstance(self._value, np.ndarray):
            return _HOST
        kind, number = self._value.__dlpack_device__()
        return int(kind), int(number)

    @staticmethod
    def from_dlpack(name: str | bytes, tensor: Any) -> Tensor:
        """Return a tensor over the memory of an array of any library, or of a DLPack capsule."""
        name = _checked_name(name)
        if type(tensor).__name__ == _CAPSULE:
            return received_tensor(name, array_from_capsule(tensor))
        if isinstance(tensor, Tensor):
            return received_tensor(name, tensor._value)
        if not hasattr(tensor, "__dlpack__"):
            raise TritonModelException(
                f"Tensor {name!r} is made of a DLPack capsule or an array that has __dlpack__, but "
                f"{type(tensor).__name__} was given"
            )
        # numpy can import neither what is on a device nor bfloat16, so such arrays stay with their library.
        stays = is_on_device(tensor) or str(getattr(tensor, "dtype", "")) == "torch.bfloat16"
        return received_tensor(name, tensor if stays else np.from_dlpack(tensor))

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, shape={self.shape()}, dtype={self._value.dtype})"


def received_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor without checks, for a valid name and a value that is an array."""
    tensor = Tensor.__new__(Tensor)
    tensor._name = name
    tensor._value = value
    return tensor


def arrays_of(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Return the arrays of tensors by name, of whichever library."""
    return {one._name: one._value for one in tensors}


def get_input_tensor_by_name(inference_request: Any, name: str) -> Tensor | None:
    """Return the input of this name, or None if the request has none."""
    return tensor_named(inference_request.inputs(), name)


def tensor_named(tensors: Iterable[Tensor], name: str) -> Tensor | None:
    """Return the first tensor of this name, or None if there is none."""
    return next((one for one in tensors if one._name == name), None)


def _checked_name(name: str | bytes) -> str:
    text = text_of(name, "the name of a Tensor")
    if not text:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return text


def _string_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return the elements as bytes or str. Any other element becomes its text."""
    elements = array.ravel().tolist()
    if set(map(type, elements)) <= _TEXT_TYPES:
        return array
    texts = np.empty(array.size, dtype=object)
    texts[:] = [one if type(one) in _TEXT_TYPES else str(one) for one in elements]
    return texts.reshape(array.shape)


def _on_host(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return bfloat16_array(value) if value.dtype == torch.bfloat16 else value.detach().numpy()
    return np.asarray(value)


#: The number of each v2 datatype in Triton's ``TRITONSERVER_DataType``.
DATATYPE_NUMBERS: Final = {
    datatype: number
    for number, datatype in enumerate(
        (
            *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
            *("FP16", "FP32", "FP64", "BYTES", "BF16"),
        ),
        start=1,
    )
}
_DATATYPE_BY_NUMBER: Final = {number: datatype for datatype, number in DATATYPE_NUMBERS.items()}

#: The datatypes of a model configuration, and the numpy types that models expect for them.
TRITON_STRING_TO_NUMPY: Final[dict[str, Any]] = {
    **{f"TYPE_{one}": numpy_dtype(one).type for one in DATATYPE_NUMBERS if one not in {"BYTES", BF16}},
    "TYPE_BOOL": bool,
    "TYPE_STRING": np.object_,
}
_LENGTH_NBYTES: Final = 4


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a datatype such as TYPE_FP32. Raise ``KeyError`` if there is none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of Triton's number of a datatype, or None if there is none."""
    datatype = _DATATYPE_BY_NUMBER.get(int(data_type))
    return None if datatype in {None, BF16} else numpy_dtype(str(datatype)).type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return Triton's number for a numpy type, or None if there is none."""
    try:
        return DATATYPE_NUMBERS[datatype_of(data_type)]
    except ValueError:
        return None


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> Any:
    """Encode string elements, each after its length. Return () for no elements, None for another kind."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_bytes(
        [one if type(one) is bytes else str(one).encode() for one in input_tensor.ravel().tolist()]
    )


def deserialize_bytes_tensor(encoded_tensor: Any) -> NDArray[Any]:
    """Return the flat array of bytes in encoded elements. Raise ValueError if the last one is cut off."""
    data = memoryview(encoded_tensor).cast("B")
    elements: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + _LENGTH_NBYTES
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data):
            raise ValueError(f"a string tensor of {len(data)} bytes ends in the middle of an element")
        elements.append(bytes(data[start:position]))
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


_CAPSULE_NAMES: Final = (b"dltensor", b"dltensor_versioned")
_DL_CPU: Final = 1
_DL_CUDA_HOST: Final = 3
_DL_CUDA: Final = frozenset({2, 13})
#: ``DLDataType.code`` of bfloat16, which numpy does not have.
_DL_BFLOAT: Final = 4


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _DLVersionedTensor(ctypes.Structure):
    """The struct of a capsule of DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


class _CapsuleArray:
    """A capsule with the interface of an array, from which any library can import."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def array_from_capsule(capsule: Any) -> Any:
    """Return the array in a capsule, which cannot be used again.

    A library that is installed here must be able to read the capsule: numpy on the host, CuPy or torch on a
    GPU. Only the description of the tensor is read here, never its elements. Raise TritonModelException if no
    library can read the capsule.
    """
    tensor = _tensor_in_capsule(capsule)
    if tensor.device_type not in _DL_CUDA | {_DL_CPU, _DL_CUDA_HOST}:
        raise TritonModelException(
            f"DLPack device type {tensor.device_type} is not supported: expected memory of the host or CUDA"
        )
    if tensor.device_type in _DL_CUDA:
        return _import_capsule(("cupy", "torch"), capsule, tensor)
    if tensor.code == _DL_BFLOAT:
        return _import_capsule(("torch",), capsule, tensor)
    return np.from_dlpack(_CapsuleArray(capsule, (_DL_CPU, 0)))


def _tensor_in_capsule(capsule: Any) -> Any:
    is_valid, pointer_of = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.argtypes = pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    pointer_of.restype = ctypes.c_void_p
    for name, layout in zip(_CAPSULE_NAMES, (_DLTensor, _DLVersionedTensor), strict=True):
        if is_valid(capsule, name):
            found: Any = layout.from_address(pointer_of(capsule, name))
            return found.tensor if layout is _DLVersionedTensor else found
    raise TritonModelException("the capsule is no DLPack tensor, or was used by another array already")


def _import_capsule(libraries: tuple[str, ...], capsule: Any, tensor: Any) -> Any:
    for name in libraries:
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        return library.from_dlpack(_CapsuleArray(capsule, (tensor.device_type, tensor.device_id)))
    raise TritonModelException(f"a DLPack tensor like this needs {' or '.join(libraries)} installed")
