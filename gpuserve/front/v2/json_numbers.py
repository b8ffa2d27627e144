"""Arrays of numbers in JSON: lifted out of the text of a request, read, and written. Pure. They are most of
the text of most requests, and a parser that makes something of every number takes ten times as long: here
orjson reads them, slice by slice where they are long, and numpy keeps them. What is odd in an array is left
to ``json_values``, which has the words for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import orjson

from gpuserve_worker.protocol.tensor import numpy_dtype

#: So much of an array is read in one go, so many elements are written: some milliseconds.
SLICE_NBYTES: Final = 512 << 10
SLICE_ELEMENTS: Final = 32 << 10
MAX_DEPTH: Final = 100
#: What stands in a text for an array that was lifted, as no request has it.
PLACE: Final = b"NaN"

_KEY: Final = b'"data"'
_BEGINNING: Final = re.compile(rb'"data"[ \t\r\n]*+:[ \t\r\n]*+(?=\[)')
_FLAT: Final = bytes.maketrans(b"[]", b"  ")
#: Bytes as steps of the depth, and which of them belong to a number.
_STEPS: Final = np.zeros(256, np.int16)
_STEPS[[ord("["), ord("]")]] = 1, -1
_IS_NUMBER: Final = np.isin(np.arange(256), list(b"+-.0123456789Ee"))
#: Of true, false and null.
_LETTERS: Final = (b"t", b"f", b"n")
_NOT_NUMBERS: Final = frozenset({"BOOL", "BYTES", "FP16", "BF16"})

ReadOdd: TypeAlias = Callable[[bytes, int, int], "np.ndarray[Any, Any]"]


class LiftedText(NamedTuple):
    """A text with ``PLACE`` for each of some arrays, which are ``text`` from ``starts`` to ``ends``."""

    skeleton: bytes
    text: bytes | bytearray
    starts: list[int]
    ends: list[int]

    def origin(self, position: int) -> int:
        """Where in the text the byte is that has this position in the skeleton."""
        for start, end in zip(self.starts, self.ends, strict=True):
            if position < start:
                break
            position += end - start - len(PLACE)
        return position


def lift(text: bytes | bytearray) -> LiftedText | None:
    """Take the arrays that may be of numbers out of the members "data"; None: there are none."""
    at, kept = text.find(_KEY), 0
    if at < 0:
        return None
    parts: list[bytes | bytearray] = []
    starts: list[int] = []
    ends: list[int] = []
    while at >= 0:
        found = _BEGINNING.match(text, at)
        after = at + len(_KEY)
        if found is not None and text[at - 1 : at] != b"\\":
            start = found.end()
            end = _end_of_array(text, start)
            if end > start:
                parts.append(text[kept:start])
                starts.append(start)
                ends.append(end)
                kept = after = end
        at = text.find(_KEY, after)
    parts.append(text[kept:])
    if not starts or any(PLACE in part or b"Infinity" in part for part in parts):
        return None
    return LiftedText(PLACE.join(parts), text, starts, ends)


def _end_of_array(text: bytes | bytearray, start: int) -> int:
    """Where an array ends that has neither text nor objects in it; otherwise not after ``start``."""
    end = text.find(b'"', start)
    if end < 0:
        end = len(text)
    brace = text.find(b"}", start, end)
    return text.rfind(b"]", start, end if brace < 0 else brace) + 1


def short_tensor(text: bytes | bytearray, datatype: str, count: int) -> bytes | None:
    """The elements of a whole array as they are sent; None: there is something about it, whatever it is."""
    array = _slice_of(text, datatype)
    return array.tobytes() if array is not None and array.size == count else None


def long_tensor(
    text: bytes | bytearray, start: int, end: int, datatype: str, count: int, read_odd: ReadOdd
) -> tuple[np.ndarray[Any, Any], int]:
    """The same, slice by slice, of the array that begins and ends there, and how many elements it has: what
    is over ``count`` is not kept. ``read_odd`` reads a slice, without brackets, that has something about it,
    and is told where it begins and how many elements are before it. ``NotAsDeep``: its arrays are not.
    """
    depth = Depth() if text.find(b"[", start + 1, end) >= 0 else None
    tensor = np.empty(min(count, (end - start) // 2), numpy_dtype(datatype))
    n = 0
    for begins, ends in _slices(text, start + 1, end - 1):
        part = bytes(text[begins:ends])
        if depth is not None:
            depth.go_on(part)
            part = part.translate(_FLAT)
        piece = b"[%b]" % part
        array = _slice_of(piece, datatype)
        if array is None:
            array = read_odd(piece, begins, n)
        tensor[n : n + array.size] = array[: max(0, len(tensor) - n)]
        n += array.size
    if depth is not None:
        depth.finish()
    return tensor, n


def _slices(text: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the parts of an array begin and end, without the commas between them."""
    while end - start > SLICE_NBYTES:
        comma = text.rfind(b",", start, start + SLICE_NBYTES)
        if comma < 0:
            break
        yield start, comma
        start = comma + 1
    yield start, end


