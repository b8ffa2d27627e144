"""Bad input: one clear sentence with the right code, nothing stops, and nothing reaches a worker."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from exploring import examples
from fuzzing import json_requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Addresses
from test_v2_inference import metric
from tritonclient.grpc import service_pb2

SERVED = ("echo_FP32", "echo_BYTES", "parameters")
METHOD = "/inference.GRPCInferenceService/ModelInfer"
FOUR = np.arange(4, dtype=np.float32).tobytes()


def request(name: str = "echo_FP32") -> Any:
    """A good request: x, FP32, [1, 4]."""
    made = service_pb2.ModelInferRequest(model_name=name)
    made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    made.raw_input_contents.append(FOUR)
    return made


def over_grpc(server: Addresses, body: bytes, method: str = METHOD, **options: Any) -> tuple[str, str]:
    """(status code, text) of a call with these bytes as its message."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(method, lambda raw: raw, lambda raw: raw)
        try:
            call(body, timeout=10, **options)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def over_http(
    server: Addresses, path: str, body: bytes = b"", method: str = "POST", **headers: str
) -> tuple[int, str]:
    """(status, error text) of a request; header names get dashes for underscores."""
    connection = http.client.HTTPConnection(server.http, timeout=10)
    try:
        connection.request(
            method, path, body, {key.replace("_", "-"): value for key, value in headers.items()}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    return answer.status, json.loads(text)["error"] if text.startswith('{"error"') else text


def infer_json(server: Addresses, body: Any, name: str = "echo_FP32") -> tuple[int, str]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return over_http(server, f"/v2/models/{name}/infer", raw)


@pytest.fixture(autouse=True)
def valid_requests(server: Addresses) -> Iterator[list[str]]:
    """Check that no request reached a worker, except valid ones, which a random test lists."""
    before = metric(server, "gpuserve_batch_size_count")
    valid: list[str] = []
    yield valid
    assert metric(server, "gpuserve_batch_size_count") - before in range(len(valid) + 1)
    assert over_grpc(server, request().SerializeToString()) == ("OK", "")


# ---- what contradicts the model -------------------------------------------------------------


def edit(**fields: Any) -> Callable[[Any], None]:
    """Change fields of the first input."""

    def change(made: Any) -> None:
        for key, value in fields.items():
            if key == "shape":
                del made.inputs[0].shape[:]
                made.inputs[0].shape.extend(value)
            else:
                setattr(made.inputs[0], key, value)

    return change


def twice(made: Any) -> None:
    made.inputs.add().CopyFrom(made.inputs[0])
    made.raw_input_contents.append(FOUR)


def surplus(made: Any) -> None:
    made.inputs.add(name="z", datatype="FP32", shape=[1, 4])
    made.raw_input_contents.append(FOUR)


def none_at_all(made: Any) -> None:
    del made.inputs[:], made.raw_input_contents[:]


def short(made: Any) -> None:
    made.raw_input_contents[0] = FOUR[:-1]


def typed_too(made: Any) -> None:
    made.inputs[0].contents.fp32_contents.extend([0.0] * 4)


def asks_for(name: str) -> Callable[[Any], None]:
    return lambda made: made.outputs.add(name=name)


CONTRADICTIONS: list[tuple[Callable[[Any], None], list[str]]] = [
    (edit(name="wrong"), ["wrong", "echo_FP32", "x"]),
    (edit(datatype="INT32"), ["'x'", "INT32", "FP32", "echo_FP32"]),
    (edit(datatype="FLOAT"), ["'x'", "FLOAT"]),
    (edit(shape=[4]), ["'x'", "echo_FP32"]),
    (edit(shape=[1, 2, 2]), ["'x'", "[-1,-1]", "[1,2,2]"]),
    (edit(shape=[1, 5]), ["'x'", "20", "16"]),
    (edit(shape=[1, -4]), ["'x'", "-4"]),
    (edit(shape=[1, 1 << 62, 4]), ["'x'"]),
    (edit(shape=[1, 1 << 62]), ["'x'"]),
    (edit(shape=[65, 0]), ["65", "64", "echo_FP32"]),
    (short, ["'x'", "16", "15", "echo_FP32"]),
    (none_at_all, ["x", "echo_FP32"]),
    (twice, ["'x'", "already exists"]),
    (surplus, ["'z'", "echo_FP32"]),
    (typed_too, ["'x'", "contents"]),
    (asks_for("nope"), ["nope", "echo_FP32", "y"]),
    (lambda made: made.raw_input_contents.append(FOUR), ["raw_input_contents", "2", "1"]),
    (lambda made: made.raw_input_contents.pop(), ["'x'", "echo_FP32"]),
]


@pytest.mark.parametrize(("spoil", "named"), CONTRADICTIONS)
def test_a_request_that_contradicts_the_model(
    server: Addresses, spoil: Callable[[Any], None], named: list[str]
) -> None:
    made = request()
    spoil(made)
    code, text = over_grpc(server, made.SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert [word for word in named if word not in text] == []
    assert "Traceback" not in text
    assert "/" not in text


def body(**fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3], **fields}]}


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (body(name="wrong"), ["wrong", "echo_FP32"]),
        (body(datatype="INT32"), ["'x'", "INT32", "FP32"]),
        (body(shape=[4]), ["'x'"]),
        (body(shape=[1, 2, 2]), ["'x'", "[1,2,2]"]),
        (body(data=[1, 2]), ["shape does not match true shape"]),
        (body(data=[1, 2, 3, 4, 5]), ["Shape does not match true shape"]),
        (body(data=["a", 1, 2, 3]), ["'x'"]),
        (body(data=[True, 1, 2, 3]), ["'x'"]),
        (body(shape=[1, 1 << 40]), ["shape"]),
        (body(shape=[1.5, 4]), ["shape"]),
        (body(shape=[1, -4]), ["got -4 for input 'x'"]),
        ({"inputs": []}, ["x", "echo_FP32"]),
        ({}, ["inputs"]),
        ([], ["object"]),
        ({**body(), "outputs": [{"name": "nope"}]}, ["nope", "echo_FP32"]),
        ({**body(), "id": 7}, ["id"]),
        (b'{"inputs": [', ["JSON"]),
        (b"\xff\xfe", ["JSON"]),
        (b'{"inputs": [], "inputs": []}', ["inputs"]),
        (
            b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            ["nesting depth exceeds maximum allowed limit (100)"],
        ),
        (b"[" * 1_000_000, ["nesting depth exceeds maximum allowed limit (100)"]),
    ],
)
def test_json_that_contradicts_the_protocol_or_the_model(
    server: Addresses, sent: Any, named: list[str]
) -> None:
    status, text = infer_json(server, sent)
    assert status == 400
    assert [word for word in named if word not in text] == []


