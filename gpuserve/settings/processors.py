"""How many processors this process may keep busy. Light: workers ask too."""

from __future__ import annotations

import os
from typing import Final

#: What a container sees of its control group, v2 and v1: microseconds of processors in a period of so many.
_V2_QUOTA: Final = "sys/fs/cgroup/cpu.max"
_V1_QUOTA: Final = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us")


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
