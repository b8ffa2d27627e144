"""Ingress processes, which own the connections: one may die or hang without effect on others."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import http.client
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
from commands import ingress_metric, ingress_pids, ingress_rows
from exploring import variants
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import children, command_line, measured, n_files, wait_ended, wait_until
from steady_load import message

from gpuserve.front.ingress.monitored_ingress import HUNG_S, SILENT_S
from gpuserve.front.net.server import CLOSE_TIMEOUT_S

CALL = "/inference.GRPCInferenceService/"
CONNECTION_ERRORS = (OSError, http.client.HTTPException)
N_INGRESS = 2
#: Has an ingress process wait for a lock before its own code runs.
SLOW_START = """
import fcntl, sys
if "gpuserve.front.ingress" in " ".join(sys.orig_argv):
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
"""
_LOST = re.compile(r"ingress process \d ended \(signal SIGKILL, with (\d+) connections\)")


def operated(tmp_path: Path, orders: Orders, **settings: Any) -> OperatedServer:
    settings = {"ingress_processes": N_INGRESS, "host": "127.0.0.1", **settings}
    return OperatedServer(config(tmp_path, model("m", orders), **settings))


def all_ingress_pids(server: OperatedServer) -> list[int]:
    """The pids of the ingress processes; empty unless all are up."""
    found = ingress_pids(server)
    return found if len(found) == N_INGRESS else []


def spares_of(server: OperatedServer) -> list[int]:
    """Return the pids of the spare processes."""
    ingress = [row["pid"] for row in ingress_rows(server)]
    found = [pid for pid in children(server.pid) if "gpuserve.front.ingress" in command_line(pid)]
    return [pid for pid in found if pid not in ingress]


@contextlib.contextmanager
def connected(server: OperatedServer, n: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Open a number of kept connections, each of which has had one answer."""
    with contextlib.ExitStack() as stack:
        kept = []
        for _ in range(n):
            one = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
            stack.callback(one.close)
            assert get(one) == 200
            kept.append(one)
        yield kept


def get(connection: http.client.HTTPConnection, path: str = "/v2/health/ready") -> int:
    """Return the status of an answer, 0 if the connection is broken; do not reconnect."""
    connection.auto_open = connection.sock is None and not hasattr(connection, "was_open")
    connection.was_open = True  # type: ignore[attr-defined]
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except CONNECTION_ERRORS:
        return 0


