"""HTTP/1 by sockets: the answer is the same however a body is sent, and what clients do besides asking one
good request after the other.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import select
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_file import model, models, tensor, write_config
from ingress import INGRESS_PROCESSES
from operated import OperatedServer
from processes import wait_until

LIMIT_NBYTES = 4 << 20
TIMEOUT_S = 10.0
MODELS = Path(__file__).parents[1] / "models"
SERVED = {"echo_FP32", "echo_UINT8", "echo_BYTES", "echo_BF16", "parameters"}
FOUR = np.arange(4, dtype=np.float32).tobytes()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\n\r\n"


@pytest.fixture(scope="module")
def fifo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "gate"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def server(fifo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """A few models, one that raises, and one that runs until its FIFO is opened and closed."""
    flat = [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)]
    raises = model("raises", "", *flat) | {"callable": f"{MODELS}/raises.py:always"}
    gate = model("gate", "", *flat, 1, kwargs={"fifo": str(fifo)}) | {"callable": f"{MODELS}/blocks.py:Gate"}
    entries = [one for one in models() if one["name"] in SERVED] + [raises, gate]
    config = write_config(
        tmp_path_factory.mktemp("http1"),
        entries,
        host="127.0.0.1",
        transport="native",
        max_request_nbytes=LIMIT_NBYTES,
        http_header_forward_pattern="^x-|triton_",
    )
    with OperatedServer(config).until_ended() as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_of_it_is_left(server: OperatedServer) -> Iterator[None]:
    said = len(server.log)
    yield
    wait_until(lambda: server.metric("gpuserve_arena_blocks") == 0, "the arena is empty", TIMEOUT_S)
    told = [line for line in server.log[said:] if "spoiled" not in line]  # by the model that raises
    assert told == []


def connected(server: OperatedServer) -> socket.socket:
    host, _, port = server.addresses["HTTP"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def response(connection: socket.socket, arrived: bytes = b"") -> tuple[bytes, bytes]:
    """The head, without its date, and the body of one response."""
    while b"\r\n\r\n" not in arrived:
        piece = connection.recv(65536)
        assert piece, arrived
        arrived += piece
    head, _, body = arrived.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    nbytes = int(found[1]) if found else 0
    while len(body) < nbytes:
        piece = connection.recv(1 << 20)
        assert piece
        body += piece
    assert len(body) == nbytes
    return re.sub(rb"\r\ndate: [^\r]*", b"", head), body


def infer(
    body: bytes, *fields: bytes, to: bytes = b"echo_FP32", line: bytes = b"POST /v2/models/%b/infer HTTP/1.1"
) -> bytes:
    head = b"\r\n".join((line % to, b"Host: x", b"Content-Length: %d" % len(body), *fields))
    return head + b"\r\n\r\n" + body


def binary(raw: bytes, datatype: str = "FP32", *shape: int, **more: Any) -> tuple[bytes, bytes]:
    """A body whose only tensor is binary, and the header that says where it begins."""
    one = {"name": "x", "datatype": datatype, "shape": shape or [1, 4]}
    one["parameters"] = {"binary_data_size": len(raw)}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}, **more}).encode()
    return text + raw, b"Inference-Header-Content-Length: %d" % len(text)


def document(**fields: Any) -> bytes:
    one = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]}
    return json.dumps({"inputs": [one | fields]}).encode()


def queued(server: OperatedServer) -> float:
    return server.metric("gpuserve_queue_requests", model="gate")


def running(server: OperatedServer) -> float:
    return server.metric("gpuserve_running_requests", model="gate")


def cancelled(server: OperatedServer) -> float:
    return server.metric("gpuserve_cancelled_total", model="gate")


# ---- a body in one piece, in chunks and compressed -------------------------------------------

BIG = bytes(range(256)) * 1024
REQUESTS = {
    "json": infer(document()),
    "binary": infer(*binary(FOUR)),
    "large": infer(*binary(BIG, "UINT8", 1, len(BIG)), to=b"echo_UINT8"),
    "id and version": infer(*binary(FOUR, id="a"), to=b"echo_FP32/versions/1"),
    "raw": infer(FOUR, b"Inference-Header-Content-Length: 0"),
    "json outputs": infer(binary(FOUR, outputs=[{"name": "y"}])[0], binary(FOUR, outputs=[{"name": "y"}])[1]),
    "forwarded": infer(document(shape=[1, 1], data=[0]), b"X-A: 1", b"x-a: 2", to=b"parameters"),
    "forwarded and reserved": infer(*binary(FOUR), b"triton_a: 1"),
    "forwarded, reserved and large": infer(
        *binary(BIG, "UINT8", 1, len(BIG)), b"triton_a: 1", to=b"echo_UINT8"
    ),
    "no json form": infer(
        binary(FOUR[:8], "BF16", outputs=[{"name": "y"}])[0],
        binary(FOUR[:8], "BF16", outputs=[{"name": "y"}])[1],
        to=b"echo_BF16",
    ),
    "no classes": infer(
        document()[:-1] + b', "outputs": [{"name": "y", "parameters": {"classification": 2}}]}'
    ),
    "classes of bytes": infer(
        json.dumps(
            {
                "inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}],
                "outputs": [{"name": "y", "parameters": {"classification": 2}}],
            }
        ).encode(),
        to=b"echo_BYTES",
    ),
    "no json": infer(b"{"),
    "nothing": infer(b""),
    "no such model": infer(document(), to=b"nope"),
    "no such version": infer(document(), to=b"echo_FP32/versions/9"),
    "no such input": infer(document(name="z")),
    "no such output": infer(document()[:-1] + b', "outputs": [{"name": "z"}]}'),
    "too short": infer(binary(FOUR)[0][:-1], binary(FOUR)[1]),
    "too long": infer(binary(FOUR)[0] + b"a", binary(FOUR)[1]),
    "large and too short": infer(binary(BIG, "UINT8", 1, len(BIG))[0][:-1], binary(BIG)[1], to=b"echo_UINT8"),
    "a length that lies": infer(binary(FOUR)[0], b"Inference-Header-Content-Length: 99999"),
    "a length that is none": infer(binary(FOUR)[0], b"Inference-Header-Content-Length: x"),
    "negative": infer(document(shape=[1, -4])),
    "raises": infer(document(shape=[4]), to=b"raises"),
    "another method": infer(document(), line=b"PUT /v2/models/%b/infer HTTP/1.1"),
    "a query": infer(document(), line=b"POST /v2/models/%b/infer?a=b HTTP/1.1"),
    "old": infer(document(), line=b"POST /v2/models/%b/infer HTTP/1.0"),
    "closing": infer(document(), b"Connection: close"),
}


@pytest.fixture(autouse=True)
def _the_gate_is_open_in_the_end(server: OperatedServer, fifo: Path) -> Iterator[None]:
    yield

    def is_idle() -> bool:
        with contextlib.suppress(OSError):  # nobody is at it now
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return running(server) == 0

    wait_until(is_idle, "the gate is open", TIMEOUT_S)


def compressed(sent: bytes) -> bytes:
    """The same request with a gzip body."""
    head, _, body = sent.partition(b"\r\n\r\n")
    packed = gzip.compress(body, 1)
    head = re.sub(
        rb"Content-Length: \d+\r\n", b"Content-Length: %d\r\n" % len(packed), head + b"\r\n", count=1
    )
    return head + b"Content-Encoding: gzip\r\n\r\n" + packed


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_same_however_the_body_is_sent(server: OperatedServer, name: str) -> None:
    sent = REQUESTS[name]
    answers = []
    for one in (sent, sent.replace(b"\r\n", b"\r\nContent-Encoding: Identity\r\n", 1), compressed(sent)):
        with connected(server) as connection:
            connection.sendall(one)
            answers.append(response(connection))
    assert answers[0] == answers[1] == answers[2]
    assert json.loads(answers[0][1].partition(b"}]}")[0] + b"}]}") if b" 200 " in answers[0][0] else True


def test_of_two_types_the_first_counts(server: OperatedServer) -> None:
    types = b"Content-Type: application/grpc\r\nContent-Type: application/json"
    with connected(server) as connection:
        connection.sendall(infer(document(), types))
        assert b"grpc-status: 12" in response(connection)[0]


def test_a_late_answer(server: OperatedServer) -> None:
    late = infer(document()[:-1] + b', "parameters": {"timeout": 1000}}', to=b"gate")
    with connected(server) as first:
        first.sendall(infer(document(), to=b"gate"))
        wait_until(lambda: running(server) == 1, "the model runs", TIMEOUT_S)
        answers = []
        # The worker may take one ahead, which is told otherwise.
        for one in (late, late, compressed(late)):
            with connected(server) as connection:
                connection.sendall(one)
                answers.append(response(connection))
    assert answers[1] == answers[2]
    assert b" 504 " in answers[0][0]


def test_a_client_that_says_nothing_is_asked_whether_it_is_there(server: OperatedServer) -> None:
    with connected(server) as connection:
        connection.sendall(LIVE)
        response(connection)
        ours, theirs = (f":{one[1]:04X}" for one in (connection.getsockname(), connection.getpeername()))

        def timer() -> list[str]:
            """Of the server's end, as the kernel tells it: what it waits for, and for how many ticks."""
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
            return [row[5] for row in rows if row[1].endswith(theirs) and row[2].endswith(ours)]

        wait_until(lambda: timer()[0].startswith("02:"), "the keepalive timer runs", TIMEOUT_S)
        assert int(timer()[0][3:], 16) <= 60 * os.sysconf("SC_CLK_TCK")


