"""The control socket and clients that do not behave: none of them disturbs another, or the server."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from commands import ask, row, status
from exploring import variants
from operated import InBackground, OperatedServer, Orders, config, model
from processes import cpu_s, finished, wait_until
from serving import GPUSERVE, unlikely_port

from gpuserve.cli.exit_codes import ExitCode
from gpuserve.core.errors import ControlError
from gpuserve.supervisor.control import operator_client
from gpuserve.supervisor.control.attach_protocol import attach_name
from gpuserve.supervisor.control.operator_client import ControlName
from gpuserve.supervisor.control.operator_protocol import (
    OPERATOR_VOCABULARY,
    PROTOCOL,
    CommandKeepAlive,
    CommandProgress,
    OperatorCommand,
    VerbOutcome,
)
from gpuserve.supervisor.operator.operator_verbs import ASK_TIMEOUT_S, MAX_ASK_NBYTES, MAX_CLIENTS


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("socket") / "orders")


@pytest.fixture(scope="module")
def server(orders: Orders) -> Iterator[OperatedServer]:
    path = config(orders.directory.parent, model("m", orders), model("n", orders), host="127.0.0.1")
    with OperatedServer(path) as one:
        yield one.wait_ready()


@contextlib.contextmanager
def connected(server: OperatedServer) -> Iterator[socket.socket]:
    address, _, port = server.addresses["HTTP"].rpartition(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20.0)
        sock.connect(ControlName(os.geteuid(), address, int(port)).encode())
        yield sock


def is_let_go(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionResetError:  # it had not read all that was sent
        return True


NONSENSE = {
    "no msgpack": b"\xc1\xc1garbage",
    "a spilled message": b"\xc1",
    "no list": msgpack.packb("status"),
    "another tag": msgpack.packb([99]),
    "too few fields": msgpack.packb([1, PROTOCOL]),
    "what only a server says": OPERATOR_VOCABULARY.encode(CommandProgress("hello")),
    "a verb that is a number": msgpack.packb([1, PROTOCOL, 7, {}]),
    "arguments that are a list": msgpack.packb([1, PROTOCOL, "status", []]),
    "deeply nested": b"\x91" * 100_000,
    "too long": msgpack.packb([1, PROTOCOL, "status", {"x": "y" * (MAX_ASK_NBYTES + 1)}]),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_that_client_and_nothing_else(server: OperatedServer, what: str) -> None:
    with connected(server) as other, connected(server) as sock:
        sock.send(NONSENSE[what])
        assert is_let_go(sock)
        other.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, "status", {})))
        assert isinstance(OPERATOR_VOCABULARY.decode(other.recv(1 << 17)), VerbOutcome)
        assert is_let_go(other)


def test_another_protocol_is_told_so(server: OperatedServer) -> None:
    with connected(server) as sock:
        sock.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL + 1, "status", {})))
        answer = OPERATOR_VOCABULARY.decode(sock.recv(1 << 16))
        assert (answer.code, "same version of gpuserve" in answer.text) == ("UNIMPLEMENTED", True)


@pytest.mark.thorough
def test_a_client_that_says_nothing_is_let_go(server: OperatedServer) -> None:
    with connected(server) as sock:
        sock.settimeout(ASK_TIMEOUT_S + 10.0)
        assert is_let_go(sock)


def test_more_clients_than_there_may_be_wait_for_the_others(server: OperatedServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(MAX_CLIENTS):
            held.enter_context(connected(server))
        with connected(server) as sock:
            sock.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, "status", {})))
            assert server.infer("m", 1.0).output("y") == [2.0]
            assert not select.select([sock], [], [], 0.0)[0]
            held.close()
            assert isinstance(OPERATOR_VOCABULARY.decode(sock.recv(1 << 17)), VerbOutcome)
    assert status(server.addresses["gRPC"])["server"]["pid"] == server.pid


def test_several_at_once(server: OperatedServer) -> None:
    asked = [InBackground(status, server.addresses["HTTP"]) for _ in range(8)]
    assert {one.result()["server"]["pid"] for one in asked} == {server.pid}


def test_what_a_client_asked_for_goes_on_without_it(server: OperatedServer) -> None:
    at = server.addresses["HTTP"]
    with connected(server) as sock:
        sock.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, "scale", {"counts": {"m": 2}})))
        assert isinstance(OPERATOR_VOCABULARY.decode(sock.recv(1 << 16)), CommandProgress)
    wait_until(lambda: row(at, "m")["slots"] == 2, "it is scaled nevertheless")
    assert ask(at, "scale", counts={"m": 1}).code == ""


@pytest.mark.thorough
def test_a_client_that_waits_is_told_that_the_server_is_alive(server: OperatedServer, orders: Orders) -> None:
    at = server.addresses["HTTP"]
    orders.shut()
    asked = InBackground(server.infer, "n", 1.0)
    wait_until(lambda: row(at, "n")["in_flight"] == 1, "it runs")
    with connected(server) as sock:
        sock.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, "drain", {})))
        assert isinstance(OPERATOR_VOCABULARY.decode(sock.recv(1 << 16)), CommandProgress)
        assert isinstance(OPERATOR_VOCABULARY.decode(sock.recv(1 << 16)), CommandKeepAlive)
        orders.open()
        assert OPERATOR_VOCABULARY.decode(sock.recv(1 << 16))[0] == ""
    assert asked.result().output("y") == [2.0]
    assert ask(at, "drain", undo=True).code == ""


def test_a_server_that_hangs_is_not_waited_for(server: OperatedServer) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ControlError, match=rf"process {server.pid} is stopped \(SIGSTOP\)"):
            operator_client.ask(server.addresses["HTTP"], "load", {"model": "m"}, lambda _: None, 0.5)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert status(server.addresses["HTTP"])["server"]["pid"] == server.pid


def test_a_command_that_is_interrupted_says_what_goes_on(server: OperatedServer, orders: Orders) -> None:
    at = server.addresses["HTTP"]
    orders.shut()
    asked = InBackground(server.infer, "n", 1.0)
    wait_until(lambda: row(at, "n")["in_flight"] == 1, "it runs")
    command = [GPUSERVE, "drain", "--server", at]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as drain:
        assert drain.stderr is not None
        assert drain.stderr.readline() == "not ready from now on\n"
        drain.send_signal(signal.SIGINT)
        assert drain.communicate(timeout=20.0) == ("", "interrupted: the server continues the command\n")
        assert drain.returncode == 130
    orders.open()
    assert asked.result().output("y") == [2.0]
    assert ask(at, "drain", undo=True).code == ""


def test_a_client_that_asks_twice_is_let_go(server: OperatedServer, orders: Orders) -> None:
    at = server.addresses["HTTP"]
    orders.shut()
    asked = InBackground(server.infer, "n", 1.0)
    wait_until(lambda: row(at, "n")["in_flight"] == 1, "it runs")
    with connected(server) as sock:
        sock.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, "unload", {"model": "n"})))
        assert isinstance(OPERATOR_VOCABULARY.decode(sock.recv(1 << 16)), CommandProgress)
        sock.send(OPERATOR_VOCABULARY.encode(OperatorCommand(PROTOCOL, "status", {})))
        assert is_let_go(sock)
    orders.open()
    assert asked.result().output("y") == [2.0]
    wait_until(lambda: row(at, "n")["state"] == "UNAVAILABLE", "it is unloaded")
    assert ask(at, "load", model="n").code == ""


def test_a_server_that_ends_lets_its_clients_go(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    with OperatedServer(
        config(tmp_path, model("m", orders), host="127.0.0.1", lame_duck_s=60)
    ).until_killed() as server:
        drained = InBackground(ask, server.addresses["HTTP"], "drain")
        wait_until(lambda: server.status("/v2/health/ready") == 400, "it leaves")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(server.addresses["HTTP"])["server"]["state"] == "DRAINING", "it ends")
        assert server.end() == 0  # the second signal
        with pytest.raises(ControlError, match="the server ended before it answered"):
            drained.result()


def test_a_name_that_somebody_else_has_is_no_end_of_the_server(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    port = unlikely_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(ControlName(os.geteuid(), "127.0.0.1", port).encode())
        flags = ("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
        with OperatedServer(config(tmp_path, model("m", orders), host="127.0.0.1"), *flags) as server:
            server.wait_log(f"the server cannot be operated by 127.0.0.1:{port}: ")
            server.wait_ready()
            assert status(server.addresses["gRPC"])["server"]["pid"] == server.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_processes_of_other_users_cost_nearly_nothing(server: OperatedServer) -> None:
    address, _, port = server.addresses["HTTP"].rpartition(":")
    name = ControlName(os.geteuid(), address, int(port)).encode()
    n_lines, used_s, until = len(server.log), cpu_s(server.pid), time.monotonic() + 1.5
    stranger = os.fork()
    if not stranger:
        _connect_until(until, name)
    status(server.addresses["HTTP"])  # who may, gets through
    os.waitpid(stranger, 0)
    assert cpu_s(server.pid) - used_s < 0.5
    told = [line for line in server.log[n_lines:] if "may not operate the server" in line]
    assert len(told) <= 1


def _connect_until(until: float, name: bytes) -> None:
    """What another user does, in a process of its own."""
    os.setuid(54321)
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(0.1)
            sock.connect(name)
    os._exit(0)


@pytest.mark.parametrize("kind", variants("operators", "programs"))
def test_a_name_that_somebody_else_has_ends_a_server_that_requires_it(tmp_path: Path, kind: str) -> None:
    port = unlikely_port()
    names = {
        "operators": ControlName(os.geteuid(), "127.0.0.1", port).encode(),
        "programs": attach_name(os.geteuid(), port),
    }
    path = config(tmp_path, model("m", Orders(tmp_path / "orders")), host="127.0.0.1")
    flags = ("--require-control", "--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(names[kind])
        squatter.listen()
        ran = finished([GPUSERVE, "serve", str(path), *flags])
    assert ran.returncode == ExitCode.STARTUP_FAILURE
    said = (
        f"Address already in use by process {os.getpid()} of user {os.geteuid()} (the setting require_control"
    )
    assert said in ran.stderr
