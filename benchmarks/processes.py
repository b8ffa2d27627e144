"""Process trees with their CPU time and memory, out of /proc, and control groups of the kernel."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
        """RSS and PSS now. Raises FileNotFoundError: the process is gone."""
        lines = (_PROC / str(self.pid) / "smaps_rollup").read_text().splitlines()[1:]
        nbytes = {name: int(value) * 1024 for name, value, *_unit in map(str.split, lines)}
        return Memory(nbytes["Rss:"], nbytes["Pss:"])

    def mapped_files(self) -> set[str]:
        """Base names of the files mapped into the process: which shared objects it has loaded."""
        maps = (_PROC / str(self.pid) / "maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5].rpartition("/")[2] for line in maps if "/" in line}


def tree(root_pid: int) -> list[Process]:
    """The process and all its descendants, the root first; empty when the root is gone."""
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    everything = {one.pid: one for one in map(Process.read, pids) if one}
    children: dict[int, list[Process]] = {}
    for one in everything.values():
        children.setdefault(one.parent_pid, []).append(one)
    found = [everything[root_pid]] if root_pid in everything else []
    for one in found:  # grows while it is read: breadth first
        found.extend(children.get(one.pid, ()))
    return found


def pause(root_pid: int) -> None:
    """Stop the process and its descendants, until ``resume``."""
    _signal_all(root_pid, signal.SIGSTOP)


def resume(root_pid: int) -> None:
    _signal_all(root_pid, signal.SIGCONT)


def _signal_all(root_pid: int, number: signal.Signals) -> None:
    for one in tree(root_pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, number)


def is_left(member: Process) -> bool:
    """Return whether this very process still runs."""
    now = Process.read(member.pid)
    return now is not None and now.started_ticks == member.started_ticks


def cpu_by_pid(root_pid: int) -> dict[int, float]:
    return {one.pid: one.cpu_s for one in tree(root_pid)}


def machine_busy_s() -> float:
    """CPU seconds that all processes together have used since boot (steal and waiting left out)."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, (_PROC / "stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


_PERIOD_US: Final = 100_000
_REMOVAL_S: Final = 30.0


class Group:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def within(self, *command: str) -> list[str]:
        """Return a command that runs ``command`` in this group."""
        enter = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *command]


def cpu_group(cpus: float) -> AbstractContextManager[Group]:
    """Return a group that may use so many CPUs; see ``_group``."""
    quota_us = round(cpus * _PERIOD_US)
    return _group("cpu", {"cpu.cfs_quota_us": str(quota_us)}, {"cpu.max": f"{quota_us} {_PERIOD_US}"})


def memory_group(nbytes: int) -> AbstractContextManager[Group]:
    """Return a group that may use so much memory; see ``_group``."""
    return _group("memory", {"memory.limit_in_bytes": str(nbytes)}, {"memory.max": str(nbytes)})


@contextlib.contextmanager
def _group(controller: str, version_1: dict[str, str], version_2: dict[str, str]) -> Iterator[Group]:
    """Make a group while the context lasts. Raises OSError: This process may not make such a group; the text
    says why.
    """
    parent, limits = _parent(controller, version_1, version_2)
    folder = parent / f"gpuserve-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        for name, value in limits.items():
            (folder / name).write_text(value)
        yield Group(folder)
    finally:
        end_s = time.monotonic() + _REMOVAL_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):  # until the processes of the group have ended
                folder.rmdir()
                break
            time.sleep(0.01)


def _parent(
    controller: str, version_1: dict[str, str], version_2: dict[str, str]
) -> tuple[Path, dict[str, str]]:
    """Return the folder of the group of this process, and the files of the limit in a group below."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(f"/sys/fs/cgroup/{controllers}{path}"), version_1
    folder = Path(f"/sys/fs/cgroup{path}")  # the line of version 2 is the last
    if controller not in (folder / "cgroup.subtree_control").read_text().split():
        # The kernel refuses this in a group that has processes of its own, except for the root group.
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    return folder, version_2
