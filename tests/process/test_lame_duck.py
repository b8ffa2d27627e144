"""A server that is told to end, and the clients that it spares: it goes on until they have heard of it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from exploring import variants
from http2_peer import NO_ERROR, data
from http2_wire import Wire
from operated import TIMEOUT_S, OperatedServer, Orders, config, model
from processes import measured, wait_until
from serving import FREE_PORTS, GPUSERVE, unlikely_port
from steady_load import SteadyLoad, message

CALL = "/inference.GRPCInferenceService/"
NO_LAST = (1 << 31) - 1
POST = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
#: A user's program with a server that has served.
PROGRAM = """
import threading, time
from gpuserve import Server

def tell():
    while not server.addresses:
        time.sleep(0.01)
    print("ready", flush=True)

with Server(http_port=0, grpc_port=0, metrics_port=0) as server:
    threading.Thread(target=tell).start()
    {then}
"""
GET_READY = [(":method", "GET"), (":scheme", "http"), (":path", "/v2/health/ready"), (":authority", "a")]


def leaving(tmp_path: Path, orders: Orders, name: str = "one", **settings: Any) -> OperatedServer:
    folder = tmp_path / name
    folder.mkdir()
    return OperatedServer(config(folder, model("m", orders), host="127.0.0.1", **settings))


def inputs_for(client: Any) -> list[Any]:
    x = client.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.full((1, 1), 3.0, np.float32))
    return [x]


def test_one_of_two_servers_leaves_and_no_request_is_lost(tmp_path: Path, orders: Orders) -> None:
    """By default, because it has no terminal."""
    settings = {"lame_duck_s": None}
    with leaving(tmp_path, orders, "one", **settings) as one, leaving(tmp_path, orders, "two") as two:
        servers = one.wait_ready().addresses, two.wait_ready().addresses
        load = SteadyLoad([at["HTTP"] for at in servers], [at["gRPC"] for at in servers])
        with load:
            load.wait_answers(300)
            started = time.monotonic()
            assert one.end() == 0
            measured(f"SIGTERM to exit, under load: {time.monotonic() - started:.3f} s")
            load.wait_answers(100)
    assert load.lost() == {}
    assert len(load.outcomes) == 4
    assert [one["msg"] for one in one.messages() if "served for 2 s more" in one["msg"]]


@pytest.mark.thorough
def test_ctrl_c_at_a_terminal_ends_at_once(tmp_path: Path, orders: Orders) -> None:
    ours, theirs = os.openpty()
    path, log = config(tmp_path, model("m", orders), host="127.0.0.1", lame_duck_s=None), tmp_path / "log"
    command = ("setsid", "--ctty", GPUSERVE, "serve", str(path), *FREE_PORTS, "--log-format", "json")
    with log.open("w") as stderr:
        server = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(theirs)
    wait_until(lambda: '"ready: ' in log.read_text(), "it is ready")
    started = time.monotonic()
    os.write(ours, b"\x03")
    assert server.wait(TIMEOUT_S) == 0
    assert time.monotonic() - started < 1.5
    assert "stopping: finishing queued requests" in log.read_text()
    os.close(ours)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("then", "number", "least_s"),
    [
        ("server.serve()", signal.SIGTERM, 2.0),
        ("server.serve()", signal.SIGINT, 0.0),
        ("server.run(); input(); server.stop()", None, 0.0),
    ],
)
def test_a_program_has_a_lame_duck_for_a_sigterm_alone(
    tmp_path: Path, then: str, number: signal.Signals | None, least_s: float
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(then=then))
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = time.monotonic()
        if number is None:
            process.stdin.write(b"\n")
            process.stdin.flush()
        else:
            process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 0
    assert least_s <= time.monotonic() - started < least_s + 1.5


@pytest.mark.thorough
def test_it_serves_on_while_it_is_not_ready(tmp_path: Path, orders: Orders) -> None:
    with leaving(tmp_path, orders, lame_duck_s=60).until_ended() as server:
        at_http, at_grpc = server.addresses["HTTP"], server.addresses["gRPC"]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/ready") == 400, "not ready")
        assert [server.status(f"/v2/health/{one}") for one in ("live", "startup")] == [200, 200]
        assert server.status("/v2/models/m/ready") == 400
        by_http, by_grpc = (
            tritonclient.http.InferenceServerClient(at_http),
            tritonclient.grpc.InferenceServerClient(at_grpc),
        )
        for library, client in ((tritonclient.http, by_http), (tritonclient.grpc, by_grpc)):
            assert not client.is_server_ready()
            answer = client.infer("m", inputs_for(library))
            assert answer.as_numpy("y").tolist() == [[6.0]]
        by_http.close()
        by_grpc.close()


@pytest.mark.thorough
def test_what_comes_late_is_told_to_try_again(tmp_path: Path, orders: Orders) -> None:
    with leaving(tmp_path, orders).until_killed() as server:
        asked = orders.hold(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/ready") == 400, "not ready")
        client = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        client.request("POST", "/v2/models/m/generate", '{"x": [[1]]}')
        refused = client.getresponse()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        client.close()
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            infer = channel.unary_unary(CALL + "ModelInfer")
            with pytest.raises(grpc.RpcError, match="stopping") as raised:
                infer(message(), timeout=TIMEOUT_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(raised.value.trailing_metadata())["grpc-retry-pushback-ms"] == "100"
        # A stream too: by its status, on which clients and proxies ask again, and not by a message.
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            stream = channel.stream_stream(CALL + "ModelStreamInfer")
            with pytest.raises(grpc.RpcError, match="stopping") as raised:
                list(stream(iter([message()]), timeout=TIMEOUT_S))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        orders.open()
        assert asked.result().output("y") == [2.0]
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.thorough
def test_connections_are_told_and_what_crosses_is_served(tmp_path: Path, orders: Orders) -> None:
    with leaving(tmp_path, orders, lame_duck_s=0.2).until_killed() as server:
        kept = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        kept.connect()
        with contextlib.closing(kept), Wire(server.addresses["gRPC"]) as wire:
            wire.ping()
            server.process.send_signal(signal.SIGTERM)
            wire.read_until(lambda: bool(wire.peer.pings))
            assert wire.peer.goaways == [(NO_LAST, NO_ERROR)]
            kept.request("GET", "/v2/models/m")
            last = kept.getresponse()
            assert (last.status, last.headers["Connection"]) == (200, "close")
            wire.send(wire.peer.headers(1, GET_READY, end=True) + wire.peer.echo())
            wire.read_until(lambda: wire.peer.response(1).ended)
            wire.read_to_the_end()
            assert wire.peer.goaways == [(NO_LAST, NO_ERROR), (1, NO_ERROR)]
            assert wire.peer.response(1).reset is None
        assert server.process.wait(TIMEOUT_S) == 0
        said = "stopping: requests are served for 0.2 s more, then queued requests are finished"
        assert said in [one["msg"] for one in server.messages()]


@pytest.mark.thorough
def test_an_open_stream_is_told_that_the_server_ends(tmp_path: Path, orders: Orders) -> None:
    with leaving(tmp_path, orders, lame_duck_s=0.2).until_killed() as server:
        answers: list[tuple[Any, Any]] = []
        news = threading.Semaphore(0)

        def on_answer(result: Any, error: Any) -> None:
            answers.append((result, error))
            news.release()

        with tritonclient.grpc.InferenceServerClient(server.addresses["gRPC"]) as client:
            client.start_stream(on_answer)
            client.async_stream_infer("m", inputs_for(tritonclient.grpc))
            assert news.acquire(timeout=TIMEOUT_S)
            server.process.send_signal(signal.SIGTERM)
            assert news.acquire(timeout=TIMEOUT_S)
        assert server.process.wait(TIMEOUT_S) == 0
    (result, none), (nothing, error) = answers
    assert result.as_numpy("y").tolist() == [[6.0]]
    assert (none, nothing) == (None, None)
    assert error.status() == "StatusCode.UNAVAILABLE"


@pytest.mark.thorough
def test_a_stream_without_an_answer_ends_so_that_it_may_be_repeated(tmp_path: Path, orders: Orders) -> None:
    """Its status comes without headers before it: gRPC's retries and proxies repeat nothing else."""
    with leaving(tmp_path, orders).until_killed() as server:
        with Wire(server.addresses["gRPC"]) as wire:
            wire.ping()
            wire.send(wire.peer.headers(1, [*POST, (":path", CALL + "ModelStreamInfer"), *GRPC]))
            wire.ping()
            server.process.send_signal(signal.SIGTERM)
            wire.read_until(lambda: wire.peer.response(1).ended)
            (head,) = wire.peer.response(1).heads
            assert dict(head)["grpc-status"] == "14"
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_a_second_signal_does_not_wait(tmp_path: Path, orders: Orders, number: signal.Signals) -> None:
    with leaving(tmp_path, orders, lame_duck_s=60).until_killed() as server:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/ready") == 400, "not ready")
        started = time.monotonic()
        assert server.end(number) == 0
        assert time.monotonic() - started < 2.0


