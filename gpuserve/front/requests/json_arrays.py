"""JSON arrays of numbers: lifted out of a request's text, parsed, and written. Pure.

Arrays are most of the text of most requests, and a parser that creates an object for every number takes ten
times as long. Here orjson parses them, slice by slice if they are long, and numpy stores them. Arrays with
anything unusual are left to ``json_values``, which reports errors.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import orjson

from gpuserve_worker.protocol.tensor import ITEMSIZE, numpy_dtype

#: Arrays up to this size are parsed at once.
SHORT_NBYTES: Final = 256 << 10
#: JSON of any kind up to this size is parsed at once: 64 KiB may hold 32,768 values.
SHORT_JSON_NBYTES: Final = 64 << 10
#: Bytes of a longer array that are parsed at once, and elements that are written at once: about a
#: millisecond.
SLICE_NBYTES: Final = 64 << 10
SLICE_ELEMENTS: Final = 4 << 10
MAX_DEPTH: Final = 100
#: The depth limit of an array in "data", which lies in an object in a list in the request.
_MAX_DATA_DEPTH: Final = MAX_DEPTH - 3
#: Bytes of a text that are searched at once.
SEARCHED_NBYTES: Final = 256 << 10
#: Number of cached packers, one for each array length and datatype.
_REMEMBERED: Final = 256
#: The longest distance between arrays that is searched.
MOST_SEARCHED_NBYTES: Final = 8 << 20
#: The placeholder of a lifted array in a text; no request contains it.
PLACE: Final = b"NaN"

DATA_KEY: Final = b'"data"'
_BEGINNING: Final = re.compile(rb'(?<!\\)"data"[ \t\r\n]*+:[ \t\r\n]*+(?=\[)')
_FLAT: Final = bytes.maketrans(b"[]", b"  ")
#: Depth steps by byte, and which bytes belong to a number.
_STEPS: Final = np.zeros(256, np.int16)
_STEPS[[ord("["), ord("]")]] = 1, -1
_IS_NUMBER: Final = np.isin(np.arange(256), list(b"+-.0123456789Ee"))
#: struct codes. Packing refuses numbers that do not fit, and fractions for integers.
_CODES: Final = {
    **{"FP32": "f", "FP64": "d", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"},
    **{"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"},
}

ReadOdd: TypeAlias = Callable[[bytes, int, int], bytes]
WriteOdd: TypeAlias = Callable[[np.ndarray[Any, Any]], bytes]


class LiftedText(NamedTuple):
    """A text with ``PLACE`` for each lifted array; the arrays are ``text`` from ``starts`` to ``ends``."""

    skeleton: bytes
    text: bytes | bytearray
    starts: list[int]
    ends: list[int]

    def origin(self, position: int) -> int:
        """Return the position in the text of a position in the skeleton."""
        for start, end in zip(self.starts, self.ends, strict=True):
            if position < start:
                break
            position += end - start - len(PLACE)
        return position


def lift(text: bytes | bytearray) -> LiftedText | None:
    """Lift the arrays that may hold numbers out of the members "data", or return None if there are none."""
    parts: list[bytes | bytearray] = []
    starts: list[int] = []
    ends: list[int] = []
    kept = 0
    at = text.find(DATA_KEY) if len(text) <= SEARCHED_NBYTES else _next_key(text, 0)
    while at >= 0:
        found = _BEGINNING.match(text, at)
        after = at + len(DATA_KEY)
        if found is not None:
            start = found.end()
            # An array of numbers ends before the next string and the next object.
            quote = text.find(b'"', start)
            if quote < 0:
                quote = len(text)
            brace = text.find(b"}", start, quote)
            end = text.rfind(b"]", start, quote if brace < 0 else brace) + 1
            if end > start:
                parts.append(text[kept:start])
                starts.append(start)
                ends.append(end)
                kept = after = end
        is_near = len(text) - after <= SEARCHED_NBYTES
        at = text.find(DATA_KEY, after) if is_near else _next_key(text, after)
    if not starts:
        return None
    parts.append(text[kept:])
    skeleton = PLACE.join(parts)
    if skeleton.count(PLACE) != len(starts) or b"Infinity" in skeleton:
        return None  # the text has such words of its own, or a placeholder is missing
    return LiftedText(skeleton, text, starts, ends)


def _next_key(text: bytes | bytearray, start: int) -> int:
    """Return the position of the next key nearby, or -1. Each search holds the interpreter lock."""
    for begins in range(start, min(len(text), start + MOST_SEARCHED_NBYTES), SEARCHED_NBYTES):
        at = text.find(DATA_KEY, begins, begins + SEARCHED_NBYTES + len(DATA_KEY) - 1)
        if at >= 0:
            return at
    return -1


def long_tensor(
    text: bytes | bytearray, start: int, end: int, datatype: str, count: int, read_odd: ReadOdd
) -> tuple[bytearray, int]:
    """Parse an array slice by slice. Returns its elements and their number; parsing stops above ``count``.

    ``read_odd`` parses a slice that is not plain; its arguments are the slice, its position, and the number
    of elements before it. Raises UnevenNesting if the nested arrays are not equally deep.
    """
    depth = Depth() if text.find(b"[", start + 1, end) >= 0 else None
    itemsize = ITEMSIZE[datatype]
    # Not as many as a client claims: each element takes two bytes of text.
    tensor, filled = bytearray(min(count, (end - start) // 2) * itemsize), 0
    with memoryview(text) as view:
        for begins, ends in _slices(text, start + 1, end - 1):
            piece = b"".join((b"[", view[begins:ends], b"]"))
            if depth is not None:
                depth.go_on(piece[1:-1])
                piece = b"[%b]" % piece[1:-1].translate(_FLAT)
            data = packed(piece, datatype) or read_odd(piece, begins, filled // itemsize)
            begun, filled = filled, filled + len(data)
            if filled > len(tensor):
                return tensor, filled // itemsize
            tensor[begun:filled] = data
    if depth is not None:
        depth.finish()
    return tensor, filled // itemsize


def _slices(text: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part of an array, without the commas between the parts."""
    while end - start > SLICE_NBYTES:
        comma = text.rfind(b",", start, start + SLICE_NBYTES)
        if comma < 0:
            break
        yield start, comma
        start = comma + 1
    yield start, end


