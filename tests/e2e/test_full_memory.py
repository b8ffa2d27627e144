"""The memory for inputs of a model: no client takes all of it, and a model is not ready if it stays full."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from pathlib import Path

import pytest
from config_file import models, write_config
from http2_peer import data
from http2_wire import GRPC, Wire
from ingress import ONE
from operated import OperatedServer
from processes import wait_until
from sending import frame, message, sized

MIB = 1 << 20
ARENA_NBYTES = 48 * MIB


def begin(wire: Wire, nbytes: int) -> None:
    """Send a call of ModelInfer but for its last byte."""
    wire.send(wire.peer.headers(1, GRPC))
    body = frame(message("echo_FP32", 1, nbytes // 4, raw=bytes(nbytes)).SerializeToString())[:-1]
    response = wire.peer.response(1)
    for at in range(0, len(body), 16384):
        wire.read_until(lambda: response.ended or min(window(wire), wire.peer.send_window) >= 16384)
        if response.ended:
            return
        wire.send(data(1, body[at : at + 16384]))
        wire.peer.send_window -= 16384
        wire.peer.send_windows[1] = wire.peer.send_windows.get(1, 0) - 16384


def window(wire: Wire) -> int:
    """What the stream may send: the server's first word says how much at the beginning."""
    wire.read_until(lambda: bool(wire.peer.settings))
    return wire.peer.settings[0].get(4, 65535) + wire.peer.send_windows.get(1, 0)


@pytest.mark.thorough
def test_memory_that_stays_full_makes_a_model_not_ready(tmp_path: Path) -> None:
    config = write_config(tmp_path, models("echo_FP32"), host="127.0.0.1", max_arena_nbytes=ARENA_NBYTES)
    with OperatedServer(config, *ONE).until_ended() as server:
        with Wire(server.addresses["gRPC"]) as holder, Wire(server.addresses["gRPC"]) as other:
            begin(holder, ARENA_NBYTES - MIB)
            begin(other, 20 * MIB)
            assert "no memory" in other.peer.responses[1].heads[0][-1][1]
            started = time.monotonic()
            wait_until(lambda: server.status("/v2/models/echo_FP32/ready") != 200, "it is not ready", 20.0)
            assert time.monotonic() - started > 8
            with server.client() as client:
                assert "max_arena_nbytes" in client.get("/v2/models/echo_FP32/ready").error
            assert server.status("/v2/health/ready") != 200
        wait_until(lambda: server.status("/v2/models/echo_FP32/ready") == 200, "it is ready", 10.0)
        assert server.status("/v2/health/ready") == 200
        server.wait_log("memory for inputs", times=2)
        levels = [json.loads(line)["level"] for line in server.log if "memory for inputs" in line]
        assert [one.lower() for one in levels] == ["error", "warning"]


def test_a_client_that_takes_all_it_can_leaves_some_for_others(tmp_path: Path) -> None:
    config = write_config(tmp_path, models("echo_FP32"), host="127.0.0.1", max_arena_nbytes=ARENA_NBYTES)
    nbytes = 4 * MIB
    text = json.dumps({"inputs": [sized(nbytes, shape=[1, nbytes // 4])]}).encode()
    body, headers = text + bytes(nbytes), {"Inference-Header-Content-Length": str(len(text))}
    with OperatedServer(config, *ONE).until_killed() as server, contextlib.ExitStack() as stack:

        def connection(source: str) -> http.client.HTTPConnection:
            address = server.addresses["HTTP"]
            return stack.enter_context(
                contextlib.closing(
                    http.client.HTTPConnection(address, timeout=15.0, source_address=(source, 0))
                )
            )

        greedy = [connection("127.0.0.2") for _ in range(ARENA_NBYTES // nbytes)]
        for one in greedy:
            one.putrequest("POST", "/v2/models/echo_FP32/infer")
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                one.putheader(name, value)
            one.endheaders(body[:-1])
        refused = stack.enter_context(contextlib.closing(greedy[-1].getresponse()))
        assert refused.status == 503
        assert b"requests from this address" in refused.read()
        other = connection("127.0.0.1")
        other.request("POST", "/v2/models/echo_FP32/infer", body, headers)
        assert other.getresponse().status == 200
