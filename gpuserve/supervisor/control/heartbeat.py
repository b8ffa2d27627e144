"""Heartbeats between two processes, the watchdog of an event loop, and the state of a process by the kernel.

One process increments a counter of the kernel (an eventfd), and the other polls the counter. Polls are
counted, not seconds, so that no peer is blamed for a suspended machine, nor for a lack of CPU time.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

#: Period of the heartbeat and of its polls; shorter if the timeout is short.
_PERIOD_S: Final = 1.0
_PER_TIMEOUT: Final = 10


def heartbeat_period_s(timeout_s: float) -> float:
    """Return the period of heartbeats and polls for a timeout; 0 is no timeout."""
    return min(_PERIOD_S, timeout_s / _PER_TIMEOUT) if timeout_s else _PERIOD_S


class Heartbeat:
    """A counter shared by two processes: one of them beats, the other polls. Owner of the descriptor."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd < 0 else fd

    def beat(self) -> None:
        os.eventfd_write(self.fd, 1)

    def has_beaten(self) -> bool:
        """Return whether there was a beat since the last call."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.fd)


class LoopWatchdog:
    """The watchdog of a peer's event loop. ``silent_s`` excludes time without CPU. Pure."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._polled_at: float | None = None
        self._times: CpuTimes | None = None

    def poll(self, has_beaten: bool, now: float, period_s: float, times: CpuTimes | None = None) -> float:
        """Count a poll, and return how long the peer's event loop has been blocked.

        Args:
            has_beaten: whether the peer has beaten since the last poll.
            now: the time of the poll, in seconds of a monotonic clock.
            period_s: the period of polls. A poll that comes much later does not count.
            times: the CPU times of the peer's process, if it has not beaten; None: unknown.
        """
        is_late = self._polled_at is None or now - self._polled_at > 2 * period_s
        self._polled_at = now
        before, self._times = self._times, times
        if has_beaten:
            self.silent_s = 0.0
            self._times = None
        elif not is_late:
            self.silent_s += own_s(before, times, period_s)
        return self.silent_s


def own_s(before: CpuTimes | None, now: CpuTimes | None, period_s: float) -> float:
    """Return the part of the period between two polls in which other processes did not keep a process from
    running: of a runnable process the time that it ran; of another one the period less the time it waited.
    """
    if before is None or now is None:
        return period_s
    if now.is_runnable:
        return min(period_s, now.ran_s - before.ran_s)
    return max(0.0, period_s - (now.waited_s - before.waited_s))


#: Descriptions of process states, by the kernel's letters.
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)", "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, and cannot be interrupted", "Z": "it has ended", "X": "it has ended",
    "S": "it sleeps", "R": "it runs", "I": "it idles in the kernel",
}  # fmt: skip
STOPPED: Final = frozenset("Tt")
_RUNNABLE: Final = "R"


class CpuTimes(NamedTuple):
    """Seconds that a main thread ran, and waited for a CPU. ``is_runnable``: it runs, or waits for one."""

    ran_s: float
    waited_s: float
    is_runnable: bool


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process, or "" if the process is not visible."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def cpu_times(pid: int) -> CpuTimes | None:
    """Return the CPU times of a process, or None if the kernel does not report them."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as schedstat:
            ran_ns, waited_ns, *_ = map(int, schedstat.read().split())
    except (OSError, ValueError):
        return None
    return CpuTimes(ran_ns / 1e9, waited_ns / 1e9, state_of(pid) == _RUNNABLE)


def describe_process_state(pid: int) -> str:
    return _STATES.get(state_of(pid), "it has ended")
