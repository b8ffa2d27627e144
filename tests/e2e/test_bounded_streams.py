"""What streams may take of the server: how many there are, and what is made for who does not read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from config_file import write_config
from http2_peer import Response, data
from http2_wire import GRPC, Wire
from ingress import ONE
from operated import OperatedServer
from processes import wait_until
from test_streams import PATH, entry
from tritonclient.grpc import service_pb2 as pb

TIMEOUT_S = 10.0
#: Responses of 64 KiB: what fits into the buffers of two sockets and of the server, and some more.
MOST_UNREAD = 400
WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture(scope="module")
def closed_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("closed") / "at"


@pytest.fixture(scope="module", params=["native", pytest.param("grpcio", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, closed_at: Path
) -> Iterator[OperatedServer]:
    # Requests of one batch wait for each other's clients, and two may come in one turn of the event loop.
    floods = entry("floods", decoupled=True, max_batch_size=1, instances=[{"count": 2}])
    models = [entry("count", decoupled=True), floods]
    settings = {"host": "127.0.0.1", "max_streams": 8, "max_half_requests": 64, "transport": request.param}
    config = write_config(tmp_path_factory.mktemp("bounded"), models, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOSED_AT", str(closed_at))
        with OperatedServer(config, *ONE).until_ended() as started:
            yield started


def asking(model: str) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"\1\0\0\0"])
    request.inputs.add(name="x", datatype="INT32", shape=[1, 1])
    body: bytes = request.SerializeToString()
    return body


def n_made(closed_at: Path) -> int:
    """How many responses the generator had given when it was closed."""
    wait_until(closed_at.exists, "the generator is closed", TIMEOUT_S)
    return int(closed_at.read_text())


def test_of_too_many_streams_the_last_are_refused_and_calls_are_not(server: OperatedServer) -> None:
    with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
        infer, watch = channel.stream_stream(PATH), channel.unary_stream(WATCH)
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        opened = [watch(b"", timeout=60) for _ in range(6)]
        for one in opened:
            next(one)
        assert server.metric("gpuserve_streams") == 6
        with pytest.raises(grpc.RpcError, match="6 streams of gRPC are open, expected at most 8") as raised:
            list(infer(iter([asking("count")]), timeout=TIMEOUT_S))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert live(b"", timeout=TIMEOUT_S) == b"\x08\x01"
        assert server.metric("gpuserve_connections_refused_total", reason="streams") == 1
        opened[0].cancel()
        wait_until(lambda: server.metric("gpuserve_streams") == 5, "one has gone", TIMEOUT_S)
        assert len(list(infer(iter([asking("count")]), timeout=TIMEOUT_S))) == 1
        for one in opened:
            one.cancel()


def test_a_client_that_does_not_read_is_told_that_its_time_is_over(
    server: OperatedServer, closed_at: Path
) -> None:
    closed_at.unlink(missing_ok=True)
    body = asking("floods")
    head = [(name, PATH if name == ":path" else value) for name, value in GRPC]
    with Wire(server.addresses["gRPC"]) as wire:
        wire.send(wire.peer.headers(1, [*head, ("grpc-timeout", "400m")]))
        wire.send(data(1, b"\0" + len(body).to_bytes(4) + body))
        started = time.monotonic()
        wire.read_until(lambda: wire.peer.response(1).ended)
        assert time.monotonic() - started > 0.3
        assert status(wire.peer.response(1)) == "4"
    assert n_made(closed_at) < MOST_UNREAD


def status(response: Response) -> str:
    return response.trailers.get("grpc-status") or dict(response.heads[0])["grpc-status"]


def test_no_more_events_are_made_than_their_client_reads(server: OperatedServer, closed_at: Path) -> None:
    """While another client, whose events are made beside it, reads very many."""
    closed_at.unlink(missing_ok=True)
    with events(server) as reads:
        with events(server):
            n_read = 0
            while n_read < 2 * MOST_UNREAD:
                received = reads.recv(1 << 16)
                assert received
                n_read += received.count(b"data: ")
        assert n_made(closed_at) < MOST_UNREAD
        closed_at.unlink()
    assert n_made(closed_at) >= n_read


def events(server: OperatedServer) -> socket.socket:
    """A connection that asks for events without end."""
    body = json.dumps({"x": [[1]]}).encode()
    head = (
        f"POST /v2/models/floods/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, _, port = server.addresses["HTTP"].rpartition(":")
    client = socket.create_connection((host, int(port)), TIMEOUT_S)
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("server", ["native"], indirect=True)
def test_of_too_many_half_requests_those_of_who_has_most_are_closed(server: OperatedServer) -> None:
    """Each takes 20 s to be late, and a long head memory for so long."""
    with Wire(server.addresses["gRPC"]) as few, Wire(server.addresses["gRPC"]) as many:
        few.send(few.peer.headers(1, GRPC))
        for number in range(8):
            many.send(many.peer.headers(2 * number + 1, [*GRPC, ("x-long", "x" * 8192)]))
        started = time.monotonic()
        many.read_to_the_end()
        assert time.monotonic() - started < 15  # they are late after 20 s
        few.ping()
        assert not few.peer.response(1).ended
