"""One running server: started with a log of its own, awaited, borrowed, and ended with all its processes."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.processes import Process
from benchmarks.servers.server import MODELS, Ports, Server

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.005


class ServerFailed(Exception):
    """A server that is installed did not come up or did not answer as it should; the text has its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers. Borrowed from ``running``, which ends it."""

    server: Server
    ports: Ports
    pid: int
    ready_s: float  #: from the start of the command until the server and its models said ready


@contextmanager
def running(
    server: Server, logs: Path, models: Sequence[str] = MODELS, ready_timeout_s: float = _READY_TIMEOUT_S
) -> Iterator[RunningServer]:
    """Start a prepared server with these models, wait until it is ready, and end all of it afterwards.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    ports = Ports.free()
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{server.log_name}.log"
    with log.open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            server.command(ports, models),
            env={**os.environ, **server.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the benchmark, which then ends the server in order
        )
    try:
        if not _is_ready_within(ready_timeout_s, server, process, ports, models):
            how = f"was not ready in {ready_timeout_s:.0f} s"
            if process.poll() is not None:
                how = f"ended with {process.returncode}"
            raise ServerFailed(f"{server.title} {how}:\n{_tail(log)}")
        yield RunningServer(server, ports, process.pid, time.perf_counter() - began)
    finally:
        with _signals_held_back():
            _stop(process, server.stop_signal)


def _is_ready_within(
    seconds: float, server: Server, process: subprocess.Popen[bytes], ports: Ports, models: Sequence[str]
) -> bool:
    """False where it has ended, too."""
    deadline = time.monotonic() + seconds
    while not _is_ready(server, ports, models):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_ready(server: Server, ports: Ports, models: Sequence[str]) -> bool:
    paths = server.ready_paths(models)
    return all(_says_ok(ports.http, path) for path in paths) if paths else _takes_connections(ports.grpc)


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _says_ok(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals) -> None:
    """The signal to the first process; what of the tree is left after the timeout is killed."""
    members = {one.pid: one for one in processes.tree(process.pid)}
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    process.send_signal(stop_signal)
    while any(map(_is_left, members.values())) and time.monotonic() < deadline:
        process.poll()
        members |= {one.pid: one for one in processes.tree(process.pid)}  # it may have been starting some
        time.sleep(_POLL_S)
    for member in filter(_is_left, members.values()):
        os.kill(member.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait: a server that is half stopped would stay behind.

    By handlers, not by a mask: gRPC's threads would take the signal, and Python hand it to this one.
    """
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
    if caught:
        signal.raise_signal(caught[0])


def _is_left(member: Process) -> bool:
    now = Process.read(member.pid)
    return now is not None and now.started_ticks == member.started_ticks


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