def test_connections_are_balanced_and_counted(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        assert len(all_ingress_pids(server)) == N_INGRESS
        with connected(server, 10):
            assert ingress_metric(server, "connections") == [5, 5]
            wait_until(lambda: sum(ingress_metric(server, "requests_total")) >= 10, "requests are counted")
            assert all(cpu_s > 0 for cpu_s in ingress_metric(server, "cpu_seconds_total"))
            rows = ingress_rows(server)
            assert [row["connections"] for row in rows] == [5, 5]
            assert [row["pid"] for row in rows] == all_ingress_pids(server)
        wait_until(lambda: ingress_metric(server, "connections") == [0, 0], "they have left")
        assert server.infer("m", 3.0).output("y") == [6.0]
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            assert channel.unary_unary(CALL + "ModelInfer")(message(), timeout=TIMEOUT_S)


def test_a_killed_process_loses_its_connections_and_nothing_else(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        with connected(server, 8) as kept:
            victim = all_ingress_pids(server)[0]
            os.kill(victim, signal.SIGKILL)
            # No connection is lost that is made before the front notices.
            assert [server.status("/v2/health/ready") for _ in range(8)] == [200] * 8
            assert sorted(get(one) for one in kept) == [0] * 4 + [200] * 4
        server.wait_log("it is started again at once")
        server.wait_log("is up again")
        assert victim not in all_ingress_pids(server)
        assert sum(ingress_metric(server, "restarts_total")) == 1
        (line,) = [one["msg"] for one in server.messages() if "it is started again" in one["msg"]]
        assert "ended (signal SIGKILL, with 4 connections)" in line


@pytest.mark.thorough
def test_a_spare_replaces_a_process_that_dies(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        wait_until(lambda: spares_of(server), "one waits")
        first = spares_of(server)
        os.kill(first[0], signal.SIGKILL)  # an unused spare is replaced
        wait_until(lambda: spares_of(server) not in ([], first), "another waits")
        (waiting,) = spares_of(server)
        victim = all_ingress_pids(server)[1]
        os.kill(victim, signal.SIGKILL)
        took_s = wait_until(lambda: waiting in all_ingress_pids(server), "the spare serves")
        measured(f"the spare serves after {took_s:.3f} s")
        assert victim not in all_ingress_pids(server)
        assert server.infer("m", 3.0).output("y") == [6.0]
        wait_until(lambda: spares_of(server), "the next one waits")


@pytest.mark.thorough
def test_a_hung_process_is_replaced(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        hanging = all_ingress_pids(server)[0]
        os.kill(hanging, signal.SIGSTOP)
        wait_until(lambda: are_up(server, hanging), "it is replaced", timeout_s=HUNG_S + TIMEOUT_S)
        server.wait_log("no heartbeat for 30 s")


@pytest.mark.thorough
def test_a_process_that_does_not_handle_signals_yet_survives_the_request_for_its_stacks(
    tmp_path: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may take this long to start from a slow file system."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with operated(tmp_path, orders) as server:
        with open(tmp_path / "sitecustomize.py", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            server.wait_log("has sent no heartbeat for", times=N_INGRESS)
        server.wait_ready()
        assert sum(ingress_metric(server, "restarts_total")) == 0
        assert server.end() == 0


@pytest.mark.thorough
def test_a_connection_waits_while_no_process_is_up(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        for pid in all_ingress_pids(server):
            os.kill(pid, signal.SIGKILL)
        assert [server.status("/v2/health/ready") for _ in range(4)] == [200] * 4


@pytest.mark.thorough
def test_a_stopped_process_gets_no_connections(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        stopped = all_ingress_pids(server)[0]
        os.kill(stopped, signal.SIGSTOP)
        threading.Event().wait(SILENT_S + 0.5)  # the time itself is tested
        assert [server.status("/v2/health/ready") for _ in range(8)] == [200] * 8
        os.kill(stopped, signal.SIGCONT)


@pytest.mark.thorough
def test_unaccepted_connections_of_a_stopped_process_go_to_another_when_it_is_killed(
    tmp_path: Path, orders: Orders
) -> None:
    with operated(tmp_path, orders).until_ended() as server:
        stopped = all_ingress_pids(server)[0]
        os.kill(stopped, signal.SIGSTOP)
        asked = [InBackground(server.status, "/v2/health/ready") for _ in range(6)]
        # At once: of successive connections the process would get only the first, which is never closed.
        wait_until(lambda: sum(ingress_metric(server, "connections")) >= 1, "the stopped process has some")
        os.kill(stopped, signal.SIGKILL)
        assert [one.result() for one in asked] == [200] * 6


@pytest.mark.thorough
@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_ingress_processes_end_with_the_server(
    tmp_path: Path, orders: Orders, number: signal.Signals
) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        ingress = all_ingress_pids(server)
        asked = orders.hold(server)
        server.process.send_signal(number)
        wait_until(lambda: server.status("/v2/health/ready") != 200, "it ends")
        orders.open()
        assert asked.result().output("y") == [2.0]
        assert server.process.wait(TIMEOUT_S) == 0
        assert wait_ended(ingress, TIMEOUT_S) == []


def test_a_server_ends_when_its_ingress_processes_have_ended(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        began_s = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began_s < CLOSE_TIMEOUT_S, (
            "the front did not notice the end of its ingress processes"
        )


def test_no_process_survives_a_killed_supervisor(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        wait_until(lambda: spares_of(server), "one waits")
        ingress = [*all_ingress_pids(server), *spares_of(server)]
        os.kill(server.pid, signal.SIGKILL)
        assert wait_ended(ingress, TIMEOUT_S) == []


@pytest.mark.thorough
def test_limits_of_connections_are_those_of_the_server(tmp_path: Path, orders: Orders) -> None:
    limits = {"max_connections": 6, "max_connections_per_address": 4}
    with operated(tmp_path, orders, **limits).until_ended() as server:
        with connected(server, 4) as kept:
            with pytest.raises(CONNECTION_ERRORS):
                server.infer("m", 1.0)  # one address has four
            port = int(server.addresses["HTTP"].rpartition(":")[2])
            other = ("127.0.0.9", 0)
            with contextlib.ExitStack() as stack:
                more = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S, other))
                    for _ in range(3)
                ]
                assert [is_taken(one) for one in more] == [True, True, False]
            kept.pop().close()
            wait_until(lambda: server.status("/v2/health/ready") == 200, "there is a place again")
        for pid in all_ingress_pids(server):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.status("/v2/health/ready") == 200, "its places are free")


def is_taken(connection: socket.socket) -> bool:
    """Return whether an answer comes."""
    with contextlib.suppress(OSError):
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        return bool(connection.recv(1))
    return False


# ---- under load -----------------------------------------------------------------------------------


class Load:
    """Threads that send requests over both protocols, each on one connection that is reopened when it breaks.
    ``outcomes`` counts answers by protocol, and connections that broke.
    """

    def __init__(self, server: OperatedServer, n: int) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._server = server
        self._over = threading.Event()
        self._clients = [
            InBackground(self._keep_on, ask) for ask in (self._ask_http, self._ask_grpc) for _ in range(n)
        ]

    def stop(self) -> None:
        self._over.set()
        for one in self._clients:
            one.result()

    def wait_more(self, n: int = 200) -> None:
        seen = self.outcomes.total()
        wait_until(lambda: self.outcomes.total() > seen + n, "traffic goes on")

    def _keep_on(self, ask: Callable[[], None]) -> None:
        while not self._over.is_set():
            ask()

    def _ask_http(self) -> None:
        with self._server.client() as client:
            try:
                while not self._over.is_set():
                    assert client.infer("m", 21.0).output("y") == [42.0]
                    self.outcomes["http"] += 1
            except CONNECTION_ERRORS:
                self.outcomes["http broke"] += 1

    def _ask_grpc(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self._server.addresses["gRPC"], options) as channel:
            call = channel.unary_unary(CALL + "ModelInfer")
            try:
                while not self._over.is_set():
                    assert call(message(), timeout=TIMEOUT_S)
                    self.outcomes["grpc"] += 1
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.outcomes["grpc broke"] += 1


def kill_under_load(server: OperatedServer, times: int, n_clients: int) -> None:
    """Kill each process a number of times under load; only connections of killed processes break."""
    server.wait_ready()
    load = Load(server, n_clients)
    load.wait_more()
    wait_until(lambda: spares_of(server), "one waits")
    before, back_s = n_files(server.front), []
    for _ in range(times):
        for victim in all_ingress_pids(server):
            load.wait_more(50)
            os.kill(victim, signal.SIGKILL)
            back_s.append(wait_until(lambda victim=victim: are_up(server, victim), "another is up"))
            load.wait_more()
    load.stop()
    n_killed = times * N_INGRESS
    took = f"another up after {median(back_s):.3f} s, {max(back_s):.3f} at most"
    measured(f"{n_killed} processes killed: {dict(load.outcomes)}, {took}")  # the time depends on the machine
    lost = [int(found[1]) for found in map(_LOST.search, server.log) if found is not None]
    assert len(lost) == n_killed
    assert 0 < load.outcomes["http broke"] + load.outcomes["grpc broke"] <= sum(lost)
    assert sum(lost) <= n_killed * 2 * n_clients
    wait_until(lambda: ingress_metric(server, "connections") == [0] * N_INGRESS, "all have left")
    wait_until(lambda: n_files(server.front) <= before, "nothing is left open in the front")
    assert server.metric("gpuserve_running_requests", model="m") == 0
    assert server.metric("gpuserve_arena_blocks", model="m") == 0


def are_up(server: OperatedServer, victim: int) -> bool:
    """Return whether all processes are up and none of them is ``victim``."""
    rows = ingress_rows(server)
    return all(row["state"] == "UP" and row["pid"] != victim for row in rows)


@pytest.mark.thorough
def test_a_process_is_killed_under_load(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders) as server:
        kill_under_load(server, 1, 2)
        assert server.end() == 0


@pytest.mark.thorough
@pytest.mark.timeout(300)  # 100 processes start, a minute on an idle machine
def test_each_process_is_killed_again_and_again_under_load(tmp_path: Path, orders: Orders) -> None:
    with operated(tmp_path, orders) as server:
        kill_under_load(server, 50, 4)
        assert server.end() == 0
