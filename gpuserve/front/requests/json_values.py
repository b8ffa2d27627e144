"""JSON of the HTTP endpoint: text to checked Python values, and tensors to and from JSON arrays. Pure.

Errors of clients are raised as ``InvalidArgument``; the HTTP codec interprets the members of an inference
request. The standard library's parser is used: it supports NaN and Infinity and detects duplicate keys. It
recurses, so the nesting depth is checked first.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Any, Final, TypeVar

import numpy as np

from gpuserve.core.errors import InvalidArgument, ResourceExhausted
from gpuserve.front.requests.json_arrays import (
    MAX_DEPTH,
    SEARCHED_NBYTES,
    SHORT_NBYTES,
    SLICE_ELEMENTS,
    LiftedText,
    UnevenNesting,
    long_tensor,
    packed,
    written,
)
from gpuserve.front.requests.limits import shown
from gpuserve_worker.protocol.tensor import ITEMSIZE, decode_bytes, element_count, encode_bytes, numpy_dtype

#: JSON becomes many times its size in Python objects. Larger data has the binary form.
MAX_JSON_NBYTES: Final = 64 << 20
#: Limit of values parsed without interruption: about 30 ms. Arrays of numbers do not count.
MAX_VALUES: Final = 1 << 17
TOO_DEEP: Final = f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})"
#: Clients compare these with the whole error text, so nothing can be added to them.
TOO_FEW: Final = "Failed to parse 'data' field: shape does not match true shape"
TOO_MANY: Final = "Unable to parse 'data': Shape does not match true shape of 'data' field"
MAX_INT64: Final = (1 << 63) - 1

#: A JSON string, or an unterminated string up to the end. The pattern always matches at a quote, so the scan
#: is linear for any text.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
#: A span that ends with a comma or a colon outside of strings, or with a string that neither follows.
_VALUE: Final = re.compile(rb'[^",:]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?[^",:]*+)?[,:]?', re.DOTALL)
#: Brackets as steps of the depth, read as int8; every other byte is deleted.
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS: Final = bytes(code for code in range(256) if code not in b"[]{}")
_SCAN_NBYTES: Final = 1 << 20

_KINDS: Final[dict[type, str]] = {bool: "true or false", str: "a string", list: "an array", dict: "an object"}
_NO_JSON_DATA: Final = frozenset({"FP16", "BF16"})

_MALFORMED: Final = "failed to parse the request JSON buffer: "

T = TypeVar("T")


class MalformedJson(InvalidArgument):
    """A document that is no JSON, with the reason ``detail`` and its ``position``."""

    detail = ""
    position = 0


class LiftedArray(list[Any]):
    """The placeholder of the lifted array with this ``number``."""

    number = 0


class DuplicateKey(InvalidArgument):
    """An object of a document has ``key`` twice."""

    key = ""


def loads(text: bytes | bytearray) -> Any:
    """Parse a document. Raise InvalidArgument if malformed, ResourceExhausted if too large."""
    return _loads(text, _DECODER)


def loads_skeleton(text: bytes) -> Any:
    """Parse a text with lifted arrays, each of which becomes a numbered ``LiftedArray``."""
    numbers = count()

    def lifted(_: str) -> LiftedArray:
        array = LiftedArray()
        array.number = next(numbers)
        return array

    return _loads(text, json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=lifted))


def _loads(text: bytes | bytearray, decoder: json.JSONDecoder) -> Any:
    check_json_size(len(text))
    _check_values(text)
    if is_too_deep(text):
        raise InvalidArgument(TOO_DEEP)
    try:
        decoded = text.decode()
        document = decoder.decode(decoded)
        if "\\ud" in decoded or "\\uD" in decoded:
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # legal JSON, but no text
        raise _malformed("a string holds half of a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise malformed("not UTF-8", error.start) from None
    except json.JSONDecodeError as error:
        raise malformed(error.msg.removesuffix(" at"), error.pos) from None
    except ValueError:  # the interpreter's limit on the digits of an int
        raise _malformed("an integer has too many digits") from None
    return document


def check_json_size(nbytes: int) -> None:
    if nbytes > MAX_JSON_NBYTES:
        raise ResourceExhausted(
            f"request JSON size of {nbytes} bytes exceeds the maximum allowed input size of "
            f"{MAX_JSON_NBYTES} bytes. Please use the binary data format for large inputs"
        )


def _check_values(text: bytes | bytearray) -> None:
    """Raise ResourceExhausted if a text takes long to parse. Commas inside of strings do not count."""
    if len(text) > MAX_VALUES and _has_many_marks(text):
        found = islice(_VALUE.finditer(text), MAX_VALUES + 1)
        if sum(1 for _ in found) > MAX_VALUES:
            raise ResourceExhausted(
                f"the request JSON holds more than {MAX_VALUES} values beside the arrays of numbers in "
                "'data'. Please use the binary data format for large inputs"
            )


def _has_many_marks(text: bytes | bytearray) -> bool:
    n = 0
    for at in range(0, len(text), SEARCHED_NBYTES):
        n += sum([text.count(mark, at, at + SEARCHED_NBYTES) for mark in (b",", b":", b'"')])
        if n > MAX_VALUES:
            return True
    return False


def is_too_deep(text: bytes | bytearray) -> bool:
    """Return whether the nesting is deeper than ``MAX_DEPTH``, in linear time, without recursion."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    steps = _STRING.sub(b"", text).translate(_STEPS, _NO_BRACKETS)
    depth = 0
    for start in range(0, len(steps), _SCAN_NBYTES):
        part = np.frombuffer(steps[start : start + _SCAN_NBYTES], dtype=np.int8)
        depths = np.cumsum(part, dtype=np.int64) + depth
        if depths.max() > MAX_DEPTH:
            return True
        depth = int(depths[-1])
    return False


