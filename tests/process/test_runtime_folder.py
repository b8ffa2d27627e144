"""The socket files of a server whose user has a runtime folder ($XDG_RUNTIME_DIR)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import status
from leaks import own_name
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from serving import GPUSERVE, unlikely_port

import gpuserve
from gpuserve import Server
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.core.errors import AttachError
from gpuserve.supervisor.control.attach_protocol import attach_addresses, attach_name
from gpuserve.supervisor.control.operator_client import ControlName

#: Listens as another user on the abstract names that it is given in hexadecimal, until its input ends.
SQUATTER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
taken = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in sys.argv[1:]]
for sock, name in zip(taken, sys.argv[1:]):
    sock.bind(bytes.fromhex(name)); sock.listen()
print("ready", flush=True); sys.stdin.read()
"""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the sockets. A socket file that a test leaves there is found by ``leaks.py``."""
    base = Path(tempfile.gettempdir(), own_name())
    base.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield base / "gpuserve"
    for folder in (base / "gpuserve", base):
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def squatter(*names: bytes) -> Iterator[None]:
    command = [sys.executable, "-c", SQUATTER, *(name.hex() for name in names)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()


def operated(path: Path, port: int, *flags: str) -> OperatedServer:
    """A server on this port that requires its control sockets."""
    file = config(path, model("m", Orders(path / "orders")), host="127.0.0.1")
    ports = ("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
    return OperatedServer(file, "--require-control", *ports, *flags)


def files(runtime: Path) -> set[str]:
    return {one.name for one in runtime.iterdir()} if runtime.exists() else set()


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_who_has_the_abstract_names_hinders_nobody(runtime: Path, tmp_path: Path) -> None:
    port = unlikely_port()
    names = (ControlName(os.geteuid(), "127.0.0.1", port).encode(), attach_name(os.geteuid(), port))
    with squatter(*names), operated(tmp_path, port) as server:
        waiting = InBackground(Server.attach, f"localhost:{port}", timeout_s=TIMEOUT_S)
        server.wait_ready()
        waiting.result().stop()
        address = server.addresses["HTTP"]
        assert status(address)["server"]["pid"] == server.pid
        with gpuserve.events(address, past=True) as stream:
            assert stream.next(TIMEOUT_S) is not None
        with Server.attach(address, timeout_s=TIMEOUT_S) as attached:
            assert attached.addresses["http"] == f"http://{address}"
        command = [GPUSERVE, "status", "--server", address]
        without = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        for environment in (None, without):  # the table of the kernel has the path
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=TIMEOUT_S)
        assert any("did not bind @gpuserve/" in line for line in server.log)
        assert {f"control-127.0.0.1:{port}", f"port-{port}"} <= files(runtime)
        modes = {stat.filemode((runtime / name).stat().st_mode) for name in files(runtime)}
        assert modes == {"srw-------"}
        assert server.end() == 0
    assert files(runtime) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_program_does_not_attach_to_another_user() -> None:
    port = unlikely_port()
    with (
        squatter(attach_name(os.geteuid(), port)),
        pytest.raises(AttachError, match=r"process \d+ listens there and belongs to user 65534"),
    ):
        Server.attach(f"localhost:{port}", timeout_s=0.2)


def test_a_server_that_cannot_start_leaves_no_file(runtime: Path, tmp_path: Path) -> None:
    port = unlikely_port()
    with contextlib.ExitStack() as opened:
        for address in attach_addresses(port, create=True):
            sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.bind(address)
            sock.listen()
        server = opened.enter_context(operated(tmp_path, port))
        server.wait_log(f"programs cannot attach by port {port}: Address already in use by process")
        assert server.process.wait(TIMEOUT_S) == ExitCode.STARTUP_FAILURE
        assert files(runtime) == {f"port-{port}"}
        (runtime / f"port-{port}").unlink()


@pytest.mark.thorough
def test_a_server_replaces_the_files_of_one_that_was_killed(runtime: Path, tmp_path: Path) -> None:
    port = unlikely_port()
    with operated(tmp_path, 0).until_ended() as other, operated(tmp_path, port) as killed:
        killed.wait_ready()
        os.kill(killed.pid, signal.SIGKILL)
        killed.process.wait(TIMEOUT_S)
        left = files(runtime)
        assert {f"control-127.0.0.1:{port}", f"port-{port}"} < left
        with operated(tmp_path, port).until_ended() as server:
            for one in (server, other):
                assert status(one.addresses["HTTP"])["server"]["pid"] == one.pid
            # The ports of gRPC and metrics of the killed server were others.
            assert len(files(runtime)) == len(left)
        assert status(other.addresses["HTTP"])["server"]["pid"] == other.pid
    assert files(runtime) == set()
