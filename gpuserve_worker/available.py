"""How much memory may still be taken, by this machine's word and by that of our control group.

A memfd has no limit of its own: reserving more than there is does not fail, it wakes the OOM killer,
which may choose anybody. So it is asked first. Read when a segment is made, never for a request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = "proc/meminfo"
#: (limit, usage) of the group this process is in, as a container sees it: cgroup v2, then v1.
_CGROUPS: Final = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_nbytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be reserved without anybody being killed for it; None where nothing tells."""
    told = [_of_machine(root), *(_of_group(root, limit, usage) for limit, usage in _CGROUPS)]
    known = [nbytes for nbytes in told if nbytes is not None]
    return min(known) if known else None


def _of_machine(root: Path) -> int | None:
    try:
        lines = (root / _MEMINFO).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_group(root: Path, limit: str, usage: str) -> int | None:
    try:
        most, used = (root / limit).read_text().strip(), (root / usage).read_text().strip()
    except OSError:
        return None
    # "max" is no limit in v2; v1 has a number near 2**63 for that, which does no harm.
    return max(0, int(most) - int(used)) if most.isdigit() and used.isdigit() else None
