"""Drain of a server with ingress processes: each informs its clients, and its requests are awaited."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import ask, ingress_pids, ingress_rows
from http2_peer import NO_ERROR
from http2_wire import Wire
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import wait_until

NO_LAST = (1 << 31) - 1


def operated(tmp_path: Path, orders: Orders, **settings: Any) -> OperatedServer:
    return OperatedServer(
        config(tmp_path, model("m", orders), ingress_processes=2, host="127.0.0.1", **settings)
    )


def drain(server: OperatedServer, **arguments: Any) -> Any:
    return ask(server.addresses["HTTP"], "drain", **arguments)


def n_connections(server: OperatedServer) -> list[int]:
    return [row["connections"] for row in ingress_rows(server)]


def test_clients_of_every_process_are_notified_and_new_ones_are_not(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server, contextlib.ExitStack() as stack:
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
    with operated(tmp_path, orders).until_killed() as server:
        (hung, _) = ingress_pids(server)
        with server.client() as client:
            assert client.get("/v2/health/ready").status == 200
            os.kill(hung, signal.SIGSTOP)
            assert server.end() == 0


@pytest.mark.thorough
def test_an_ingress_process_that_dies_while_drained_is_replaced_by_a_drained_one(
    tmp_path: Path, orders: Orders
) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        assert drain(server).code == ""
        for pid in ingress_pids(server):
            os.kill(pid, signal.SIGKILL)
        assert server.status("/v2/health/ready") == 400
        assert server.infer("m", 3.0).output("y") == [6.0]
        assert drain(server, undo=True).text == "in service again"
        wait_until(lambda: server.status("/v2/health/ready") == 200, "in service")
