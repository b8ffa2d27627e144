"""How many doors a server may have: what ``auto`` stands for, and what keeps it from having so many."""

from __future__ import annotations

import os
import resource
from typing import Any, Final

AUTO: Final = "auto"
#: Beside so many processors one door keeps a scheduler busy; more than eight doors have been of no use.
_PROCESSORS_OF_DOOR: Final = 4
_MOST_BY_ITSELF: Final = 8
#: Descriptors that a front keeps for each of its doors: its passage, its process, and memory of its requests.
DESCRIPTORS_OF_DOOR: Final = 64


#: What a container sees of its control group, v2 and v1: microseconds of processors in a period of so many.
_V2_QUOTA: Final = "sys/fs/cgroup/cpu.max"
_V1_QUOTA: Final = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us")


def read_doors(value: Any) -> Any:
    """The number that ``auto`` stands for here; anything else as it is."""
    return doors_of(n_processors()) if value == AUTO else value


def doors_of(processors: float) -> int:
    """What ``auto`` stands for beside so many processors."""
    return max(1, min(_MOST_BY_ITSELF, int(processors // _PROCESSORS_OF_DOOR)))


def n_processors(root: str = "") -> float:
    """Those that this process may run on, or what its container may use of them, where that is less."""
    quota = _read(f"{root}/{_V2_QUOTA}") or [
        *_read(f"{root}/{_V1_QUOTA[0]}"),
        *_read(f"{root}/{_V1_QUOTA[1]}"),
    ]
    allowed = float(len(os.sched_getaffinity(0)))
    if len(quota) != len(_V1_QUOTA) or not quota[0].isdigit():  # "max", or -1: as many as there are
        return allowed
    return min(allowed, int(quota[0]) / int(quota[1]))


def _read(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []


def doors_problem(doors: Any, transport: Any) -> str | None:
    """Why a server cannot have so many doors; None where it can, or where they are no number."""
    doors = read_doors(doors)
    if not isinstance(doors, int) or doors <= 1:
        return None
    if transport == "grpcio":
        return f"doors: transport grpcio has its connections in the front, expected 1, got {doors}"
    _, most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, most_descriptors // DESCRIPTORS_OF_DOOR)
    if most_descriptors != resource.RLIM_INFINITY and doors > most:
        return (
            f"doors: a process may have {most_descriptors} open files (RLIMIT_NOFILE), of which each door "
            f"takes {DESCRIPTORS_OF_DOOR}: expected at most {most}, got {doors}"
        )
    return None
