"""Typed tensor contents of gRPC requests (``InferTensorContents``) as bytes in wire layout. Pure.

People write typed contents by hand, and some clients send them for small tensors. In long requests protobuf
would create an object of 16 to 140 bytes for every element, in one call that nothing can interrupt. So the
``contents`` are cut out of a long message, the fields of the rest are counted before protobuf parses it, and
numpy decodes packed elements slice by slice.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.protocols.grpc.infer_encoder import varint
from gpuserve.front.requests.json_values import MAX_VALUES
from gpuserve.front.requests.limits import MAX_TEXTS_NBYTES, shown
from gpuserve_worker.protocol.tensor import BYTES, encode_bytes, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Requests within the limits on inputs, outputs and parameters have fewer fields, on all levels together.
MAX_ALL_FIELDS: Final = 1 << 16
#: The sizes of the parts in which packed elements are decoded, and bytes copied.
_DECODED_NBYTES: Final = 64 << 10
_COPIED_NBYTES: Final = 1 << 20
_LONGEST_VARINT: Final = 10
#: Valid field tags; field number 0 does not exist.
_TAGS: Final = range(1 << 3, 1 << 32)
_pack_length = struct.Struct("<I").pack


class WireType(enum.IntEnum):
    """The encoding of a protobuf value, which determines where it ends: the low three bits of its tag."""

    VARINT = 0
    FIXED64 = 1
    LENGTH = 2
    GROUP = 3
    END_GROUP = 4
    FIXED32 = 5


_INPUT_TAG: Final = 5 << 3 | WireType.LENGTH
_SHAPE_TAG: Final = 3 << 3 | WireType.LENGTH
_CONTENTS_TAG: Final = 5 << 3 | WireType.LENGTH
_NO_CONTENTS: Final = bytes((_CONTENTS_TAG, 0))

#: Tags of fields that are messages, each with the nested tags inside.
_Nested: TypeAlias = Mapping[int, Any]
_ENTRY: Final[_Nested] = {2 << 3 | WireType.LENGTH: {}}
_IN_INPUT: Final[_Nested] = {4 << 3 | WireType.LENGTH: _ENTRY}
_IN_OUTPUT: Final[_Nested] = {2 << 3 | WireType.LENGTH: _ENTRY}
_IN_REQUEST: Final[_Nested] = {4 << 3 | WireType.LENGTH: _ENTRY, 6 << 3 | WireType.LENGTH: _IN_OUTPUT}


class _Field(NamedTuple):
    """A field of ``InferTensorContents``: the wire and the numpy type of its elements, and the v2 datatypes
    that use it.
    """

    name: str
    wire_type: WireType
    element: Any
    datatypes: str


#: By their numbers, from 1 on. FP16 and BF16 have no field: they are raw only.
_FIELDS: Final = (
    _Field("bool_contents", WireType.VARINT, np.bool_, "BOOL"),
    _Field("int_contents", WireType.VARINT, np.int32, "INT32/INT16/INT8"),
    _Field("int64_contents", WireType.VARINT, np.int64, "INT64"),
    _Field("uint_contents", WireType.VARINT, np.uint32, "UINT32/UINT16/UINT8"),
    _Field("uint64_contents", WireType.VARINT, np.uint64, "UINT64"),
    _Field("fp32_contents", WireType.FIXED32, np.float32, "FP32"),
    _Field("fp64_contents", WireType.FIXED64, np.float64, "FP64"),
    _Field("bytes_contents", WireType.LENGTH, np.object_, "BYTES"),
)
_BY_NAME: Final = {one.name: one for one in _FIELDS}
_BY_DATATYPE: Final = {datatype: one for one in _FIELDS for datatype in one.datatypes.split("/")}


class CutMessage(NamedTuple):
    """A request without its contents, and the contents of each input that has some, by input position."""

    rest: bytes
    contents: dict[int, list[memoryview]]


@dataclass(slots=True)
class _Budget:
    """A count of remaining fields. ``refusal`` is raised for one field too many."""

    left: int
    refusal: RequestError

    def spend(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise self.refusal


def cut_contents(message: bytes | bytearray | memoryview) -> CutMessage:
    """Cut the contents of the inputs out of a ``ModelInferRequest``. Raises InvalidArgument if the message is
    malformed or has too many fields, and ResourceExhausted if the rest is too large.
    """
    refusal = InvalidArgument(f"the request has too many fields, expected at most {MAX_ALL_FIELDS}")
    budget = _Budget(MAX_ALL_FIELDS, refusal)
    rest = bytearray()
    contents: dict[int, list[memoryview]] = {}
    n_inputs = 0
    with memoryview(message) as view:
        for tag, begin, start, end in _iterate_fields(view, budget):
            if tag == _INPUT_TAG:
                kept, found = _cut_input(view[start:end], budget)
                if found:
                    contents[n_inputs] = found
                n_inputs += 1
                rest += bytes((_INPUT_TAG,)) + varint(len(kept)) + kept
            else:
                if (nested := _IN_REQUEST.get(tag)) is not None:
                    _count_nested(view[start:end], nested, budget)
                _check_rest(len(rest) + end - begin)
                rest += view[begin:end]
    return CutMessage(bytes(rest), contents)


def _cut_input(view: memoryview, budget: _Budget) -> tuple[bytearray, list[memoryview]]:
    kept = bytearray()
    found: list[memoryview] = []
    for tag, begin, start, end in _iterate_fields(view, budget):
        if tag == _CONTENTS_TAG:
            kept += _NO_CONTENTS  # an empty field, so that protobuf still reports contents for the input
            if start < end:
                found.append(view[start:end])
            continue
        if tag == _SHAPE_TAG:
            budget.spend(end - start)  # a dimension takes at least one byte
        elif (nested := _IN_INPUT.get(tag)) is not None:
            _count_nested(view[start:end], nested, budget)
        _check_rest(len(kept) + end - begin)
        kept += view[begin:end]
    return kept, found


def _check_rest(nbytes: int) -> None:
    if nbytes > MAX_TEXTS_NBYTES:
        raise ResourceExhausted(
            f"names, shapes and parameters of the request take more than {MAX_TEXTS_NBYTES} bytes. "
            "Please send large values as tensors, in raw_input_contents"
        )


def _count_nested(view: memoryview, nested: _Nested, budget: _Budget) -> None:
    for tag, _, start, end in _iterate_fields(view, budget):
        if (inner := nested.get(tag)) is not None:
            _count_nested(view[start:end], inner, budget)


def _iterate_fields(view: memoryview, budget: _Budget) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tag, its start, start of the value, end of the value) for each field; a group is one field."""
    position, nbytes = 0, len(view)
    group_begin = 0
    groups: list[int] = []
    while position < nbytes:
        budget.spend(1)
        begin = position
        tag, start = view[position], position + 1  # most tags are one byte
        if tag > 0x7F:
            tag, start = _read_varint(view, position)
        if tag not in _TAGS:
            raise malformed_message(f"a field has the tag {tag}")
        start, position = _value_bounds(view, tag & 7, start)
        if position > nbytes:
            raise malformed_message("a field ends behind the end of its message")
        if tag & 7 == WireType.GROUP:
            group_begin = group_begin if groups else begin
            groups.append(tag >> 3)
        elif tag & 7 == WireType.END_GROUP:
            if not groups or groups.pop() != tag >> 3:
                raise malformed_message("a group ends that did not begin")
            begin = group_begin
        if not groups:
            yield tag, begin, start, position
    if groups:
        raise malformed_message("a group does not end")