def test_a_body_over_the_limit(server: OperatedServer) -> None:
    too_large = binary(bytes(LIMIT_NBYTES), "UINT8", 1, LIMIT_NBYTES)
    connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
    for _ in range(2):  # the connection goes on
        name, _, length = too_large[1].decode().partition(": ")
        connection.request("POST", "/v2/models/echo_UINT8/infer", too_large[0], {name: length})
        answer = connection.getresponse()
        assert answer.status == 413
        assert f"exceeds the maximum allowed input size of {LIMIT_NBYTES} bytes" in answer.read().decode()
    connection.close()


# ---- how requests come ----------------------------------------------------------------------


def test_inference_requests_that_come_together(server: OperatedServer) -> None:
    bodies = [binary(np.full(4, n, np.float32).tobytes()) for n in range(50)]
    with connected(server) as connection:
        connection.sendall(b"".join(infer(*one) for one in bodies) + LIVE)
        arrived = b""
        while not arrived.endswith(b'{"live":true}'):
            arrived += connection.recv(65536)
    found = [arrived.find(np.full(4, n, np.float32).tobytes()) for n in range(1, 50)]
    assert -1 not in found
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"POST /v2/models/echo_FP32/infer", b"421"),  # a page of another host
        (b"POST /nowhere", b"404"),
        (b"POST /v2/health/live", b"405"),
        (b"POST /inference.GRPCInferenceService/ModelInfer", b"415"),
        (b"POST /v2/admin/drain", b"404"),
    ][
        : 1 if INGRESS_PROCESSES > 1 else None
    ],  # an ingress process asks the front for the answer to the others
)
def test_a_request_refused_by_its_head_is_not_asked_for_its_body(
    server: OperatedServer, line: bytes, status: bytes
) -> None:
    with connected(server) as connection:
        host = b"Host: a.example\r\nOrigin: http://a.example" if status == b"421" else b"Host: x"
        head = host + b"\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        connection.sendall(line + b" HTTP/1.1\r\n" + head)
        assert connection.recv(100).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("path", ["models/echo_FP32/infer", "repository/models/echo_FP32/load"])