def test_truncated_byte_strings(server: Addresses) -> None:
    for raw in (b"\x05\0\0\0abc", b"\x01\0", struct.pack("<I", 1 << 31), b"\x01\0\0\0a\x01\0\0\0b"):
        made = service_pb2.ModelInferRequest(model_name="echo_BYTES")
        made.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
        made.raw_input_contents.append(raw)
        code, text = over_grpc(server, made.SerializeToString())
        assert (code, "'x'" in text, "echo_BYTES" in text) == ("INVALID_ARGUMENT", True, True)


# ---- what contradicts the transport ---------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "..%2fx", "a\0b", "", "x" * 65536, "\N{FRACTION SLASH}etc"])
def test_odd_model_names(server: Addresses, name: str) -> None:
    code, text = over_grpc(server, request(name).SerializeToString())
    assert (code, text.startswith("Request for unknown model")) == ("NOT_FOUND", True)
    assert len(text) < 300


@pytest.mark.parametrize("path", ["%2e%2e%2fetc", "a%00b", "x" * 10_000, "%ff"])
def test_odd_model_names_in_paths(server: Addresses, path: str) -> None:
    status, text = over_http(server, f"/v2/models/{path}/infer", b"{}")
    assert (status, "unknown model" in text) == (404, True)


def test_unknown_paths_methods_and_codings(server: Addresses) -> None:
    assert over_http(server, "/v3", method="GET") == (404, "Not Found")
    assert over_http(server, "/v2/models/echo_FP32/infer", method="GET") == (405, "Method Not Allowed")
    assert over_http(server, "/v2/models/echo_FP32/infer", b"{}", content_encoding="br")[0] == 501
    assert over_http(server, "/v2/models/echo_FP32/infer", b"no", content_encoding="gzip")[0] == 400
    assert over_grpc(server, b"", "/inference.GRPCInferenceService/Nope")[0] == "UNIMPLEMENTED"
    assert over_grpc(server, b"", "/nope/Nope")[0] == "UNIMPLEMENTED"


#: Every endpoint of HTTP that reads a body.
READERS = (
    *(f"/v2/models/{name}/{verb}" for name in SERVED for verb in ("infer", "generate", "generate_stream")),
    *("/v2/repository/index", "/v2/repository/models/echo_FP32/load", "/v2/repository/models/x/unload"),
    *("/v2/trace/setting", "/v2/models/echo_FP32/trace/setting", "/v2/logging"),
    *("/v2/systemsharedmemory/region/a/register", "/v2/cudasharedmemory/region/a/register"),
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
)


@given(path=st.sampled_from(READERS), raw=json_requests.INPUTS, length=st.none() | st.integers(-1, 100))
@settings(
    max_examples=examples(900), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_body_is_the_servers_fault(
    server: Addresses, valid_requests: list[str], path: str, raw: bytes, length: int | None
) -> None:
    named = {} if length is None else {"Inference_Header_Content_Length": str(length)}
    status, text = over_http(server, path, raw, **named)
    assert status != 500, text
    if status == 200:
        valid_requests.append(path)


@pytest.mark.parametrize("headers", [{}, {"Transfer_Encoding": "chunked"}])
def test_an_empty_body_is_no_tensor(server: Addresses, headers: dict[str, str]) -> None:
    sent = b"0\r\n\r\n" if headers else b""
    status, text = over_http(server, "/v2/models/echo_FP32/infer", sent, **headers)
    assert (status, "is empty, expected a JSON object such as" in text) == (400, True)


# ---- limits ---------------------------------------------------------------------------------