def _value_bounds(view: memoryview, wire_type: int, start: int) -> tuple[int, int]:
    """Return the start and the end of a field's value. ``start`` is the end of its tag."""
    match wire_type:
        case WireType.VARINT:
            return start, _read_varint(view, start)[1]
        case WireType.LENGTH:
            length, start = _read_varint(view, start)
            return start, start + length
        case WireType.FIXED64:
            return start, start + 8
        case WireType.FIXED32:
            return start, start + 4
        case WireType.GROUP | WireType.END_GROUP:
            return start, start
    raise malformed_message(f"a field has wire type {wire_type}")


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    number = shift = 0
    for byte in view[position : position + _LONGEST_VARINT]:
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    raise malformed_message("a number is cut off, or has over 64 bits")


def long_contents(parts: Sequence[memoryview], name: str, datatype: str, model_name: str) -> memoryview:
    """Return the elements of serialised ``InferTensorContents`` as the bytes of a tensor. Raises
    InvalidArgument for a wrong datatype or range, and ResourceExhausted for over ``MAX_VALUES`` elements that
    are not packed.
    """
    given = _read_fields(parts, name)
    where = f"for input tensor '{shown(name)}' for model '{shown(model_name)}'"
    _check_field([_FIELDS[number - 1] for number in sorted(given)], datatype, where)
    if not given:
        return memoryview(b"")
    ((number, data),) = given.items()
    field = _FIELDS[number - 1]
    if field.wire_type is WireType.VARINT:
        data = _decode_varints(data, field.element, datatype, where)
    elif datatype != BYTES and len(data) % np.dtype(field.element).itemsize:
        raise malformed_message("a packed field does not hold a whole number of elements")
    return memoryview(data)


