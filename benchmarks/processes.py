"""What /proc says about a server: its process tree, the CPU time and the memory of each process.

Reads only. Processes are found by parent, so a server that starts its own sessions is seen whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one process. ``pss_nbytes`` counts a shared page in equal parts to its sharers."""

    rss_nbytes: int
    pss_nbytes: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process, told from a later one of the same pid by its start time."""

    pid: int
    parent_pid: int
    started_ticks: int
    cpu_s: float

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """The process as it is now; None when it is gone."""
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name, in parentheses, may hold anything: the fixed fields start after the last one.
        fields = stat.rpartition(")")[2].split()
        if fields[0] in {"Z", "X"}:
            return None
        return cls(pid, int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)

    @property
    def command(self) -> str:
        """The command line, words parted by blanks; empty when the process is gone."""
        try:
            return (_PROC / str(self.pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    @property
    def memory(self) -> Memory:
        """RSS and PSS now.

        Raises:
            FileNotFoundError: the process is gone.
        """
        fields = dict(_rollup(_PROC / str(self.pid) / "smaps_rollup"))
        return Memory(fields["Rss"], fields["Pss"])

    def mapped_files(self) -> set[str]:
        """Base names of the files mapped into the process: which shared objects it has loaded."""
        maps = (_PROC / str(self.pid) / "maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5].rpartition("/")[2] for line in maps if "/" in line}


def tree(root_pid: int) -> list[Process]:
    """The process and all its descendants, the root first; empty when the root is gone."""
    everything = {one.pid: one for one in _all()}
    children: dict[int, list[Process]] = {}
    for one in everything.values():
        children.setdefault(one.parent_pid, []).append(one)
    found = [everything[root_pid]] if root_pid in everything else []
    for one in found:  # grows while it is read: breadth first
        found.extend(children.get(one.pid, ()))
    return found


def cpu_by_pid(root_pid: int) -> dict[int, float]:
    """CPU seconds that each process of the tree has used so far."""
    return {one.pid: one.cpu_s for one in tree(root_pid)}


def machine_busy_s() -> float:
    """CPU seconds that all processes together have used since boot (steal and waiting left out)."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, (_PROC / "stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def _all() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (process := Process.read(int(entry.name))):
            yield process


def _rollup(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text().splitlines()[1:]:
        name, value, *_unit = line.split()
        yield name.rstrip(":"), int(value) * 1024
