"""Clients that claim memory and send nothing, or more than there is: they are refused, others are served, and
nothing is kept when they have gone.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from config_file import models, write_config
from http2_peer import data
from http2_wire import GRPC, Wire
from ingress import ONE
from operated import OperatedServer
from processes import wait_until
from sending import INFER, TIMEOUT_S, Sender, assert_clear, entry, frame, message, sized

MIB = 1 << 20
GIB = 1 << 30
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SERVED = {"echo_FP32", "cube", "flat_FP32"}


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    entries = models(*SERVED)
    limits = {"host": "127.0.0.1", "max_arena_nbytes": 2 * GIB, "max_intake_nbytes": 4 * MIB}
    limits["max_inflated_nbytes"] = 2 * MIB
    config = write_config(tmp_path_factory.mktemp("claims"), entries, **limits)
    with OperatedServer(config, *ONE).until_ended() as started:
        made = Sender(started)
        made.assert_serves()
        yield made
        made.close()


@pytest.fixture(autouse=True)
def _nothing_is_kept(sender: Sender) -> Iterator[None]:
    yield
    for gauge in ("gpuserve_arena_blocks", "gpuserve_intake_bytes"):
        wait_until(lambda gauge=gauge: sender.server.metric(gauge) == 0, gauge, TIMEOUT_S)
    sender.assert_serves()


def begun(sender: Sender, text: bytes, content_length: int, *, binary: bool = True) -> socket.socket:
    """A request of which this has been sent."""
    host, port = sender.server.addresses["HTTP"].split(":")
    sock = socket.create_connection((host, int(port)), TIMEOUT_S)
    length = b"Inference-Header-Content-Length: %d\r\n" % len(text.rstrip(b"\0")) if binary else b""
    head = b"POST /v2/models/echo_FP32/infer HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    sock.sendall(head % (length, content_length) + text)
    return sock


def announced(*entries: Any) -> bytes:
    return json.dumps({"inputs": entries}).encode()


def test_claims_without_bytes_hold_nobody_up(sender: Sender) -> None:
    text = announced(sized(GIB, shape=[1, GIB // 4]))
    socks = [begun(sender, text + b"\0", len(text) + GIB) for _ in range(20)]
    wait_until(lambda: sender.server.metric("gpuserve_arena_blocks") == 20, "the claims", TIMEOUT_S)
    assert sender.http("/v2/health/ready", method="GET")[0] == 200
    assert sender.server.metric("gpuserve_arena_bytes") < 20 * MIB
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("model", "claim", "status", "named"),
    [
        ("echo_FP32", sized(3 * GIB, shape=[1, 3 * GIB // 4]), 413, ["'echo_FP32'", "max_arena_nbytes"]),
        ("flat_FP32", sized(GIB, shape=[GIB // 4]), 400, ["'flat_FP32'", "at most 4 bytes"]),
    ],
)
def test_a_claim_that_can_never_be_met_is_refused_at_once(
    sender: Sender, model: str, claim: Any, status: int, named: list[str]
) -> None:
    text = announced(claim)
    nbytes = claim["parameters"]["binary_data_size"]
    connection = http.client.HTTPConnection(sender.server.addresses["HTTP"], timeout=TIMEOUT_S)
    connection.putrequest("POST", f"/v2/models/{model}/infer")
    connection.putheader("Inference-Header-Content-Length", str(len(text)))
    connection.putheader("Content-Length", str(len(text) + nbytes))
    connection.endheaders(text + b"\0")
    answer = connection.getresponse()
    assert answer.status == status
    assert_clear(json.loads(answer.read())["error"], named)
    connection.close()


def test_bodies_under_way_have_one_limit(sender: Sender) -> None:
    """The fifth MiB is one too many, until somebody has gone."""
    text = announced(entry(data=[0, 1, 2, 3]))
    padded = text + b" " * MIB
    held = [begun(sender, padded[:-1], len(padded), binary=False) for _ in range(3)]
    wait_until(lambda: sender.server.metric("gpuserve_intake_bytes") > 3 * MIB, "three bodies", TIMEOUT_S)
    connection = http.client.HTTPConnection(sender.server.addresses["HTTP"], timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/echo_FP32/infer", text + b" " * 2 * MIB)
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("retry-after")) == (503, "1")
    assert_clear(json.loads(answer.read())["error"], ["max_intake_nbytes", str(4 * MIB)])
    assert sender.server.metric("gpuserve_intake_refused_total") == 1
    for sock in held:
        sock.close()
    connection.close()
    wait_until(lambda: sender.server.metric("gpuserve_intake_bytes") == 0, "the others", TIMEOUT_S)
    assert sender.json(text + b" " * 2 * MIB)[0] == 200


BOMB = zlib.compress(bytes(64 * MIB), 1)


def test_bombs_are_refused_over_both_protocols(sender: Sender) -> None:
    status, text = sender.json(BOMB, content_encoding="deflate")
    assert status == 413
    assert_clear(text, [str(2 * MIB), "max_inflated_nbytes"])
    packed = message("echo_FP32", 1, 16 * MIB, raw=bytes(64 * MIB)).SerializeToString()
    for method in (INFER, STREAM):
        code, text = sender.grpc(packed, method, compression=grpc.Compression.Gzip)
        assert code == "RESOURCE_EXHAUSTED"
        assert_clear(text, [str(2 * MIB), "max_inflated_nbytes"])


def test_what_is_inflated_counts_and_is_read_in_slices(sender: Sender) -> None:
    text = announced(entry(data=[0, 1, 2, 3])) + b" " * MIB
    assert sender.json(gzip.compress(text), content_encoding="gzip")[0] == 200
    packed = message("echo_FP32", 1, MIB // 4, raw=bytes(MIB)).SerializeToString()
    for method in (INFER, STREAM):
        assert sender.grpc(packed, method, compression=grpc.Compression.Gzip) == ("OK", "")


# ---- memory that one client cannot take whole ----------------------------------------------------


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
