"""gRPC requests to objects, responses to bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import Internal, InvalidArgument, RequestError
from gpuserve.front.protocols.grpc import infer_encoder
from gpuserve.front.protocols.grpc.grpc_protocol import unary_message
from gpuserve.front.protocols.grpc.infer_decoder import parse_infer_request
from gpuserve.front.protocols.grpc.infer_encoder import LARGE_NBYTES, encode_infer_response
from gpuserve.front.requests.inference import InferResponse, OutputTensor
from gpuserve_worker.protocol.tensor import ITEMSIZE, encode_bytes, numpy_dtype

LIMIT = 1 << 20


def message(**fields: Any) -> Any:
    return pb.ModelInferRequest(model_name="m", **fields)


def tensor(name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (2,), **fields: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **fields)


def typed(**contents: Any) -> Any:
    return pb.InferTensorContents(**contents)


def parse(request: Any) -> Any:
    return parse_infer_request(request.SerializeToString())


def refusal(request: Any, error: type[RequestError] = InvalidArgument) -> str:
    with pytest.raises(error) as caught:
        parse(request)
    return str(caught.value)


def test_a_whole_request_is_read() -> None:
    request = message(
        model_version="3",
        id="r-1 é",
        inputs=[tensor("b", "INT8", (2, 1)), tensor("a", "FP32", ())],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("z", "y")],
        raw_input_contents=[b"\1\2", b"\0\0\0\0"],
    )
    parsed = parse(request)
    assert (parsed.model_name, parsed.model_version, parsed.id) == ("m", "3", "r-1 é")
    assert parsed.outputs == ("z", "y")
    assert [(t.name, t.datatype, t.shape, t.data) for t in parsed.inputs] == [
        ("b", "INT8", (2, 1), b"\1\2"),
        ("a", "FP32", (), b"\0\0\0\0"),
    ]
    assert parsed.parameters == {}
    assert parsed.timeout_s is None


def test_a_memoryview_is_read_like_bytes() -> None:
    body = message(inputs=[tensor()], raw_input_contents=[bytes(8)]).SerializeToString()
    assert parse_infer_request(memoryview(body)).inputs[0].data == bytes(8)


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x3a\xff\xff\xff\xff\x0f"])
def test_malformed_protobuf_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="not a ModelInferRequest"):
        parse_infer_request(body)


CONTENTS = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-32768, 32767]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [1.5, float("-inf")]),
    "FP64": ("fp64_contents", [0.1, float("inf")]),
}


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_become_raw_bytes(datatype: str) -> None:
    field, values = CONTENTS[datatype]
    parsed = parse(message(inputs=[tensor("x", datatype, (2,), contents=typed(**{field: values}))]))
    assert parsed.inputs[0].data == np.array(values, dtype=numpy_dtype(datatype)).tobytes()


def test_typed_bytes_are_length_prefixed() -> None:
    elements = [b"", b"a\0b", "é".encode()]
    parsed = parse(message(inputs=[tensor("x", "BYTES", (3,), contents=typed(bytes_contents=elements))]))
    assert parsed.inputs[0].data == encode_bytes(elements)


@pytest.mark.parametrize("datatype", ITEMSIZE)
def test_empty_contents_are_an_empty_tensor(datatype: str) -> None:
    assert parse(message(inputs=[tensor("x", datatype, (0,), contents=typed())])).inputs[0].data == b""


@pytest.mark.parametrize(
    ("datatype", "contents", "sentence"),
    [
        (
            "FP32",
            typed(int_contents=[1]),
            "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'INT32/INT16/INT8', "
            "expected datatype 'FP32'",
        ),
        ("FP16", typed(fp32_contents=[1]), "of type 'FP32', expected datatype 'FP16'"),
        ("BF16", typed(bytes_contents=[b"ab"]), "of type 'BYTES', expected datatype 'BF16'"),
        ("WHAT", typed(bool_contents=[True]), "of type 'BOOL', expected datatype 'WHAT'"),
        ("INT32", typed(int_contents=[1], uint_contents=[1]), "binary data was already supplied."),
        ("INT8", typed(int_contents=[0, 300]), "element 1 for input tensor 'x' for model 'm' is 300,"),
        ("UINT16", typed(uint_contents=[65536]), "is 65536, expected 0 to 65535 for datatype 'UINT16'"),
    ],
)
def test_contents_of_another_type_are_refused(datatype: str, contents: Any, sentence: str) -> None:
    assert sentence in refusal(message(inputs=[tensor("x", datatype, (1,), contents=contents)]))


def test_raw_and_typed_contents_together_are_refused() -> None:
    request = message(
        inputs=[tensor("a"), tensor("b", contents=typed(fp32_contents=[1, 2]))], raw_input_contents=[bytes(8)]
    )
    expected = "contents field must not be specified when using raw_input_contents for 'b' for model 'm'"
    assert expected in refusal(request)


def test_typed_contents_that_hold_nothing_are_none_beside_raw_ones() -> None:
    """MLServer's client of gRPC sends them."""
    one = tensor("a", shape=(2,), contents=typed())
    request = parse(message(inputs=[one], raw_input_contents=[bytes(8)]))
    assert [bytes(each.data) for each in request.inputs] == [bytes(8)]


