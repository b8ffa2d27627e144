"""Tensors on the wire: the v2 datatypes, their numpy types, the BYTES layout, and conversions to and from
torch. No other module pairs v2 datatypes with numpy types.

A tensor on the wire is row-major, little-endian and unpadded. BYTES is, for each element, a little-endian
``uint32`` length and that many bytes (Open Inference Protocol v2, binary tensor data extension). numpy is
imported when the first array is made, because the supervisor makes none and saves 17 MB. torch is imported
when the first torch tensor is made. Conversions to torch share memory and do not move data between devices.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTES: Final = "BYTES"
BF16: Final = "BF16"

#: v2 datatype, its numpy name, and the bytes that an element takes. BYTES has no fixed size and is 0.
_TYPES: Final = (
    ("BOOL", "bool", 1),
    ("INT8", "int8", 1),
    ("INT16", "int16", 2),
    ("INT32", "int32", 4),
    ("INT64", "int64", 8),
    ("UINT8", "uint8", 1),
    ("UINT16", "uint16", 2),
    ("UINT32", "uint32", 4),
    ("UINT64", "uint64", 8),
    ("FP16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("FP32", "float32", 4),
    ("FP64", "float64", 8),
    ("BYTES", "object", 0),
)
ITEMSIZE: Final = {datatype: nbytes for datatype, _, nbytes in _TYPES}
_NUMPY_OF_DATATYPE: Final = {datatype: name for datatype, name, _ in _TYPES}
_DATATYPE_OF_NUMPY: Final = {name: datatype for datatype, name, _ in _TYPES}
#: Accepted names of the BYTES datatype.
_BYTES_WORDS: Final = frozenset({"bytes", "object", "string", "bytes_", "type_string"})
#: numpy's kinds that have no v2 datatype -> what to use.
_INSTEAD: Final[dict[str, str]] = {
    "U": 'use bytes ("BYTES"), whose elements the callable decodes, or object',
    "c": "use two float tensors, for the real and the imaginary part",
    "M": 'use int64 ("INT64"), counted from an epoch of your own',
    "m": 'use int64 ("INT64"), counted in a unit of your own',
    "V": "use one tensor for each field",
}
#: Size of the length prefix of each BYTES element.
_PREFIX_NBYTES: Final = 4
_pack_length = struct.Struct("<I").pack
_unpack_length = struct.Struct("<I").unpack_from
#: Up to this many lengths are compared without numpy.
_FEW_ELEMENTS: Final = 256
#: Up to this element size numpy splits the payload; beyond, copying dominates the time.
_LONGEST_CUT_NBYTES: Final = 1 << 16


class TensorSpec(NamedTuple):
    """One declared input or output. ``shape`` excludes the batch dimension of a batching model; -1 stands for
    any size. An input whose ``memory`` is "gpu" is placed on the GPU of its instance, if the instance has
    one. The requests of one batch may have different shapes of a ``ragged`` tensor. ``schema`` is the JSON
    Schema of an element of a BYTES tensor, as text, or "".
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    memory: str = "cpu"
    ragged: bool = False
    schema: str = ""


@functools.lru_cache(maxsize=32)
def numpy_dtype(datatype: str) -> np.dtype[Any]:
    """Return the numpy type of a v2 datatype: ``object`` for BYTES. Raise ``KeyError`` for an unknown
    datatype, and ``ImportError`` for BF16 if ``ml_dtypes`` is not installed.
    """
    import numpy as np

    if datatype == BF16:
        from ml_dtypes import bfloat16  # only models that use BF16 pay for the import

        brain: np.dtype[Any] = np.dtype(bfloat16)
        return brain
    return np.dtype(_NUMPY_OF_DATATYPE[datatype])


