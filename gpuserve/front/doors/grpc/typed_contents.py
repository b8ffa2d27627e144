"""Typed tensor contents of long gRPC requests, decoded from their protobuf bytes. Pure.

protobuf makes an object of 16 to 140 bytes of every element, in one call that nothing can interrupt. Here the
``contents`` of the inputs are cut out of the message, the fields of the rest are counted before protobuf
parses it, and packed elements are decoded by numpy, slice by slice. Short requests do not need this: see
``requests.parse_infer_request``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.doors.grpc.contents import check_given, field_of, narrowed
from gpuserve.front.doors.grpc.responses import varint
from gpuserve.front.v2.json_values import MAX_VALUES
from gpuserve.front.v2.limits import MAX_TEXTS_NBYTES, shown
from gpuserve_worker.protocol.tensor import BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Requests within the limits on inputs, outputs and parameters have fewer fields, at all levels together.
MAX_ALL_FIELDS: Final = 1 << 16
#: Packed elements are decoded, and bytes copied, in parts of so many bytes.
_DECODED_NBYTES: Final = 64 << 10
_COPIED_NBYTES: Final = 1 << 20
_LONGEST_VARINT: Final = 10
#: Number 0 does not exist.
_TAGS: Final = range(1 << 3, 1 << 32)
_pack_length = struct.Struct("<I").pack


class WireType(enum.IntEnum):
    """How a protobuf field says where it ends: the low three bits of its tag."""

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

#: Tags of fields that are messages themselves, each with those inside it.
_Nested: TypeAlias = Mapping[int, Any]
_ENTRY: Final[_Nested] = {2 << 3 | WireType.LENGTH: {}}
_IN_INPUT: Final[_Nested] = {4 << 3 | WireType.LENGTH: _ENTRY}
_IN_OUTPUT: Final[_Nested] = {2 << 3 | WireType.LENGTH: _ENTRY}
_IN_REQUEST: Final[_Nested] = {4 << 3 | WireType.LENGTH: _ENTRY, 6 << 3 | WireType.LENGTH: _IN_OUTPUT}

_BYTES_NUMBER: Final = 8
#: Field of ``InferTensorContents`` -> the wire type of one element, and the numpy type of varints.
_ELEMENTS: Final = {
    1: (WireType.VARINT, np.bool_),
    2: (WireType.VARINT, np.int32),
    3: (WireType.VARINT, np.int64),
    4: (WireType.VARINT, np.uint32),
    5: (WireType.VARINT, np.uint64),
    6: (WireType.FIXED32, None),
    7: (WireType.FIXED64, None),
    _BYTES_NUMBER: (WireType.LENGTH, None),
}


class CutMessage(NamedTuple):
    """A request without its contents, and the contents of each input that has some, by its position."""

    rest: bytes
    contents: dict[int, list[memoryview]]


class _Budget:
    """The fields that may still come; ``refusal`` is raised for one more."""

    __slots__ = ("left", "refusal")

    def __init__(self, left: int, refusal: RequestError) -> None:
        self.left = left
        self.refusal = refusal

    def spend(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise self.refusal


def cut_contents(message: bytes | bytearray | memoryview) -> CutMessage:
    """Cut the contents of the inputs out of a ``ModelInferRequest``.

    Raises InvalidArgument if its encoding is malformed or it has too many fields, and ResourceExhausted if
    the rest is too large.
    """
    budget = _Budget(
        MAX_ALL_FIELDS,
        InvalidArgument(f"the request has too many fields, expected at most {MAX_ALL_FIELDS}"),
    )
    rest = bytearray()
    contents: dict[int, list[memoryview]] = {}
    n_inputs = 0
    with memoryview(message) as view:
        for tag, begin, start, end in _fields(view, budget):
            if tag == _INPUT_TAG:
                kept, found = _cut_input(view[start:end], budget)
                if found:
                    contents[n_inputs] = found
                n_inputs += 1
                rest += bytes((_INPUT_TAG,)) + varint(len(kept)) + kept
            else:
                if (nested := _IN_REQUEST.get(tag)) is not None:
                    _count(view[start:end], nested, budget)
                _check_rest(len(rest) + end - begin)
                rest += view[begin:end]
    return CutMessage(bytes(rest), contents)


def _cut_input(view: memoryview, budget: _Budget) -> tuple[bytearray, list[memoryview]]:
    kept = bytearray()
    found: list[memoryview] = []
    for tag, begin, start, end in _fields(view, budget):
        if tag == _CONTENTS_TAG:
            kept += _NO_CONTENTS  # protobuf still says that the input has contents
            if start < end:
                found.append(view[start:end])
            continue
        if tag == _SHAPE_TAG:
            budget.spend(end - start)  # one dimension takes a byte or more
        elif (nested := _IN_INPUT.get(tag)) is not None:
            _count(view[start:end], nested, budget)
        _check_rest(len(kept) + end - begin)
        kept += view[begin:end]
    return kept, found


def _check_rest(nbytes: int) -> None:
    if nbytes > MAX_TEXTS_NBYTES:
        raise ResourceExhausted(
            f"names, shapes and parameters of the request take more than {MAX_TEXTS_NBYTES} bytes. "
            "Please send large values as tensors, in raw_input_contents"
        )


def _count(view: memoryview, nested: _Nested, budget: _Budget) -> None:
    for tag, _, start, end in _fields(view, budget):
        if (inner := nested.get(tag)) is not None:
            _count(view[start:end], inner, budget)


def _fields(view: memoryview, budget: _Budget) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of a message: tag, and where its tag begins, its value begins and its value ends. A
    group is one field.
    """
    position, nbytes = 0, len(view)
    group_begin = 0
    groups: list[int] = []
    while position < nbytes:
        budget.spend(1)
        begin = position
        tag, start = view[position], position + 1  # mostly it is one byte
        if tag > 0x7F:
            tag, start = _number(view, position)
        if tag not in _TAGS:
            raise malformed(f"a field has the tag {tag}")
        start, position = _value(view, tag & 7, start)
        if position > nbytes:
            raise malformed("a field ends behind the end of its message")
        if tag & 7 == WireType.GROUP:
            group_begin = group_begin if groups else begin
            groups.append(tag >> 3)
        elif tag & 7 == WireType.END_GROUP:
            if not groups or groups.pop() != tag >> 3:
                raise malformed("a group ends that did not begin")
            begin = group_begin
        if not groups:
            yield tag, begin, start, position
    if groups:
        raise malformed("a group does not end")