def test_an_input_without_data_is_refused() -> None:
    request = message(inputs=[tensor("a"), tensor("b")], raw_input_contents=[bytes(8)])
    assert refusal(request) == "unable to find data for input tensor 'b' for model 'm' in request."


def test_surplus_raw_contents_are_refused() -> None:
    request = message(inputs=[tensor("a")], raw_input_contents=[bytes(8), b""])
    assert "has 2 entries in raw_input_contents, expected one for each of its 1 inputs" in refusal(request)


@pytest.mark.parametrize("what", ["inputs", "outputs", "parameters"])
def test_too_many_of_anything_are_refused_with_the_number(what: str) -> None:
    request = message()
    for number in range(2000):
        if what == "parameters":
            request.parameters[str(number)].bool_param = True
        else:
            getattr(request, what).add(name=str(number))
    assert f"has 2000 {what}, expected at most" in refusal(request)


def test_long_and_odd_names_are_cut_in_a_refusal() -> None:
    text = refusal(message(inputs=[tensor("n\n" + "x" * 65536)]))
    assert "n\\nx" in text
    assert "\n" not in text
    assert len(text) < 500


def with_parameter(key: str, **choice: Any) -> Any:
    request = message(inputs=[tensor()], raw_input_contents=[bytes(8)])
    request.parameters[key].CopyFrom(pb.InferParameter(**choice))
    return request


@pytest.mark.parametrize(
    ("choice", "value"),
    [("bool_param", False), ("int64_param", -5), ("string_param", "é"), ("double_param", 0.25)],
)
def test_custom_parameters_are_passed_on(choice: str, value: Any) -> None:
    parsed = parse(with_parameter("mine", **{choice: value}))
    assert parsed.parameters == {"mine": value}
    assert type(parsed.parameters["mine"]) is type(value)


def test_the_protocols_own_parameters_are_read_and_not_passed_on() -> None:
    request = with_parameter("sequence_id", int64_param=7)
    request.parameters["sequence_start"].bool_param = True
    request.parameters["priority"].uint64_param = 2
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    parsed = parse(request)
    assert parsed.parameters == {}
    assert parsed.sequence == (7, True, False)
    assert (parsed.priority, parsed.empty_final) == (2, True)


def test_without_parameters_there_is_no_priority_and_no_empty_final_response() -> None:
    parsed = parse(message())
    assert (parsed.priority, parsed.empty_final, parsed.parameters) == (0, False, {})


@pytest.mark.parametrize(("choice", "priority"), [("int64_param", 3), ("uint64_param", (1 << 64) - 1)])
def test_a_priority_may_be_either_integer(choice: str, priority: int) -> None:
    assert parse(with_parameter("priority", **{choice: priority})).priority == priority


def test_the_empty_final_response_may_be_declined() -> None:
    parsed = parse(with_parameter("triton_enable_empty_final_response", bool_param=False))
    assert parsed.empty_final is False


@pytest.mark.parametrize(("timeout_us", "timeout_s"), [(0, None), (1, 1e-6), (2_500_000, 2.5)])
def test_the_timeout_is_in_microseconds(timeout_us: int, timeout_s: float | None) -> None:
    parsed = parse(with_parameter("timeout", int64_param=timeout_us))
    assert (parsed.timeout_s, parsed.parameters) == (timeout_s, {})


@pytest.mark.parametrize(
    ("key", "choice", "sentence"),
    [
        (
            "mine",
            {"uint64_param": 1},
            "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param.",
        ),
        ("mine", {}, "gave no value"),
        ("timeout", {"string_param": "1"}, "value type for 'timeout' parameter, expected int64_param."),
        ("timeout", {"int64_param": -1}, "invalid value for 'timeout', expected value >= 0."),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        ("priority", {"bool_param": True}, "invalid value type for 'priority' parameter"),
        ("triton_x", {"bool_param": True}, "parameter keys starting with 'triton_' are reserved"),
        ("triton_enable_empty_final_response", {"int64_param": 1}, "expected bool_param"),
        ("k" * 257, {"bool_param": True}, "is longer than the 256 bytes a name may have"),
    ],
)
def test_wrong_parameters_are_refused(key: str, choice: dict[str, Any], sentence: str) -> None:
    text = refusal(with_parameter(key, **choice))
    assert sentence in text
    assert "model 'm'" in text


