"""Arrays of numbers in JSON: what is lifted, read in slices, and written is what Python's parser has."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from present import present

from gpuserve.core.errors import InvalidArgument, RequestError
from gpuserve.front.protocols.http.infer_json import header_for, read_header
from gpuserve.front.requests import json_arrays, json_values
from gpuserve.front.requests.json_arrays import LiftedText, lift
from gpuserve.front.requests.json_values import MAX_VALUES, lifted_tensor, tensor_bytes, tensor_json
from gpuserve_worker.protocol.tensor import numpy_dtype

NUMBERS = ["UINT8", "INT8", "INT64", "UINT64", "FP32", "FP64"]
ELEMENTS = st.one_of(
    st.integers(-300, 300),
    st.integers(-(1 << 66), 1 << 66),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.floats(allow_nan=False, allow_infinity=False),
)
QUICK = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPACES = st.sampled_from(["", "", " ", "\n", "\t "])


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_arrays, "SLICE_NBYTES", 24)
    monkeypatch.setattr(json_values, "SHORT_NBYTES", 0)


def lifted(array: str) -> LiftedText:
    found = present(lift(b'{"data":' + array.encode() + b"}"))
    assert found.skeleton == b'{"data":NaN}'
    return found


def told(read: Any) -> bytes | str:
    try:
        return bytes(read())
    except RequestError as error:
        return str(error)


def nested(values: list[Any], width: int) -> list[Any]:
    return [values[at : at + width] for at in range(0, len(values), width)]


@pytest.mark.usefixtures("short_slices")
@QUICK
@given(st.data(), st.sampled_from(NUMBERS), SPACES, SPACES)
def test_slices_hold_what_the_whole_does(data: st.DataObject, datatype: str, before: str, after: str) -> None:
    values = data.draw(st.lists(ELEMENTS, min_size=1, max_size=40))
    for _ in range(data.draw(st.integers(0, 2))):
        values = nested(values, data.draw(st.integers(1, 5)))
    text = json.dumps(values, separators=(f"{before},{after}", ":"))
    count = text.count(",") + 1
    whole = told(lambda: tensor_bytes(json.loads(text), datatype, count, "x"))
    in_slices = told(lambda: lifted_tensor(lifted(text), 0, datatype, count, "x"))
    # Of several that are wrong, another may be told.
    assert in_slices == whole if isinstance(whole, bytes) else isinstance(in_slices, str)
    wrong = count + data.draw(st.sampled_from([-1, 1, 1 << 40]))
    assert isinstance(told(lambda: lifted_tensor(lifted(text), 0, datatype, wrong, "x")), str)


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("text", ["[true,false,true,true,false]", "[[true,false],[true,true]]"])
def test_booleans_are_read_in_slices(text: str) -> None:
    count = text.count(",") + 1
    values = tensor_bytes(json.loads(text), "BOOL", count, "x")
    assert bytes(lifted_tensor(lifted(text), 0, "BOOL", count, "x")) == values


BROKEN = """\
[1,2,3,4,5,6,7,8,9,10,11,,12]
[1,2,3,4,5,6,7,8,9,10,11,12,]
[1,2,3,4,5,6,7,8,9,10,11 12]
[1,2,3,4,5,6,7,8,9,10,11],12]
[[1,2,3,4,5,6],[7,8,9,10,11,12]
[[1,2,3,4,5,6],[7,8,9,10,11],12]
[[1,2,3,4,5,6],[7,8,9,10,11,[12]]]
[[1,2,3,4,5,6][7,8,9,10,11,12]]
[1,2,3,4,5,6],[7,8,9,10,11,12]
[1,2,3,4,5,6,7,8,9,10,11,012,13]
[1,2,3,4,5,6,7,8,9,10,11,12-,13]
[,1,2,3,4,5,6,7,8,9,10,11,12,13]
[1,2,3,4,5,6,7,8,9,10,11,1e999,13,null]
""".splitlines()


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("text", BROKEN)
def test_a_long_array_that_is_broken_is_refused(text: str) -> None:
    count = text.count(",") + 1
    with pytest.raises(InvalidArgument, match=r"failed to parse|equally deep|non-number|too large|too many"):
        lifted_tensor(lifted(text), 0, "FP32", count, "x")


@pytest.mark.usefixtures("short_slices")
def test_the_place_of_what_is_wrong_is_told_in_the_whole_text() -> None:
    text = "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,x]"
    with pytest.raises(InvalidArgument, match=f"at {text.index('x') + 8}$"):
        lifted_tensor(lifted(text), 0, "FP32", 16, "x")
    floats = "[" + ",".join(["1"] * 30) + ",1.5]"
    with pytest.raises(InvalidArgument, match=r"element 30 is 1\.5"):
        lifted_tensor(lifted(floats), 0, "INT32", 31, "x")


def test_what_is_no_array_of_numbers_stays() -> None:
    for text in [
        '{"data":["a","b"]}',
        '{"data":[{"a":1}]}',
        '{"x":[1,2]}',
        '{"data":7}',
        '{"data":NaN,"x":1}',
        '{"data":[1,2],"y":NaN}',
        '{"data":[1,2],"y":-Infinity}',
        '{"x\\"data":[1,2]}',
        '{"data":[1,2',
    ]:
        assert lift(text.encode()) is None, text


def test_places_are_found_again() -> None:
    text = b'{"a":{"data" : [1,2,3]},"b":{"data":[4]},"c":5}'
    found = present(lift(text))
    assert found.skeleton == b'{"a":{"data" : NaN},"b":{"data":NaN},"c":5}'
    assert [text[a:b] for a, b in zip(found.starts, found.ends, strict=True)] == [b"[1,2,3]", b"[4]"]
    assert text[found.origin(found.skeleton.index(b"5"))] == ord("5")
    assert text[found.origin(found.skeleton.index(b'"b"'))] == ord('"')


def test_a_text_of_a_client_is_not_taken_for_one_whose_array_was_lifted() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":%b}]}'
    _, first = header_for("m", body % b"[1,2]", binary=True)
    assert next(first) == np.array([1, 2], np.float32).tobytes()
    with pytest.raises(InvalidArgument, match="expected an array"):
        header_for("m", body % b"NaN", binary=True)
    _, again = header_for("m", body % b"[3,4]", binary=True)
    assert next(again) == np.array([3, 4], np.float32).tobytes()


def test_numbers_that_json_does_not_have_are_taken_as_before() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[NaN,1,-Infinity]}]}'
    header, arrays = header_for("m", body, binary=False)
    assert header.inputs[0].own_data(arrays) == read_header(body).inputs[0].inline


def test_an_array_of_numbers_may_be_no_deeper_than_any_other() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":%b1%b}]}'
    deepest = body % (b"[" * 97, b"]" * 97)
    assert next(header_for("m", deepest, binary=False)[1]) == np.float32(1).tobytes()
    for depth in (98, 900):
        with pytest.raises(InvalidArgument, match="nesting depth exceeds"):
            header_for("m", body % (b"[" * depth, b"]" * depth), binary=False)


def test_values_beside_arrays_of_numbers_are_limited() -> None:
    text = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[%d],"data":[%b]}]}'
    n = MAX_VALUES + 1
    for body in (text % (n, b",".join([b'"a"'] * n)), b'"a"' * n):
        with pytest.raises(RequestError, match="values beside"):
            header_for("m", body, binary=False)
    prose = b'a, b: \\" ' * MAX_VALUES
    (prosaic,) = header_for("m", text % (1, b'"%b"' % prose), binary=False)[0].inputs
    assert prosaic.inline[4:] == prose.replace(b"\\", b"")


@QUICK
@given(st.sampled_from(NUMBERS), st.data())
def test_what_is_written_is_read_again(datatype: str, data: st.DataObject) -> None:
    dtype = np.dtype(numpy_dtype(datatype))
    raw = data.draw(st.binary(max_size=80))
    array = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
    text = b"".join(tensor_json(array.tobytes(), datatype, array.shape, "y"))
    again = np.array(json.loads(text), dtype)
    np.testing.assert_array_equal(again, array)


def test_long_outputs_are_written_in_parts() -> None:
    array = np.arange(100_000, dtype=np.float32)
    array[70_000] = np.nan
    parts = tensor_json(array.tobytes(), "FP32", array.shape, "y")
    assert max(map(len, parts)) < 1 << 20
    np.testing.assert_array_equal(np.array(json.loads(b"".join(parts)), np.float32), array)
    assert tensor_json(b"", "FP32", (0,), "y") == [b"[]"]
