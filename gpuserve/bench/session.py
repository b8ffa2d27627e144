"""One run, from a target and data to the figures: level after level, each warmed up, measured and drained."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gpuserve.bench.calls.messages import LevelCounted, LevelDone, LevelStarted, MeasureLevel, StopLevel
from gpuserve.bench.fleet import Fleet
from gpuserve.bench.plan.plan import LoadKind, LoadLevel, LoadPlan, SharedMemory
from gpuserve.bench.preparation import (
    Data,
    check_memory,
    place_tensors,
    request_arrays,
    require_answer,
    setup,
)
from gpuserve.bench.reports.latencies import histogram_type
from gpuserve.bench.reports.results import WINDOW_S, LevelResult, Tally, Window, is_stable
from gpuserve.bench.server.control import ServerControl, connect
from gpuserve.bench.server.payloads import Tensors
from gpuserve.bench.server.regions import SharedRegions
from gpuserve.bench.server.server_time import difference
from gpuserve.bench.server.target import Target

_GRACE_S: Final = 30.0


class BenchObserver(Protocol):
    """Receives the progress of a run, to show it."""

    def level_started(self, level: LoadLevel, position: int, levels: int) -> None:
        """A level begins with its warm-up."""

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        """A stretch of a level has been measured."""

    def level_ended(self, result: LevelResult) -> None:
        """A level has been measured."""


class LevelSession:
    """Measures the levels of a plan; ``results`` has those that are done, also after an error."""

    def __init__(self, plan: LoadPlan, control: ServerControl, observer: BenchObserver) -> None:
        self._plan = plan
        self._control = control
        self._observer = observer
        self.results: list[LevelResult] = []

    async def run(self, fleet: Fleet, until: Callable[[Sequence[LevelResult]], bool]) -> None:
        """Start the fleet and measure everything, or until there are results enough; else BenchError."""
        async with fleet:
            for position, level in enumerate(self._plan.levels):
                self._observer.level_started(level, position, len(self._plan.levels))
                result = await self._measure(fleet, level)
                self.results.append(result)
                self._observer.level_ended(result)
                if until(self.results):
                    return

    async def _measure(self, fleet: Fleet, level: LoadLevel) -> LevelResult:
        fleet.start(level)
        await fleet.gather(LevelStarted)
        await _pass(fleet, self._plan.warmup_s)
        before = await asyncio.to_thread(self._control.totals)
        fleet.tell(MeasureLevel())
        total = Tally()
        await self._count(fleet, total)
        fleet.tell(StopLevel())
        asking = asyncio.create_task(asyncio.to_thread(self._control.totals))
        await self._drain(fleet, total)
        return total.result(level, difference(before, await asking))

    async def _count(self, fleet: Fleet, total: Tally) -> None:
        """Count until the time is over, or the level is stable."""
        began_s = time.monotonic()
        recent, recent_since_s = Tally(), began_s
        windows: list[Window] = []
        while (left_s := began_s + self._plan.duration_s - time.monotonic()) > 0:
            received = await fleet.receive(left_s)
            if received is None or not isinstance(received[1], LevelCounted):
                continue
            index, counted = received[0], received[1].interval
            total.add(index, counted)
            recent.add(index, counted)
            now = time.monotonic()
            if now - recent_since_s >= WINDOW_S:
                windows.append(recent.window())
                self._tell(now - began_s, windows[-1], total)
                recent, recent_since_s = Tally(), now
                if self._plan.stable and is_stable(windows):
                    return

    def _tell(self, elapsed_s: float, window: Window, total: Tally) -> None:
        self._observer.progressed(elapsed_s, window, sum(count for count, _ in total.failures.values()))

    async def _drain(self, fleet: Fleet, total: Tally) -> None:
        missing = set(range(fleet.size))
        deadline = time.monotonic() + self._plan.drain_s + _GRACE_S
        while missing and (received := await fleet.receive(deadline - time.monotonic())) is not None:
            index, message = received
            if isinstance(message, LevelCounted | LevelDone):
                total.add(index, message.interval)
            if isinstance(message, LevelDone):
                missing.discard(index)


async def _pass(fleet: Fleet, seconds: float) -> None:
    """Let ``seconds`` go by; raises where a process ends meanwhile."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        await fleet.receive(left_s)


@dataclass(frozen=True)
class BenchRun:
    """A run: the model, the data of requests, and the load."""

    target: Target
    data: Data
    plan: LoadPlan
    memory: SharedMemory = SharedMemory.NONE


@dataclass(frozen=True)
class BenchOutcome:
    """The measured levels; ``interrupted`` by Ctrl-C before the last of them."""

    levels: tuple[LevelResult, ...]
    interrupted: bool


def measure(
    run: BenchRun,
    observer: BenchObserver,
    until: Callable[[Sequence[LevelResult]], bool] = lambda _results: False,
) -> BenchOutcome:
    """Measure the levels of a plan, or until there are results enough; BenchOptionError: an option does not
    go with the model; BenchError: it cannot be loaded; or MissingPackage.
    """
    histogram_type()
    with contextlib.ExitStack() as stack:
        control = connect(run.target)
        stack.callback(control.close)
        model = control.metadata()
        check_memory(run.target, model, run.memory)
        requests = [Tensors(arrays) for arrays in request_arrays(model, run.data)]
        if run.memory is not SharedMemory.NONE:
            regions = stack.enter_context(SharedRegions(run.memory, control))
            arrays = [dict(one.arrays) for one in requests]
            requests = place_tensors(control, run.target, model, arrays, regions, _most_in_flight(run.plan))
        require_answer(control, run.target, model, requests)
        session = LevelSession(run.plan, control, observer)
        interrupted = False
        fleet = Fleet(setup(run.target, model, requests, run.plan), run.plan, run.target.url.protocol)
        try:
            asyncio.run(session.run(fleet, until))
        except KeyboardInterrupt:
            interrupted = True
        return BenchOutcome(tuple(session.results), interrupted)


def _most_in_flight(plan: LoadPlan) -> int:
    rates = [one for one in plan.levels if one.kind is LoadKind.RATE]
    return plan.max_in_flight if rates else int(max(one.value for one in plan.levels))
