"""Inference bodies over HTTP: what tritonclient writes is understood, what it reads is written, and
whatever breaks the protocol is answered with one sentence."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import tritonclient.http as client
from config_file import DATATYPES
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument, NotFound
from gpuserve.front.net.http1_messages import parse_head
from gpuserve.front.protocols.http import infer_json as header
from gpuserve.front.protocols.http.infer_codec import LARGE_NBYTES, encode_infer_response, parse_infer_request
from gpuserve.front.protocols.http.infer_json import OutputForm
from gpuserve.front.requests.inference import InferRequest, InferResponse, OutputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of, encode_bytes

JSON_DATATYPES = [one for one in DATATYPES if one not in {"FP16", "BF16", "BYTES"}]
EVERYTHING = OutputForm(everything=True)
INSTANCES = (InstanceSpec("m_0", "cpu", {}),)


def an_input(**changes: Any) -> dict[str, Any]:
    entry = {"name": "x", "shape": [2], "datatype": "INT32", "data": [1, 2], **changes}
    return {key: value for key, value in entry.items() if value is not None}


def split(document: dict[str, Any], *tensors: bytes) -> tuple[bytes, str]:
    text = json.dumps(document).encode()
    return text + b"".join(tensors), str(len(text))


def binary_input(name: str, nbytes: int) -> dict[str, Any]:
    return an_input(name=name, data=None, parameters={"binary_data_size": nbytes})


def told(body: bytes | bytearray, length: str) -> Any:
    """All of a request, or its error."""
    try:
        request, form = parse_infer_request("m", "", body, length)
    except InvalidArgument as error:
        return str(error)
    tensors = [(one.name, one.datatype, one.shape, bytes(one.data)) for one in request.inputs]
    return (
        form,
        tensors,
        {name: getattr(request, name) for name in InferRequest.__slots__ if name != "inputs"},
    )


def client_request(array: Any, **options: Any) -> tuple[InferRequest, OutputForm]:
    tensor = client.InferInput("x", list(array.shape), datatype_of(array.dtype))
    tensor.set_data_from_numpy(array, binary_data=options.pop("binary", True))
    body, length = client.InferenceServerClient.generate_request_body([tensor], **options)
    return parse_infer_request("m", "3", body, None if length is None else str(length))


class TestWhatTritonclientSends:
    @pytest.mark.parametrize("binary", [True, False])
    @pytest.mark.parametrize("datatype", [*JSON_DATATYPES])
    def test_every_datatype(self, datatype: str, binary: bool) -> None:
        dtype = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}.get(datatype, datatype.lower())
        array = np.array([[0, 1, 1], [1, 0, 1]], dtype=dtype)
        request, _ = client_request(array, binary=binary)
        (tensor,) = request.inputs
        assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, (2, 3))
        assert tensor.data == array.tobytes()

    @pytest.mark.parametrize("binary", [True, False])
    def test_strings(self, binary: bool) -> None:
        array = np.array(["a", "", "gr\u00fc\u00df \U0001f600"], dtype=object)
        request, _ = client_request(array, binary=binary)
        assert request.inputs[0].data == encode_bytes(array)

    def test_request_members(self) -> None:
        request, form = client_request(
            np.zeros(4, np.float32),
            request_id="r-1",
            priority=2,
            timeout=1500,
            parameters={"k": "v", "n": 3, "b": True, "d": 0.5},
            outputs=[client.InferRequestedOutput("y"), client.InferRequestedOutput("z", binary_data=False)],
        )
        assert (request.model_name, request.model_version, request.id) == ("m", "3", "r-1")
        assert (request.timeout_s, request.priority) == (0.0015, 2)
        assert request.parameters == {"k": "v", "n": 3, "b": True, "d": 0.5}
        assert request.outputs == ("y", "z")
        assert form == OutputForm(frozenset(request.outputs[:1]))

    def test_no_outputs_asks_for_all_as_binary(self) -> None:
        request, form = client_request(np.zeros((0, 4), np.float32))
        assert (request.inputs[0].shape, request.inputs[0].data) == ((0, 4), b"")
        assert request.outputs == ()
        assert form.everything


class TestBinaryTensors:
    def test_cut_in_order_of_the_inputs_beside_json_data(self) -> None:
        document = {"inputs": [binary_input("a", 8), an_input(name="b"), binary_input("c", 8)]}
        body, length = split(document, b"aaaaaaaa", b"cccccccc")
        request, _ = parse_infer_request("m", "", memoryview(body), length)
        expected = [b"aaaaaaaa", np.array([1, 2], np.int32).tobytes(), b"cccccccc"]
        assert [one.data for one in request.inputs] == expected

    def test_a_large_one_is_a_view_of_the_body(self) -> None:
        body, length = split({"inputs": [binary_input("a", LARGE_NBYTES)]}, bytes(LARGE_NBYTES))
        request, _ = parse_infer_request("m", "", body, length)
        data = request.inputs[0].data
        assert isinstance(data, memoryview)
        assert data.obj is body

    @pytest.mark.parametrize("surplus", [-1, 0, 1])
    @pytest.mark.parametrize("changes", [{}, {"id": "i"}, {"parameters": {"priority": 2, "timeout": 5}}])
    def test_a_remembered_request_is_read_as_another(self, changes: dict[str, Any], surplus: int) -> None:
        """A bytearray is read without what is remembered."""
        inputs = [binary_input("a", 8), binary_input("b", 8)]
        outputs = [{"name": "y", "parameters": {"binary_data": True}}]
        body, length = split({"inputs": inputs, "outputs": outputs, **changes}, bytes(range(16)))
        body = body[:surplus] if surplus < 0 else body + bytes(surplus)
        for _ in range(2):
            assert told(body, length) == told(bytearray(body), length)

    def test_remembered_headers_do_not_share_parameters(self) -> None:
        body, length = split({"inputs": [], "parameters": {"k": 1}})
        first, _ = parse_infer_request("m", "", body, length)
        first.parameters["k"] = 2
        second, _ = parse_infer_request("m", "", body, length)
        assert second.parameters == {"k": 1}

    def test_what_is_remembered_is_bounded(self) -> None:
        long_id, length = split({"id": "i" * 2000, "inputs": []})
        before = header._remembered_header.cache_info()
        request, _ = parse_infer_request("m", "", long_id, length)
        after = header._remembered_header.cache_info()
        assert request.id == "i" * 2000
        assert before == after
        assert after.maxsize is not None

    @pytest.mark.parametrize(
        ("tensors", "text"),
        [
            (bytes(7), "unexpected size for input 'a', expecting 1 additional bytes for model 'm'"),
            (bytes(9), "unexpected size for input 'b', expecting 7 additional bytes for model 'm'"),
            (b"", "unexpected size for input 'a', expecting 8 additional bytes for model 'm'"),
            (bytes(17), "unexpected additional input data for model 'm'"),
        ],
    )
    def test_sizes_that_lie(self, tensors: bytes, text: str) -> None:
        document = {"inputs": [binary_input("a", 8), binary_input("b", 8)]}
        body, length = split(document, tensors)
        with pytest.raises(InvalidArgument) as caught:
            parse_infer_request("m", "", body, length)
        assert str(caught.value) == text

    def test_without_the_header(self) -> None:
        with pytest.raises(InvalidArgument) as caught:
            parse_infer_request("m", "", json.dumps({"inputs": [binary_input("a", 8)]}).encode(), None)
        assert str(caught.value) == (
            "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' "
            "when passing inputs in binary data format"
        )

    @pytest.mark.parametrize("size", [-1, 1.5, True, "8", None, 1 << 70])
    def test_a_size_that_is_none(self, size: Any) -> None:
        body, length = split({"inputs": [an_input(data=None, parameters={"binary_data_size": size})]})
        with pytest.raises(InvalidArgument, match=r"'binary_data_size' of input 'x': expected an integer"):
            parse_infer_request("m", "", body, length)


class TestHeaderLength:
    @pytest.mark.parametrize(
        ("values", "text"),
        [
            (
                ["x", "", "1_0", "٣", "1.0", "0x10", "--1", "1 2"],
                "Unable to parse Inference-Header-Content-Length, got: ",
            ),
            (
                ["99999999999", "-99999999999", "9" * 5000],
                "Unable to parse Inference-Header-Content-Length, value is out of range "
                "[ -2147483648, 2147483647 ], got: ",
            ),
            (["-1", "3", "2147483647"], "inference header size should be in range (0, 2), got: "),
        ],
        ids=["no number", "beyond int32", "out of the body"],
    )
    def test_refused(self, values: list[str], text: str) -> None:
        for value in values:
            with pytest.raises(InvalidArgument) as caught:
                parse_infer_request("m", "", b"{}", value)
            assert str(caught.value) == text + value[:64]

    def test_leading_zeros_are_a_number(self) -> None:
        body, length = split({"inputs": []})
        request, _ = parse_infer_request("m", "", body, "0" * 30 + length)
        assert request.inputs == []


class TestRawBinaryRequests:
    def spec(self, *inputs: TensorSpec, max_batch_size: int = 0) -> ModelSpec:
        return ModelSpec("m", inputs, (), max_batch_size, INSTANCES)

    def parse(self, body: bytes, spec: ModelSpec | None) -> InferRequest:
        request, form = parse_infer_request("m", "", body, "0", spec)
        assert form == EVERYTHING
        return request

    @pytest.mark.parametrize("count", [8, 32, 0])
    def test_one_open_dimension_takes_the_rest(self, count: int) -> None:
        spec = self.spec(TensorSpec("x", "FP32", (-1, 4)))
        (tensor,) = self.parse(bytes(count * 4), spec).inputs
        assert (tensor.name, tensor.datatype, tensor.shape) == ("x", "FP32", (count // 4, 4))
        assert tensor.data == bytes(count * 4)

    def test_batch_dimension(self) -> None:
        spec = self.spec(TensorSpec("x", "INT8", (4,)), max_batch_size=8)
        assert self.parse(b"abcd", spec).inputs[0].shape == (1, 4)

    def test_bytes_get_their_length(self) -> None:
        spec = self.spec(TensorSpec("x", "BYTES", (1,)))
        assert self.parse(b"hello", spec).inputs[0].data == encode_bytes([b"hello"])
        assert parse_infer_request("m", "", b"", "0", spec)[0].inputs[0].data == encode_bytes([b""])

    @pytest.mark.parametrize(
        ("inputs", "text"),
        [
            (
                (TensorSpec("a", "FP32", (4,)), TensorSpec("b", "FP32", (4,))),
                "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' "
                "model configuration",
            ),
            (
                (TensorSpec("x", "FP32", (-1, -1)),),
                "The shape of the raw input 'x' can not be deduced because there are more than one "
                "variable-sized dimension",
            ),
            *(
                (
                    (TensorSpec("x", "BYTES", shape),),
                    "For BYTE datatype raw input 'x', the model must have input shape [1]",
                )
                for shape in [(-1,), (2,)]
            ),
            *(
                (
                    (TensorSpec("x", "FP32", (-1, axis)),),
                    f"the raw input 'x' has 5 bytes, which is no multiple of the {4 * axis} bytes that one "
                    "step of its variable-sized dimension takes",
                )
                for axis in (2, 0)
            ),
        ],
    )
    def test_refused(self, inputs: tuple[TensorSpec, ...], text: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            self.parse(b"hello", self.spec(*inputs))
        assert str(caught.value) == text

    def test_unknown_model(self) -> None:
        with pytest.raises(NotFound, match=r"^Request for unknown model: 'm' is not found$"):
            self.parse(b"hello", None)


def output(name: str, array: Any, datatype: str | None = None) -> OutputTensor:
    data = encode_bytes(array.ravel()) if array.dtype == object else array.tobytes()
    return OutputTensor(name, datatype or datatype_of(array.dtype), array.shape, data)


def response(*outputs: OutputTensor, **changes: Any) -> InferResponse:
    members = {"request_id": "", "parameters": {}, **changes}
    return InferResponse("m", "1", members["request_id"], members["parameters"], list(outputs))


class TestResponses:
    def test_json_members_in_order(self) -> None:
        one = response(
            output("y", np.array([[1, 2]], np.int32)), request_id='i"d', parameters={"p": 1.5, "q": "r"}
        )
        head, pieces, nbytes = encode_infer_response(one, OutputForm())
        text = (
            b'{"id":"i\\"d","model_name":"m","model_version":"1","parameters":{"p":1.5,"q":"r"},'
            b'"outputs":[{"name":"y","datatype":"INT32","shape":[1,2],"data":[1,2]}]}'
        )
        assert pieces == [text]
        assert (head.status, head.headers) == (200, ((b"content-type", b"application/json"),))
        assert nbytes == len(text)

    def test_without_id_parameters_and_outputs(self) -> None:
        head, pieces, _ = encode_infer_response(response(), EVERYTHING)
        assert pieces == [b'{"model_name":"m","model_version":"1","outputs":[]}']
        assert b"inference-header-content-length" not in dict(head.headers)

    def test_tritonclient_reads_binary_and_json_side_by_side(self) -> None:
        arrays = {
            "a": np.arange(6, dtype=np.float16).reshape(2, 3),
            "b": np.array([[True, False]]),
            "c": np.array([b"\xff\x00", "gr\u00fc\u00df".encode()], dtype=object),
        }
        one = response(*(output(name, array) for name, array in arrays.items()))
        head, pieces, nbytes = encode_infer_response(one, OutputForm(frozenset({"a", "c"})))
        found = dict(head.headers)
        assert nbytes == sum(map(len, pieces))
        assert found[b"content-type"] == b"application/octet-stream"
        result = client.InferenceServerClient.parse_response_body(
            b"".join(pieces), header_length=int(found[b"inference-header-content-length"])
        )
        assert result.get_response()["model_version"] == "1"
        for name, array in arrays.items():
            np.testing.assert_array_equal(result.as_numpy(name), array)

    @given(
        st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=3)), max_size=20),
        st.sets(st.sampled_from("abc")),
        st.booleans(),
        st.binary(min_size=1, max_size=1),
    )
    def test_what_is_remembered_of_a_response_is_what_is_written(
        self, outputs: list[tuple[str, list[int]]], names: set[str], everything: bool, filling: bytes
    ) -> None:
        """With an id nothing is remembered: but for it the response is the same."""
        form = OutputForm(frozenset(names), everything)
        tensors = [OutputTensor(name, "UINT8", tuple(of), filling * math.prod(of)) for name, of in outputs]
        _, pieces, nbytes = encode_infer_response(response(*tensors), form)
        head, again, _ = encode_infer_response(response(*tensors), form)
        other, written, with_id = encode_infer_response(response(*tensors, request_id="i"), form)
        assert b"".join(pieces) == b"".join(again) == b"".join(written).replace(b'"id":"i",', b"", 1)
        assert nbytes == len(b"".join(pieces)) == with_id - len(b'"id":"i",')
        assert [name for name, _ in head.headers] == [name for name, _ in other.headers]
        told = dict(head.headers).get(b"inference-header-content-length")
        assert told is None or json.loads(b"".join(pieces)[: int(told)])["model_name"] == "m"

    def test_large_outputs_are_not_copied(self) -> None:
        data = memoryview(bytes(1 << 20))
        one = response(OutputTensor("y", "UINT8", (1 << 20,), data))
        _, pieces, nbytes = encode_infer_response(one, EVERYTHING)
        assert pieces[1] is data
        assert nbytes == len(pieces[0]) + len(data)

    @pytest.mark.parametrize("datatype", JSON_DATATYPES)
    def test_json_data_comes_back_as_it_went(self, datatype: str) -> None:
        dtype = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}.get(datatype, datatype.lower())
        array = np.array([[0, 1], [1, 1]], dtype)
        _, pieces, _ = encode_infer_response(response(output("y", array)), OutputForm())
        data = json.loads(pieces[0])["outputs"][0]["data"]
        assert data == array.ravel().tolist()

    @pytest.mark.parametrize(
        ("array", "text"),
        [
            (np.array([np.nan, np.inf, -np.inf], np.float32), "[NaN,Infinity,-Infinity]"),
            (np.array(["gr\u00fc\u00df", 'a"b'], dtype=object), '["gr\u00fc\u00df","a\\"b"]'),
        ],
        ids=["literals", "UTF-8"],
    )
    def test_values_of_json(self, array: Any, text: str) -> None:
        _, pieces, _ = encode_infer_response(response(output("y", array)), OutputForm())
        assert f'"data":{text}'.encode() in pieces[0]

    def test_bytes_that_are_no_text(self) -> None:
        one = response(output("y", np.array([b"\xff"], dtype=object)))
        text = r"not UTF-8.*Please use the binary data format for output y"
        with pytest.raises(InvalidArgument, match=text):
            encode_infer_response(one, OutputForm())

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_half_floats_have_no_json_form(self, datatype: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            encode_infer_response(response(OutputTensor("y", datatype, (1,), b"\0\0")), OutputForm())
        assert str(caught.value) == (
            f"sending {datatype} data via JSON is not supported. "
            "Please use the binary data format for output y"
        )


def test_requests_of_two_thousand_lengths_cost_as_much_as_those_of_one() -> None:
    def calls_per_request(lengths: range) -> float:
        requests = []
        for length in lengths:
            tensor = {"name": "x", "shape": [1, length], "datatype": "INT8"}
            text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": length}}]}).encode()
            head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
            answer = InferResponse("m", "1", "", {}, [OutputTensor("y", "INT8", (1, length), bytes(length))])
            body = text + bytes(length)
            requests.append((head % len(body), body, str(len(text)), answer))
        calls = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        for is_counted in (False, True):
            sys.setprofile(counted if is_counted else None)
            try:
                for head, body, json_length, answer in requests:
                    parse_head(head)
                    parse_infer_request("m", "", body, json_length)
                    encode_infer_response(answer, OutputForm(everything=True))
            finally:
                sys.setprofile(None)
        return calls / len(requests)

    assert calls_per_request(range(1, 2001)) < 1.1 * calls_per_request(range(1, 17))
