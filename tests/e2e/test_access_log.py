"""The access log: one line for each request at its end, over both protocols, and the ids of requests."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from config_file import tensor, write_config
from ingress import INGRESS_PROCESSES
from operated import OperatedServer
from tritonclient.grpc import service_pb2 as pb

MODELS = Path(__file__).resolve().parents[1] / "models"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
TIMEOUT_S = 20.0
of_one_process = pytest.mark.skipif(
    INGRESS_PROCESSES > 1,
    reason="the log of an ingress process lacks what workers measure, callables its request ids",
)


def write_models(folder: Path, **server: Any) -> Path:
    x, y = [tensor("x", "INT32", -1)], [tensor("y", "INT32", -1)]
    echo = {"name": "echo", "callable": f"{MODELS / 'echo.py'}:batched", "max_batch_size": 8}
    count = {"name": "count", "callable": f"{MODELS / 'streams.py'}:count", "max_batch_size": 1}
    logs = {"name": "logs", "callable": f"{MODELS / 'logs.py'}:tell", "max_batch_size": 8}
    waits = {"name": "waits", "callable": f"{MODELS / 'logs.py'}:tell_later", "max_batch_size": 8}
    entries = [
        {**logs, "inputs": x, "outputs": y},
        {**waits, "inputs": x, "outputs": y},
        {**echo, "inputs": x, "outputs": y},
        {**count, "inputs": x, "outputs": y, "decoupled": True},
    ]
    return write_config(folder, entries, host="127.0.0.1", lame_duck_s=0, **server)


class Logged(OperatedServer):
    """A server whose lines of requests are looked up by an id."""

    def lines(self) -> list[dict[str, Any]]:
        return [one for one in self.messages() if one["logger"] == "gpuserve.access"]

    def line(self, request_id: str) -> dict[str, Any]:
        self.wait_log(f'"request_id": "{request_id}"')
        (found,) = [one for one in self.lines() if one["request_id"] == request_id]
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    with Logged(write_models(tmp_path_factory.mktemp("access"), access_log="all")) as started:
        yield started.wait_ready()  # type: ignore[misc]


@pytest.fixture(scope="module")
def channel(server: Logged) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.addresses["gRPC"]) as made:
        grpc.channel_ready_future(made).result(TIMEOUT_S)
        yield made


def post(server: Logged, path: str, body: bytes, **headers: str) -> tuple[int, str | None]:
    """The status, and the id in the answer."""
    connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {name.replace("_", "-"): v for name, v in headers.items()})
        response = connection.getresponse()
        response.read()
        return response.status, response.headers["x-request-id"]
    finally:
        connection.close()


def body(request_id: str = "") -> bytes:
    one = {"name": "x", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
    return json.dumps({"inputs": [one], **({"id": request_id} if request_id else {})}).encode()


def message(model: str = "echo", request_id: str = "", value: int = 2) -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="x", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.append(np.int32(value).tobytes())
    return request


@of_one_process
def test_a_request_over_http_has_a_line_with_what_is_known_of_it(server: Logged) -> None:
    sent = body("v2-id")
    path = "/v2/models/echo/infer?token=secret"
    status, answered = post(server, path, sent, x_request_id="from-header", authorization="secret")
    assert (status, answered) == (200, "from-header")
    line = server.line("from-header")
    assert line["protocol"] == "http/1.1"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v2/models/echo/infer", 200)
    assert (line["model"], line["batch_size"], line["client"]) == ("echo", 1, "127.0.0.1")
    assert line["received_nbytes"] == len(sent)
    assert line["sent_nbytes"] > 0
    assert 0 < line["compute_s"] <= line["duration_s"] < TIMEOUT_S
    assert 0 <= line["queue_s"] <= line["duration_s"]
    assert "secret" not in json.dumps(line)
    assert {"grpc_status", "aborted", "requests"}.isdisjoint(line)


def test_without_the_header_the_id_is_that_of_the_request_or_is_made(server: Logged) -> None:
    assert post(server, "/v2/models/echo/infer", body("own")) == (200, "own")
    assert server.line("own")["status"] == 200
    made = {post(server, "/v2/models/echo/infer", body())[1] for _ in range(2)}
    made.add(post(server, "/v2/models/echo/infer", body(), x_request_id="x" * 129)[1])
    assert len(made) == 3
    assert all(one and server.line(one)["model"] == "echo" for one in made)


@of_one_process
def test_a_call_of_grpc_has_a_line_and_its_status(server: Logged, channel: grpc.Channel) -> None:
    infer = channel.unary_unary(
        INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )
    sent = message()
    _, call = infer.with_call(sent, timeout=TIMEOUT_S, metadata=(("x-request-id", "call"),))
    assert dict(call.initial_metadata())["x-request-id"] == "call"
    line = server.line("call")
    assert (line["protocol"], line["path"], line["model"]) == ("grpc", INFER, "echo")
    assert (line["status"], line["grpc_status"], line["batch_size"]) == (200, 0, 1)
    assert line["received_nbytes"] == sent.ByteSize() + 5
    with pytest.raises(grpc.RpcError):
        infer(message("nobody"), timeout=TIMEOUT_S, metadata=(("x-request-id", "unknown"),))
    line = server.line("unknown")
    assert (line["model"], line["grpc_status"]) == ("nobody", grpc.StatusCode.NOT_FOUND.value[0])
    assert "compute_s" not in line


def test_a_stream_has_one_line_at_its_end(server: Logged, channel: grpc.Channel) -> None:
    stream = channel.stream_stream(
        STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    asked = iter([message("count", "a", 3), message("count", "b", 2)])
    call = stream(asked, timeout=TIMEOUT_S, metadata=(("x-request-id", "stream"),))
    assert len(list(call)) == 5
    assert dict(call.initial_metadata())["x-request-id"] == "stream"
    line = server.line("stream")
    assert (line["model"], line["requests"], line["grpc_status"]) == ("count", 2, 0)
    assert line["sent_nbytes"] > 0


def test_other_endpoints_and_refusals_have_lines_too(server: Logged) -> None:
    assert post(server, "/v2/models/echo/infer", b"{}", x_request_id="empty")[0] == 400
    assert server.line("empty")["status"] == 400
    assert post(server, "/nowhere%0aforged", b"", x_request_id="nowhere") == (404, "nowhere")
    assert server.line("nowhere")["path"] == "/nowhere%0aforged"


def test_a_client_that_leaves_is_told_of(server: Logged) -> None:
    host, port = server.addresses["HTTP"].split(":")
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: a\r\nx-request-id: left\r\ncontent-length: 9"
    with socket.create_connection((host, int(port)), TIMEOUT_S) as client:
        client.sendall(head + b"\r\n\r\n12")
    line = server.line("left")
    assert line["aborted"] is True
    assert line["received_nbytes"] <= 2
    assert "status" not in line


@of_one_process
@pytest.mark.parametrize("model", ["logs", "waits"])
def test_what_a_callable_logs_names_its_requests(server: Logged, model: str) -> None:
    name = f"{model}-told"
    assert post(server, f"/v2/models/{model}/infer", body(), x_request_id=name)[0] == 200
    server.wait_log(f"ran ('{name}',)")
    told = [one for one in server.messages() if one["msg"].startswith("ran ") and one["model"] == model]
    assert [one["request_ids"] for one in told] == [[name]]
    failing = body().replace(b"[1, 2]}", b"[0, 0]}")
    name = f"{model}-failed"
    assert post(server, f"/v2/models/{model}/infer", failing, x_request_id=name)[0] == 500
    text = f"callable of model '{model}' raised ZeroDivisionError"
    server.wait_log(text)
    (raised,) = [one for one in server.messages() if text in one["msg"]]
    assert raised["request_ids"] == [name]


@pytest.mark.thorough
def test_only_failures_are_logged_where_no_more_is_wanted(tmp_path: Path) -> None:
    with Logged(write_models(tmp_path, access_log="errors"), log_format="text") as server:
        server.wait_log("  HTTP  ")
        (shown,) = [one for one in server.log if one.startswith("  HTTP  ")]
        server.addresses["HTTP"] = shown.rpartition("http://")[2].strip()
        assert post(server, "/v2/models/echo/infer", body(), x_request_id="good") == (200, "good")
        assert post(server, "/v2/models/echo/infer", b"{}", x_request_id="bad") == (400, "bad")
        server.wait_log("request_id=bad")
        (line,) = [one for one in server.log if " access " in one]
    assert " access POST /v2/models/echo/infer 400 protocol=http/1.1 " in line


@pytest.mark.thorough
def test_ingress_processes_write_the_lines_of_their_requests(tmp_path: Path) -> None:
    with Logged(write_models(tmp_path, access_log="all", ingress_processes=2)).until_killed() as server:
        assert post(server, "/v2/models/echo/infer", body(), x_request_id="by-ingress") == (200, "by-ingress")
        line = server.line("by-ingress")
        assert (line["model"], line["status"]) == ("echo", 200)
        assert line["pid"] != server.front
        connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        connection.request("GET", "/v2", headers={"x-request-id": "passed-on"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["x-request-id"]) == (200, "passed-on")
        connection.close()
        assert server.line("passed-on")["path"] == "/v2"


@pytest.mark.thorough
def test_a_server_without_an_access_log_answers_no_id(tmp_path: Path) -> None:
    with Logged(write_models(tmp_path)).until_killed() as server:
        assert post(server, "/v2/models/echo/infer", body(), x_request_id="mine") == (200, None)
        assert server.lines() == []
