"""Clients over ``max_requests_per_s``, with tritonclient over both protocols, as its users meet the limit."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import models, write_config
from config_operator import operated
from ingress import ONE
from operated import OperatedServer
from processes import wait_until
from repositories import entry
from tritonclient.utils import InferenceServerException

BURST = 5
#: A client that sends more than ``BURST`` requests within a second is refused soon.
SLOW = {"max_requests_per_s": 1, "max_request_burst": BURST}
TOKEN = "a-token-of-a-client"
TIMEOUT_S = 10.0
INFER = "/v2/models/echo_FP32/infer"
X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}


@contextlib.contextmanager
def served(folder: Path, *flags: str, **settings: Any) -> Iterator[OperatedServer]:
    config = write_config(folder, models("echo_FP32"), host="127.0.0.1", **settings)
    with OperatedServer(config, *flags).until_ended() as server:
        yield server


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[OperatedServer]:
    """A server that serves ``BURST`` requests of each client at once."""
    with served(tmp_path, *ONE, **SLOW) as server:
        yield server


def http_infer(server: OperatedServer, **headers: str) -> Any:
    tensor = tritonclient.http.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.http.InferenceServerClient(server.addresses["HTTP"]) as client:
        return client.infer("echo_FP32", [tensor], headers=headers or None)


def grpc_infer(server: OperatedServer) -> Any:
    tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.grpc.InferenceServerClient(server.addresses["gRPC"]) as client:
        return client.infer("echo_FP32", [tensor])


def until_refused(ask: Callable[[], Any], is_refused: Callable[[Any], bool]) -> Any:
    """Ask until an answer is a refusal, which is returned; ``BURST`` requests are served before."""
    for n_served in range(1000):
        if is_refused(answer := ask()):
            assert n_served >= BURST
            return answer
    raise AssertionError("no request was refused")


def error_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> Exception | None:
    try:
        call(*arguments, **named)
    except (InferenceServerException, grpc.RpcError) as error:
        return error
    return None


def is_limit(error: Exception | None) -> bool:
    return error is not None and "max_requests_per_s" in str(error)


@pytest.mark.parametrize(("infer", "status"), [(http_infer, "429"), (grpc_infer, "RESOURCE_EXHAUSTED")])
def test_tritonclient_shows_the_limit(slow: OperatedServer, infer: Any, status: str) -> None:
    error = until_refused(lambda: error_of(infer, slow), lambda error: error is not None)
    assert "from this address: expected at most 1 a second and 5 at once" in str(error)
    assert status in str(error.status())
    assert slow.status("/v2/health/live") == slow.status("/metrics") == 200
    assert slow.metric("gpuserve_requests_rate_limited_total", client="address") == 1
    slow.wait_log("refused a request of 127.0.0.1: over max_requests_per_s, which is 1")


def test_a_refusal_says_when_to_retry_and_waits_for_no_body(slow: OperatedServer) -> None:
    """Heads announce bodies that never come, also the first ones, which the server waits for."""
    host, _, port = slow.addresses["HTTP"].rpartition(":")
    fields = "Host: x\r\nExpect: 100-continue\r\nContent-Length: 1000000\r\n"
    head = f"POST {INFER} HTTP/1.1\r\n{fields}\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(BURST + 20):
            one = stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
            one.sendall(head)
        answer = one.recv(4096).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 429 ")
    assert "retry-after: 1\r\n" in head.lower() + "\r\n"
    assert "max_requests_per_s" in json.loads(body)["error"]


@pytest.mark.parametrize("transport", ["native", pytest.param("grpcio", marks=pytest.mark.thorough)])
def test_grpc_trailers_say_when_to_retry(tmp_path: Path, transport: str) -> None:
    with (
        served(tmp_path, *ONE, transport=transport, **SLOW) as server,
        grpc.insecure_channel(server.addresses["gRPC"]) as channel,
    ):
        service = "/inference.GRPCInferenceService/"
        live, metadata = (channel.unary_unary(f"{service}Server{one}") for one in ("Live", "Metadata"))
        told = until_refused(lambda: error_of(metadata, b"", timeout=TIMEOUT_S), is_limit)
        assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(told.trailing_metadata())
        assert trailers["retry-after"] == "1"
        assert 0 < int(trailers["grpc-retry-pushback-ms"]) <= 1000
        assert live(b"", timeout=TIMEOUT_S) == b"\x08\x01"


@pytest.mark.thorough
def test_a_client_that_goes_on_is_served_at_the_rate(tmp_path: Path) -> None:
    with served(tmp_path, *ONE, max_requests_per_s=20, max_request_burst=1) as server:
        began, n_refused, n_served = time.monotonic(), 0, 0
        while n_served < 10:
            if server.status("/v2") == 200:
                n_served += 1
            else:
                n_refused += 1
        took_s = time.monotonic() - began
        assert took_s >= 9 / 20 - 0.01
        assert server.metric("gpuserve_requests_rate_limited_total") == n_refused > 0


@pytest.mark.thorough
def test_each_request_of_a_stream_counts(slow: OperatedServer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.grpc.InferenceServerClient(slow.addresses["gRPC"]) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in range(BURST + 20):
            client.async_stream_infer("echo_FP32", [tensor], request_id=str(number))
        got = [answers.get(timeout=TIMEOUT_S) for _ in range(BURST + 20)]
        client.stop_stream()
    errors = [one for one in got if isinstance(one, InferenceServerException)]
    assert not any(one in errors for one in got[:BURST])
    assert len(errors) > 10
    assert all(is_limit(one) for one in errors)


@pytest.mark.thorough
def test_a_token_is_a_client_wherever_it_comes_from(tmp_path: Path) -> None:
    rules = [{"groups": ["inference"], "token": TOKEN}]
    with served(tmp_path, *ONE, access_rules=rules, **SLOW) as server:
        guesses = iter(range(1000))
        error = until_refused(
            lambda: error_of(http_infer, server, Authorization=f"Bearer {next(guesses)}"), is_limit
        )
        assert "from this address" in str(error)
        error = until_refused(lambda: error_of(http_infer, server, Authorization=f"Bearer {TOKEN}"), is_limit)
        assert "from this token" in str(error)
        assert server.metric("gpuserve_requests_rate_limited_total", client="token") == 1


@pytest.mark.thorough
def test_openai_clients_are_told_in_their_form(slow: OperatedServer) -> None:
    with slow.client() as client:
        answer = until_refused(lambda: client.get("/v1/models"), lambda answer: answer.status != 200)
    assert answer.status == 429
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")


@pytest.mark.thorough
def test_a_reload_changes_the_limit(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m")) as operator:
        server = operator.server
        assert [server.status("/v2") for _ in range(20)] == [200] * 20
        operator.reload(entry("m"), **SLOW)
        operator.wait_said("server.max_requests_per_s is 1 now, it was null")
        wait_until(lambda: server.status("/v2") == 429, "the limit holds")
        operator.reload(entry("m"))
        operator.wait_said("server.max_requests_per_s is null now, it was 1")
        wait_until(lambda: server.status("/v2") == 200, "there is no limit")
        assert [server.status("/v2") for _ in range(20)] == [200] * 20


@pytest.mark.thorough
def test_ingress_processes_share_the_limit(tmp_path: Path) -> None:
    """Whatever connections a client uses, all processes together serve it at the rate."""
    rate, burst, n_ingress = 40, 10, 3
    settings = {"max_requests_per_s": rate, "max_request_burst": burst}
    with served(tmp_path, "--ingress-processes", str(n_ingress), **settings) as server:
        began, n_served, n_refused = time.monotonic(), 0, 0
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(server.client()) for _ in range(2 * n_ingress)]
            while time.monotonic() - began < 3:
                for client in clients:
                    if client.infer("echo_FP32", 1.0).status == 200:
                        n_served += 1
                    else:
                        n_refused += 1
        took_s = time.monotonic() - began
        # Each may grant its burst, and the rate for the quarter of a second until it hears of the others.
        excess = (n_ingress - 1) * (burst + math.ceil(rate * 0.5))
        assert rate * took_s * 0.5 < n_served <= burst + rate * took_s + excess
        wait_until(
            lambda: server.metric("gpuserve_requests_rate_limited_total") == n_refused > 0,
            "every process has reported",
        )
