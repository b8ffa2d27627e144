"""Typed tensor contents of a gRPC request (``InferTensorContents``) as bytes in wire layout. They are what
people write by hand and what some clients send for small tensors; raw ones need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.errors import InvalidArgument
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
_FIELD: Final = {
    datatype: field for field, (_, datatypes) in _ELEMENTS.items() for datatype in datatypes.split("/")
}


def contents_data(contents: Any, name: str, datatype: str, model_name: str) -> bytes:
    """The elements as the bytes of a tensor; InvalidArgument: not of the datatype, or out of its range."""
    given = [descriptor.name for descriptor, _ in contents.ListFields()]
    if not given:
        return b""
    where = f"for input tensor '{shown(name)}' for model '{shown(model_name)}'"
    expected = _FIELD.get(datatype)
    for field in given:
        if field != expected:
            raise InvalidArgument(_unexpected(field, datatype, where, twice=given[0] == expected))
    elements = getattr(contents, given[0])
    if datatype == BYTES:
        return encode_bytes(elements)
    return _numbers(elements, given[0], datatype, where)


def _unexpected(field: str, datatype: str, where: str, *, twice: bool) -> str:
    sentence = f"unexpected explicit tensor data {where} of type '{_ELEMENTS[field][1]}'"
    if twice:
        return f"{sentence}, binary data was already supplied."
    return f"{sentence}, expected datatype '{shown(datatype)}'"


def _numbers(elements: Sequence[Any], field: str, datatype: str, where: str) -> bytes:
    wide: NDArray[Any] = np.fromiter(elements, dtype=_ELEMENTS[field][0], count=len(elements))
    narrow = numpy_dtype(datatype)
    if wide.dtype == narrow:
        return wide.tobytes()
    range_ = np.iinfo(narrow)
    outside = (wide < range_.min) | (wide > range_.max)
    if outside.any():
        position = int(outside.argmax())
        raise InvalidArgument(
            f"element {position} {where} is {wide[position]}, "
            f"expected {range_.min} to {range_.max} for datatype '{datatype}'"
        )
    return wide.astype(narrow).tobytes()
