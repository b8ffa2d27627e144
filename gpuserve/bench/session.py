"""One run: level after level, each warmed up, measured and drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gpuserve.bench.control import Control
from gpuserve.bench.fleet import Fleet
from gpuserve.bench.levels import Level
from gpuserve.bench.messages import Counted, Done, Measure, Started, Stop
from gpuserve.bench.plan import Plan
from gpuserve.bench.results import LevelResult, Tally
from gpuserve.bench.server_time import difference
from gpuserve.bench.stability import WINDOW_S, Window, is_stable

_GRACE_S: Final = 30.0


class Observer(Protocol):
    """Who is told how a run goes on."""

    def level_started(self, level: Level, position: int, levels: int) -> None:
        """A level is warmed up."""

    def progressed(self, elapsed_s: float, window: Window, failed: int) -> None:
        """What the last stretch of a level gave."""

    def level_ended(self, result: LevelResult) -> None:
        """The figures of a level."""


class Session:
    """Measures the levels of a plan. ``results`` has those that are through, also after an error."""

    def __init__(self, plan: Plan, control: Control, observer: Observer) -> None:
        self._plan = plan
        self._control = control
        self._observer = observer
        self.results: list[LevelResult] = []

    async def run(self, fleet: Fleet, until: Callable[[Sequence[LevelResult]], bool]) -> None:
        """Measure everything, or until there are results enough.

        Raises:
            BenchError: the server cannot be loaded.
        """
        for position, level in enumerate(self._plan.levels):
            self._observer.level_started(level, position, len(self._plan.levels))
            result = await self.measure(fleet, level)
            self.results.append(result)
            self._observer.level_ended(result)
            if until(self.results):
                return

    async def measure(self, fleet: Fleet, level: Level) -> LevelResult:
        """One level.

        Raises:
            BenchError: the server cannot be loaded.
        """
        fleet.start(level)
        await fleet.gather(Started)
        await _pass(fleet, self._plan.warmup_s)
        before = await asyncio.to_thread(self._control.totals)
        fleet.tell(Measure())
        total = Tally()
        await self._count(fleet, total)
        fleet.tell(Stop())
        asking = asyncio.create_task(asyncio.to_thread(self._control.totals))
        await self._drain(fleet, total)
        return total.result(level, difference(before, await asking))

    async def _count(self, fleet: Fleet, total: Tally) -> None:
        """Until the time is over, or nothing new is to be seen."""
        began_s = time.monotonic()
        recent, recent_since_s = Tally(), began_s
        windows: list[Window] = []
        while (left_s := began_s + self._plan.duration_s - time.monotonic()) > 0:
            received = await fleet.receive(left_s)
            if received is None or not isinstance(received[1], Counted):
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
            if isinstance(message, Counted | Done):
                total.add(index, message.interval)
            if isinstance(message, Done):
                missing.discard(index)


async def _pass(fleet: Fleet, seconds: float) -> None:
    """Let time go by, unless a process ends."""
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        await fleet.receive(left_s)
