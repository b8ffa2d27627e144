"""How two processes see that the other's loop turns. Each has a counter of the kernel that it counts up now
and then, and the other looks whether it has. Looks are counted, not seconds: where the machine, or who looks,
stood still, nobody else is to blame. Nor is a process that wants to run and gets no CPU.
"""

from __future__ import annotations

import os
from typing import Final

from gpuserve.control.process_state import CpuTimes

#: A loop shows so often that it turns, and is looked at so often; more often where it may not be silent long.
_PERIOD_S: Final = 1.0
_PER_TIMEOUT: Final = 10


def pulse_period_s(timeout_s: float) -> float:
    """How often a loop beats and is looked at, that may be silent for ``timeout_s``; 0 is no limit."""
    return min(_PERIOD_S, timeout_s / _PER_TIMEOUT) if timeout_s else _PERIOD_S


class Pulse:
    """One counter, in both processes: one of them beats, and the other looks. Owner of the descriptor."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd < 0 else fd

    def beat(self) -> None:
        os.eventfd_write(self.fd, 1)

    def has_beaten(self) -> bool:
        """Whether there was a beat since the last look."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.fd)


class Stillness:
    """How long another loop has been blocked, excluding time when it could run and had no CPU. Pure."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._looked_at: float | None = None
        self._times: CpuTimes | None = None

    def look(self, has_beaten: bool, now: float, period_s: float, times: CpuTimes | None = None) -> float:
        """Count a look at this time, which comes every ``period_s``; return how long the silence is now.
        ``times`` are those of the process while it is silent; None: not known.
        """
        is_late = self._looked_at is None or now - self._looked_at > 2 * period_s
        self._looked_at = now
        before, self._times = self._times, times
        if has_beaten:
            self.silent_s = 0.0
            self._times = None
        elif not is_late:
            self.silent_s += own_s(before, times, period_s)
        return self.silent_s


def own_s(before: CpuTimes | None, now: CpuTimes | None, period_s: float) -> float:
    """Return how much of the period between two looks a process was not kept from running by others.

    A process that runs or waits for a CPU is at fault for what it ran; one that sleeps or is stopped, for all
    of the period but what it waited.
    """
    if before is None or now is None:
        return period_s
    if now.is_runnable:
        return min(period_s, now.ran_s - before.ran_s)
    return max(0.0, period_s - (now.waited_s - before.waited_s))
