"""Typed tensor contents of a gRPC request (``InferTensorContents``) as bytes in wire layout. They are what
people write by hand and what some clients send for small tensors; raw ones need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.limits import shown
from gpuserve_worker.protocol.tensor import BYTES, encode_bytes, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Field -> the numpy type of its elements, and the v2 datatypes whose elements come in it. FP16 and BF16
#: come in none: they are raw only.
_ELEMENTS: Final = {
    "bool_contents": (np.bool_, "BOOL"),
    "int_contents": (np.int32, "INT32/INT16/INT8"),
    "int64_contents": (np.int64, "INT64"),
    "uint_contents": (np.uint32, "UINT32/UINT16/UINT8"),
    "uint64_contents": (np.uint64, "UINT64"),
    "fp32_contents": (np.float32, "FP32"),
    "fp64_contents": (np.float64, "FP64"),
    "bytes_contents": (np.object_, "BYTES"),
}
#: In the order of their numbers, from 1 on.
_NAMES: Final = tuple(_ELEMENTS)
#: Lists of more strings take more memory than the strings of a client are worth.
_FEW_STRINGS: Final = 1024
_FIELD: Final = {
    datatype: field for field, (_, datatypes) in _ELEMENTS.items() for datatype in datatypes.split("/")
}


def contents_data(contents: Any, name: str, datatype: str, model_name: str) -> bytes:
    """The elements as the bytes of a tensor; InvalidArgument: not of the datatype, or out of its range."""
    given = [descriptor.name for descriptor, _ in contents.ListFields()]
    if not given:
        return b""
    where = f"for input tensor '{shown(name)}' for model '{shown(model_name)}'"
    check_given(given, datatype, where)
    elements = getattr(contents, given[0])
    if datatype == BYTES:
        return encode_bytes(elements) if len(elements) <= _FEW_STRINGS else _joined(elements)
    wide: NDArray[Any] = np.fromiter(elements, dtype=_ELEMENTS[given[0]][0], count=len(elements))
    return narrowed(wide, datatype, where).tobytes()


def _joined(elements: Sequence[bytes]) -> bytes:
    """Strings in wire layout, of which there is one object at a time."""
    data = bytearray()
    for one in elements:
        data += len(one).to_bytes(4, "little")
        data += one
    return bytes(data)


def field_of(number: int) -> str:
    """Return the name of the field of ``InferTensorContents`` that has this number."""
    return _NAMES[number - 1]


def check_given(given: Sequence[str], datatype: str, where: str) -> None:
    """Raise InvalidArgument if the elements are not all in the field that the datatype has."""
    expected = _FIELD.get(datatype)
    for field in given:
        if field != expected:
            sentence = f"unexpected explicit tensor data {where} of type '{_ELEMENTS[field][1]}'"
            if given[0] == expected:
                raise InvalidArgument(f"{sentence}, binary data was already supplied.")
            raise InvalidArgument(f"{sentence}, expected datatype '{shown(datatype)}'")


def narrowed(wide: NDArray[Any], datatype: str, where: str, first: int = 0) -> NDArray[Any]:
    """Return elements, the first of which is number ``first``, as those of the datatype; InvalidArgument if
    one is out of its range.
    """
    narrow = numpy_dtype(datatype)
    if wide.dtype == narrow:
        return wide
    range_ = np.iinfo(narrow)
    outside = (wide < range_.min) | (wide > range_.max)
    if outside.any():
        position = int(outside.argmax())
        raise InvalidArgument(
            f"element {first + position} {where} is {wide[position]}, "
            f"expected {range_.min} to {range_.max} for datatype '{datatype}'"
        )
    return wide.astype(narrow)
