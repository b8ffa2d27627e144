"""How the kernel says that a process is, in words, and what CPU time it had and waited for."""

from __future__ import annotations

from typing import Final, NamedTuple

#: By the letters that the kernel calls them by.
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel, and cannot be interrupted",
    "Z": "it has ended",
    "X": "it has ended",
    "S": "it sleeps",
    "R": "it runs",
    "I": "it idles in the kernel",
}
STOPPED: Final = frozenset("Tt")
_RUNNABLE: Final = "R"


class CpuTimes(NamedTuple):
    """What the main thread of a process had of CPUs so far, and how long it waited for one, in seconds. Time
    waited is counted once the wait is over. ``is_runnable``: the thread runs, or waits for a CPU.
    """

    ran_s: float
    waited_s: float
    is_runnable: bool


def state_of(pid: int) -> str:
    """The letter by which the kernel calls the state of a process; "" where there is no such process here."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def cpu_times(pid: int) -> CpuTimes | None:
    """The CPU times of a process; None where there is no such process here, or the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as schedstat:
            ran_ns, waited_ns, *_ = map(int, schedstat.read().split())
    except (OSError, ValueError):
        return None
    return CpuTimes(ran_ns / 1e9, waited_ns / 1e9, state_of(pid) == _RUNNABLE)


def how_it_is(pid: int) -> str:
    return _STATES.get(state_of(pid), "it has ended")