def test_a_body_over_the_limit_is_refused_before_it_is_sent(server: OperatedServer, path: str) -> None:
    with connected(server) as connection:
        connection.sendall(
            b"POST /v2/%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), 1 << 40)
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 4")


def test_the_head_of_a_body_over_the_limit_is_not_answered_by_continue(server: OperatedServer) -> None:
    with connected(server) as connection:
        fields = b"Host: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (1 << 40)
        connection.sendall(b"POST /v2/models/echo_FP32/infer HTTP/1.1\r\n" + fields)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_curl_sees_why_its_upload_is_refused(server: OperatedServer) -> None:
    done = subprocess.run(
        [
            *("curl", "-s", "-m", "10", "-w", "%{http_code}", "-H", "Expect:", "--data-binary", "@-"),
            f"http://{server.addresses['HTTP']}/v2/models/echo_UINT8/infer",
        ],
        input=bytes(80 << 20),
        capture_output=True,
        check=False,
    )
    assert done.stdout.endswith(b"413")


# ---- clients that go away -------------------------------------------------------------------


def let_through(fifo: Path) -> None:
    """Let whoever waits at the gate go on, if anybody does."""
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


@pytest.mark.parametrize("waits", ["at a worker", "in the queue"])
def test_a_client_that_leaves_while_it_waits_is_noticed_at_once(
    server: OperatedServer, fifo: Path, waits: str
) -> None:
    ask = infer(document(), to=b"gate")
    with connected(server) as first:
        first.sendall(ask)
        wait_until(lambda: running(server) == 1, "the model runs", TIMEOUT_S)
        before = cancelled(server)
        second = connected(server)
        second.sendall(ask)
        # Where the first one was expected to end just now, the next one waits at its worker.
        wait_until(lambda: running(server) + queued(server) == 2, "one waits", TIMEOUT_S)
        (first if waits == "at a worker" else second).close()
        wait_until(lambda: cancelled(server) == before + 1, "the request is cancelled", TIMEOUT_S)
        if waits == "in the queue":
            with open(fifo, "wb"):
                pass
            assert b" 200 OK" in response(first)[0]
        else:
            # The first one may still have its end open when the other one is let through.
            wait_until(lambda: let_through(fifo) or is_readable(second), "the other is answered", TIMEOUT_S)
            assert b" 200 OK" in response(second)[0]
        second.close()


def test_a_client_that_leaves_with_large_answers_unread(server: OperatedServer) -> None:
    nbytes = LIMIT_NBYTES - 1000
    body, length = binary(bytes(nbytes), "UINT8", 1, nbytes)
    with connected(server) as connection:
        connection.settimeout(1.0)
        connection.sendall(infer(body, length, to=b"echo_UINT8"))
        with pytest.raises(TimeoutError):  # what is not read is not answered, and then not taken
            connection.sendall(infer(body, length, to=b"echo_UINT8") * 8)


def test_a_client_that_leaves_in_the_middle_of_a_large_body(server: OperatedServer) -> None:
    body, length = binary(bytes(1 << 20), "UINT8", 1, 1 << 20)
    with connected(server) as connection:
        connection.sendall(infer(body, length, to=b"echo_UINT8")[:-1])
        wait_until(lambda: server.metric("gpuserve_arena_blocks") == 1, "the body arrives", TIMEOUT_S)