def test_an_old_connection_takes_no_more_and_finishes_what_it_has(tmp_path: Path, orders: Orders) -> None:
    with leaving(tmp_path, orders, max_connection_age_s=0.5).until_killed() as server:
        orders.shut()
        with Wire(server.addresses["gRPC"]) as wire:
            opened_at = time.monotonic()
            body = b"\0" + len(message()).to_bytes(4) + message()
            head = wire.peer.headers(1, [*POST, (":path", CALL + "ModelInfer"), *GRPC])
            wire.send(head + data(1, body, end=True))
            wire.read_until(lambda: bool(wire.peer.goaways))
            assert 0.4 < time.monotonic() - opened_at < 2.0
            while len(wire.peer.goaways) < 2:
                wire.send(wire.peer.echo())
                wire.read_some()
            orders.open()
            wire.read_until(lambda: wire.peer.response(1).ended)
            assert wire.peer.response(1).trailers["grpc-status"] == "0"
            wire.read_to_the_end()
            assert wire.peer.goaways == [(NO_LAST, NO_ERROR), (1, NO_ERROR)]


def test_an_old_http_connection_ends_with_an_answer(tmp_path: Path, orders: Orders) -> None:
    with leaving(tmp_path, orders, max_connection_age_s=0.3).until_killed() as server:
        kept = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)

        def is_last() -> bool:
            kept.request("GET", "/v2/health/live")
            answer = kept.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            return answer.headers["Connection"] == "close"

        kept.connect()
        with contextlib.closing(kept):
            assert not is_last()
            waited_s = wait_until(is_last, "the last answer")
        assert 0.2 < waited_s < 2.0


