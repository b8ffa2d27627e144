"""HTTP/2 of the server's own, by clients that speak it right, badly, slowly, or not to the end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_file import models, write_config
from http2_peer import (
    HEADERS,
    NO_ERROR,
    PING_FRAME,
    PROTOCOL_ERROR,
    Frame,
    Peer,
    data,
    grow,
    settings,
)
from http2_wire import GRPC, TIMEOUT_S, Wire
from operated import OperatedServer
from processes import wait_until
from sending import FOUR, Sender, message
from sending import frame as framed
from tls import Authority

MIB = 1 << 20
SMALL = framed(message().SerializeToString())
GET = ((":method", "GET"), (":scheme", "http"), (":path", "/v2/models/echo_FP32"), (":authority", "x"))


def large(nbytes: int) -> bytes:
    return framed(message("echo_FP32", 1, nbytes // 4, raw=bytes(nbytes)).SerializeToString())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    entries = [one for one in models() if one["name"] == "echo_FP32"]
    config = write_config(tmp_path_factory.mktemp("http2"), entries, host="127.0.0.1", transport="native")
    with OperatedServer(config).until_ended() as started:
        yield started


@pytest.fixture(autouse=True)
def _the_server_goes_on(server: OperatedServer) -> Iterator[None]:
    said = len(server.log)
    yield
    wait_until(lambda: server.metric("gpuserve_arena_blocks") == 0, "the arena is empty", TIMEOUT_S)
    sender = Sender(server)
    sender.assert_serves()
    sender.close()
    assert server.log[said:] == []


def ask(wire: Wire, stream_id: int, body: bytes = SMALL) -> bytes:
    """A call of ModelInfer, as bytes."""
    parts = [body[at : at + 16384] for at in range(0, len(body), 16384)]
    frames = [data(stream_id, part, end=n == len(parts) - 1) for n, part in enumerate(parts)]
    return wire.peer.headers(stream_id, GRPC) + b"".join(frames)


def assert_answered(wire: Wire, *stream_ids: int) -> None:
    wire.read_until(lambda: all(wire.peer.response(one).ended for one in stream_ids))
    for stream_id in stream_ids:
        response = wire.peer.responses[stream_id]
        assert response.trailers["grpc-status"] == "0"
        assert FOUR in response.body


def rss_nbytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


# ---- clients that speak it right ------------------------------------------------------------


def test_the_rest_of_the_protocol_on_both_ports(server: OperatedServer) -> None:
    for port in ("HTTP", "gRPC"):
        with Wire(server.addresses[port]) as wire:
            wire.send(wire.peer.headers(1, GET, end=True))
            wire.send(wire.peer.headers(3, [(":method", "HEAD"), *GET[1:]], end=True))
            wire.read_until(lambda wire=wire: wire.peer.response(1).ended and wire.peer.response(3).ended)
            assert wire.peer.responses[1].status == "200"
            assert b'"echo_FP32"' in wire.peer.responses[1].body
            assert wire.peer.responses[3].body == b""


def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.issue("server")
    entries = [one for one in models() if one["name"] == "echo_FP32"]
    files = {"tls_certfile": str(pair.certificate), "tls_keyfile": str(pair.key)}
    config = write_config(tmp_path, entries, host="127.0.0.1", transport="native", **files)
    with OperatedServer(config) as started:
        started.wait_log('"ready: ')
        line = next(one["msg"] for one in started.messages() if one["msg"].startswith("ready: "))
        address = line.partition("gRPC ")[2].split(",")[0].rpartition("/")[2]
        with Wire(address, Peer(window=4 * MIB, frame_nbytes=MIB), trusted=authority.certificate) as wire:
            wire.send(wire.peer.grow(0, 64 * MIB) + ask(wire, 1) + ask(wire, 3, large(3 * MIB)))
            assert_answered(wire, 1)
            wire.read_until(lambda: wire.peer.response(3).ended)
            assert len(wire.peer.responses[3].body) > 3 * MIB
        with Wire(address, trusted=authority.certificate) as wire:
            wire.send(grow(1, 1))
            wire.read_to_the_end()
            assert wire.peer.error == PROTOCOL_ERROR
        assert started.end() == 0


def test_tables_of_header_fields_that_clients_choose_and_change(server: OperatedServer) -> None:
    """A block that did not fit the client's table would not decode, or to another status."""
    with Wire(server.addresses["gRPC"]) as wire:
        for stream_id, nbytes in zip(
            range(1, 60, 4), [None, None, 0, 0, 48, 48, 4096, 4096, 0, 1 << 16], strict=False
        ):
            if nbytes is not None:
                wire.send(wire.peer.resize_table(nbytes))
                wire.ping()
            wire.send(ask(wire, stream_id) + ask(wire, stream_id + 2))
            assert_answered(wire, stream_id, stream_id + 2)
            assert dict(wire.peer.responses[stream_id].heads[0])["content-type"] == "application/grpc"