def _read_fields(parts: Sequence[memoryview], name: str) -> dict[int, bytearray]:
    """Return the bytes of each field: packed elements joined, elements of BYTES in wire layout."""
    given: dict[int, bytearray] = {}
    refusal = ResourceExhausted(
        f"the contents of input tensor '{shown(name)}' hold more than {MAX_VALUES} elements that are not "
        "packed. Please use raw_input_contents for large inputs"
    )
    budget = _Budget(MAX_VALUES, refusal)
    for part in parts:
        for tag, _, start, end in _iterate_fields(part, budget):
            number = tag >> 3
            if number > len(_FIELDS):
                continue  # protobuf treats this as an unknown field, too
            field = _FIELDS[number - 1]
            is_bytes = field.wire_type is WireType.LENGTH
            if tag & 7 not in (field.wire_type, WireType.LENGTH) or (start == end and not is_bytes):
                continue
            data = given.setdefault(number, bytearray())
            if is_bytes:
                data += _pack_length(end - start)
            copied = start
            while end - copied > _COPIED_NBYTES:
                data += part[copied : copied + _COPIED_NBYTES]
                copied += _COPIED_NBYTES
            data += part[copied:end]
    return given


def _decode_varints(packed: bytearray, element: Any, datatype: str, where: str) -> bytearray:
    bytes_ = np.frombuffer(packed, np.uint8)
    tensor = bytearray()
    position = n = 0
    while position < len(bytes_):
        values, nbytes = _split_varints(bytes_[position : position + _DECODED_NBYTES])
        wide = values != 0 if element is np.bool_ else values.astype(element)
        tensor += narrow_elements(wide, datatype, where, n).tobytes()
        position += nbytes
        n += len(values)
    return tensor


def _split_varints(piece: NDArray[np.uint8]) -> tuple[NDArray[Any], int]:
    """Return the complete numbers in a piece, and the number of bytes that they take."""
    ends = np.flatnonzero(piece < 0x80)
    if not len(ends):
        raise malformed_message("a number is cut off, or has over 64 bits")
    nbytes = int(ends[-1]) + 1
    if len(ends) == nbytes:
        return piece[:nbytes], nbytes
    lengths = np.diff(ends, prepend=-1)
    starts = ends - lengths + 1
    longest = int(lengths.max())
    if longest > _LONGEST_VARINT:
        raise malformed_message("a number has over 64 bits")
    numbers = (piece[starts] & 0x7F).astype(np.uint64)
    for place in range(1, longest):
        longer = lengths > place
        numbers[longer] |= (piece[starts[longer] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return numbers, nbytes


def malformed_message(why: str) -> InvalidArgument:
    return InvalidArgument(f"the request body is not a ModelInferRequest: {why}")


# ---- short requests, parsed by protobuf ----------------------------------------------------------

#: Above this number, a list of strings takes too much memory.
_FEW_STRINGS: Final = 1024


def contents_data(contents: Any, name: str, datatype: str, model_name: str) -> bytes:
    """Return the elements as tensor bytes. Raise InvalidArgument for a wrong datatype or range."""
    given = [_BY_NAME[descriptor.name] for descriptor, _ in contents.ListFields()]
    if not given:
        return b""
    where = f"for input tensor '{shown(name)}' for model '{shown(model_name)}'"
    _check_field(given, datatype, where)
    elements = getattr(contents, given[0].name)
    if datatype == BYTES:
        return encode_bytes(elements) if len(elements) <= _FEW_STRINGS else _encode_strings(elements)
    wide: NDArray[Any] = np.fromiter(elements, dtype=given[0].element, count=len(elements))
    return narrow_elements(wide, datatype, where).tobytes()


def _encode_strings(elements: Sequence[bytes]) -> bytes:
    """Return strings in wire layout, with one string object at a time."""
    data = bytearray()
    for one in elements:
        data += len(one).to_bytes(4, "little")
        data += one
    return bytes(data)


def _check_field(given: Sequence[_Field], datatype: str, where: str) -> None:
    """Raise InvalidArgument if the elements are not all in the field of the datatype."""
    expected = _BY_DATATYPE.get(datatype)
    for field in given:
        if field is not expected:
            sentence = f"unexpected explicit tensor data {where} of type '{field.datatypes}'"
            if given[0] is expected:
                raise InvalidArgument(f"{sentence}, binary data was already supplied.")
            raise InvalidArgument(f"{sentence}, expected datatype '{shown(datatype)}'")


def narrow_elements(wide: NDArray[Any], datatype: str, where: str, first: int = 0) -> NDArray[Any]:
    """Convert elements, counted from ``first``, to the datatype. Raise InvalidArgument if out of range."""
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
