"""The event-loop watchdog of the tests, which reports turns over the limit in ``GPUSERVE_TURN_LIMIT_MS``.

uvloop has no hook for its turns. So a kernel timer counts the CPU time of the event loop's thread, and a
signal handler runs in that thread after every ``PERIOD_S``. The first signal in a turn schedules a callback,
which runs when the turn has ended. Waiting for a CPU or for the interpreter lock does not count. Start-up is
exempt, as there are no clients yet: the limit holds from the turn after the process has read its settings.
Nothing runs unless the variable is set.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Final

from gpuserve.core.turn_limit import report_turn

#: The precision of the measurement.
PERIOD_S: Final = 0.005
#: Within one call a thread sleeps at most a few times, for the interpreter lock.
_MANY_SLEEPS: Final = 20
_SIGNAL: Final = signal.SIGRTMIN + 7
_CLOCK_THREAD_CPUTIME_ID: Final = 3
_SIGEV_THREAD_ID: Final = 4


class TurnMeter:
    """A meter of turns, by samples at every ``PERIOD_S`` of ``clock``. ``call_soon`` runs a callback once the
    present turn has ended. ``report`` receives the CPU seconds and the stack of a turn over the limit.
    ``sleeps`` counts how often the thread has slept, as it does between turns.
    """

    def __init__(
        self,
        limit_s: float,
        call_soon: Callable[[Callable[[], None]], object],
        report: Callable[[float, str], None],
        clock: Callable[[], float] = time.thread_time,
        sleeps: Callable[[], int] = lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
    ) -> None:
        self._limit_s = limit_s
        self._call_soon = call_soon
        self._report = report
        self._clock = clock
        self._sleeps = sleeps
        self._last, self._slept = clock(), sleeps()
        self._started_at: float | None = None
        self._where = ""

    def sample(self, where: Callable[[], str]) -> None:
        """Record that the event loop's thread runs, and its stack if the turn is over the limit."""
        now = self._clock()
        if self._started_at is None:
            # The turn began after the last sample, and may contain one long call into C. Or there were many
            # short turns: the kernel's tick, which triggers samples, may miss a thread between two of them.
            self._started_at = self._last if self._sleeps() - self._slept < _MANY_SLEEPS else now
            self._call_soon(self._end)
        if not self._where and now - self._started_at > self._limit_s:
            self._where = where()
        self._last, self._slept = now, self._sleeps()

    def _end(self) -> None:
        began_at, now = self._started_at, self._clock()
        where, self._where = self._where, ""
        self._started_at, self._last, self._slept = None, now, self._sleeps()
        if began_at is not None and where and now - began_at > self._limit_s + PERIOD_S:
            self._report(now - began_at, where)


class _Event(ctypes.Structure):
    """``struct sigevent`` of Linux, 64 bytes long."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("padding", ctypes.c_byte * 44),
    )


def watch_event_loop(limit_s: float) -> None:
    """Report turns of the running loop over the limit."""
    loop = asyncio.get_running_loop()
    loop.call_soon(_start, loop, limit_s)


def _start(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    meter = TurnMeter(limit_s, loop.call_soon, lambda took_s, where: report_turn(took_s, limit_s, where))

    def on_signal(_: int, frame: FrameType | None) -> None:
        meter.sample(lambda: "".join(traceback.format_stack(frame, 12)))

    signal.signal(_SIGNAL, on_signal)
    event = _Event(None, _SIGNAL, _SIGEV_THREAD_ID, threading.get_native_id())
    timer = ctypes.c_void_p()
    libc = ctypes.CDLL(None, use_errno=True)
    seconds, nanoseconds = divmod(int(PERIOD_S * 1e9), 10**9)
    interval = (ctypes.c_long * 4)(seconds, nanoseconds, seconds, nanoseconds)
    if libc.timer_create(_CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer)) or (
        libc.timer_settime(timer, 0, ctypes.byref(interval), None)
    ):
        raise OSError(ctypes.get_errno(), "a timer of the thread's CPU time cannot be had")
    atexit.register(libc.timer_delete, timer)  # the end of the interpreter removes the handler
