"""The ingress monitor of a front with real ingress processes and a real supervisor of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import until

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.ingress.channel_messages import IngressSetup
from gpuserve.front.ingress.ingress_monitor import IngressMonitor
from gpuserve.front.ingress.proxied_requests import IngressSession
from gpuserve.front.net.admission import Admission
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.exchange import AnswerHead, BodyReceiver, Exchange
from gpuserve.front.service.inference_service import inference_service
from gpuserve.supervisor.control.front_messages import IngressUp
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_supervision import LogLines
from gpuserve.supervisor.processes.front_monitor import IngressProcesses

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = AnswerHead(200, ())


class Answered:
    """A handler that answers each client with the client's address."""

    def __init__(self, exchange: Exchange) -> None:
        body = repr(exchange.endpoints.client).encode()
        exchange.answer(HEAD, (body,), len(body))

    def receive_body(self, data: Any, end: bool) -> None:
        pass

    def abandon(self) -> None:
        pass


def accept(exchange: Exchange) -> BodyReceiver:
    return Answered(exchange)


class Supervisor:
    """The supervisor of the ingress processes, in a reactor thread; ``monitor`` runs in the test's loop."""

    def __init__(self) -> None:
        self.monitor: IngressMonitor
        self._loop = asyncio.get_running_loop()
        self._reactor = Reactor()
        self._ingress = IngressProcesses(self._reactor, self, LogLines(self._reactor), relay_output=False)
        self._thread = threading.Thread(target=self._reactor.run)
        self._thread.start()

    def ask(self, number: int) -> None:
        self._reactor.call_soon_threadsafe(partial(self._ingress.start, number))

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        kept = [os.dup(fd) for fd in fds]
        if isinstance(message, IngressUp):
            self._loop.call_soon_threadsafe(lambda: self.monitor.ingress_up(message, kept))
        else:
            self._loop.call_soon_threadsafe(lambda: self.monitor.ingress_down(message))

    def close(self) -> None:
        self._reactor.call_soon_threadsafe(self._ingress.close)
        self._reactor.call_soon_threadsafe(self._reactor.stop)
        self._thread.join()
        self._reactor.close()


@contextlib.asynccontextmanager
async def opened(listener: socket.socket, n: int = 2) -> AsyncIterator[tuple[IngressMonitor, Admission]]:
    """Start ``n`` ingress processes that accept the connections of ``listener``; close it afterwards."""
    admission = Admission()
    setup, supervisor = IngressSetup(ServerSettings(ingress_processes=n).to_wire(), 0, (), {}), Supervisor()
    serve = partial(IngressSession, inference_service(ServerSettings()), accept)
    speak_tls = {os.dup(listener.fileno()): False}
    events = inference_service(ServerSettings()).events
    monitor = supervisor.monitor = IngressMonitor(
        speak_tls, serve, AsyncRequests(), admission, setup, None, events.publish, supervisor.ask
    )
    with listener:
        try:
            await monitor.start()
            yield monitor, admission
            await monitor.stop()
        finally:
            supervisor.close()
    assert [row.state for row in monitor.ingress_rows()] == ["ENDED"] * n
    assert admission.n_open == 0


async def answer(address: Any) -> bytes:
    """Return the body of one answer over a new connection."""
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection(*address)
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    nbytes = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(nbytes)
    writer.close()
    await writer.wait_closed()
    return body


async def test_connections_of_a_unix_socket(tmp_path: Path) -> None:
    listener, path = socket.socket(socket.AF_UNIX), str(tmp_path / "s")
    listener.bind(path)
    async with opened(listener) as (monitor, admission):
        assert [await answer(path) for _ in range(4)] == [b"None"] * 4
        await until(lambda: admission.n_open == 0)
        await until(lambda: sum(row.counts.n_requests for row in monitor.ingress_rows()) == 4)


async def test_a_process_unaware_of_the_notice_is_counted() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    async with opened(listener, n=1) as (monitor, _):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await until(lambda: sum(row.n_connections for row in monitor.ingress_rows()) == 1)
        (row,) = monitor.ingress_rows()
        assert row.pid is not None
        os.kill(row.pid, signal.SIGSTOP)
        monitor.announce()
        assert monitor.n_unaware == 1
        os.kill(row.pid, signal.SIGCONT)
        head = b""
        while b"connection: close" not in head.lower():  # the process may read a request before the notice
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
        await until(lambda: monitor.n_unaware == 0)
        writer.close()


async def test_a_process_that_cannot_be_started_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener, popen, failures = socket.create_server(("127.0.0.1", 0)), subprocess.Popen, [errno.EMFILE]

    def start(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "no descriptor is left")
        return popen(*arguments, **named)

    monkeypatch.setattr(subprocess, "Popen", start)
    with caplog.at_level(logging.ERROR):
        async with opened(listener, n=1) as (monitor, _):
            (row,) = monitor.ingress_rows()
            assert (row.state, row.counts.restarts) == ("UP", 1)
            assert await answer(listener.getsockname())
    assert caplog.messages[0] == (
        "ingress process 0 ended (cannot start a process of gpuserve.front.ingress: no descriptor is left); "
        "it is started again at once"
    )