def test_an_answer_that_repeats_the_last_has_a_small_head(server: OperatedServer) -> None:
    with Wire(server.addresses["gRPC"]) as wire:
        frames = {}
        for stream_id in (1, 3, 5):
            wire.send(ask(wire, stream_id))
            found: list[Frame] = []
            while not wire.peer.response(stream_id).ended:
                found += wire.read_some()
            frames[stream_id] = [one.payload for one in found if one.kind == HEADERS]
        assert [len(one) for one in frames[1]] > [50, 10]
        assert [len(one) for one in frames[3]] == [len(one) for one in frames[5]] == [3, 1]


def test_a_shut_down_in_the_middle_of_a_large_answer(tmp_path: Path) -> None:
    """The client goes on to send window updates: no answer may be lost for them."""
    entries = [one for one in models() if one["name"] == "echo_FP32"]
    config = write_config(tmp_path, entries, host="127.0.0.1", transport="native")
    with OperatedServer(config).until_killed() as started:
        address, peer = started.addresses["gRPC"], Peer(window=200_000)
        with Wire(address) as idle, Wire(address, peer, buffer_nbytes=32 << 10) as wire:
            idle.ping()
            wire.send(ask(wire, 1, large(3 * MIB)))  # within the window that it begins with
            wire.read_until(lambda: len(wire.peer.response(1).body) > 50_000)
            started.process.terminate()
            idle.read_to_the_end()
            assert idle.peer.error == NO_ERROR
            n_seen = 0
            while not wire.peer.response(1).ended:
                if n_new := len(wire.peer.responses[1].body) - n_seen:
                    n_seen += n_new
                    wire.send(wire.peer.grow(1, n_new) + wire.peer.grow(0, n_new) + PING_FRAME)
                wire.read_some()
            assert wire.peer.error == NO_ERROR
        assert started.process.wait(TIMEOUT_S) == 0


# ---- clients that speak it badly ------------------------------------------------------------


@pytest.mark.parametrize("flood", [PING_FRAME, settings({4: 70_000}), settings()])
def test_floods_of_a_client_that_does_not_read(server: OperatedServer, flood: bytes) -> None:
    before = rss_nbytes(server.front)
    with Wire(server.addresses["gRPC"], buffer_nbytes=4096) as wire:
        assert wire.flood(flood * 5000, 256 * MIB) < 256 * MIB
        assert rss_nbytes(server.front) - before < 8 * MIB
        with Wire(server.addresses["gRPC"]) as other:
            other.send(ask(other, 1))
            assert_answered(other, 1)


@pytest.mark.thorough
def test_floods_of_refused_calls_that_are_not_read(server: OperatedServer) -> None:
    refused = framed(message("nobody" * 20).SerializeToString())
    before = rss_nbytes(server.front)
    with Wire(server.addresses["gRPC"], buffer_nbytes=4096) as wire:
        calls = b"".join(ask(wire, one, refused) for one in range(1, 200_000, 2))
        assert wire.flood(calls, len(calls)) < len(calls)
        assert rss_nbytes(server.front) - before < 16 * MIB
        wire.read_until(lambda: len(wire.peer.responses) > 1000)


# ---- clients that do not read, or leave -----------------------------------------------------


def test_large_answers_that_nobody_reads(server: OperatedServer) -> None:
    """They wait in the shared memory of the workers or for its room; the front has no copy, others go on."""
    with Wire(server.addresses["gRPC"], Peer(window=64 * MIB), buffer_nbytes=4096) as wire:
        wire.send(wire.peer.grow(0, 1 << 30))
        before = rss_nbytes(server.front)
        wire.send(b"".join(ask(wire, one, large(MIB)) for one in range(1, 65, 2)))
        with Wire(server.addresses["gRPC"]) as other:
            for stream_id in range(1, 21, 2):
                other.send(ask(other, stream_id))
                assert_answered(other, stream_id)
        assert rss_nbytes(server.front) - before < 160 * MIB  # with what it looked at of the shared memory
    wait_until(lambda: server.metric("gpuserve_arena_blocks") == 0, "the answers are released", TIMEOUT_S)


@pytest.mark.parametrize("leave", ["close", "reset", "half"])
def test_clients_that_leave_in_the_middle(server: OperatedServer, leave: str) -> None:
    """Of a request, of an answer, of a frame's head, and of a header block: each connection is closed."""
    before = server.n_sockets()
    for sent in (SMALL, large(MIB)):
        with Wire(server.addresses["gRPC"], buffer_nbytes=4096) as wire:
            whole = ask(wire, 1, sent) + ask(wire, 3, sent)
            for nbytes in (len(whole), len(whole) - 10, len(whole) // 2, 60, 12, 4):
                with Wire(server.addresses["gRPC"], buffer_nbytes=4096) as one:
                    one.send(whole[:nbytes])
                    if leave == "reset":
                        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    elif leave == "half":
                        one.socket.shutdown(socket.SHUT_WR)
                        one.read_to_the_end()
    wait_until(lambda: server.n_sockets() <= before, "their connections are closed", TIMEOUT_S)