def packed(text: bytes | bytearray, datatype: str) -> bytes | None:
    """Return an array of numbers in wire layout, or None if it is empty, mixed, or out of range."""
    if datatype not in _CODES or b"t" in text or b"f" in text:  # true or false
        return None
    try:
        values = orjson.loads(text)
        if type(values[0]) is list:
            values = _flat(values)
        return _packer(datatype, len(values))(*values)
    except (orjson.JSONDecodeError, IndexError, TypeError, OverflowError, struct.error):
        return None


def _flat(values: list[Any]) -> list[Any]:
    """Return the values of nested arrays. Raise TypeError or IndexError if unequally or too deep."""
    for _ in range(1, _MAX_DATA_DEPTH):
        values = list(chain.from_iterable(values))
        if type(values[0]) is not list:
            return values
    raise TypeError


@functools.lru_cache(_REMEMBERED)
def _packer(datatype: str, n: int) -> Callable[..., bytes]:
    """Return the packer of ``n`` numbers."""
    return struct.Struct(f"<{n}{_CODES[datatype]}").pack


class UnevenNesting(ValueError):
    """An array has values where another part of it has arrays."""


class Depth:
    """A tracker of bracket depth. Raises UnevenNesting unless all numbers are equally deep."""

    def __init__(self) -> None:
        self._now = 1
        self._of_numbers = 0

    def go_on(self, part: bytes) -> None:
        codes = np.frombuffer(part, np.uint8)
        depths = np.cumsum(_STEPS[codes], dtype=np.int32) + self._now
        of_numbers = depths[_IS_NUMBER[codes]]
        if not len(of_numbers):
            raise UnevenNesting
        self._now = int(depths[-1])
        self._of_numbers = self._of_numbers or int(of_numbers[0])
        is_one = of_numbers.min() == of_numbers.max() == depths.max() == self._of_numbers
        if not is_one or self._of_numbers > _MAX_DATA_DEPTH or depths.min() < 1:
            raise UnevenNesting

    def finish(self) -> None:
        if self._now != 1:
            raise UnevenNesting


def written(data: bytes | memoryview, datatype: str, write_odd: WriteOdd) -> Iterator[bytes]:
    """Yield the elements as JSON arrays, a slice at a time, in the fewest digits that restore them.

    ``write_odd`` writes slices with a number that JSON does not have.
    """
    array = np.frombuffer(data, numpy_dtype(datatype))
    for at in range(0, len(array), SLICE_ELEMENTS):
        part = array[at : at + SLICE_ELEMENTS]
        text = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)
        yield write_odd(part) if b"n" in text else text  # orjson writes null for NaN
