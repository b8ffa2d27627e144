"""``gpuserve drain``: a server out of service serves what comes, and has nothing to lose in the end."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc
import tritonclient.http
from commands import ask, ask_and_hear, gpuserve, ingress_pids, ingress_rows, status
from exploring import variants
from http2_peer import NO_ERROR
from http2_wire import Wire
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import measured, wait_until
from steady_load import PROPAGATION_S, SteadyLoad, message

CALL = "/inference.GRPCInferenceService/"
WATCH = "/grpc.health.v1.Health/Watch"
NO_LAST = (1 << 31) - 1
GET = [(":method", "GET"), (":scheme", "http"), (":path", "/v2/health/live"), (":authority", "a")]
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: Without ingress processes, and with two.
INGRESS = pytest.mark.parametrize("ingress", [1, pytest.param(2, marks=pytest.mark.thorough)])


def operated(tmp_path: Path, orders: Orders, name: str = "one", **settings: Any) -> OperatedServer:
    folder = tmp_path / name
    folder.mkdir()
    return OperatedServer(config(folder, model("m", orders), host="127.0.0.1", **settings))


def drain(server: OperatedServer, **arguments: Any) -> Any:
    return ask(server.addresses["HTTP"], "drain", **arguments)


def health(server: OperatedServer) -> list[int]:
    return [server.status(f"/v2/{one}") for one in ("health/ready", "models/m/ready", "health/live")]


READY, NOT_READY = [200, 200, 200], [400, 400, 200]


def test_it_is_not_ready_and_serves_until_it_is_undone(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        gone = gpuserve("drain", server=server)
        assert (gone.status, gone.stdout) == (0, "out of service; nothing waits or runs\n")
        assert gone.stderr == "not ready from now on\n"
        assert health(server) == NOT_READY
        assert status(server.addresses["HTTP"])["server"]["service"] == "OUT_OF_SERVICE"
        assert server.infer("m", 3.0).output("y") == [6.0]
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            assert channel.unary_unary(CALL + "ModelInfer")(message(), timeout=TIMEOUT_S)
        with tritonclient.grpc.InferenceServerClient(server.addresses["gRPC"]) as client:
            assert not client.is_server_ready()
        back = gpuserve("drain", "--undo", server=server)
        assert (back.status, back.stdout) == (0, "in service again\n")
        assert health(server) == READY
        assert drain(server, undo=True).text == "in service already"


@pytest.mark.thorough
def test_one_of_two_is_drained_and_killed_and_no_request_is_lost(tmp_path: Path, orders: Orders) -> None:
    settings = {"lame_duck_s": 5 * PROPAGATION_S}
    with operated(tmp_path, orders, "one", **settings) as one, operated(tmp_path, orders, "two") as two:
        servers = one.wait_ready().addresses, two.wait_ready().addresses
        load = SteadyLoad([at["HTTP"] for at in servers], [at["gRPC"] for at in servers])
        with load:
            load.wait_answers(300)
            started = time.monotonic()
            assert drain(one).result == {"unfinished": 0}
            measured(f"drained under load: {time.monotonic() - started:.3f} s")
            for pid in one.family():
                os.kill(pid, signal.SIGKILL)
            load.wait_answers(100)
    assert load.lost() == {}
    assert len(load.outcomes) == 4


@pytest.mark.thorough
@INGRESS
def test_drained_and_undone_again_and_again_under_load(tmp_path: Path, orders: Orders, ingress: int) -> None:
    """The only server, with nobody else to go to: its clients find it again, and it is never drained."""
    with operated(tmp_path, orders, ingress_processes=ingress) as server:
        at = server.wait_ready().addresses
        with SteadyLoad([at["HTTP"]], [at["gRPC"]], by_health=False) as load:
            for _ in range(3):
                assert drain(server, timeout_s=1.0).code == "DEADLINE_EXCEEDED"
                load.wait_answers(50)
                assert drain(server, undo=True).code == ""
        assert load.lost() == {}


def test_it_waits_for_what_runs(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        asked = orders.hold(server)
        late = drain(server, timeout_s=0.1)
        assert (late.code, late.result) == ("DEADLINE_EXCEEDED", {"unfinished": 1})
        assert late.text == "1 request is not finished within 0.1 s; the server stays out of service"
        assert health(server) == NOT_READY
        found = gpuserve("drain", "--timeout", "0.1", server=server)
        assert (found.status, found.stdout) == (1, "")
        drained = InBackground(drain, server)
        wait_until(lambda: status(server.addresses["HTTP"])["server"]["service"] == "LEAVING", "it leaves")
        orders.open()
        assert drained.result().result == {"unfinished": 0}
        assert asked.result().output("y") == [2.0]


def test_connections_are_told_after_the_lame_duck_and_new_ones_are_not(
    tmp_path: Path, orders: Orders
) -> None:
    with operated(tmp_path, orders, lame_duck_s=0.3).until_killed() as server:
        kept = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        kept.connect()
        with contextlib.closing(kept), Wire(server.addresses["gRPC"]) as wire:
            wire.ping()
            asked = InBackground(ask_and_hear, server.addresses["HTTP"], "drain")
            wait_until(lambda: server.status("/v2/health/ready") == 400, "not ready")
            assert not wire.peer.goaways
            wire.read_until(lambda: bool(wire.peer.pings))
            assert wire.peer.goaways == [(NO_LAST, NO_ERROR)]
            wire.send(wire.peer.headers(1, GET, end=True) + wire.peer.echo())
            wire.read_until(lambda: wire.peer.response(1).ended)
            wire.read_to_the_end()
            assert wire.peer.goaways == [(NO_LAST, NO_ERROR), (1, NO_ERROR)]
            kept.request("GET", "/v2/models/m")
            last = kept.getresponse()
            assert (last.status, last.headers["Connection"]) == (200, "close")
            assert asked.result().told == ["not ready from now on; connections are told to go in 0.3 s"]
        with server.client() as client:
            assert [client.infer("m", float(n)).output("y") for n in range(2)] == [[0.0], [2.0]]
        with Wire(server.addresses["gRPC"]) as wire:
            wire.ping()
            assert not wire.peer.goaways


def goaway_after(wire: Wire, started: float) -> float:
    """How long after a moment a connection is told that it takes no more, in seconds."""
    wire.read_until(lambda: bool(wire.peer.goaways))
    return time.monotonic() - started


@pytest.mark.thorough
def test_the_lame_duck_is_had_in_full_and_once_however_often_it_is_drained(
    tmp_path: Path, orders: Orders
) -> None:
    lame_duck_s = 1.0
    with operated(tmp_path, orders, lame_duck_s=lame_duck_s).until_killed() as server:
        undone = InBackground(drain, server)
        wait_until(lambda: health(server) == NOT_READY, "not ready")
        assert drain(server, undo=True).code == ""
        assert undone.result().code == "CANCELLED"
        with Wire(server.addresses["gRPC"]) as wire:
            wire.ping()
            first_at = time.monotonic()
            first = InBackground(drain, server)
            wait_until(lambda: time.monotonic() > first_at + 0.6 * lame_duck_s, "most of it is over")
            again = InBackground(drain, server)
            # The loop's clock stands still while it works: its timers come some milliseconds early.
            assert goaway_after(wire, first_at) > lame_duck_s - 0.1
        assert (first.result().code, again.result().code) == ("", "")
        with Wire(server.addresses["gRPC"]) as wire:
            wire.ping()
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert goaway_after(wire, started) < 0.5 * lame_duck_s
            wire.send(wire.peer.headers(1, GET, end=True))
            wire.read_until(lambda: wire.peer.response(1).ended)
            assert wire.peer.response(1).status == "200"
            wire.send(wire.peer.echo())
            wire.read_to_the_end()
        assert server.process.wait(TIMEOUT_S) == 0


@INGRESS
def test_an_open_stream_is_waited_for_and_one_that_watches_health_is_not(
    tmp_path: Path, orders: Orders, ingress: int
) -> None:
    with (
        operated(tmp_path, orders, ingress_processes=ingress).until_ended() as server,
        grpc.insecure_channel(server.addresses["gRPC"]) as channel,
    ):
        said = channel.unary_stream(WATCH)(b"", timeout=TIMEOUT_S)
        assert next(said) == SERVING
        ended = threading.Event()

        def requests() -> Any:
            yield message()
            ended.wait(TIMEOUT_S)

        stream = channel.stream_stream(CALL + "ModelStreamInfer")(requests(), timeout=TIMEOUT_S)
        assert next(stream)
        late = drain(server, timeout_s=0.1)
        assert (late.code, late.result) == ("DEADLINE_EXCEEDED", {"unfinished": 1})
        assert next(said) == NOT_SERVING
        ended.set()
        assert list(stream) == []
        assert drain(server).result == {"unfinished": 0}
        said.cancel()


def test_a_drain_that_is_undone_is_told_so(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders, lame_duck_s=60).until_killed() as server:
        both = [InBackground(drain, server) for _ in range(2)]
        server.wait_log("out of service", times=2)
        wait_until(lambda: health(server) == NOT_READY, "not ready")
        assert drain(server, undo=True).text == "in service again"
        assert {one.result()[:2] for one in both} == {("CANCELLED", "the drain was undone")}
        assert health(server) == READY


@pytest.mark.thorough
def test_a_front_that_dies_while_the_server_is_drained(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        assert drain(server).code == ""
        os.kill(server.front, signal.SIGKILL)
        wait_until(lambda: server.status("/v2/health/live") == 200, "another front")
        wait_until(lambda: server.status("/v2/health/startup") == 200, "it knows that all is loaded")
        assert health(server) == NOT_READY
        wait_until(lambda: server.infer("m", 3.0).status == 200, "it serves")
        assert health(server) == NOT_READY
        assert drain(server, undo=True).code == ""
        assert health(server) == READY


@pytest.mark.thorough
def test_a_front_that_dies_while_it_drains(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        asked = orders.hold(server)
        drained = InBackground(drain, server)
        wait_until(lambda: health(server) == NOT_READY, "not ready")
        os.kill(server.front, signal.SIGKILL)
        assert drained.result().result == {"unfinished": 0}  # what it had is lost with it
        with pytest.raises((OSError, http.client.HTTPException)):
            asked.result()
        orders.open()


@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_a_drained_server_ends_as_ever(tmp_path: Path, orders: Orders, number: signal.Signals) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        assert drain(server).code == ""
        asked = orders.hold(server)
        server.process.send_signal(number)
        wait_until(lambda: state(server) in {"DRAINING", "STOPPING"}, "it ends")
        orders.open()
        assert asked.result().output("y") == [2.0]
        assert server.process.wait(TIMEOUT_S) == 0


def state(server: OperatedServer) -> str:
    return str(status(server.addresses["HTTP"])["server"]["state"])


# ---- clients of several ingress processes --------------------------------------------------------


def n_connections(server: OperatedServer) -> list[int]:
    return [row["connections"] for row in ingress_rows(server)]


def test_clients_of_every_process_are_notified_and_new_ones_are_not(tmp_path: Path, orders: Orders) -> None:
    with (
        operated(tmp_path, orders, ingress_processes=2).until_ended() as server,
        contextlib.ExitStack() as stack,
    ):
        kept = [http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S) for _ in range(2)]
        for one in kept:
            stack.callback(one.close)
            one.connect()
        wires = [stack.enter_context(Wire(server.addresses["gRPC"])) for _ in range(2)]
        for wire in wires:
            wire.ping()
        assert n_connections(server) == [2, 2]
        drained = InBackground(drain, server)
        for wire in wires:
            wire.read_until(lambda wire=wire: bool(wire.peer.pings))
            assert wire.peer.goaways == [(NO_LAST, NO_ERROR)]
            wire.send(wire.peer.echo())
            wire.read_to_the_end()
        for one in kept:
            one.request("GET", "/v2/models/m")
            last = one.getresponse()
            assert (last.status, last.headers["Connection"]) == (200, "close")
        assert drained.result().result == {"unfinished": 0}
        with server.client() as client:
            assert [client.infer("m", float(n)).output("y") for n in range(2)] == [[0.0], [2.0]]
        assert drain(server, undo=True).text == "in service again"


@pytest.mark.thorough  # the process has five seconds
def test_a_hung_ingress_process_does_not_delay_the_end(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders, ingress_processes=2).until_killed() as server:
        (hung, _) = ingress_pids(server)
        with server.client() as client:
            assert client.get("/v2/health/ready").status == 200
            os.kill(hung, signal.SIGSTOP)
            assert server.end() == 0


@pytest.mark.thorough
def test_an_ingress_process_that_dies_while_drained_is_replaced_by_a_drained_one(
    tmp_path: Path, orders: Orders
) -> None:
    with operated(tmp_path, orders, ingress_processes=2).until_ended() as server:
        assert drain(server).code == ""
        for pid in ingress_pids(server):
            os.kill(pid, signal.SIGKILL)
        assert server.status("/v2/health/ready") == 400
        assert server.infer("m", 3.0).output("y") == [6.0]
        assert drain(server, undo=True).text == "in service again"
        wait_until(lambda: server.status("/v2/health/ready") == 200, "in service")
