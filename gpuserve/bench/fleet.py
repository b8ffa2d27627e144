"""The processes that load: started, told, heard, ended. One fleet serves all levels of a run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Final

from gpuserve.bench.calls import messages
from gpuserve.bench.calls.messages import LoaderFailed, LoaderMessage, LoaderReady, LoaderSetup, StartLevel
from gpuserve.bench.plan.errors import BenchError
from gpuserve.bench.plan.plan import LoadKind, LoadLevel, LoadPlan

_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0
_READ_NBYTES: Final = 1 << 18


class Fleet:
    """The processes that send requests, a context manager; they end with their stdin, not by Ctrl-C."""

    def __init__(self, setup: LoaderSetup, plan: LoadPlan, protocol: str) -> None:
        self._setup = setup
        self._plan = plan
        self._protocol = protocol
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, LoaderMessage]] = asyncio.Queue()

    async def __aenter__(self) -> Fleet:
        try:
            for index in range(self._plan.processes):
                await self._spawn(index)
            self.tell(self._setup)
            await self.gather(LoaderReady)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._end()

    @property
    def size(self) -> int:
        return len(self._processes)

    def tell(self, message: LoaderMessage) -> None:
        data = messages.packed(message)
        for process in self._processes:
            _write(process, data)

    def start(self, level: LoadLevel) -> None:
        """Tell each process to begin its share of a level."""
        for index, process in enumerate(self._processes):
            _write(process, messages.packed(self._start_of(level, index)))

    async def receive(self, timeout_s: float | None = None) -> tuple[int, LoaderMessage] | None:
        """The next message and who it is from, None after the time; BenchError: a process cannot go on."""
        try:
            async with asyncio.timeout(timeout_s):
                index, message = await self._inbox.get()
        except TimeoutError:
            return None
        if isinstance(message, LoaderFailed):
            raise BenchError(f"the server cannot be loaded: {message.text}")
        return index, message

    async def gather(self, kind: type[LoaderReady] | type[messages.LevelStarted]) -> None:
        """Wait until every process has sent a message of this kind; BenchError: one cannot go on."""
        missing = set(range(self.size))
        while missing:
            received = await self.receive(_START_TIMEOUT_S)
            if received is None:
                raise BenchError(
                    f"a process of the load generator did not begin within {_START_TIMEOUT_S:g} s"
                )
            if isinstance(received[1], kind):
                missing.discard(received[0])

    def _start_of(self, level: LoadLevel, index: int) -> StartLevel:
        part = level.share(index, self.size)
        is_rate = level.kind is LoadKind.RATE
        return StartLevel(
            self._plan.connections_of(part, self._protocol),
            0 if is_rate else int(part.value),
            part.value if is_rate else 0.0,
            self._plan.arrivals.value,
            self._plan.seed + index,
            index / self.size,
        )

    async def _spawn(self, index: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gpuserve.bench.calls.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        self._readers.append(asyncio.create_task(self._read(index, process)))

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        unpacker = messages.unpacker()
        while data := await process.stdout.read(_READ_NBYTES):
            unpacker.feed(data)
            for one in unpacker:
                self._inbox.put_nowait((index, messages.unpacked(one)))
        self._inbox.put_nowait((index, LoaderFailed("a process of the load generator ended")))

    async def _end(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for reader in self._readers:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader


def _write(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
