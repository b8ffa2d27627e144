"""Triton's numbers and words for datatypes, their numpy types, and the bytes of string tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve_worker.protocol.tensor import BF16, datatype_of, encode_bytes, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The number of each v2 datatype in Triton's ``TRITONSERVER_DataType``.
NUMBERS: Final = {
    datatype: number
    for number, datatype in enumerate(
        (
            *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
            *("FP16", "FP32", "FP64", "BYTES", "BF16"),
        ),
        start=1,
    )
}
_DATATYPES: Final = {number: datatype for datatype, number in NUMBERS.items()}

#: The words of a model configuration, and the numpy types that models expect for them.
TRITON_STRING_TO_NUMPY: Final[dict[str, Any]] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
_LENGTH_NBYTES: Final = 4


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a word such as TYPE_FP32; ``KeyError``: there is none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of one of Triton's numbers; None for a number that has none."""
    datatype = _DATATYPES.get(int(data_type))
    return None if datatype in {None, BF16} else numpy_dtype(str(datatype)).type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Triton's number for a numpy type; None for a type that has none."""
    try:
        return NUMBERS[datatype_of(data_type)]
    except ValueError:
        return None


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> Any:
    """The elements of a string tensor one after the other, each after its length; ``()`` for no element,
    None for an array of another kind.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_bytes([_as_bytes(one) for one in input_tensor.ravel().tolist()])


def deserialize_bytes_tensor(encoded_tensor: Any) -> NDArray[Any]:
    """The elements that ``serialize_byte_tensor`` wrote, as a flat array of bytes; ``ValueError``: they end
    in the middle of one.
    """
    elements = list(_elements(memoryview(encoded_tensor).cast("B")))
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def _as_bytes(element: Any) -> bytes:
    return element if type(element) is bytes else str(element).encode()


def _elements(data: memoryview) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        start = position + _LENGTH_NBYTES
        end = start + int.from_bytes(data[position:start], "little")
        if end > len(data):
            raise ValueError(f"a string tensor of {len(data)} bytes ends in the middle of an element")
        yield bytes(data[start:end])
        position = end
