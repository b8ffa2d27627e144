"""What the machine and our control groups have left to be reserved. A memfd has no limit of its own: to
reserve more than there is wakes the OOM killer, which may choose anybody.

A container sees its own group at the root of the mount (cgroup v2 and v1); a service of systemd is in a group
further down, as ``/proc/self/cgroup`` says, and every group above it has a limit as well.
"""

from __future__ import annotations

import functools
import os
from typing import Final, NamedTuple


class _Files(NamedTuple):
    """Where the groups of a version of cgroups are mounted, and which files of a group tell what."""

    mount: str
    limit: str
    usage: str


_V2: Final = _Files("sys/fs/cgroup", "memory.max", "memory.current")
_V1: Final = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
_STATISTICS: Final = "memory.stat"
#: The page cache of the group, which the kernel takes back before it kills; shared memory is not in it.
_RECLAIMABLE: Final = frozenset({"active_file", "inactive_file"})
#: v1 has a number near 2**63 for no limit, v2 a word.
_NO_LIMIT: Final = 1 << 62


def available_nbytes(root: str = "") -> int | None:
    """Bytes that this machine and our control groups have left to be reserved; None where nothing tells."""
    told = [_of_machine(root), *(_of_group(folder, files) for folder, files in _groups(root))]
    known = [nbytes for nbytes in told if nbytes is not None]
    return min(known) if known else None


def _of_machine(root: str) -> int | None:
    for line in _text(f"{root}/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


@functools.cache
def _groups(root: str) -> list[tuple[str, _Files]]:
    """The folders of the groups that this process is in, which it does not leave, and of those above them."""
    found = []
    for line in ["0::/", "0:memory:/", *_text(f"{root}/proc/self/cgroup").splitlines()]:
        _, controllers, path = line.split(":", 2)
        files = _V1 if "memory" in controllers.split(",") else _V2
        if (files is _V1 or not controllers) and ".." not in path:
            names = path.strip("/").split("/")
            each = ("/".join([root, files.mount, *names[:n]]) for n in range(len(names), -1, -1))
            found += [(one.rstrip("/"), files) for one in each if os.path.exists(f"{one}/{files.limit}")]
    return list(dict.fromkeys(found))


def _of_group(folder: str, files: _Files) -> int | None:
    limit = _text(f"{folder}/{files.limit}").strip()
    if not limit.isdigit() or int(limit) > _NO_LIMIT:
        return None
    usage = _text(f"{folder}/{files.usage}").strip()
    if not usage.isdigit():
        return None
    return max(0, int(limit) - max(0, int(usage) - _reclaimable(f"{folder}/{_STATISTICS}")))


def _reclaimable(statistics: str) -> int:
    # v1 tells of the group alone, and after "total_" of those below it too, as its usage does.
    lines = [line.removeprefix("total_") for line in _text(statistics).splitlines()]
    named = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return sum(int(named.get(name, "0")) for name in _RECLAIMABLE)


def _text(path: str) -> str:
    """What stands in a file of the kernel; nothing where there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode()
    except OSError:
        return ""