def datatype_of(dtype: Any) -> str:
    """Return the v2 datatype of a numpy dtype, a scalar type or a word, as users write them:
    ``np.dtype("float32")``, ``np.float32``, ``bool``/``bytes``/``object``, "float32", "FP32", "TYPE_FP32",
    "bf16", "bytes". Raise ``ValueError`` if v2 has no such type; the text names the given value and an
    alternative.
    """
    if isinstance(dtype, str):
        word = dtype.removeprefix("TYPE_")
        if word.upper() in ITEMSIZE:
            return word.upper()
        if dtype.lower() in _BYTES_WORDS:
            return BYTES
        if dtype in _DATATYPE_OF_NUMPY:
            return _DATATYPE_OF_NUMPY[dtype]
    import numpy as np

    try:
        resolved = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{dtype!r} is no tensor datatype") from None
    # numpy interprets None as float64, and any class as object.
    if dtype is None or (
        resolved.kind == "O" and isinstance(dtype, type) and not issubclass(np.object_, dtype)
    ):
        raise ValueError(f"{getattr(dtype, '__name__', dtype)} is no tensor datatype")
    if resolved.kind == "S":
        return BYTES
    datatype = _DATATYPE_OF_NUMPY.get(resolved.name)
    if datatype is None or resolved.byteorder == ">":
        instead = _INSTEAD.get(resolved.kind, f"use one of {', '.join(ITEMSIZE)}, little-endian")
        shown = dtype.__name__ if isinstance(dtype, type) else resolved
        raise ValueError(f"{shown} has no v2 datatype: {instead}")
    return datatype


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape as a Python int, which cannot overflow; 1 for rank 0."""
    count = 1
    for dim in shape:
        count *= dim
    return count


def fits_shape(shape: Sequence[int], declared: Sequence[int]) -> bool:
    """Return whether a shape matches a declared shape, in which -1 stands for any size."""
    return len(shape) == len(declared) and all(
        want in (-1, dim) for want, dim in zip(declared, shape, strict=True)
    )


def fit_shape(shapes: Collection[Sequence[int]], declared: Sequence[int]) -> bool:
    """Return whether all of several shapes match a declared shape."""
    return {len(one) for one in shapes} == {len(declared)} and all(
        want == -1 or {one[axis] for one in shapes} == {want} for axis, want in enumerate(declared)
    )


def encode_bytes(elements: Iterable[Any]) -> bytes:
    """Return elements, row-major, in the v2 BYTES layout; raise ``TypeError`` unless bytes or str."""
    strings = elements if type(elements) is list else list(elements)
    if set(map(type, strings)) != {bytes}:
        strings = [_as_bytes(one) for one in strings]
    lengths = list(map(len, strings))
    prefixes = {length: _pack_length(length) for length in set(lengths)}
    if len(prefixes) == 1:
        (prefix,) = prefixes.values()
        return prefix + prefix.join(strings)
    parts = [b""] * (2 * len(strings))
    parts[::2] = map(prefixes.__getitem__, lengths)
    parts[1::2] = strings
    return b"".join(parts)


def _as_bytes(element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, (bytes, bytearray, memoryview)):
        return bytes(element)
    raise TypeError(f"a BYTES tensor holds bytes or str, but an element is {type(element).__name__}")


def common_length(data: memoryview | bytes, count: int) -> int | None:
    """Return the length of every element of a BYTES payload with exactly ``count`` elements of equal length,
    or None. Strings of fixed width and single strings are common, and need no step for each element.
    """
    nbytes = len(data)
    if not count or nbytes < _PREFIX_NBYTES * count:
        return None
    length: int = _unpack_length(data, 0)[0]
    step = _PREFIX_NBYTES + length
    if step * count != nbytes:
        return None
    return length if count == 1 or _repeats(data, count, step) else None


def _repeats(data: memoryview | bytes, count: int, step: int) -> bool:
    """Return whether each of ``count`` parts of ``step`` bytes begins with the same length prefix."""
    if type(data) is bytes and count <= _FEW_ELEMENTS:  # a third of what numpy takes
        return (
            data[::step] == data[:1] * count
            and data[1::step] == data[1:2] * count
            and data[2::step] == data[2:3] * count
            and data[3::step] == data[3:4] * count
        )
    import numpy as np

    lengths: NDArray[Any] = np.ndarray((count,), "<u4", data, 0, (step,))
    return bool((lengths == step - _PREFIX_NBYTES).all())


def holds_elements(data: memoryview | bytes, count: int) -> bool:
    """Return whether ``data`` has exactly ``count`` BYTES elements; ``check_bytes`` tells why not."""
    nbytes = len(data)
    if nbytes < _PREFIX_NBYTES * count or not count:
        return count == nbytes == 0
    if common_length(data, count) is not None:
        return True
    position = 0
    try:
        for _ in range(count):
            position += _PREFIX_NBYTES + _unpack_length(data, position)[0]
    except struct.error:
        return False
    return position == nbytes


def element_ends(data: memoryview | bytes, counts: Sequence[int]) -> list[int]:
    """Return the end offsets of consecutive groups of elements in a BYTES payload: ``counts[0]`` elements,
    then ``counts[1]``, and so on. Raise ``ValueError`` unless the payload has exactly that many elements.
    """
    length = common_length(data, sum(counts))
    if length is not None:
        step = _PREFIX_NBYTES + length
        return [step * before for before in itertools.accumulate(counts)]
    ends, end = [], 0
    try:
        for count in counts:
            for _ in range(count):
                end += _PREFIX_NBYTES + _unpack_length(data, end)[0]
            ends.append(end)
    except struct.error:
        end = -1
    if end != len(data):
        raise ValueError(f"{len(data)} bytes do not hold exactly {sum(counts)} elements")
    return ends


def decode_bytes(data: memoryview | bytes, count: int) -> list[bytes]:
    """Return a v2 BYTES payload's ``count`` elements; raise ``ValueError`` as ``check_bytes``."""
    whole = bytes(data)  # a copy, so that the client cannot change the data during decoding
    elements = []
    position = 0
    try:
        for _ in range(count):
            start = position + _PREFIX_NBYTES
            position = start + _unpack_length(whole, position)[0]
            elements.append(whole[start:position])
    except struct.error:
        position = -1
    if position != len(whole):
        raise ValueError(check_bytes(whole, count))
    return elements


