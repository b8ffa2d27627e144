"""A server that a service manager starts, as systemd does: inherited listeners and notifications."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from serving import END_TIMEOUT_S, GPUSERVE

#: Puts the given descriptors where sd_listen_fds(3) has them, and becomes the server.
LAUNCH = """
import os, sys
count = int(sys.argv[1])
for position, fd in enumerate(sys.argv[2 : 2 + count]):
    os.dup2(int(fd), 3 + position)
os.environ.update(LISTEN_PID=str(os.getpid()), WATCHDOG_PID=str(os.getpid()), LISTEN_FDS=str(count))
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""
CONFIG = """
server: {{http_port: {http}, grpc_port: {grpc}, metrics_port: null, lame_duck_s: 0}}
models:
  - {{name: double, callable: model.py:double, max_batch_size: 8,
     inputs: [{{name: x, dtype: float32, shape: [1]}}], outputs: [{{name: y, dtype: float32, shape: [1]}}]}}
"""
MODEL = "def double(requests):\n    return [{'y': 2 * r['x']} for r in requests]\n"
BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3]}]}'


@dataclass
class Manager:
    """The part of a service manager: it owns the listeners, starts servers and hears what they say."""

    folder: Path
    names: str = ""
    listeners: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(2):
            listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
            # Above the descriptors at which the server looks for its listeners.
            self.listeners.append(listener)
        self.http, grpc = (one.getsockname()[1] for one in self.listeners)
        (self.folder / "config.yaml").write_text(CONFIG.format(http=self.http, grpc=grpc))
        (self.folder / "model.py").write_text(MODEL)
        self.heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.bind(str(self.folder / "notify"))
        self.heard.settimeout(END_TIMEOUT_S)

    def close(self) -> None:
        for one in (*self.listeners, self.heard):
            one.close()

    @contextlib.contextmanager
    def serving(self, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        fds = [one.fileno() for one in self.listeners]
        high = [os.dup(fd) if fd > 8 else _above(fd) for fd in fds]
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), "WATCHDOG_USEC": "900000"}
        if self.names:
            environment["LISTEN_FDNAMES"] = self.names
        command = [sys.executable, "-c", LAUNCH, str(len(high)), *map(str, high), GPUSERVE, "serve"]
        process = subprocess.Popen(
            [*command, str(self.folder / "config.yaml"), *flags], pass_fds=high, env=environment,
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        for fd in high:
            os.close(fd)
        try:
            yield process
        finally:
            process.kill()
            sys.stderr.write(process.communicate()[1].decode())  # pytest shows the log with a failure

    def wait_for(self, assignment: str) -> list[str]:
        """Return the messages up to the first with the assignment."""
        messages = []
        while not messages or assignment not in messages[-1].split("\n"):
            messages.append(self.heard.recv(4096).decode())
        return messages

    def ask(self) -> bytes:
        client = http.client.HTTPConnection("127.0.0.1", self.http, timeout=END_TIMEOUT_S)
        try:
            client.request("POST", "/v2/models/double/infer", BODY)
            return client.getresponse().read()
        finally:
            client.close()


def _above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, 16)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with contextlib.closing(Manager(tmp_path)) as one:
        yield one


def test_the_server_reports_its_states_and_resets_the_watchdog(manager: Manager) -> None:
    with manager.serving() as process:
        assert any("WATCHDOG=1" in one for one in manager.wait_for("READY=1"))
        assert b'"data":[6.0]' in manager.ask()
        (manager.folder / "model.py").write_text(MODEL.replace("2 *", "4 *"))
        process.send_signal(signal.SIGHUP)
        reloading = manager.wait_for("RELOADING=1")[-1]
        assert "MONOTONIC_USEC=" in reloading
        manager.wait_for("READY=1")
        process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert process.wait(END_TIMEOUT_S) == 0


@pytest.mark.thorough
def test_connections_wait_while_the_service_restarts(manager: Manager) -> None:
    """Each request has a connection of its own, and four are in flight at a time."""
    over, answers, failures = threading.Event(), itertools.count(), []

    def ask_on() -> None:
        while not over.is_set():
            try:
                assert b'"data":[6.0]' in manager.ask()
                next(answers)
            except Exception as error:
                failures.append(repr(error))

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(manager.serving())
        manager.wait_for("READY=1")
        threads = [threading.Thread(target=ask_on) for _ in range(4)]
        stack.callback(over.set)
        for one in threads:
            one.start()
            stack.callback(one.join)
        for _ in range(2):
            first.send_signal(signal.SIGTERM)
            assert first.wait(END_TIMEOUT_S) == 0
            first = stack.enter_context(manager.serving())
            manager.wait_for("READY=1")
        assert b'"data":[6.0]' in manager.ask()
        over.set()
        for one in threads:
            one.join(END_TIMEOUT_S)
    assert not failures, f"{len(failures)} of {next(answers)} failed: {failures[:3]}"


@pytest.mark.parametrize(
    ("names", "flags", "expected"),
    [
        ("grpc:http", (), 0),
        ("", ("--http-port", "1"), "has no role: expected a port of the settings"),
        pytest.param("http:http", (), "is a second one for http", marks=pytest.mark.thorough),
        pytest.param(
            "", ("--transport", "grpcio"), "cannot use an inherited listener", marks=pytest.mark.thorough
        ),
    ],
)
def test_listeners_have_the_role_of_their_name_or_port(
    tmp_path: Path, names: str, flags: tuple[str, ...], expected: int | str
) -> None:
    with contextlib.closing(Manager(tmp_path, names)) as manager, manager.serving(*flags) as process:
        if isinstance(expected, str):
            _, log = process.communicate(timeout=END_TIMEOUT_S)
            assert process.returncode != 0
            assert expected in log.decode()
        else:
            manager.wait_for("READY=1")
            manager.http = manager.listeners[1].getsockname()[1]
            assert b'"data":[6.0]' in manager.ask()