def _slice_of(piece: bytes | bytearray, datatype: str) -> np.ndarray[Any, Any] | None:
    """The numbers of a flat array; None: there are none, or something else."""
    if any(letter in piece for letter in _LETTERS):
        return None
    try:
        return _array(orjson.loads(piece), datatype)
    except orjson.JSONDecodeError:
        return None


def _array(values: list[Any], datatype: str) -> np.ndarray[Any, Any] | None:
    """Numbers of a datatype; None: they are not, or not all of them fit."""
    dtype = np.dtype(numpy_dtype(datatype)) if datatype not in _NOT_NUMBERS else None
    if dtype is None or not values:
        return None
    try:
        with np.errstate(over="ignore"):
            if dtype.kind == "f":
                array = np.array(values, dtype)
                return array if np.isfinite(array).all() else None
            array = np.array(values)
    except (ValueError, OverflowError, TypeError):
        return None
    if array.dtype.kind not in "iu":
        return None
    limits = np.iinfo(dtype)
    return array.astype(dtype) if limits.min <= array.min() and array.max() <= limits.max else None


class NotAsDeep(ValueError):
    """An array has values where another part of it has arrays."""


class Depth:
    """Follows the brackets between those of an array, part by part: its numbers are all equally deep in it,
    or ``NotAsDeep``.
    """

    def __init__(self) -> None:
        self._now = 1
        self._of_numbers = 0

    def go_on(self, part: bytes) -> None:
        codes = np.frombuffer(part, np.uint8)
        depths = np.cumsum(_STEPS[codes], dtype=np.int32) + self._now
        of_numbers = depths[_IS_NUMBER[codes]]
        if not len(of_numbers):
            raise NotAsDeep
        self._now = int(depths[-1])
        self._of_numbers = self._of_numbers or int(of_numbers[0])
        is_one = of_numbers.min() == of_numbers.max() == depths.max() == self._of_numbers
        if not is_one or self._of_numbers > MAX_DEPTH or depths.min() < 1:
            raise NotAsDeep

    def finish(self) -> None:
        if self._now != 1:
            raise NotAsDeep


def written(
    data: bytes | memoryview, datatype: str, write_odd: Callable[[np.ndarray[Any, Any]], bytes]
) -> Iterator[bytes]:
    """The elements as JSON with commas, so many at a time, each in the fewest digits that make it again.
    ``write_odd`` writes those among which is one that JSON does not have.
    """
    array = np.frombuffer(data, numpy_dtype(datatype))
    for at in range(0, len(array), SLICE_ELEMENTS):
        part = array[at : at + SLICE_ELEMENTS]
        if array.dtype.kind == "f" and not np.isfinite(part).all():
            yield write_odd(part)
        else:
            yield orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