def response(*outputs: OutputTensor, request_id: str = "", parameters: Any = None) -> InferResponse:
    return InferResponse("m", "1", request_id, parameters or {}, list(outputs))


def decoded(encoded: list[bytes | memoryview]) -> Any:
    return pb.ModelInferResponse.FromString(b"".join(encoded))


@pytest.mark.parametrize("datatype", ITEMSIZE)
@pytest.mark.parametrize("request_id", ["", "1", "ünïcode 🙂" * 40])
def test_a_response_parses_back(datatype: str, request_id: str) -> None:
    data = encode_bytes([b"ab", b""]) if datatype == "BYTES" else bytes(range(2 * ITEMSIZE[datatype]))
    outputs = [
        OutputTensor("ÿ", datatype, (1, 2), data),
        OutputTensor("empty", datatype, (0,), memoryview(b"")),
        OutputTensor("scalar", datatype, (), data),
    ]
    encoded = encode_infer_response(response(*outputs, request_id=request_id))
    assert len(encoded) == 1
    message = decoded(encoded)
    assert (message.model_name, message.model_version, message.id) == ("m", "1", request_id)
    assert [(o.name, o.datatype, tuple(o.shape)) for o in message.outputs] == [
        ("ÿ", datatype, (1, 2)),
        ("empty", datatype, (0,)),
        ("scalar", datatype, ()),
    ]
    assert list(message.raw_output_contents) == [data, b"", data]


def test_responses_that_differ_only_in_a_shape_do_not_share_a_header() -> None:
    shapes = [(1, 2), (2, 1), (2,), (1, 2)]
    encoded = [encode_infer_response(response(OutputTensor("y", "INT8", shape, b"ab"))) for shape in shapes]
    assert [tuple(decoded(one).outputs[0].shape) for one in encoded] == shapes


def test_many_outputs_are_encoded_too() -> None:
    outputs = [OutputTensor(f"y{n}", "INT8", (n,), bytes(n)) for n in range(40)]
    message = decoded(encode_infer_response(response(*outputs)))
    assert [len(raw) for raw in message.raw_output_contents] == list(range(40))
    assert message.outputs[39].name == "y39"


def test_response_parameters_keep_their_types() -> None:
    parameters = {"b": True, "i": -3, "u": 2**64 - 1, "f": 0.5, "s": "é"}
    message = decoded(encode_infer_response(response(parameters=parameters, request_id="7")))
    given = {key: getattr(p, p.WhichOneof("parameter_choice")) for key, p in message.parameters.items()}
    assert given == parameters
    assert type(given["b"]) is bool
    assert message.id == "7"


@pytest.mark.parametrize("value", [None, [1], 2**64, b"raw", "\ud800"])
def test_a_parameter_that_grpc_cannot_carry_is_an_internal_error(value: Any) -> None:
    with pytest.raises(Internal, match="model 'm' set response parameter 'k'"):
        encode_infer_response(response(parameters={"k": value}))


def test_large_outputs_are_not_copied() -> None:
    large = memoryview(bytearray(LARGE_NBYTES))
    large[-1] = 7
    outputs = [
        OutputTensor("a", "UINT8", (3,), b"abc"),
        OutputTensor("b", "UINT8", (LARGE_NBYTES,), large),
        OutputTensor("c", "UINT8", (1,), b"d"),
    ]
    encoded = encode_infer_response(response(*outputs))
    assert any(piece is large for piece in encoded)
    assert len(encoded) == 3
    assert list(decoded(encoded).raw_output_contents) == [b"abc", bytes(large), b"d"]


@pytest.mark.parametrize("nbytes", [1, LARGE_NBYTES])
def test_a_framed_response_is_one_grpc_message(nbytes: int) -> None:
    encoded = encode_infer_response(
        response(OutputTensor("y", "UINT8", (nbytes,), bytes(nbytes))), framed=True
    )
    message = unary_message(b"".join(encoded), LIMIT)
    assert pb.ModelInferResponse.FromString(message).raw_output_contents[0] == bytes(nbytes)


def test_a_response_over_the_limit_of_grpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_encoder, "MAX_MESSAGE_NBYTES", 100)
    with pytest.raises(InvalidArgument, match=r"Response has byte size \d+ which exceeds gRPC's byte size"):
        encode_infer_response(response(OutputTensor("y", "UINT8", (100,), bytes(100))))
