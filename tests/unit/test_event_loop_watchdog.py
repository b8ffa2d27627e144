"""The meter of event-loop iterations, with an injected clock and on a loop of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuserve.front.event_loop_watchdog import PERIOD_S, TurnMeter
from gpuserve.supervisor.control.reactor import Reactor

LIMIT_S = 0.05


class Loop:
    """A loop whose turns take as much CPU as they are told, and the samples of its timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reports: list[tuple[float, str]] = []
        self.sleeps = 0
        self._ready: list[Callable[[], None]] = []
        self._meter = TurnMeter(
            LIMIT_S,
            self._ready.append,
            lambda s, where: self.reports.append((s, where)),
            lambda: self.now,
            lambda: self.sleeps,
        )

    def turn(self, *calls_s: float) -> None:
        """Run one turn that makes calls of so many seconds; no sample comes within a call."""
        for call_s in calls_s:
            due = int(self.now / PERIOD_S)
            self.now += call_s
            if int(self.now / PERIOD_S) > due:
                self._meter.sample(lambda: f"at {self.now:g}")
        ready, self._ready[:] = list(self._ready), []
        for callback in ready:
            callback()


def test_short_turns_are_not_reported_however_many() -> None:
    loop = Loop()
    for _ in range(1000):
        loop.turn(*[0.001] * 45)
    assert loop.reports == []


def test_short_turns_that_no_sample_sees_are_not_one_long_turn() -> None:
    loop = Loop()
    for _ in range(100):
        loop.now += 0.001
        loop.sleeps += 1
    loop.turn(0.005)
    assert loop.reports == []


def test_one_long_call_is_reported_at_its_end() -> None:
    loop = Loop()
    loop.turn(0.001)
    loop.turn(1.0)
    ((took_s, where),) = loop.reports
    assert abs(took_s - 1.0) <= PERIOD_S
    assert where == "at 1.001"


def test_many_short_calls_of_one_turn_are_reported_once_with_where_the_limit_was_passed() -> None:
    loop = Loop()
    loop.turn(*[0.002] * 40)
    loop.turn(*[0.002] * 5)
    ((took_s, where),) = loop.reports
    assert abs(took_s - 0.08) <= PERIOD_S
    assert LIMIT_S <= float(where.removeprefix("at ")) <= LIMIT_S + 2 * PERIOD_S


_PROGRAM = """
import asyncio, uvloop
from gpuserve.front.event_loop_watchdog import watch_event_loop

async def main():
    watch_event_loop(0.05)
    await asyncio.sleep(0)
    for _ in range(10):
        sum(range(500_000))
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    sorted(range(2_000_000, 0, -1), key=int)
    await asyncio.sleep(0.01)

uvloop.run(main())
"""


def test_a_loop_tells_of_a_call_that_holds_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    environ = {**os.environ, "GPUSERVE_TURN_FILE": str(path)}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    (line,) = path.read_text().splitlines()
    turn = json.loads(line)
    assert turn["took_s"] > 0.05
    assert "in main" in turn["where"]
    assert "event loop turn took" in done.stderr


def test_a_long_supervisor_callback_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "turns"
    monkeypatch.setenv("GPUSERVE_TURN_FILE", str(path))
    monkeypatch.setenv("GPUSERVE_TURN_LIMIT_MS", "5")
    reactor = Reactor()

    def plan_long() -> None:
        sorted(range(500_000, 0, -1), key=int)

    for call in (int, plan_long, reactor.stop):
        reactor.call_soon_threadsafe(call)
    reactor.run()
    reactor.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["took_s"] > 0.02
    assert "plan_long" in json.loads(line)["where"]
