"""A timer of the kernel for the event loop. The loops' own timers have steps of a millisecond, which is
longer than many of the answers that are timed here.
"""

from __future__ import annotations

import ctypes
import os
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """Calls back once for each ``set``, at that time of ``time.monotonic``; ``close`` when it is done with.

    Raises:
        OSError: the process has no descriptor left.
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
        """Call back at this time, or as soon as can be where it is over; an earlier one is forgotten."""
        ns = max(1, int(at_s * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(ns // 1_000_000_000, ns % 1_000_000_000))
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        """No more calls."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set anew meanwhile
            return
        self._callback()
