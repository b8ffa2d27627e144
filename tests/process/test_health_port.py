"""The health port: what it says, to whom, and that nothing keeps it from saying it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import measured, wait_until
from serving import unlikely_port
from tls import Authority

HEALTH = "/grpc.health.v1.Health/"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
LIMIT_S = 0.1


def get(address: str, path: str) -> int:
    client = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    with contextlib.closing(client):
        client.request("GET", path)
        return client.getresponse().status


def request(service: str) -> bytes:
    return b"\x0a" + bytes([len(service)]) + service.encode()


def check(channel: Any, service: str) -> Any:
    return channel.unary_unary(HEALTH + "Check")(request(service), timeout=TIMEOUT_S)


def watch(channel: Any, service: str) -> Iterator[bytes]:
    changes: Iterator[bytes] = channel.unary_stream(HEALTH + "Watch")(request(service), timeout=60)
    return changes


def test_it_asks_nobody_for_a_certificate_or_a_token(tmp_path: Path, orders: Orders) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.issue("server")
    closed = {
        "tls_certfile": str(pair.certificate),
        "tls_keyfile": str(pair.key),
        "tls_client_ca": str(authority.certificate),
        "restricted_endpoints": ["health", "inference"],
        "access_token": "open sesame",
        "health_port": 0,
        "host": "127.0.0.1",
    }
    with OperatedServer(config(tmp_path, model("m", orders), **closed)).until_killed() as server:
        address = server.addresses["health"]
        # Another thread answers there, and hears of it a moment after the log.
        wait_until(lambda: get(address, "/v2/health/ready") == 200, "ready")
        assert [get(address, f"/v2/health/{one}") for one in ("live", "ready", "startup")] == [200] * 3
        others = ("/v2", "/metrics", "/v2/models/m", "/v2/health/", "/docs", "/v2/gpus", "/v2/models/m/infer")
        assert {get(address, path) for path in others} == {404}
        with grpc.insecure_channel(address) as channel:
            services = "", "readiness", "liveness", "startup", "model/m"
            assert {check(channel, one) for one in services} == {SERVING}
            assert next(watch(channel, "model/m")) == SERVING
            assert next(watch(channel, "model/other")) == SERVICE_UNKNOWN
            for path in ("/inference.GRPCInferenceService/ServerLive", HEALTH + "List"):
                with pytest.raises(grpc.RpcError) as raised:
                    channel.unary_unary(path)(b"", timeout=TIMEOUT_S)
                assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.RpcError) as raised:
                check(channel, "model/other")
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert get(address, "/v2/health/live") == 200


@pytest.mark.thorough
def test_it_answers_while_every_callable_hangs_and_the_front_is_busy(tmp_path: Path, orders: Orders) -> None:
    settings = {"health_port": 0, "host": "127.0.0.1"}
    with OperatedServer(config(tmp_path, model("m", orders), **settings)).until_killed() as server:
        orders.shut()
        hung = [InBackground(server.infer, "m", 1.0) for _ in range(8)]
        orders.wait_calls(1)
        ended = threading.Event()
        busy = [InBackground(keep_busy, server, ended) for _ in range(2)]
        took_s = []
        with grpc.insecure_channel(server.addresses["health"]) as channel:
            check(channel, "")
            for _ in range(20):
                started = time.monotonic()
                assert check(channel, "liveness") == SERVING
                assert get(server.addresses["health"], "/v2/health/ready") == 200
                took_s.append((time.monotonic() - started) / 2)
        ended.set()
        sent = [one.result() for one in busy]
        orders.open()
        assert [one.result().status for one in hung] == [200] * 8
        assert min(sent) > 0
        measured(f"a probe of a busy server: {statistics.median(took_s):.4f} s, at most {max(took_s):.4f} s")
        assert statistics.median(took_s) < LIMIT_S


def keep_busy(server: OperatedServer, ended: threading.Event) -> int:
    """Have the front parse large numbers of numbers, for nothing; how often."""
    values = ", ".join(["0.125"] * 500_000)
    body = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": [2], "data": [{values}]}}]}}'
    n_sent = 0
    client = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
    with contextlib.closing(client):
        while not ended.is_set():
            client.request("POST", "/v2/models/m/infer", body)
            answer = client.getresponse()
            assert answer.status == 400, json.loads(answer.read())
            answer.read()
            n_sent += 1
    return n_sent


def test_it_follows_the_life_of_a_server(tmp_path: Path, orders: Orders) -> None:
    port = unlikely_port()
    address = f"127.0.0.1:{port}"
    settings = {"health_port": port, "host": "127.0.0.1", "lame_duck_s": 0.2}
    orders.shut()
    with OperatedServer(config(tmp_path, model("m", orders, "load_slowly"), **settings)) as server:
        wait_until((orders.directory / "loading").exists, "it loads")
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            assert [get(address, f"/v2/health/{one}") for one in ("live", "ready", "startup")] == [
                200,
                400,
                400,
            ]
            readiness, startup = watch(channel, "readiness"), watch(channel, "startup")
            assert (next(readiness), next(startup)) == (NOT_SERVING, NOT_SERVING)
            orders.open()
            assert (next(readiness), next(startup)) == (SERVING, SERVING)
            server.wait_ready()
            server.process.send_signal(signal.SIGTERM)
            assert next(readiness) == NOT_SERVING
            assert (check(channel, "liveness"), check(channel, "startup")) == (SERVING, SERVING)
            assert check(channel, "model/m") == NOT_SERVING
            with pytest.raises(grpc.RpcError) as raised:
                next(readiness)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(("wanted", "is_enough"), [(2, False), (1, True)])
def test_too_few_instances(tmp_path: Path, orders: Orders, wanted: int, is_enough: bool) -> None:
    """The server is not ready, but the model that lacks one takes requests."""
    two = model("m", orders, instances=[{"device": "cpu", "count": 2}])
    settings = {"health_port": 0, "host": "127.0.0.1", "min_ready_instances": wanted}
    with (
        OperatedServer(config(tmp_path, two, model("n", orders), **settings)).until_killed() as server,
        grpc.insecure_channel(server.addresses["health"]) as channel,
    ):
        readiness = watch(channel, "readiness")
        assert SERVING in readiness  # n has one instance, and cannot have two
        os.kill(victim(server, orders), signal.SIGKILL)
        if not is_enough:
            assert next(readiness) == NOT_SERVING
            assert (check(channel, "model/m"), check(channel, "liveness")) == (SERVING, SERVING)
            assert next(readiness) == SERVING
        else:
            server.wait_log("ready after", times=4)
            assert check(channel, "readiness") == SERVING


def victim(server: OperatedServer, orders: Orders) -> int:
    """A worker of the model that has two."""
    server.infer("m", 1.0)
    return int(orders.calls()[-1]["pid"])
