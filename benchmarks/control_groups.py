"""Control groups of the kernel, version 1 or 2, below the group of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PERIOD_US: Final = 100_000
_REMOVAL_S: Final = 30.0


class Group:
    """A control group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def within(self, *command: str) -> tuple[str, ...]:
        """Return a command that runs ``command`` in this group."""
        enter = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        return ("/bin/sh", "-c", enter, "sh", *command)


@contextlib.contextmanager
def cpu_group(cpus: float) -> Iterator[Group]:
    """Make a group that may use so many CPUs, and remove the group at the end.

    Raises:
        OSError: This process may not make such a group; the text says why.
    """
    quota_us = round(cpus * _PERIOD_US)
    with _group("cpu", {"cpu.cfs_quota_us": str(quota_us)}, {"cpu.max": f"{quota_us} {_PERIOD_US}"}) as group:
        yield group


@contextlib.contextmanager
def memory_group(nbytes: int) -> Iterator[Group]:
    """Make a group that may use so much memory, and remove the group at the end.

    Raises:
        OSError: This process may not make such a group; the text says why.
    """
    with _group("memory", {"memory.limit_in_bytes": str(nbytes)}, {"memory.max": str(nbytes)}) as group:
        yield group


@contextlib.contextmanager
def _group(controller: str, version_1: dict[str, str], version_2: dict[str, str]) -> Iterator[Group]:
    parent, limits = _parent(controller, version_1, version_2)
    folder = parent / f"gpuserve-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        for name, value in limits.items():
            (folder / name).write_text(value)
        yield Group(folder)
    finally:
        end_s = time.monotonic() + _REMOVAL_S
        while not _removed(folder) and time.monotonic() < end_s:
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


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
