"""The end of a server: what is queued is finished, a second signal does not wait, nothing stays."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

import pytest
from exploring import variants
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import measured, wait_ended, wait_until
from tls import make_certificate

from gpuserve.front.net.server import CLOSE_TIMEOUT_S

GONE_S = 15.0
PROGRAM = """
import sys, threading, time
import numpy as np
from gpuserve import ModelConfig, Server, Tensor
from gpuserve.decorators import batch

@batch
def double(x):
    return {{"y": x * 2}}

with Server(http_port=0, grpc_port=0, metrics_port=0, lame_duck_s=0) as server:
    server.bind("m", double, [Tensor(name="x", dtype=np.float32, shape=(-1,))],
                [Tensor(name="y", dtype=np.float32, shape=(-1,))], config=ModelConfig(max_batch_size=8))
    def announce():
        while not server.addresses:
            time.sleep(0.002)
        print('{{"msg": "ready: HTTP ' + server.addresses["http"] + '"}}', file=sys.stderr, flush=True)
    threading.Thread(target=announce, daemon=True).start()
    {then}
"""


def program(path: Path, then: str = "server.serve()") -> OperatedServer:
    """A user's program with a ``Server`` in it."""
    file = path / "program.py"
    file.write_text(PROGRAM.format(then=then))
    return OperatedServer(file, command=(sys.executable, str(file)), log_format="text")


def test_everything_that_is_queued_is_answered(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, max_batch_size=1))).until_killed() as server:
        family = server.family()
        orders.shut()
        asked = [InBackground(server.infer, "m", float(value)) for value in range(20)]
        orders.wait_calls(1)
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 19, "19 are queued")
        server.process.send_signal(signal.SIGTERM)
        unready_s = wait_until(lambda: server.status("/v2/health/ready") != 200, "not ready")
        measured(f"SIGTERM to not ready: {unready_s:.3f} s")
        assert server.status("/v2/health/live") == 200
        refused = server.infer("m", 99.0)
        assert refused.status == 503
        assert "stopping" in refused.error
        orders.open()
        assert [one.result().output("y") for one in asked] == [[2.0 * value] for value in range(20)]
        assert server.process.wait(TIMEOUT_S) == 0
        assert not wait_ended(family, GONE_S)


def connection(server: OperatedServer, trusted: Path | None) -> http.client.HTTPConnection:
    """A connection to the HTTP port, over TLS if there is a certificate to trust."""
    port = int(server.addresses["HTTP"].rpartition(":")[2])
    if trusted is None:
        return http.client.HTTPConnection("localhost", port, timeout=TIMEOUT_S)
    context = ssl.create_default_context(cafile=trusted)
    return http.client.HTTPSConnection("localhost", port, timeout=TIMEOUT_S, context=context)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_idle_server_ends_at_once_whatever_connections_are_open(
    tmp_path: Path, orders: Orders, scheme: str
) -> None:
    import grpc

    both = make_certificate(tmp_path)
    tls = {"tls_certfile": str(both), "tls_keyfile": str(both)} if scheme == "https" else {}
    with contextlib.ExitStack() as stack:
        file = config(tmp_path, model("m", orders), **tls)
        server = stack.enter_context(OperatedServer(file))
        server.wait_ready()
        family = server.family()
        at_grpc = server.addresses["gRPC"].rpartition("/")[2]
        client = stack.enter_context(contextlib.closing(connection(server, both if tls else None)))
        channel = grpc.insecure_channel(at_grpc)
        if tls:
            credentials = grpc.ssl_channel_credentials(both.read_bytes())
            channel = grpc.secure_channel(f"localhost:{at_grpc.rpartition(':')[2]}", credentials)
        client.request("GET", "/v2/health/live")
        assert client.getresponse().status == 200
        stack.enter_context(channel)
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=TIMEOUT_S) == b"\x08\x01"
        started = time.monotonic()
        assert server.end() == 0
        took_s = time.monotonic() - started
        measured(f"SIGTERM to exit, idle, with an HTTP and a gRPC connection open: {took_s:.3f} s")
        assert took_s < CLOSE_TIMEOUT_S  # it waited for no connection
        assert not wait_ended(family, GONE_S)


@pytest.mark.thorough
def test_a_connection_that_never_asked_anything_holds_the_end_up_for_a_moment_only(
    tmp_path: Path, orders: Orders
) -> None:
    with (
        OperatedServer(config(tmp_path, model("m", orders))).until_killed() as server,
        socket.create_connection(server.addresses["HTTP"].split(":")) as silent,
    ):
        started = time.monotonic()
        assert server.end() == 0
        took_s = time.monotonic() - started
        measured(f"SIGTERM to exit, with a silent connection open: {took_s:.3f} s")
        assert took_s < 5.0
        assert silent.recv(1) == b""


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_large_answer_to_a_slow_client_is_written_to_its_end(
    tmp_path: Path, orders: Orders, scheme: str
) -> None:
    width = 8 << 20
    both = make_certificate(tmp_path)
    tls = {"tls_certfile": str(both), "tls_keyfile": str(both)} if scheme == "https" else {}
    with OperatedServer(config(tmp_path, model("m", orders), **tls)).until_killed() as server:
        head = json.dumps({
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, width],
                        "parameters": {"binary_data_size": 4 * width}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }).encode()  # fmt: skip
        client = connection(server, both if tls else None)
        headers = {"Inference-Header-Content-Length": str(len(head))}
        client.request("POST", "/v2/models/m/infer", head + bytes(4 * width), headers)
        response = client.getresponse()  # the body waits: nobody reads it yet
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("finishing queued requests")
        body = response.read()
        client.close()
        assert len(body) == int(response.headers["Inference-Header-Content-Length"]) + 4 * width
        assert server.process.wait(TIMEOUT_S) == 0