def _value(view: memoryview, wire_type: int, start: int) -> tuple[int, int]:
    """Return where the value of a field begins and ends, whose tag ends at ``start``."""
    match wire_type:
        case WireType.VARINT:
            return start, _number(view, start)[1]
        case WireType.LENGTH:
            length, start = _number(view, start)
            return start, start + length
        case WireType.FIXED64:
            return start, start + 8
        case WireType.FIXED32:
            return start, start + 4
        case WireType.GROUP | WireType.END_GROUP:
            return start, start
    raise malformed(f"a field has wire type {wire_type}")


def _number(view: memoryview, position: int) -> tuple[int, int]:
    """Return the varint at a position, and where it ends."""
    number = shift = 0
    for byte in view[position : position + _LONGEST_VARINT]:
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    raise malformed("a number is cut off, or has over 64 bits")


def long_contents(parts: Sequence[memoryview], name: str, datatype: str, model_name: str) -> memoryview:
    """Return the elements of serialised ``InferTensorContents`` as the bytes of a tensor.

    Raises InvalidArgument if they are not of the datatype or out of its range, and ResourceExhausted if there
    are over ``MAX_VALUES`` elements that are not packed, as those of BYTES.
    """
    given = _given(parts, name)
    where = f"for input tensor '{shown(name)}' for model '{shown(model_name)}'"
    check_given([field_of(number) for number in sorted(given)], datatype, where)
    if not given:
        return memoryview(b"")
    ((number, data),) = given.items()
    wire_type, element = _ELEMENTS[number]
    if element is not None:
        data = _decoded(data, element, datatype, where)
    elif datatype != BYTES and len(data) % (8 if wire_type is WireType.FIXED64 else 4):
        raise malformed("a packed field does not hold a whole number of elements")
    return memoryview(data)


def _given(parts: Sequence[memoryview], name: str) -> dict[int, bytearray]:
    """Return what each field holds: packed elements one after the other, those of BYTES in wire layout."""
    given: dict[int, bytearray] = {}
    budget = _Budget(
        MAX_VALUES,
        ResourceExhausted(
            f"the contents of input tensor '{shown(name)}' hold more than {MAX_VALUES} elements that are not "
            "packed. Please use raw_input_contents for large inputs"
        ),
    )
    for part in parts:
        for tag, _, start, end in _fields(part, budget):
            number, wire_type = tag >> 3, tag & 7
            expected, _ = _ELEMENTS.get(number, (None, None))
            if expected is None or wire_type not in (expected, WireType.LENGTH):
                continue  # an unknown field, as it is to protobuf
            if number == _BYTES_NUMBER:
                data = given.setdefault(number, bytearray())
                data += _pack_length(end - start)
            elif start == end:
                continue
            else:
                data = given.setdefault(number, bytearray())
            copied = start
            while end - copied > _COPIED_NBYTES:
                data += part[copied : copied + _COPIED_NBYTES]
                copied += _COPIED_NBYTES
            data += part[copied:end]
    return given


def _decoded(packed: bytearray, element: Any, datatype: str, where: str) -> bytearray:
    """Return packed varints as elements of the datatype."""
    bytes_ = np.frombuffer(packed, np.uint8)
    tensor = bytearray()
    position = n = 0
    while position < len(bytes_):
        values, nbytes = _varints(bytes_[position : position + _DECODED_NBYTES])
        wide = values != 0 if element is np.bool_ else values.astype(element)
        tensor += narrowed(wide, datatype, where, n).tobytes()
        position += nbytes
        n += len(values)
    return tensor


def _varints(piece: NDArray[np.uint8]) -> tuple[NDArray[Any], int]:
    """Return the numbers that are whole in a piece, and how many bytes they take."""
    ends = np.flatnonzero(piece < 0x80)
    if not len(ends):
        raise malformed("a number is cut off, or has over 64 bits")
    nbytes = int(ends[-1]) + 1
    if len(ends) == nbytes:
        return piece[:nbytes], nbytes
    lengths = np.diff(ends, prepend=-1)
    starts = ends - lengths + 1
    longest = int(lengths.max())
    if longest > _LONGEST_VARINT:
        raise malformed("a number has over 64 bits")
    numbers = (piece[starts] & 0x7F).astype(np.uint64)
    for place in range(1, longest):
        longer = lengths > place
        numbers[longer] |= (piece[starts[longer] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return numbers, nbytes


def malformed(why: str) -> InvalidArgument:
    return InvalidArgument(f"the request body is not a ModelInferRequest: {why}")