# ---- a fleet that is replaced --------------------------------------------------------------------


ROUNDS = 3


class Pod:
    """One address of the fleet, and the server that listens on it now."""

    def __init__(self, folder: Path, number: int) -> None:
        folder = folder / f"pod{number}"
        folder.mkdir()
        ports = {f"{role}_port": unlikely_port() for role in ("http", "grpc", "metrics")}
        settings = {"host": "127.0.0.1", "lame_duck_s": 2, **ports}
        self._config = config(folder, model("m", Orders(folder / "orders")), **settings)
        self._flags = ("--http-port", str(ports["http_port"]))
        self._stack = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self.server = self._stack.enter_context(OperatedServer(self._config, *self._flags))
        self.server.wait_ready()

    def close(self) -> None:
        self._stack.close()


@pytest.mark.thorough
def test_servers_are_replaced_one_by_one_and_no_request_is_lost(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        pods = [Pod(tmp_path, number) for number in range(2)]
        for pod in pods:
            stack.callback(pod.close)
        addresses = [pod.server.addresses for pod in pods]
        load = SteadyLoad([one["HTTP"] for one in addresses], [one["gRPC"] for one in addresses])
        with load:
            for pod in pods * ROUNDS:
                load.wait_answers(300)
                for one in pods:  # the client of gRPC watches the health of each
                    wait_until(lambda: one.server.metric("gpuserve_streams") > 0, "gRPC is connected")  # noqa: B023
                assert pod.server.end() == 0
                pod.start()
            measured(f"{load.n_answered()} requests answered during {len(pods) * ROUNDS} replacements")
    assert load.lost() == {}