def test_a_second_signal_ends_at_once(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_killed() as server:
        family = server.family()
        asked = orders.hold(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/ready") != 200, "it drains")
        started = time.monotonic()
        assert server.end() == 0
        measured(f"second SIGTERM to exit: {time.monotonic() - started:.3f} s")
        assert not wait_ended(family, GONE_S)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever http.client makes of it
            asked.result()


def test_a_drain_that_takes_too_long_tells_those_who_wait(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(
        config(tmp_path, model("m", orders, max_batch_size=1), drain_timeout_s=0.3)
    ).until_killed() as server:
        orders.shut()
        asked = [InBackground(server.infer, "m", 1.0) for _ in range(3)]
        orders.wait_calls(1)
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 2, "two are queued")
        server.process.send_signal(signal.SIGTERM)
        answers = [one.result() for one in asked]
        orders.open()
        assert [one.status for one in answers] == [503] * 3
        assert server.process.wait(TIMEOUT_S) == 0
        assert any("3 requests were not finished" in one["msg"] for one in server.messages())


@pytest.mark.thorough
def test_a_worker_that_dies_during_the_drain(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_killed() as server:
        orders.shut()
        asked = InBackground(server.infer, "m", 8.0)
        (call,) = orders.wait_calls(1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/ready") != 200, "it drains")
        os.kill(int(call["pid"]), signal.SIGKILL)
        orders.wait_calls(2)
        orders.open()
        assert asked.result().output("y") == [16.0]
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.thorough
def test_a_front_that_dies_during_the_drain_is_not_started_again(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_killed() as server:
        asked = orders.hold(server, 8.0)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/ready") != 200, "it drains")
        os.kill(server.front, signal.SIGKILL)
        orders.open()
        assert server.process.wait(TIMEOUT_S) == 0
        assert [one["msg"] for one in server.messages()].count("stopping: finishing queued requests") == 1
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever http.client makes of it
            asked.result()


@pytest.mark.thorough
@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_a_signal_while_a_model_loads(tmp_path: Path, orders: Orders, number: signal.Signals) -> None:
    orders.shut()
    with OperatedServer(config(tmp_path, model("m", orders, "load_slowly"))) as server:
        wait_until((orders.directory / "loading").exists, "it loads")
        family = server.family()
        started = time.monotonic()
        assert server.end(number) == 0
        assert time.monotonic() - started < 2.0
        assert not wait_ended(family, GONE_S)


def test_ctrl_c_reaches_the_group_and_acts_once(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_killed() as server:
        asked = orders.hold(server)
        os.killpg(server.pid, signal.SIGINT)
        wait_until(lambda: server.status("/v2/health/ready") != 200, "it drains")
        assert all(os.getpgid(pid) != server.pid for pid in (server.front, *server.workers))
        orders.open()
        assert asked.result().output("y") == [2.0]
        assert server.process.wait(TIMEOUT_S) == 0
        assert len(orders.calls()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["launcher", "front", "worker"])
def test_nothing_is_left_after_a_kill(tmp_path: Path, orders: Orders, victim: str) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_killed() as server:
        assert server.infer("m", 1.0).status == 200
        family = server.family()
        pid = dict(zip(("launcher", "front", "worker"), family, strict=True))[victim]
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            assert not wait_ended(family, GONE_S)
            measured(f"launcher killed: all ended after {time.monotonic() - started:.3f} s")
        else:
            assert not wait_ended([pid], GONE_S)
            wait_until(lambda: server.status("/v2/health/ready") == 200, "it is back")
            assert server.end() == 0


def test_a_program_with_a_server_in_it_that_is_killed(tmp_path: Path) -> None:
    with program(tmp_path).until_killed() as server:
        family = server.family()
        assert len([pid for pid in family if pid]) == 3
        server.end(signal.SIGKILL)
        assert not wait_ended(family, GONE_S)


@pytest.mark.thorough
@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_a_program_that_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path).until_killed() as server:
        family = server.family()
        assert server.infer("m", 4.0).output("y") == [8.0]
        assert server.end(number) == 0
        assert not wait_ended(family, GONE_S)


@pytest.mark.thorough
@pytest.mark.parametrize("then", ["raise ValueError", "import os; os._exit(1)", "sys.exit(1)"])
def test_a_program_that_ends_without_a_word(tmp_path: Path, then: str) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    with program(tmp_path, f"server.run(); open({str(fifo)!r}).close(); {then}").until_killed() as server:
        family = server.family()
        assert len([pid for pid in family if pid]) == 3
        fifo.write_bytes(b"")
        assert server.process.wait(TIMEOUT_S) == 1
        assert not wait_ended(family, GONE_S)
