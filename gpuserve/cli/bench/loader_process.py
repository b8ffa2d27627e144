"""``python -m gpuserve.cli.bench.loader_process``: a process that sends requests, with messages on stdin and
stdout. The sockets, the event loop and the clock are here; ``load_generator`` schedules the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import socket
import ssl
import sys
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Final, cast

from gpuserve.cli.bench import http2_client, loader_messages
from gpuserve.cli.bench.call_protocols import GrpcCalls, GrpcRequests, HttpCalls
from gpuserve.cli.bench.load_generator import CONNECTION_LOST, CallProtocol, LoadGenerator, ProtocolError
from gpuserve.cli.bench.load_plan import ArrivalPattern, due_times, error_reason
from gpuserve.cli.bench.loader_messages import LoaderFailed, LoaderMessage, LoaderSetup, StartLevel

_RETRY_S: Final = 0.1
_CONNECT_TIMEOUT_S: Final = 10.0


class LoadConnection(asyncio.Protocol):
    """A connection that is reopened when it is lost. Each socket gets a protocol, listed in ``by_calls``."""

    def __init__(
        self,
        setup: LoaderSetup,
        context: ssl.SSLContext | None,
        load: LoadGenerator,
        make: Callable[[], CallProtocol],
        by_calls: dict[CallProtocol, LoadConnection],
    ) -> None:
        self._setup = setup
        self._context = context
        self._load = load
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._closed = False
        self.calls: CallProtocol = make()
        self._by_calls = by_calls
        by_calls[self.calls] = self

    async def open(self) -> None:
        """Connect, and wait until calls can start; raise OSError if no server answers in this protocol."""
        loop = asyncio.get_running_loop()
        name = self._setup.host if self._context else None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await loop.create_connection(
                    lambda: self, self._setup.host, self._setup.port, ssl=self._context, server_hostname=name
                )
                while not self.calls.has_room:
                    if not self.calls.is_usable or self._transport is None:
                        raise ConnectionError("the server closed the connection at once")
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise TimeoutError(f"no answer within {_CONNECT_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        """Close the socket for good; calls in flight are dropped."""
        self._closed = True
        if self._reopening is not None:
            self._reopening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reopening
        self._by_calls.pop(self.calls, None)
        self._load.pool.remove(self.calls)
        if self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        """Close the socket; a new one is opened."""
        if self._transport is not None:
            self._transport.abort()

    def write_calls(self) -> None:
        out = self.calls.out
        if out and self._transport is not None:
            self._transport.write(bytes(out))
            out.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.calls.on_connected()
        self.write_calls()
        if self.calls.has_room:
            self._load.add_connection(self.calls, time.monotonic())

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        calls, had_room = self.calls, self.calls.has_room
        try:
            calls.receive(data, now)
        except ProtocolError as error:
            self._load.count_connect_failure(str(error))
            self.abort()
        if not had_room and calls.has_room:
            self._load.add_connection(calls, now)
        self._load.pool.to_flush.add(calls)
        flush(self._load, self._by_calls)
        if not calls.is_usable and not calls.in_flight:
            self.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        """Fail the calls of the connection, and reopen it."""
        self._transport = None
        if self._closed:
            return
        now = time.monotonic()
        lost = self.calls
        self._by_calls.pop(lost, None)
        self.calls = self._make()
        self._by_calls[self.calls] = self
        self._load.pool.remove(lost)
        lost.fail_all(CONNECTION_LOST, now)
        flush(self._load, self._by_calls)
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        while not self._closed:
            try:
                await self.open()
                return
            except OSError as error:
                self._load.count_connect_failure(error_reason(error))
                await asyncio.sleep(_RETRY_S)


def flush(load: LoadGenerator, by_calls: dict[CallProtocol, LoadConnection]) -> None:
    """Write the ``out`` buffers of all connections that may have bytes to send."""
    to_flush = load.pool.to_flush
    while to_flush:
        if (connection := by_calls.get(to_flush.pop())) is not None:
            connection.write_calls()


_CLOCK_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class KernelTimer:
    """A timer of the kernel on the clock of ``time.monotonic``: the event loops' own resolution, a
    millisecond, is longer than many measured answers. Raises OSError without a descriptor.
    """

    def __init__(self, loop: AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "cannot create a timer")
        loop.add_reader(self._fd, self._fire)

    def set(self, at_s: float) -> None:
        """Call back at this time, or at once if the time has passed; an earlier setting is dropped."""
        ns = max(1, int(at_s * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(ns // 1_000_000_000, ns % 1_000_000_000))
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # the timer was set again meanwhile
            return
        self._callback()


_REPORT_PERIOD_S: Final = 0.25
_EXPIRE_PERIOD_S: Final = 0.05
_POLL_S: Final = 0.005
_PARALLEL_CONNECTS: Final = 64
_STDOUT: Final = 1


class LoaderProcess:
    """A process that sends requests."""

    def __init__(self, setup: LoaderSetup) -> None:
        self._setup = setup
        self._load = LoadGenerator(len(setup.requests), setup.timeout_s, setup.max_in_flight)
        self._connections: list[LoadConnection] = []
        self._by_calls: dict[CallProtocol, LoadConnection] = {}
        self._blocks = http2_client.HeaderBlocks()
        self._context = loader_messages.tls_context(setup.tls, http2=setup.grpc)
        self._timer: KernelTimer | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._since_s = self._since_cpu_s = 0.0

    async def run(self, inbox: asyncio.Queue[LoaderMessage | None]) -> None:
        """Execute the messages of the reporting process until the inbox has None."""
        self._timer = KernelTimer(asyncio.get_running_loop(), self._release)
        sweeping = asyncio.create_task(self._expire_calls())
        send_message(loader_messages.LoaderReady())
        try:
            while (message := await inbox.get()) is not None:
                match message:
                    case StartLevel():
                        await self._start(message)
                    case loader_messages.MeasureLevel():
                        self._since_s, self._since_cpu_s = time.monotonic(), time.process_time()
                        self._load.measure(self._since_s)
                        self._reporting = asyncio.create_task(self._report())
                    case loader_messages.StopLevel():
                        await self._stop()
        finally:
            sweeping.cancel()
            self._timer.close()
            for one in self._connections:
                await one.close()

    async def _start(self, start: StartLevel) -> None:
        try:
            await self._connect(start.connections)
        except OSError as error:
            send_message(LoaderFailed(error_reason(error)))
            return
        now = time.monotonic()
        if start.rate_per_s:
            due = due_times(ArrivalPattern(start.arrivals), start.rate_per_s, start.seed, start.phase)
            self._load.start_open(due, now)
            self._release()
        else:
            self._load.start_closed(start.concurrency, now)
            flush(self._load, self._by_calls)
        gc.freeze()
        send_message(loader_messages.LevelStarted())

    async def _connect(self, count: int) -> None:
        surplus, self._connections = self._connections[count:], self._connections[:count]
        for one in surplus:
            await one.close()
        missing = [
            LoadConnection(self._setup, self._context, self._load, self._make_protocol, self._by_calls)
            for _ in range(count - len(self._connections))
        ]
        self._connections += missing
        for at in range(0, len(missing), _PARALLEL_CONNECTS):
            opening = [one.open() for one in missing[at : at + _PARALLEL_CONNECTS]]
            for found in await asyncio.gather(*opening, return_exceptions=True):
                if found is not None:
                    raise found

    def _make_protocol(self) -> CallProtocol:
        setup = self._setup
        if setup.grpc:
            requests = GrpcRequests(setup.head, setup.requests, setup.in_streams)
            return GrpcCalls(self._load, requests, self._blocks)
        return HttpCalls(self._load, setup.requests, in_streams=setup.in_streams)

    def _release(self) -> None:
        self._load.release(time.monotonic())
        flush(self._load, self._by_calls)
        due_s = self._load.next_due_s
        if due_s is not None and self._timer is not None:
            self._timer.set(due_s)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            self._send_counts()

    def _send_counts(self) -> None:
        now, cpu_s = time.monotonic(), time.process_time()
        interval = self._load.samples.pop_counts(now - self._since_s, cpu_s - self._since_cpu_s)
        self._since_s, self._since_cpu_s = now, cpu_s
        send_message(loader_messages.LevelCounted(interval))

    async def _stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._send_counts()
        self._load.drain()
        deadline = time.monotonic() + self._setup.drain_s
        while self._load.unanswered and time.monotonic() <= deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._close_all(self._load.finish(time.monotonic()))
        flush(self._load, self._by_calls)
        send_message(loader_messages.LevelDone(self._load.samples.pop_counts(0.0, 0.0)))

    async def _expire_calls(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_PERIOD_S)
            self._close_all(self._load.expire(time.monotonic()))
            flush(self._load, self._by_calls)

    def _close_all(self, calls: list[CallProtocol]) -> None:
        for one in calls:
            if (connection := self._by_calls.get(one)) is not None:
                connection.abort()


def send_message(message: LoaderMessage) -> None:
    """Send a message to the reporting process."""
    data = memoryview(loader_messages.pack_message(message))
    while data:
        data = data[os.write(_STDOUT, data) :]


class _MessageReader(asyncio.Protocol):
    """A protocol that puts messages from stdin into ``queue``, and None at the end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[LoaderMessage | None] = asyncio.Queue()
        self._unpacker = loader_messages.message_unpacker()

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for one in self._unpacker:
            self.queue.put_nowait(loader_messages.unpack_message(one))

    def connection_lost(self, _error: Exception | None) -> None:
        self.queue.put_nowait(None)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    transport, inbox = await loop.connect_read_pipe(_MessageReader, sys.stdin)
    try:
        setup = await inbox.queue.get()
        if not isinstance(setup, LoaderSetup):  # stdin ended
            return
        try:
            worker = LoaderProcess(setup)
        except OSError as error:
            send_message(LoaderFailed(f"TLS: {error_reason(error)}"))
            return
        await worker.run(inbox.queue)
    finally:
        transport.close()


def main() -> None:
    """Send requests as the messages on stdin demand, until stdin ends."""
    import uvloop

    gc.set_threshold(50_000, 50, 100)
    try:
        uvloop.run(_main())
    except BrokenPipeError:  # the reporting process has ended
        os._exit(1)


if __name__ == "__main__":
    main()
