"""The JSON of inference requests over HTTP: every member, every datatype, and every way to get it wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from config_file import DATATYPES
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.protocols.http.infer_codec import parse_infer_request
from gpuserve.front.protocols.http.infer_json import OutputForm
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.json_values import MAX_JSON_NBYTES

JSON_DATATYPES = [one for one in DATATYPES if one not in {"FP16", "BF16", "BYTES"}]


def an_input(**changes: Any) -> dict[str, Any]:
    entry = {"name": "x", "shape": [2], "datatype": "INT32", "data": [1, 2], **changes}
    return {key: value for key, value in entry.items() if value is not None}


def parse_json(document: Any) -> tuple[InferRequest, OutputForm]:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_infer_request("m", "", text, None)


def parse_one(**changes: Any) -> bytes:
    request, _ = parse_json({"inputs": [an_input(**changes)]})
    data = request.inputs[0].data
    assert isinstance(data, bytes)
    return data


def error_of(document: Any, kind: type[RequestError] = InvalidArgument) -> str:
    with pytest.raises(kind) as caught:
        parse_json(document)
    text, found, rest = str(caught.value).rpartition(" (in a request for model 'm')")
    assert (bool(found), rest) == (True, "")
    return text


def error_of_input(kind: type[RequestError] = InvalidArgument, **changes: Any) -> str:
    return error_of({"inputs": [an_input(**changes)]}, kind)


class TestJsonData:
    @pytest.mark.parametrize(
        "data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [[], [1, 2, 3, 4]]]
    )
    def test_flat_or_nested(self, data: Any) -> None:
        assert parse_one(shape=[2, 2], data=data) == np.array([1, 2, 3, 4], np.int32).tobytes()

    def test_nested_deeper_than_the_shape(self) -> None:
        data: Any = 5
        for _ in range(50):
            data = [data]
        assert parse_one(shape=[1], data=data) == np.array([5], np.int32).tobytes()

    @given(st.data())
    def test_integers_in_range(self, data: st.DataObject) -> None:
        datatype = data.draw(st.sampled_from([one for one in JSON_DATATYPES if "INT" in one]))
        limits = np.iinfo(datatype.lower())
        values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max))))
        raw = parse_one(datatype=datatype, shape=[len(values)], data=values)
        assert np.frombuffer(raw, datatype.lower()).tolist() == values

    @pytest.mark.parametrize("datatype", [one for one in JSON_DATATYPES if "INT" in one])
    def test_integers_out_of_range(self, datatype: str) -> None:
        limits = np.iinfo(datatype.lower())
        for value in (int(limits.min) - 1, int(limits.max) + 1, 10**4000):
            text = error_of_input(datatype=datatype, data=[0, value])
            expected = f"must hold {datatype} integers from {limits.min} to {limits.max}, but got "
            assert expected in text
            assert len(text) < 200

    @pytest.mark.parametrize("datatype", ["FP32", "FP64"])
    def test_floats_and_their_literals(self, datatype: str) -> None:
        text = b'{"inputs":[{"name":"x","shape":[5],"datatype":"%s","data":[1,0.1,NaN,Infinity,-Infinity]}]}'
        request, _ = parse_json(text % datatype.encode())
        dtype = "float32" if datatype == "FP32" else "float64"
        expected = np.array([1, 0.1, np.nan, np.inf, -np.inf], dtype)
        np.testing.assert_array_equal(np.frombuffer(request.inputs[0].data, dtype), expected)

    def test_floats_out_of_range(self) -> None:
        assert error_of_input(datatype="FP32", data=[1, 1e39]) == (
            "'data' of input 'x' holds 1e+39, which is too large for FP32"
        )
        assert "too large for FP64" in error_of_input(datatype="FP64", data=[1, 10**400])

    @pytest.mark.parametrize(
        ("datatype", "element", "text"),
        [
            ("BOOL", 1, "attempt to access JSON non-boolean as boolean"),
            ("INT32", True, "must hold INT32 integers, but element 1 is true"),
            ("INT32", 1.0, "must hold INT32 integers, but element 1 is 1.0"),
            ("INT32", "1", 'must hold INT32 integers, but element 1 is "1"'),
            ("INT32", [1], "must hold INT32 integers, but element 1 is an array"),
            ("FP32", None, "must hold FP32 numbers, but element 1 is null"),
            ("FP64", False, "must hold FP64 numbers, but element 1 is false"),
            ("BYTES", 1, "access JSON non-string as string: it must hold strings, but element 1 is 1"),
            ("INT8", "1", "attempt to access JSON non-signed-integer as signed-integer: it must hold"),
            ("UINT8", "1", "attempt to access JSON non-unsigned-integer as unsigned-integer: it must hold"),
            ("FP32", "1", "attempt to access JSON non-number as double: it must hold"),
            ("BYTES", {"a": 1}, "must hold strings, but element 1 is an object"),
        ],
    )
    def test_an_element_of_another_kind(self, datatype: str, element: Any, text: str) -> None:
        first = {"BOOL": True, "BYTES": "a"}.get(datatype, 1)
        assert text in error_of_input(datatype=datatype, data=[first, element])

    def test_arrays_and_values_mixed(self) -> None:
        assert error_of_input(data=[[1], 2]) == "'data' of input 'x' mixes arrays and values at one level"

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            ([1], "Failed to parse 'data' field: shape does not match true shape"),
            ([1, 2, 3], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ],
    )
    def test_too_few_and_too_many_are_told_in_tritons_words(self, data: list[int], text: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            parse_json({"inputs": [an_input(data=data)]})
        assert str(caught.value) == f"{text}: input 'x' has {len(data)} in 'data', its 'shape' makes 2"

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_half_floats_have_no_json_form(self, datatype: str) -> None:
        assert error_of_input(datatype=datatype) == (
            f"receiving {datatype} data via JSON is not supported. "
            "Please use the binary data format for input x"
        )

    def test_no_elements_and_a_scalar(self) -> None:
        assert parse_one(shape=[0, 3], data=[]) == b""
        assert parse_one(shape=[], data=[7]) == np.array([7], np.int32).tobytes()

    def test_data_that_is_no_array(self) -> None:
        assert error_of_input(data=5) == "'data' of input 'x': expected an array, got 5"


class TestInputs:
    @pytest.mark.parametrize("shape", [[2, -5], [-1]])
    def test_negative_dimension(self, shape: list[int]) -> None:
        assert error_of_input(InvalidArgument, shape=shape) == (
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer, "
            f"got {shape[-1]} for input 'x'"
        )

    @pytest.mark.parametrize("shape", [[1.0], [True], ["1"], [None], [1 << 70]])
    def test_dimension_that_is_none(self, shape: list[Any]) -> None:
        assert "non-unsigned-integer as unsigned-integer" in error_of_input(shape=shape)

    def test_overflowing_shapes(self) -> None:
        text = error_of_input(shape=[2**4, 2**60 + 2])
        assert "causes total element count to exceed maximum size of 9223372036854775807" in text
        assert "byte size overflow for input 'x'" in error_of_input(shape=[2**2, 2**60 + 2])
        assert "total element count" in error_of_input(shape=[2**62] * 50_000)

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({"data": None}, "But no field is set"),
            ({"parameters": {"binary_data_size": 8}}, "But set 'data' 'binary_data_size'"),
            (
                {"parameters": {"binary_data_size": 8, "shared_memory_region": "r"}},
                "But set 'data' 'binary_data_size' 'shared_memory_region'",
            ),
        ],
    )
    def test_exactly_one_source(self, changes: dict[str, Any], found: str) -> None:
        assert error_of_input(**changes) == (
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. {found} for input 'x'"
        )

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"name": None}, "'name' of input 0 is missing in the request"),
            ({"name": 5}, "'name' of input 0: expected a string, got 5"),
            ({"name": ""}, "input 0 of the request has an empty name"),
            ({"shape": None}, "'shape' of input 'x' is missing in the request"),
            ({"datatype": None}, "'datatype' of input 'x' is missing in the request"),
            ({"parameters": []}, "expected an object, got an array"),
        ],
    )
    def test_members(self, changes: dict[str, Any], text: str) -> None:
        assert text in error_of_input(**changes)

    def test_a_long_name_is_not_repeated_in_full(self) -> None:
        assert len(error_of_input(name="n" * 65536, data=[1.5, 2])) < 300

    def test_unknown_datatype(self) -> None:
        text = error_of_input(datatype="FLOAT")
        assert text.startswith("datatype 'FLOAT' of input 'x' does not exist; use one")


class TestRequestMembers:
    @pytest.mark.parametrize(
        ("document", "text"),
        [
            ({"id": 5, "inputs": []}, "'id': expected a string, got 5"),
            ({}, "'inputs' is missing in the request"),
            ({"inputs": {}}, "'inputs': expected an array, got an object"),
            ({"inputs": [5]}, "'inputs[0]': expected an object, got 5"),
            ({"inputs": [], "outputs": [{}]}, "'name' of output 0 is missing in the request"),
            ([], "the request: expected an object, got an array"),
        ],
    )
    def test_of_the_wrong_kind(self, document: Any, text: str) -> None:
        assert error_of(document) == text

    @pytest.mark.parametrize(
        ("parameters", "text"),
        [
            ({"k": None}, "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'."),
            ({"k": [1]}, "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'."),
            ({"k": 1 << 63}, "parameter 'k' is an integer of more than 64 bits"),
            (
                {"triton_x": 1},
                "parameter keys starting with 'triton_' are reserved for Triton usage "
                "and should not be specified.",
            ),
            ({"priority": -1}, "'priority': expected an integer of at least 0, got -1"),
            ({"timeout": -1}, "'timeout': expected an integer of at least 0, got -1"),
            ({"binary_data_output": 1}, "'binary_data_output': expected true or false, got 1"),
        ],
    )
    def test_parameters_refused(self, parameters: dict[str, Any], text: str) -> None:
        assert error_of({"inputs": [], "parameters": parameters}) == text

    def test_priority(self) -> None:
        request, _ = parse_json({"inputs": [], "parameters": {"priority": 7}})
        assert (request.priority, request.parameters) == (7, {})
        request, _ = parse_json({"inputs": []})
        assert request.priority == 0

    def test_timeout_zero_is_none(self) -> None:
        request, _ = parse_json({"inputs": [], "parameters": {"timeout": 0}})
        assert request.timeout_s is None

    def test_an_output_that_is_listed_decides_for_itself(self) -> None:
        outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": True}}]
        parameters = {"binary_data_output": True}
        request, form = parse_json({"inputs": [], "outputs": outputs, "parameters": parameters})
        assert request.outputs == ("a", "b")
        assert form == OutputForm(frozenset("b"))


class TestMalformedJson:
    @pytest.mark.parametrize(
        ("text", "detail"),
        [
            (b"{", "Expecting property name enclosed in double quotes at 1"),
            # Python 3.13 has a sentence of its own for it.
            (
                b'{"inputs":[],}',
                "Expecting property name enclosed in double quotes at 13"
                if sys.version_info < (3, 13)
                else "Illegal trailing comma before end of object at 12",
            ),
            (b'{"id":"a', "Unterminated string starting at 6"),
            (b"{} x", "Extra data at 3"),
            (b'{"id":"\xff"}', "not UTF-8 at 7"),
            (b'{"id":"\\ud800"}', "a string holds half of a surrogate pair"),
            (b'{"id":"a","id":"b"}', 'key "id" is given twice in one object'),
            (b'{"inputs":[{"name":"x","name":"y"}]}', 'key "name" is given twice in one object'),
            (b'{"id":' + b"9" * 5000 + b"}", "an integer has too many digits"),
        ],
    )
    def test_is_told_where(self, text: bytes, detail: str) -> None:
        assert error_of(text) == f"failed to parse the request JSON buffer: {detail}"

    @pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
    @pytest.mark.parametrize("closed", [True, False])
    def test_deep_nesting(self, opening: bytes, closed: bool) -> None:
        closing = opening.translate(bytes.maketrans(b"[{", b"]}"), b'"a:')[::-1] * closed
        text = b'{"inputs":' + opening * 100_000 + b"1" + closing * 100_000 + b"}"
        assert error_of(text) == "JSON nesting depth exceeds maximum allowed limit (100)"

    def test_brackets_side_by_side_or_in_strings_are_not_deep(self) -> None:
        rows = [[i] for i in range(3000)]
        assert len(parse_one(shape=[3000, 1], data=rows)) == 12_000
        assert parse_one(datatype="BYTES", shape=[1], data=["[" * 500 + '\\"[{' * 99]) != b""

    def test_a_hostile_string_takes_linear_time(self) -> None:
        text = error_of(b"[" * 101 + b'"' + b'\\"' * 1_000_000)
        assert text == "JSON nesting depth exceeds maximum allowed limit (100)"

    def test_more_than_the_limit(self) -> None:
        text = error_of(b" " * (MAX_JSON_NBYTES + 1), ResourceExhausted)
        assert "request JSON size of 67108865 bytes exceeds the maximum allowed input size of" in text

    @given(st.binary(max_size=60))
    def test_any_bytes_are_answered(self, body: bytes) -> None:
        with pytest.raises(RequestError):
            parse_infer_request("m", "", body, None)