def check_bytes(data: memoryview | bytes, count: int) -> str | None:
    """Return the defect of a BYTES payload that should have ``count`` elements, or None."""
    if holds_elements(data, count):
        return None
    position, end, seen = 0, len(data), 0
    while position < end:
        if seen == count:
            return f"expecting {count} string elements, got more"
        if end - position < _PREFIX_NBYTES:
            return (
                f"incomplete string length indicator at element {seen}, expecting 4 bytes "
                f"but only {end - position} bytes available"
            )
        length = _unpack_length(data, position)[0]
        position += _PREFIX_NBYTES
        if end - position < length:
            return (
                f"incomplete string data at element {seen}, expecting {length} bytes "
                f"but only {end - position} bytes available"
            )
        position += length
        seen += 1
    return f"expected {count} string elements, got {seen}"


def bytes_array(data: memoryview | bytes, shape: Sequence[int]) -> NDArray[np.object_]:
    """Return a BYTES payload as an object array of ``bytes`` of a shape. Raise as ``decode_bytes``."""
    import numpy as np

    count = element_count(shape)
    length = common_length(data, count)
    if length is not None and 0 < length <= _LONGEST_CUT_NBYTES:
        # An object of an unstructured void is its bytes, and numpy makes all of them in one go.
        strides = (_PREFIX_NBYTES + length,)
        fixed: NDArray[Any] = np.ndarray((count,), f"V{length}", data, _PREFIX_NBYTES, strides)
        return fixed.astype(object).reshape(tuple(shape))
    array = np.fromiter(decode_bytes(data, count), object, count)
    return array.reshape(tuple(shape))


#: Carrier types for datatypes that not every version of DLPack or torch supports.
CARRIERS: Final = {BF16: "int16", "BOOL": "uint8"}


def as_tensor(array: Any) -> Any:
    """Return a torch tensor over the memory of a numeric numpy array. Return any other value unchanged."""
    import numpy as np
    import torch

    if not isinstance(array, np.ndarray) or array.dtype.kind == "O":
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bfloat16_array(tensor: Any) -> NDArray[Any]:
    """Return a numpy array over the memory of a torch tensor of bfloat16 on the host."""
    import torch

    array: NDArray[Any] = tensor.view(torch.int16).numpy().view(numpy_dtype(BF16))
    return array


def from_device(array: Any, datatype: str) -> Any:
    """Return a torch tensor over the memory of a device array, whose type is the carrier of ``datatype``."""
    import torch

    tensor = torch.from_dlpack(array)
    if datatype not in CARRIERS:
        return tensor
    return tensor.view(torch.bfloat16 if datatype == BF16 else torch.bool)
