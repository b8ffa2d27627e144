"""Connections as they are in the wild: cut in the middle, half sent, of the wrong protocol. Whatever happens
on one, nothing is held for it any longer, the log has no word of it, and the others go on.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_file import model, tensor, write_config
from operated import OperatedServer
from processes import wait_until
from test_v2_inference import CLIENTS
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

INFER = "/inference.GRPCInferenceService/ModelInfer"
LARGE_NBYTES = 32 << 20
TIMEOUT_S = 10.0
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\n\r\n"
POST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """One echo model, and the log of the server."""
    echo = model("echo", "echo", [tensor("x", "UINT8", -1)], [tensor("y", "UINT8", -1)], 64)
    folder = tmp_path_factory.mktemp("connections")
    config = write_config(folder, [echo], host="127.0.0.1")
    with OperatedServer(config).until_ended() as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_of_it_is_left(server: OperatedServer) -> Iterator[None]:
    said = len(server.log)
    yield
    wait_until(lambda: server.metric("gpuserve_arena_blocks") == 0, "the arena is empty", TIMEOUT_S)
    assert echoes(server, "http")
    assert echoes(server, "grpc")
    assert server.log[said:] == []


def address(server: OperatedServer, protocol: str) -> str:
    return server.addresses["gRPC" if protocol == "grpc" else "HTTP"]


def infer(server: OperatedServer, protocol: str, nbytes: int, name: str = "echo") -> Any:
    sent = CLIENTS[protocol].InferInput("x", [1, nbytes], "UINT8")
    sent.set_data_from_numpy(np.full((1, nbytes), 7, np.uint8))
    with CLIENTS[protocol].InferenceServerClient(address(server, protocol)) as client:
        return client.infer(name, [sent]).as_numpy("y")


def echoes(server: OperatedServer, protocol: str) -> bool:
    return infer(server, protocol, 3).tolist() == [[7, 7, 7]]


def connected(server: OperatedServer, role: str = "HTTP") -> socket.socket:
    host, _, port = server.addresses[role].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def until(connection: socket.socket, end: bytes) -> bytes:
    """What arrives up to ``end``, or up to the end of the connection."""
    arrived = b""
    while end not in arrived:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            break
        if not piece:
            break
        arrived += piece
    return arrived


def curl(server: OperatedServer, protocol: str, path: str, *options: str) -> subprocess.Popen[bytes]:
    """A request by curl, over HTTP/2 for gRPC; its body is what stdin is given."""
    of_grpc = ["--http2-prior-knowledge", "-H", "te: trailers", "-H", "content-type: application/grpc"]
    command = ["curl", "-sN", "-m", str(TIMEOUT_S), *(of_grpc if protocol == "grpc" else []), *options]
    return subprocess.Popen(
        [*command, f"http://{address(server, protocol)}{path}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def grpc_body(nbytes: int) -> bytes:
    """A framed ``ModelInferRequest`` for the echo model."""
    message = service_pb2.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="UINT8", shape=[1, nbytes])
    message.raw_input_contents.append(bytes(nbytes))
    body: bytes = message.SerializeToString()
    return struct.pack(">BI", 0, len(body)) + body


def http_body(nbytes: int) -> tuple[bytes, int]:
    """An inference body that asks for a binary answer, and how much of it is JSON."""
    entry = {"name": "x", "datatype": "UINT8", "shape": [1, nbytes]}
    entry["parameters"] = {"binary_data_size": nbytes}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(nbytes), len(head)


# ---- clients that go away -------------------------------------------------------------------


@pytest.mark.parametrize("protocol", CLIENTS)
def test_a_client_that_leaves_while_its_answer_is_sent(
    server: OperatedServer, protocol: str, tmp_path: Path
) -> None:
    body, length = http_body(LARGE_NBYTES)
    path, options = "/v2/models/echo/infer", ["-H", f"inference-header-content-length: {length}"]
    if protocol == "grpc":
        path, options, body = INFER, [], grpc_body(LARGE_NBYTES)
    (tmp_path / "body").write_bytes(body)
    before = server.n_sockets()
    for _ in range(2):
        with curl(server, protocol, path, *options, "--data-binary", f"@{tmp_path / 'body'}") as client:
            assert client.stdout is not None
            assert len(client.stdout.read(100_000)) == 100_000
            client.kill()
    wait_until(lambda: server.n_sockets() <= before, "its connections are closed", TIMEOUT_S)


def test_a_grpc_client_that_leaves_in_the_middle_of_a_message(server: OperatedServer) -> None:
    with curl(server, "grpc", INFER, "-X", "POST", "-T", "-") as client:
        assert client.stdin is not None
        client.stdin.write(grpc_body(LARGE_NBYTES)[: LARGE_NBYTES // 2])
        client.stdin.flush()
        wait_until(lambda: server.metric("gpuserve_arena_blocks") == 1, "the body arrives", TIMEOUT_S)
        client.kill()


# ---- answers that come before the end of the request ----------------------------------------


@pytest.mark.parametrize("protocol", CLIENTS)
def test_a_large_body_for_nobody(server: OperatedServer, protocol: str) -> None:
    for _ in range(5):
        with pytest.raises(InferenceServerException, match="unknown model: 'nope' is not found"):
            infer(server, protocol, 8 << 20, name="nope")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"POST /v2/models/nope/infer", b"404"),
        (b"POST /nope", b"404"),
        (b"PUT /v2", b"405"),
    ],
)
def test_a_connection_goes_on_after_an_early_answer(
    server: OperatedServer, line: bytes, status: bytes
) -> None:
    with connected(server) as connection:
        connection.sendall(line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
        assert until(connection, b'"}').split()[1] == status
        connection.sendall(b"x" * 999_000 + LIVE)
        assert until(connection, b"}").endswith(b'{"live":true}')


# ---- what nobody allows ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [INFER, "/inference.GRPCInferenceService/ServerLive"])
@pytest.mark.parametrize("version", ["--http2-prior-knowledge", "--http1.1"])
def test_grpc_through_something_that_drops_trailers(server: OperatedServer, version: str, path: str) -> None:
    options = ["-i", version, "-H", "content-type: application/grpc", "--data-binary", "@-"]
    with curl(server, "http", path, *options) as client:
        answer, _ = client.communicate(grpc_body(4))
    assert b"grpc-status: 3\r\n" in answer
    assert b"needs the header 'te: trailers'" in answer


def test_http_on_the_grpc_port(server: OperatedServer) -> None:
    with connected(server, "gRPC") as connection:
        connection.sendall(LIVE)
        assert until(connection, b"}").endswith(b'{"live":true}')
