"""Regions and classes in requests, told the same over both protocols, and placed outputs in responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.protocols.grpc import infer_decoder
from gpuserve.front.protocols.grpc.grpc_protocol import frame
from gpuserve.front.protocols.grpc.infer_encoder import encode_infer_response
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.protocols.http import infer_codec as codec
from gpuserve.front.protocols.http.body_scanner import BodyHead, HttpBodyScanner
from gpuserve.front.protocols.http.infer_json import OutputForm
from gpuserve.front.requests.inference import InferRequest, InferResponse, OutputTensor, RegionSlice

REGION, OFFSET, NBYTES = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
PLACE = {REGION: "r", OFFSET: 4, NBYTES: 8}
_CHOICES = {str: "string_param", int: "int64_param", bool: "bool_param", float: "double_param"}

Given = dict[str, Any] | None
#: Parses a request with these parameters of its input and of its output.
Parse = Callable[[Given, Given], InferRequest]


def _set(parameters: Any, given: dict[str, Any]) -> None:
    for key, value in given.items():
        setattr(parameters[key], _CHOICES[type(value)], value)


def grpc_message(of_input: Given, of_output: Given) -> Any:
    request = pb.ModelInferRequest(model_name="m")
    one = request.inputs.add(name="x", datatype="FP32", shape=[2])
    if of_input is None:
        request.raw_input_contents.append(bytes(8))
    else:
        _set(one.parameters, of_input)
    if of_output is not None:
        _set(request.outputs.add(name="y").parameters, of_output)
    return request


def parse_grpc(of_input: Given, of_output: Given) -> InferRequest:
    return infer_decoder.parse_infer_request(grpc_message(of_input, of_output).SerializeToString())


def share() -> Share:
    return Share(Intake(1 << 20, lambda: None))


def ingest_grpc(of_input: Given, of_output: Given) -> InferRequest:
    body = grpc_message(of_input, of_output).SerializeToString()
    scanner = GrpcBodyScanner(lambda *_: None, 1 << 20, share())
    scanner.feed(frame(len(body)) + body)
    return scanner.finish()


def http_body(of_input: Given, of_output: Given) -> bytes:
    one: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2]}
    if of_input is None:
        one["data"] = [0, 0]
    else:
        one["parameters"] = of_input
    outputs = [] if of_output is None else [{"name": "y", "parameters": of_output}]
    return json.dumps({"inputs": [one], "outputs": outputs}).encode()


def parse_http(of_input: Given, of_output: Given) -> InferRequest:
    return codec.parse_infer_request("m", "", http_body(of_input, of_output), None)[0]


def parse_remembered(of_input: Given, of_output: Given) -> InferRequest:
    """With a header length the JSON is remembered from one request to the next."""
    body = http_body(of_input, of_output)
    return codec.parse_infer_request("m", "", body, str(len(body)))[0]


def ingest_http(of_input: Given, of_output: Given) -> InferRequest:
    body = http_body(of_input, of_output)
    scanner = HttpBodyScanner(BodyHead("m", "", str(len(body)), len(body)), lambda _: None, 1 << 20, share())
    scanner.feed(body)
    return scanner.finish()[0]


every_way = pytest.mark.parametrize(
    "parse",
    [parse_grpc, ingest_grpc, parse_http, parse_remembered, ingest_http],
    ids=lambda one: one.__name__,
)
both = pytest.mark.parametrize("parse", [parse_grpc, parse_http], ids=["grpc", "http"])


def told(one: Any) -> tuple[str, int, int]:
    assert isinstance(one, RegionSlice)
    return one.region, one.offset, one.nbytes


def refusal(parse: Parse, of_input: Given, of_output: Given) -> str:
    with pytest.raises(InvalidArgument) as caught:
        parse(of_input, of_output)
    return str(caught.value)


@every_way
def test_an_input_and_an_output_in_regions(parse: Parse) -> None:
    for _ in range(2):
        request = parse(PLACE, {**PLACE, REGION: "s"})
        (given,) = request.inputs
        assert told(given.data) == ("r", 4, 8)
        assert {name: told(one) for name, one in request.placements.items()} == {"y": ("s", 4, 8)}
        assert request.regions == (given.data, request.placements["y"])
        assert request.outputs == ("y",)
        for one in request.regions:
            assert one.number == 0
            one.number = 7  # of this request only


@every_way
def test_a_request_without_any_with_an_output_in_a_region_or_with_classes(parse: Parse) -> None:
    request = parse(None, {})
    assert (request.regions, dict(request.placements), dict(request.class_counts)) == ((), {}, {})
    assert request.inputs[0].data == bytes(8)
    request = parse(None, {REGION: "s", NBYTES: 0})
    assert told(request.placements["y"]) == ("s", 0, 0)
    assert request.regions == (request.placements["y"],)
    request = parse(None, {"classification": 3})
    assert (request.outputs, request.class_counts) == (("y",), {"y": 3})


def parsed(request: Any) -> InferRequest:
    return infer_decoder.parse_infer_request(request.SerializeToString())


def test_a_raw_tensor_beside_one_in_a_region() -> None:
    request = grpc_message(PLACE, None)
    request.inputs.add(name="z", datatype="INT8", shape=[1])
    request.raw_input_contents.append(b"\1")
    found = parsed(request)
    assert (told(found.inputs[0].data), found.inputs[1].data) == (("r", 4, 8), b"\1")
    request.raw_input_contents.append(b"\2")
    with pytest.raises(InvalidArgument, match="expected one for each of its 1 inputs outside"):
        parsed(request)
    request = grpc_message(PLACE, None)
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    text = "unexpected 'content' provided when using shared memory for input tensor 'x' for model 'm'"
    with pytest.raises(InvalidArgument, match=f"^{text}$"):
        parsed(request)


def test_a_binary_tensor_beside_one_in_a_region() -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [2], "parameters": PLACE},
        {"name": "z", "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": 1}},
    ]
    text = json.dumps({"inputs": inputs}).encode()
    request, _ = codec.parse_infer_request("m", "", text + b"\1", str(len(text)))
    assert (told(request.inputs[0].data), request.inputs[1].data) == (("r", 4, 8), b"\1")


ALONG = f"'{NBYTES}' must be specified along with '{REGION}' parameter for tensor 'y'"
ALONE = f"'{{}}' can not be specified without '{REGION}' parameter for tensor 'y'"
TYPE = "invalid value type for '{}' parameter for tensor 'y'"


@both
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({REGION: "r"}, ALONG),
        ({OFFSET: 1}, ALONE.format(OFFSET)),
        ({NBYTES: 1}, ALONE.format(NBYTES)),
        ({**PLACE, REGION: 1}, TYPE.format(REGION)),
        ({**PLACE, NBYTES: "8"}, TYPE.format(NBYTES)),
        ({**PLACE, OFFSET: True}, TYPE.format(OFFSET)),
        ({**PLACE, OFFSET: -1}, "Invalid offset for shared memory region: 'r'"),
        ({**PLACE, NBYTES: -1}, "Invalid offset + byte size for shared memory region: 'r'"),
        *(
            ({"classification": n}, "invalid value for 'classification' parameter, expected >= 0")
            for n in (0, -2)
        ),
        *(
            ({"classification": n}, "invalid value type for 'classification' parameter, expe")
            for n in ("2", 1.5)
        ),
        ({**PLACE, "classification": 2}, "utput can't set both 'shared_memory_region' and 'classification'"),
    ],
)
def test_refusals(parse: Parse, parameters: dict[str, Any], text: str) -> None:
    assert text in refusal(parse, None, parameters)


def test_grpc_names_its_own_types() -> None:
    assert refusal(parse_grpc, {**PLACE, REGION: 1}, None).endswith("expected string_param.")
    assert refusal(parse_grpc, {**PLACE, OFFSET: "1"}, None).endswith("expected int64_param.")


def test_numbers_that_no_memory_has() -> None:
    assert refusal(parse_http, {**PLACE, OFFSET: (1 << 64) - 8}, None).startswith(
        "Integer overflow detected: byte_size (8) + offset (18446744073709551608) exceeds maximum value "
        "(18446744073709551615) for region 'r'"
    )
    assert "Invalid offset + byte size" in refusal(parse_http, {**PLACE, NBYTES: 1 << 63}, None)


def test_placed_outputs_have_no_bytes_in_the_response() -> None:
    outputs = [OutputTensor("y", "FP32", (1, 2), b"", True), OutputTensor("z", "INT8", (1,), b"\1")]
    response = InferResponse("m", "1", "", {}, outputs)
    message = pb.ModelInferResponse.FromString(b"".join(encode_infer_response(response)))
    assert list(message.raw_output_contents) == [b"", b"\1"]
    assert [one.name for one in message.outputs] == ["y", "z"]
    head, pieces, _ = codec.encode_infer_response(response, OutputForm(everything=True))
    length = int(dict(head.headers)[b"inference-header-content-length"])
    body = b"".join(pieces)
    assert json.loads(body[:length])["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 2]},
        {"name": "z", "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": 1}},
    ]
    assert body[length:] == b"\1"
    head, pieces, _ = codec.encode_infer_response(
        InferResponse("m", "1", "", {}, outputs[:1]), OutputForm(everything=True)
    )
    assert dict(head.headers)[b"content-type"] == b"application/json"
    assert json.loads(b"".join(pieces))["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 2]}]
