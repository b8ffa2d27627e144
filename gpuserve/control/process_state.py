"""How the kernel says that a process is, in words."""

from __future__ import annotations

from typing import Final

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


def state_of(pid: int) -> str:
    """The letter by which the kernel calls the state of a process; "" where there is no such process here."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def how_it_is(pid: int) -> str:
    return _STATES.get(state_of(pid), "it has ended")