def typed(value: Any, kind: type[T], field: str) -> T:
    """Return ``value`` if it is of this ``kind``, else raise InvalidArgument about ``field``."""
    if type(value) is kind:
        return value
    raise InvalidArgument(f"{field}: expected {_KINDS[kind]}, got {described(value)}")


def member(owner: dict[str, Any], key: str, kind: type[T], of: str = "") -> T:
    """Return a required member of this kind. ``of`` names its owner in errors: `` of input 'x'``."""
    if key not in owner:
        raise InvalidArgument(f"'{key}'{of} is missing in the request")
    return typed(owner[key], kind, f"'{key}'{of}")


def unsigned(value: Any, field: str) -> int:
    """Return ``value`` if it is an integer from 0 to 2^63 - 1, else raise InvalidArgument."""
    if type(value) is int and 0 <= value <= MAX_INT64:
        return value
    raise InvalidArgument(f"{field}: expected an integer of at least 0, got {described(value)}")


def tensor_bytes(data: list[Any], datatype: str, count: int, name: str) -> bytes:
    """Return an input's elements, nested in any way, as row-major wire bytes.

    Only the number of elements is compared with the shape, as clients expect. Raises InvalidArgument for
    another number, another type, or FP16 and BF16, which have no JSON form.
    """
    if datatype in _NO_JSON_DATA:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    elements = data
    while elements and type(elements[0]) is list:
        if any(type(part) is not list for part in elements):
            raise InvalidArgument(f"'data' of input '{name}' mixes arrays and values at one level")
        elements = [element for part in elements for element in part]
    if len(elements) != count:
        raise _miscounted(name, len(elements), count)
    return _ENCODERS[datatype](elements, datatype, name) if elements else b""


def lifted_tensor(
    lifted: LiftedText, number: int, datatype: str, count: int, name: str
) -> bytes | memoryview:
    """Return a lifted array's elements as ``tensor_bytes`` does; may also raise ``MalformedJson``."""
    start, end = lifted.starts[number], lifted.ends[number]
    if end - start <= SHORT_NBYTES:
        text = lifted.text[start:end]
        found = packed(text, datatype)
        if found is not None and len(found) == count * ITEMSIZE[datatype]:
            return found
        return tensor_bytes(_decoded(text, start), datatype, count, shown(name))
    name = shown(name)
    if datatype in _NO_JSON_DATA or datatype == "BYTES":
        return tensor_bytes([0], datatype, 1, name)  # raises the error for this datatype

    def read_odd(piece: bytes, at: int, first: int) -> bytes:
        elements = _decoded(piece, at - 1)
        if not elements:
            raise malformed("Expecting value", at)
        return _ENCODERS[datatype](elements, datatype, name, first)

    try:
        tensor, n = long_tensor(lifted.text, start, end, datatype, count, read_odd)
    except UnevenNesting:
        raise InvalidArgument(f"'data' of input '{name}' has values that are not all equally deep") from None
    if n != count:
        raise _miscounted(name, n, count)
    return memoryview(tensor)


def _miscounted(name: str, found: int, expected: int) -> InvalidArgument:
    text = TOO_FEW if found < expected else TOO_MANY
    return InvalidArgument(f"{text}: input '{name}' has {found} in 'data', its 'shape' makes {expected}")


def _decoded(text: bytes | bytearray, start: int) -> list[Any]:
    """Parse an array without strings or objects, which begins at ``start``, three levels deep."""
    if is_too_deep(b"[[[%b" % bytes(text)):
        raise InvalidArgument(TOO_DEEP)
    try:
        values: list[Any] = _loads(text, _DECODER)
    except MalformedJson as error:
        raise malformed(error.detail, start + error.position) from None
    return values


