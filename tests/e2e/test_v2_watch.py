"""``grpc.health.v1.Health/Watch`` while the health of a server changes, up to its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from config_file import model, tensor, write_config
from operated import OperatedServer
from processes import wait_until

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: How long the front waits for connections that do not end by themselves; a watch is none of them.
CLOSE_TIMEOUT_S = 15.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OperatedServer]:
    echo = model("echo", "echo", [tensor("x", "UINT8", -1)], [tensor("y", "UINT8", -1)], 4)
    config = write_config(tmp_path, [echo], host="127.0.0.1")
    with OperatedServer(config) as started:
        yield started.wait_ready()


def watch(channel: Any, service: bytes = b"") -> Any:
    call = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return call(b"\x0a" + bytes([len(service)]) + service, timeout=30)


def test_a_watch_sees_a_death_a_restart_and_the_end(server: OperatedServer) -> None:
    with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
        whole, of_model = watch(channel), watch(channel, b"model/echo")
        assert [next(whole), next(of_model)] == [SERVING, SERVING]
        os.kill(server.workers[0], signal.SIGKILL)
        for changes in (whole, of_model):
            assert [next(changes), next(changes)] == [NOT_SERVING, SERVING]
        server.process.send_signal(signal.SIGTERM)
        for changes in (whole, of_model):
            assert next(changes) == NOT_SERVING
            with pytest.raises(grpc.RpcError, match="shutting down") as raised:
                next(changes)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        took = wait_until(lambda: server.process.poll() is not None, "the server ends", 20.0)
    assert server.process.returncode == 0
    assert took < CLOSE_TIMEOUT_S, "an open watch holds nobody up"


@pytest.mark.thorough
def test_watchers_that_leave_are_forgotten(server: OperatedServer) -> None:
    for _ in range(20):
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            assert next(watch(channel)) == SERVING
    assert server.end() == 0
    assert not [one for one in server.messages() if one["level"] in {"error", "critical"}]
