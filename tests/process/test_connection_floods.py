"""Clients that take too many connections, or too long: others go on, and nothing is held for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from functools import partial

import pytest
from config_file import model, tensor, write_config
from http2_peer import Peer, data
from operated import OperatedServer
from processes import n_files, wait_until
from serving import FREE_PORTS, GPUSERVE

N_FILES = 256
N_ATTACKERS = 600
LARGE_NBYTES = 2 << 20
TIMEOUT_S = 8.0
POST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"
LIMITS = {"head_timeout_s": 1, "body_grace_s": 1, "idle_timeout_s": 2, "max_unsent_nbytes": 4 << 20}
#: What a client sends, for what it is left, and what it is told.
WAITS = {
    "an idle HTTP/2 connection": (Peer().greeting(), "idle", b""),
    "a head over HTTP/1": (b"GET / HTTP/1.1\r\nHost: ", "head", b" 408 "),
    "a frame": (Peer().greeting() + Peer().headers(1)[:-1], "head", b"takes too long"),
    "a body over HTTP/1": (POST + b"Content-Length: 9\r\n\r\n{", "body", b" 408 "),
    "a body over HTTP/2": (
        Peer().greeting() + Peer().headers(1) + data(1, b"x"),
        "body",
        b"500 bytes a second",
    ),
}
#: How many of them are left for what.
COUNTS = {"idle": 1, "head": 2, "body": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """One echo model, whose server may have few files open."""
    echo = model("echo", "echo", [tensor("x", "UINT8", -1)], [tensor("y", "UINT8", -1)], 64)
    config = write_config(tmp_path_factory.mktemp("floods"), [echo], host="0.0.0.0", **LIMITS)
    serve = f"ulimit -n {N_FILES}; exec {GPUSERVE} serve {config} {' '.join(FREE_PORTS)} --log-format json"
    with OperatedServer(config, command=("bash", "-c", serve)).until_ended() as started:
        yield started


@contextlib.contextmanager
def flood(server: OperatedServer) -> Iterator[list[socket.socket]]:
    """Idle HTTP/2 connections of one address, as many as are taken."""
    port = int(server.addresses["HTTP"].rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        kept: list[socket.socket] = []
        for _ in range(N_ATTACKERS):
            with contextlib.suppress(OSError):
                one = stack.enter_context(
                    socket.create_connection(("127.0.0.1", port), TIMEOUT_S, ("127.0.0.9", 0))
                )
                one.sendall(Peer().greeting())
                kept.append(one)
        yield kept


def ask(connection: http.client.HTTPConnection, nbytes: int) -> None:
    """Have a tensor of this size echoed, and do not read the answer."""
    parameters = {"binary_data_size": nbytes}
    entry = {"name": "x", "datatype": "UINT8", "shape": [1, nbytes], "parameters": parameters}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", "/v2/models/echo/infer", head + bytes(nbytes), headers)


def echoed_nbytes(server: OperatedServer) -> int:
    """How much of a large tensor comes back."""
    with server.client() as client:
        ask(client.connection, LARGE_NBYTES)
        response = client.connection.getresponse()
        assert response.status == 200
        return len(response.read()) - int(response.headers["Inference-Header-Content-Length"])


def test_a_flood_of_connections_leaves_the_others_served(server: OperatedServer) -> None:
    front, workers, before = server.front, server.workers, n_files(server.front)
    with flood(server):
        for _ in range(3):
            assert echoed_nbytes(server) == LARGE_NBYTES  # by a segment of each side, which is a descriptor
        assert n_files(server.front) < N_FILES * 3 / 4
        assert server.metric("gpuserve_connections") > N_FILES / 4
        assert server.metric("gpuserve_connections_refused_total", reason="address") > N_ATTACKERS / 2
    wait_until(lambda: n_files(server.front) <= before + 8, "the descriptors are given back", TIMEOUT_S)
    assert (server.front, server.workers) == (front, workers)
    assert sum("refused a connection" in line for line in server.log) <= 3


@pytest.mark.thorough
def test_who_begins_and_does_not_go_on_is_left(server: OperatedServer) -> None:
    """One byte now and then does not keep what is begun."""
    before = {reason: server.metric("gpuserve_connections_late_total", reason=reason) for reason in COUNTS}
    address = "127.0.0.1", int(server.addresses["HTTP"].rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        clients = {what: stack.enter_context(socket.create_connection(address, TIMEOUT_S)) for what in WAITS}
        for what, one in clients.items():
            one.sendall(WAITS[what][0])
        for what, one in reversed(clients.items()):  # the idle one last: each of the others idles next
            told = b""
            while WAITS[what][2] not in told or "idle" in WAITS[what]:
                part = one.recv(1 << 16)
                told += part
                if not part:
                    break
            assert WAITS[what][2] in told, what
            one.close()
    found = {reason: server.metric("gpuserve_connections_late_total", reason=reason) for reason in COUNTS}
    assert {reason: found[reason] - before[reason] for reason in COUNTS} == COUNTS


@pytest.mark.thorough
def test_answers_that_nobody_reads_are_not_held(server: OperatedServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            ask(stack.enter_context(server.client()).connection, 8 << 20)
        held = partial(server.metric, "gpuserve_connections_unsent_bytes")
        late = partial(server.metric, "gpuserve_connections_late_total", reason="answer")
        wait_until(lambda: late() >= 2, "those who read nothing are closed", TIMEOUT_S)
        wait_until(lambda: held() <= 4 << 20, "what they did not read is given back", TIMEOUT_S)
        assert echoed_nbytes(server) == LARGE_NBYTES
    wait_until(lambda: held() == 0, "nothing is held", TIMEOUT_S)
