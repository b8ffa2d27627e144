"""A run, from target and data to figures: loading processes, and levels: warmed up, measured, drained."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpuserve.cli.bench import loader_messages, preparation
from gpuserve.cli.bench.level_results import (
    WINDOW_S,
    LevelResult,
    LevelTally,
    Window,
    histogram_type,
    is_stable,
)
from gpuserve.cli.bench.load_plan import (
    BenchError,
    BenchOptionError,
    LoadKind,
    LoadLevel,
    LoadPlan,
    SharedMemory,
)
from gpuserve.cli.bench.loader_messages import (
    LevelCounted,
    LevelDone,
    LoaderFailed,
    LoaderMessage,
    LoaderSetup,
)
from gpuserve.cli.bench.preparation import RequestData, SharedRegions
from gpuserve.cli.bench.request_payloads import Target, Tensors
from gpuserve.cli.bench.server_control import ServerControl, connect, server_time_between

_DRAIN_MARGIN_S: Final = 30.0


@dataclass(frozen=True)
class BenchRun:
    """The parameters of a run: the model, the data of requests, and the load. ``only_streams`` refuses models
    that are not decoupled.
    """

    target: Target
    data: RequestData
    plan: LoadPlan
    memory: SharedMemory = SharedMemory.NONE
    only_streams: bool = False


@dataclass(frozen=True)
class BenchOutcome:
    """The measured levels; ``interrupted`` by Ctrl-C before the last of them."""

    levels: tuple[LevelResult, ...]
    interrupted: bool


def run_bench(
    run: BenchRun,
    observer: BenchObserver,
    until: Callable[[Sequence[LevelResult]], bool] = lambda _results: False,
) -> BenchOutcome:
    """Measure levels, all or until ``until``; raise BenchOptionError, BenchError or MissingPackage."""
    histogram_type()
    with contextlib.ExitStack() as stack:
        control = connect(run.target)
        stack.callback(control.close)
        model = control.metadata()
        if run.only_streams and not model.decoupled:
            text = f"model {run.target.model!r} gives one response to a request; expected a decoupled model"
            raise BenchOptionError("--stream", text)
        if run.memory is not SharedMemory.NONE and model.decoupled and not run.target.is_grpc:
            text = "a stream over HTTP carries its tensors; use --protocol grpc"
            raise BenchOptionError("--shared-memory", text)
        requests = [Tensors(arrays) for arrays in preparation.request_arrays(model, run.data)]
        if run.memory is not SharedMemory.NONE:
            regions = SharedRegions(run.memory, control, stack)
            arrays = [dict(one.arrays) for one in requests]
            rates = [one for one in run.plan.levels if one.kind is LoadKind.RATE]
            most = run.plan.max_in_flight if rates else int(max(one.value for one in run.plan.levels))
            requests = preparation.place_tensors(control, run.target, model, arrays, regions, most)
        preparation.require_answer(control, run.target, model, requests)
        session = LevelSession(run.plan, control, observer)
        interrupted = False
        setup = preparation.loader_setup(run.target, model, requests, run.plan)
        loaders = LoaderProcesses(setup, run.plan, run.target.url.protocol)
        try:
            asyncio.run(session.run(loaders, until))
        except KeyboardInterrupt:
            interrupted = True
        return BenchOutcome(tuple(session.results), interrupted)


_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0
_READ_NBYTES: Final = 1 << 18


class BenchObserver:
    """A receiver of the progress of a run, without any effect."""

    def level_started(self, level: LoadLevel, position: int, levels: int) -> None:
        """Handle the start of a level's warm-up."""

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        """Handle the figures of a measured interval."""

    def level_ended(self, result: LevelResult) -> None:
        """Handle the result of a level."""


