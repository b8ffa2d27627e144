"""``python -m gpuserve.bench.worker``: a process that loads a server. Messages are on stdin and stdout.

The event loop and the clock; what is sent when is for ``load``, and how for ``Calls``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from typing import Final

from gpuserve.bench import http2, messages
from gpuserve.bench.arrivals import Arrivals, due_times
from gpuserve.bench.calls import Calls
from gpuserve.bench.connection import Connection, flush, tls_context
from gpuserve.bench.http1_calls import HttpCalls
from gpuserve.bench.http2_calls import GrpcCalls
from gpuserve.bench.load import Load
from gpuserve.bench.messages import (
    Counted,
    Done,
    Failed,
    Measure,
    Message,
    Ready,
    Setup,
    Start,
    Started,
    Stop,
)
from gpuserve.bench.timer import Timer

_REPORT_S: Final = 0.25
_SWEEP_S: Final = 0.05
_LOOK_S: Final = 0.005
_OPENING_AT_ONCE: Final = 64
_STDOUT: Final = 1


class Worker:
    """One process that loads. ``run`` goes on until stdin ends."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._load = Load(len(setup.requests), setup.timeout_s, setup.max_in_flight)
        self._connections: list[Connection] = []
        self._by_calls: dict[Calls, Connection] = {}
        self._blocks = http2.HeaderBlocks()
        self._context = tls_context(setup.tls, http2=setup.grpc)
        self._timer: Timer | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._since_s = self._since_cpu_s = 0.0

    async def run(self, inbox: asyncio.Queue[Message | None]) -> None:
        """Do what the messages say."""
        self._timer = Timer(asyncio.get_running_loop(), self._release)
        sweeping = asyncio.create_task(self._sweep())
        tell(Ready())
        try:
            while (message := await inbox.get()) is not None:
                match message:
                    case Start():
                        await self._start(message)
                    case Measure():
                        self._measure()
                    case Stop():
                        await self._stop()
        finally:
            sweeping.cancel()
            self._timer.close()
            for one in self._connections:
                await one.close()

    async def _start(self, start: Start) -> None:
        try:
            await self._connect(start.connections)
        except OSError as error:
            tell(Failed((error.strerror or str(error) or type(error).__name__).lower()))
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
        tell(Started())

    async def _connect(self, count: int) -> None:
        """As many connections as that."""
        surplus, self._connections = self._connections[count:], self._connections[:count]
        for one in surplus:
            await one.close()
        missing = [self._connection() for _ in range(count - len(self._connections))]
        self._connections += missing
        for at in range(0, len(missing), _OPENING_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                opening = [group.create_task(_opened(one)) for one in missing[at : at + _OPENING_AT_ONCE]]
            for task in opening:
                if (error := task.result()) is not None:
                    raise error

    def _connection(self) -> Connection:
        made = Connection(self._setup, self._context, self._load, self._calls)
        made.register(self._by_calls)
        return made

    def _calls(self) -> Calls:
        setup = self._setup
        if setup.grpc:
            return GrpcCalls(
                self._load, setup.head, setup.requests, self._blocks, in_streams=setup.in_streams
            )
        return HttpCalls(self._load, setup.requests, in_streams=setup.in_streams)

    def _release(self) -> None:
        """Send what is due, and come back for the next."""
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
        tell(Counted(interval))

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
        tell(Done(self._load.samples.take(0.0, 0.0)))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._close_all(self._load.sweep(time.monotonic()))
            flush(self._load, self._by_calls)

    def _close_all(self, calls: list[Calls]) -> None:
        for one in calls:
            connection = self._by_calls.get(one)
            if connection is not None:
                connection.abort()


async def _opened(connection: Connection) -> OSError | None:
    try:
        await connection.open()
    except OSError as error:
        return error
    return None


def tell(message: Message) -> None:
    """Send a message to the process that makes the report."""
    data = memoryview(messages.packed(message))
    while data:
        data = data[os.write(_STDOUT, data) :]


class _Inbox(asyncio.Protocol):
    """Messages out of stdin, and None at its end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Message | None] = asyncio.Queue()
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
        if not isinstance(setup, Setup):  # stdin ended
            return
        try:
            worker = Worker(setup)
        except OSError as error:
            tell(Failed(f"TLS: {(error.strerror or str(error)).lower()}"))
            return
        await worker.run(inbox.queue)
    finally:
        transport.close()


def main() -> None:
    """Run until stdin ends."""
    import uvloop

    gc.set_threshold(50_000, 50, 100)
    try:
        uvloop.run(_main())
    except BrokenPipeError:  # nobody wants to know
        os._exit(1)


if __name__ == "__main__":
    main()
