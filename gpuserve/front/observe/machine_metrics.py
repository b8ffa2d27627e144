"""How busy the machine's CPU and memory are, under Triton's names, from ``/proc``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gpuserve.front.observe.triton_metrics import Family, family

#: The columns of the first line of /proc/stat that are no work: idle, and waiting for a disk.
_IDLE_COLUMNS: Final = (3, 4)
#: Those after it are parts of earlier ones.
_CPU_COLUMNS: Final = 8


class CpuTime(NamedTuple):
    """Ticks of all CPUs together since the machine's start."""

    busy: int
    total: int


def cpu_time(stat: str) -> CpuTime:
    ticks = [int(one) for one in stat.split("\n", 1)[0].split()[1:][:_CPU_COLUMNS]]
    total = sum(ticks)
    return CpuTime(total - sum(ticks[column] for column in _IDLE_COLUMNS), total)


def utilization(before: CpuTime, now: CpuTime) -> float:
    """The part of the time between two readings that the CPUs worked, 0 to 1."""
    ticks = now.total - before.total
    return (now.busy - before.busy) / ticks if ticks > 0 else 0.0


def memory_nbytes(meminfo: str) -> tuple[int, int]:
    """Total and used bytes by ``/proc/meminfo``; what could be had without swapping is not used."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    # The file counts in KiB.
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return total, total - available


class CpuMetrics:
    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = CpuTime(0, 0)

    def families(self) -> Iterator[Family]:
        try:
            stat, meminfo = (self._proc / "stat").read_text(), (self._proc / "meminfo").read_text()
        except OSError:  # some sandboxes have neither
            return
        now = cpu_time(stat)
        busy, self._before = utilization(self._before, now), now
        total, used = memory_nbytes(meminfo)
        yield family(
            "nv_cpu_utilization", "gauge", "Part of the CPUs' time that they worked, 0 to 1", [({}, busy)]
        )
        yield family("nv_cpu_memory_total_bytes", "gauge", "Memory of the machine in bytes", [({}, total)])
        yield family("nv_cpu_memory_used_bytes", "gauge", "Memory in use in bytes", [({}, used)])
