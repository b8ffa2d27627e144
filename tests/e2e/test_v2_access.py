"""Restricted endpoints and forwarded headers, over both protocols."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import model, models, tensor, write_config
from serving import GPUSERVE, Addresses, serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 15.0
TOKEN = "correct-horse"
GROUPS = ["metadata", "inference", "model-repository", "model-config", "statistics"]
LONG = "triton-grpc-protocol-triton-access-token"
SHORT = "triton-access-token"
SERVICE = "/inference.GRPCInferenceService/"
CLOSED = [
    ("GET", "/v2"),
    ("GET", "/v2/models/parameters"),
    ("GET", "/v2/models/nope"),
    ("GET", "/v2/models/%70arameters/versions/1"),
    ("GET", "/v2/models/parameters/config"),
    ("POST", "/v2/models/parameters/infer"),
    ("POST", "/v2/repository/index"),
    ("GET", "/metrics"),
]


def serve(folder: Any, **settings: Any) -> Any:
    entries = [one for one in models() if one["name"] == "parameters"]
    # An answer to each request of a stream, so that it can be asked over one.
    entries.append(model("big", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4))
    config = write_config(folder, entries, host="127.0.0.1", **settings)
    return serving(GPUSERVE, "serve", str(config))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server whose endpoints but health are restricted."""
    folder = tmp_path_factory.mktemp("closed")
    with serve(folder, restricted_endpoints=GROUPS, access_token=TOKEN) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def forwards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server that forwards headers, by another pattern for each protocol."""
    patterns = {"http_header_forward_pattern": "my_header|^x-|^TIMEOUT$", "grpc_header_forward_pattern": ".*"}
    with serve(tmp_path_factory.mktemp("forwards"), **patterns) as addresses:
        yield addresses


def answered(
    address: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{address}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def refusal(address: str, method: str, message: Any = b"", **metadata: str) -> tuple[str, str] | None:
    """The status of a unary call, None where it is OK."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(SERVICE + method)
        sent = message if isinstance(message, bytes) else message.SerializeToString()
        try:
            call(sent, metadata=[*metadata.items()], timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return None


BEARER = ", or 'authorization: Bearer' with the token"
REFUSED = ("UNAVAILABLE", f"This protocol is restricted, expecting header '{LONG}'{BEARER}")


# ---- restricted endpoints -----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_http_needs_the_token(closed: Addresses, method: str, path: str) -> None:
    expected = {"error": f"This API is restricted, expecting header '{SHORT}'{BEARER}"}
    for headers in ({}, {SHORT: "wrong"}, {SHORT: TOKEN + "x"}, {LONG: TOKEN}):
        status, body = answered(closed.http, method, path, **headers)
        assert (status, json.loads(body)) == (403, expected)
    assert answered(closed.http, method, path, **{SHORT: TOKEN})[0] != 403


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/parameters/ready"])
def test_what_is_not_restricted_is_open(closed: Addresses, path: str) -> None:
    assert answered(closed.http, "GET", path)[0] == 200


def test_what_there_is_not_is_told_as_ever(closed: Addresses) -> None:
    assert answered(closed.http, "GET", "/v2/nope")[0] == 404
    assert answered(closed.http, "POST", "/v2")[0] == 405
    assert refusal(closed.grpc, "Nope")[0] == "UNIMPLEMENTED"  # type: ignore[index]


def test_the_metrics_port_is_never_restricted(closed: Addresses) -> None:
    status, body = answered(closed.metrics, "GET", "/metrics")
    assert (status, b"gpuserve_build_info" in body) == (200, True)


@pytest.mark.parametrize("method", ["ServerMetadata", "ModelMetadata", "ModelInfer", "RepositoryIndex"])
def test_grpc_needs_the_token(closed: Addresses, method: str) -> None:
    # Over the HTTP port as well, which speaks both protocols.
    for address in (closed.grpc, closed.http):
        assert refusal(address, method) == REFUSED
        assert refusal(address, method, **{LONG: "wrong"}) == REFUSED
        assert refusal(address, method, **{LONG: TOKEN}) != REFUSED
        assert refusal(address, method, **{SHORT: TOKEN}) != REFUSED
    assert refusal(closed.grpc, "ServerLive") is None


def test_a_large_request_is_refused_and_the_connection_goes_on(closed: Addresses) -> None:
    big = pb.ModelInferRequest(model_name="big", raw_input_contents=[bytes(3 << 20)])
    with grpc.insecure_channel(closed.grpc) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as error:
                call(big.SerializeToString(), timeout=TIMEOUT_S)
            assert (error.value.code().name, error.value.details()) == REFUSED
    assert answered(closed.http, "POST", "/v2/models/big/infer", bytes(3 << 20))[0] == 403


@pytest.mark.parametrize("end", [True, False])
def test_a_stream_is_refused_whether_or_not_its_requests_end(closed: Addresses, end: bool) -> None:
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    requests.put(pb.ModelInferRequest(model_name="big").SerializeToString())
    if end:
        requests.put(None)
    with grpc.insecure_channel(closed.grpc) as channel:
        answers = channel.stream_stream(SERVICE + "ModelStreamInfer")(
            iter(requests.get, None), timeout=TIMEOUT_S
        )
        with pytest.raises(grpc.RpcError) as error:
            next(answers)
        assert (error.value.code().name, error.value.details()) == REFUSED
        requests.put(None)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inference_with_the_token(closed: Addresses, protocol: str) -> None:
    headers = {SHORT: TOKEN} if protocol == "http" else {LONG: TOKEN}
    assert seen(closed, protocol, headers) == "[('n', 1)]"
    with pytest.raises(InferenceServerException, match="is restricted, expecting header"):
        seen(closed, protocol, {})


# ---- forwarded headers --------------------------------------------------------------------------


def seen(server: Addresses, protocol: str, headers: dict[str, str], **parameters: Any) -> str:
    """The parameters that the model was given, sorted."""
    kind: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    tensor_in = kind.InferInput("x", [1, 1], "FP32")
    tensor_in.set_data_from_numpy(np.ones((1, 1), np.float32))
    with kind.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        given = {"n": 1, **parameters}
        answer = client.infer("parameters", [tensor_in], headers=headers, parameters=given)
        return str(answer.as_numpy("seen")[0, 0].decode())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_headers_reach_the_model_beside_parameters(forwards: Addresses, protocol: str) -> None:
    headers = {"my_header_1": "a b", "x-user": "ann"}
    text = seen(forwards, protocol, headers, my_parameter="p")
    assert "('my_header_1', 'a b'), ('my_parameter', 'p'), ('n', 1)" in text
    assert "('x-user', 'ann')" in text


def test_only_headers_that_match_are_forwarded(forwards: Addresses) -> None:
    text = seen(forwards, "http", {"X-User": "ann", "other": "1"})
    assert text == "[('X-User', 'ann'), ('n', 1), ('x-user', 'ann')]"  # and as the client wrote the name


def test_grpc_forwards_no_header_of_the_transport_and_no_token(forwards: Addresses) -> None:
    text = seen(forwards, "grpc", {LONG: "secret", SHORT: "secret", "tag": "1"})
    forwarded = {name for name in dict(eval(text)) if name not in {"user-agent", "accept-encoding"}}
    assert forwarded == {"n", "tag"}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_header_stands_over_a_parameter(forwards: Addresses, protocol: str) -> None:
    assert "('x-user', 'ann')" in seen(forwards, protocol, {"x-user": "ann"}, **{"x-user": "forged"})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_reserved_header_is_refused(forwards: Addresses, protocol: str) -> None:
    with pytest.raises(
        InferenceServerException,
        match=r"header 'timeout' has the name of a parameter",
    ):
        seen(forwards, protocol, {"timeout": "5"})
    assert "('n', 1)" in seen(forwards, protocol, {})


def test_the_headers_of_a_stream_are_those_of_each_request(forwards: Addresses) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensor_in = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    tensor_in.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.grpc.InferenceServerClient(forwards.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers={"x-user": "ann"})
        for _ in range(2):
            client.async_stream_infer("parameters", [tensor_in])
            result = answers.get(timeout=TIMEOUT_S)
            assert b"('x-user', 'ann')" in result.as_numpy("seen")[0, 0]
        client.stop_stream()


# ---- pages of other origins ---------------------------------------------------------------------


def test_a_page_of_another_port_unloads_nothing(forwards: Addresses) -> None:
    load, register = "/v2/repository/models/parameters/load", "/v2/systemsharedmemory/region/r/register"
    headers = {"Origin": "http://localhost:3000", "Content-Type": "text/plain"}
    for path in (load, load.replace("/load", "/unload"), register, "/v2/logging", "/v2/trace/setting"):
        status, body = answered(forwards.http, "POST", path, b"{}", **headers)
        assert (status, b"not for pages of another server" in body) == (403, True), path
    own = {"Origin": f"http://{forwards.http}", "Content-Type": "text/plain"}
    assert answered(forwards.http, "POST", "/v2/logging", b"{}", **own)[0] == 200