def tensor_json(
    data: bytes | memoryview, datatype: str, shape: tuple[int, ...], name: str
) -> list[bytes | memoryview]:
    """Return an output's elements as a flat JSON array, in parts, with NaN as rapidjson writes it. Raise
    InvalidArgument if JSON cannot carry them.
    """
    if datatype in _NO_JSON_DATA:
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {name}"
        )
    parts: Iterable[bytes]
    if datatype == "BYTES":
        elements = decode_bytes(data, element_count(shape))
        slices = (elements[at : at + SLICE_ELEMENTS] for at in range(0, len(elements), SLICE_ELEMENTS))
        parts = (_utf8_text(_texts(part, name)).encode() for part in slices)
    else:
        parts = written(data, datatype, lambda odd: compact(odd.tolist()).encode())
    arrays = list(parts)
    if len(arrays) < 2:
        return [*arrays] or [b"[]"]
    text: list[bytes | memoryview] = []
    for array in arrays:
        text += (b",", memoryview(array)[1:-1])
    text[0] = b"["
    text.append(b"]")
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        error = DuplicateKey(f"{_MALFORMED}key {described(twice)} is given twice in one object")
        error.key = twice
        raise error
    return members


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique_keys)
#: Any plain value as JSON without spaces. ASCII, so that any string can be written.
compact: Final[Callable[[Any], str]] = json.JSONEncoder(separators=(",", ":")).encode
#: The same for long text that is known to be UTF-8: escapes would triple its size.
_utf8_text: Final[Callable[[Any], str]] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def malformed(detail: str, position: int) -> MalformedJson:
    error = MalformedJson(f"{_MALFORMED}{detail} at {position}")
    error.detail, error.position = detail, position
    return error


def _malformed(detail: str) -> InvalidArgument:
    return InvalidArgument(f"{_MALFORMED}{detail}")


def _check_types(
    elements: list[Any], allowed: set[type], tried: str, expected: str, name: str, first: int
) -> None:
    """Check all types in one pass in C. ``tried`` is Triton's phrase, which clients look for."""
    if set(map(type, elements)) <= allowed:
        return
    position = next(i for i, element in enumerate(elements) if type(element) not in allowed)
    raise InvalidArgument(
        f"Unable to parse 'data' of input '{name}': attempt to access JSON non-{tried}: "
        f"it must hold {expected}, but element {first + position} is {described(elements[position])}"
    )


def described(value: Any) -> str:
    """Return a JSON value as a short text for an error, whatever it holds."""
    if isinstance(value, list | dict | LiftedArray):
        return _KINDS[dict if isinstance(value, dict) else list]
    text = compact(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 48 else f"{text[:40]}…"


def _booleans(elements: list[Any], _datatype: str, name: str, first: int = 0) -> bytes:
    if set(map(type, elements)) != {bool}:
        raise InvalidArgument(
            f"Unable to parse 'data' of input '{name}': attempt to access JSON non-boolean as boolean"
        )
    return bytes(elements)


def _integers(elements: list[Any], datatype: str, name: str, first: int = 0) -> bytes:
    sign = "unsigned" if datatype.startswith("U") else "signed"
    _check_types(elements, {int}, f"{sign}-integer as {sign}-integer", f"{datatype} integers", name, first)
    limits = np.iinfo(numpy_dtype(datatype))
    for value in (min(elements), max(elements)):
        if not limits.min <= value <= limits.max:
            raise InvalidArgument(
                f"'data' of input '{name}' must hold {datatype} integers from {limits.min} to "
                f"{limits.max}, but got {described(value)}"
            )
    return np.array(elements, dtype=limits.dtype).tobytes()


def _floats(elements: list[Any], datatype: str, name: str, first: int = 0) -> bytes:
    _check_types(elements, {int, float}, "number as double", f"{datatype} numbers", name, first)
    try:
        wide = np.array(elements, dtype=np.float64)
    except OverflowError:
        raise InvalidArgument(f"'data' of input '{name}' holds an integer too large for {datatype}") from None
    with np.errstate(over="ignore"):
        array = wide.astype(numpy_dtype(datatype))
    if datatype == "FP32":
        overflowed = np.isinf(array) & np.isfinite(wide)
        if overflowed.any():
            value = float(wide[overflowed][0])
            raise InvalidArgument(f"'data' of input '{name}' holds {value!r}, which is too large for FP32")
    return array.tobytes()


def _strings(elements: list[Any], _datatype: str, name: str, first: int = 0) -> bytes:
    _check_types(elements, {str}, "string as string", "strings", name, first)
    return encode_bytes(elements)


_ENCODERS: Final[dict[str, Callable[..., bytes]]] = {
    "BOOL": _booleans,
    "BYTES": _strings,
    "FP32": _floats,
    "FP64": _floats,
    **{f"{sign}INT{bits}": _integers for sign in ("", "U") for bits in (8, 16, 32, 64)},
}


def _texts(elements: list[bytes], name: str) -> list[str]:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"output '{name}' holds bytes that are not UTF-8, which JSON cannot carry. "
            f"Please use the binary data format for output {name}"
        ) from None
