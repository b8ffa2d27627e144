"""``python -m gpuserve.bench.calls.worker``: a process that loads a server, with messages on stdin and
stdout. The event loop and the clock are here; what is sent when is decided in ``load``.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Final

from gpuserve.bench.calls import http2, messages
from gpuserve.bench.calls.call import CallProtocol
from gpuserve.bench.calls.connection import LoadConnection, flush, tls_context
from gpuserve.bench.calls.http1_calls import HttpCalls
from gpuserve.bench.calls.http2_calls import GrpcCalls, GrpcRequests
from gpuserve.bench.calls.load import LoadGenerator
from gpuserve.bench.calls.messages import (
    LevelCounted,
    LevelDone,
    LevelStarted,
    LoaderFailed,
    LoaderMessage,
    LoaderReady,
    LoaderSetup,
    MeasureLevel,
    StartLevel,
    StopLevel,
)
from gpuserve.bench.plan.errors import reason
from gpuserve.bench.plan.plan import Arrivals, due_times

_CLOCK_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """A timer of the kernel, by ``time.monotonic``: steps of the event loops' own, a millisecond, are longer
    than many answers timed here. OSError: the process has no descriptor left.
    """

    def __init__(self, loop: AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer can be made")
        loop.add_reader(self._fd, self._fire)

    def set(self, at_s: float) -> None:
        """Call back at this time, or at once where it is over; a time that was set before is dropped."""
        ns = max(1, int(at_s * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(ns // 1_000_000_000, ns % 1_000_000_000))
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set anew meanwhile
            return
        self._callback()


_REPORT_S: Final = 0.25
_SWEEP_S: Final = 0.05
_LOOK_S: Final = 0.005
_OPENING_AT_ONCE: Final = 64
_STDOUT: Final = 1


class Worker:
    """One process that sends requests; ``run`` returns when the inbox has None."""

    def __init__(self, setup: LoaderSetup) -> None:
        self._setup = setup
        self._load = LoadGenerator(len(setup.requests), setup.timeout_s, setup.max_in_flight)
        self._connections: list[LoadConnection] = []
        self._by_calls: dict[CallProtocol, LoadConnection] = {}
        self._blocks = http2.HeaderBlocks()
        self._context = tls_context(setup.tls, http2=setup.grpc)
        self._timer: Timer | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._since_s = self._since_cpu_s = 0.0

    async def run(self, inbox: asyncio.Queue[LoaderMessage | None]) -> None:
        """Carry out the messages of the process that makes the report."""
        self._timer = Timer(asyncio.get_running_loop(), self._release)
        sweeping = asyncio.create_task(self._sweep())
        tell(LoaderReady())
        try:
            while (message := await inbox.get()) is not None:
                match message:
                    case StartLevel():
                        await self._start(message)
                    case MeasureLevel():
                        self._measure()
                    case StopLevel():
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
            tell(LoaderFailed(reason(error)))
            return
        now = time.monotonic()
        if start.rate_per_s:
            due = due_times(Arrivals(start.arrivals), start.rate_per_s, start.seed, start.phase)
            self._load.start_open(due, now)
            self._release()
        else:
            self._load.start_closed(start.concurrency, now)
            flush(self._load, self._by_calls)
        gc.freeze()
        tell(LevelStarted())

    async def _connect(self, count: int) -> None:
        surplus, self._connections = self._connections[count:], self._connections[:count]
        for one in surplus:
            await one.close()
        missing = [
            LoadConnection(self._setup, self._context, self._load, self._calls, self._by_calls)
            for _ in range(count - len(self._connections))
        ]
        self._connections += missing
        for at in range(0, len(missing), _OPENING_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                opening = [group.create_task(_opened(one)) for one in missing[at : at + _OPENING_AT_ONCE]]
            for task in opening:
                if (error := task.result()) is not None:
                    raise error

    def _calls(self) -> CallProtocol:
        setup = self._setup
        if setup.grpc:
            requests = GrpcRequests(setup.head, setup.requests, setup.in_streams)
            return GrpcCalls(self._load, requests, self._blocks)
        return HttpCalls(self._load, setup.requests, in_streams=setup.in_streams)

    def _release(self) -> None:
        """Send what is due, and set the timer for what is due next."""
        self._load.release(time.monotonic())
        flush(self._load, self._by_calls)
        due_s = self._load.next_due_s
        if due_s is not None and self._timer is not None:
            self._timer.set(due_s)

    def _measure(self) -> None:
        self._since_s, self._since_cpu_s = time.monotonic(), time.process_time()
        self._load.measure(self._since_s)
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._tell_counted()

    def _tell_counted(self) -> None:
        now, cpu_s = time.monotonic(), time.process_time()
        interval = self._load.samples.take(now - self._since_s, cpu_s - self._since_cpu_s)
        self._since_s, self._since_cpu_s = now, cpu_s
        tell(LevelCounted(interval))

    async def _stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._tell_counted()
        self._load.drain()
        deadline = time.monotonic() + self._setup.drain_s
        while True:
            if not self._load.unanswered or time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_S)
        self._close_all(self._load.finish(time.monotonic()))
        flush(self._load, self._by_calls)
        tell(LevelDone(self._load.samples.take(0.0, 0.0)))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._close_all(self._load.sweep(time.monotonic()))
            flush(self._load, self._by_calls)

    def _close_all(self, calls: list[CallProtocol]) -> None:
        for one in calls:
            connection = self._by_calls.get(one)
            if connection is not None:
                connection.abort()


async def _opened(connection: LoadConnection) -> OSError | None:
    try:
        await connection.open()
    except OSError as error:
        return error
    return None


def tell(message: LoaderMessage) -> None:
    """Send a message to the process that makes the report."""
    data = memoryview(messages.packed(message))
    while data:
        data = data[os.write(_STDOUT, data) :]


class _Inbox(asyncio.Protocol):
    """Reads messages from stdin into ``queue``, and None at its end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[LoaderMessage | None] = asyncio.Queue()
        self._unpacker = messages.unpacker()

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for one in self._unpacker:
            self.queue.put_nowait(messages.unpacked(one))

    def connection_lost(self, _error: Exception | None) -> None:
        self.queue.put_nowait(None)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    transport, inbox = await loop.connect_read_pipe(_Inbox, sys.stdin)
    try:
        setup = await inbox.queue.get()
        if not isinstance(setup, LoaderSetup):  # stdin ended
            return
        try:
            worker = Worker(setup)
        except OSError as error:
            tell(LoaderFailed(f"TLS: {reason(error)}"))
            return
        await worker.run(inbox.queue)
    finally:
        transport.close()


def main() -> None:
    """Send requests as the messages on stdin say, until stdin ends."""
    import uvloop

    gc.set_threshold(50_000, 50, 100)
    try:
        uvloop.run(_main())
    except BrokenPipeError:  # nobody wants to know
        os._exit(1)


if __name__ == "__main__":
    main()