class LevelSession:
    """A measurement of the levels of a plan; ``results`` has the completed levels, also after an error."""

    def __init__(self, plan: LoadPlan, control: ServerControl, observer: BenchObserver) -> None:
        self._plan = plan
        self._control = control
        self._observer = observer
        self.results: list[LevelResult] = []

    async def run(self, loaders: LoaderProcesses, until: Callable[[Sequence[LevelResult]], bool]) -> None:
        """Measure all levels, or those until ``until`` returns True; raise BenchError if that fails."""
        async with loaders:
            for position, level in enumerate(self._plan.levels):
                self._observer.level_started(level, position, len(self._plan.levels))
                result = await self._measure(loaders, level)
                self.results.append(result)
                self._observer.level_ended(result)
                if until(self.results):
                    return

    async def _measure(self, loaders: LoaderProcesses, level: LoadLevel) -> LevelResult:
        loaders.start(level)
        await loaders.wait_for_all(loader_messages.LevelStarted)
        end_s = time.monotonic() + self._plan.warmup_s
        while (left_s := end_s - time.monotonic()) > 0:
            await loaders.receive(left_s)  # raises BenchError if a process ends
        before = await asyncio.to_thread(self._control.totals)
        loaders.broadcast(loader_messages.MeasureLevel())
        total = LevelTally()
        await self._count(loaders, total)
        loaders.broadcast(loader_messages.StopLevel())
        asking = asyncio.create_task(asyncio.to_thread(self._control.totals))
        missing = set(range(loaders.size))
        deadline = time.monotonic() + self._plan.drain_s + _DRAIN_MARGIN_S
        while missing and (received := await loaders.receive(deadline - time.monotonic())) is not None:
            index, message = received
            if isinstance(message, LevelCounted | LevelDone):
                total.add(index, message.interval)
            if isinstance(message, LevelDone):
                missing.discard(index)
        return total.result(level, server_time_between(before, await asking))

    async def _count(self, loaders: LoaderProcesses, total: LevelTally) -> None:
        began_s = time.monotonic()
        recent, recent_since_s = LevelTally(), began_s
        windows: list[Window] = []
        while (left_s := began_s + self._plan.duration_s - time.monotonic()) > 0:
            received = await loaders.receive(left_s)
            if received is None or not isinstance(received[1], LevelCounted):
                continue
            index, counted = received[0], received[1].interval
            total.add(index, counted)
            recent.add(index, counted)
            now = time.monotonic()
            if now - recent_since_s >= WINDOW_S:
                windows.append(recent.window())
                failed = sum(count for count, _ in total.failures.values())
                self._observer.progressed(now - began_s, windows[-1], failed)
                recent, recent_since_s = LevelTally(), now
                if self._plan.stable and is_stable(windows):
                    return


class LoaderProcesses:
    """The processes that send requests, for all levels of a run; a context manager. They end when their stdin
    is closed, not by Ctrl-C.
    """

    def __init__(self, setup: LoaderSetup, plan: LoadPlan, protocol: str) -> None:
        self._setup = setup
        self._plan = plan
        self._protocol = protocol
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, LoaderMessage]] = asyncio.Queue()

    async def __aenter__(self) -> LoaderProcesses:
        try:
            for index in range(self._plan.processes):
                await self._spawn(index)
            self.broadcast(self._setup)
            await self.wait_for_all(loader_messages.LoaderReady)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stop()

    @property
    def size(self) -> int:
        return len(self._processes)

    def broadcast(self, message: LoaderMessage) -> None:
        data = loader_messages.pack_message(message)
        for process in self._processes:
            _write(process, data)

    def start(self, level: LoadLevel) -> None:
        """Send each process its share of a level."""
        for index, process in enumerate(self._processes):
            _write(process, loader_messages.pack_message(self._share_of(level, index)))

    async def receive(self, timeout_s: float | None = None) -> tuple[int, LoaderMessage] | None:
        """Return the number of a process and its next message, or None after the time limit; raise BenchError
        if a process failed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                index, message = await self._inbox.get()
        except TimeoutError:
            return None
        if isinstance(message, LoaderFailed):
            raise BenchError(f"the server cannot be loaded: {message.text}")
        return index, message

    async def wait_for_all(self, kind: type[LoaderMessage]) -> None:
        """Wait until every process has sent a message of this kind; raise BenchError if a process failed."""
        missing = set(range(self.size))
        while missing:
            received = await self.receive(_START_TIMEOUT_S)
            if received is None:
                text = f"a process of the load generator did not start within {_START_TIMEOUT_S:g} s"
                raise BenchError(text)
            if isinstance(received[1], kind):
                missing.discard(received[0])

    def _share_of(self, level: LoadLevel, index: int) -> loader_messages.StartLevel:
        part = level.share(index, self.size)
        is_rate = level.kind is LoadKind.RATE
        return loader_messages.StartLevel(
            self._plan.connections_of(part, self._protocol),
            0 if is_rate else int(part.value),
            part.value if is_rate else 0.0,
            self._plan.arrivals.value,
            self._plan.seed + index,
            index / self.size,
        )

    async def _spawn(self, index: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gpuserve.cli.bench.loader_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        self._readers.append(asyncio.create_task(self._read(index, process)))

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        message_unpacker = loader_messages.message_unpacker()
        while data := await process.stdout.read(_READ_NBYTES):
            message_unpacker.feed(data)
            for one in message_unpacker:
                self._inbox.put_nowait((index, loader_messages.unpack_message(one)))
        self._inbox.put_nowait((index, LoaderFailed("a process of the load generator ended unexpectedly")))

    async def _stop(self) -> None:
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
