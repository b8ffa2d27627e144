"""Files of the machine that belong to a process: their names say which, and one whose process has ended is
void, as all that a process had on a GPU is.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_serials = itertools.count(1)


@dataclass(frozen=True)
class Owner:
    """A process; ``started`` tells it from a later one of the same id."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it runs still; a zombie does not."""
        return _started(self.pid) == self.started


@dataclass(frozen=True)
class OwnedName:
    """The name of a process's file."""

    owner: Owner
    serial: int

    def __str__(self) -> str:
        return f"{self.owner.pid}-{self.owner.started}-{self.serial}"


def _started(pid: int) -> int | None:
    """When the process started, in ticks; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@cache
def _of(pid: int) -> Owner:
    return Owner(pid, _started(pid) or 0)


def this_process() -> Owner:
    """The process that asks."""
    return _of(os.getpid())


def new_name() -> OwnedName:
    """A name that no file had before."""
    return OwnedName(this_process(), next(_serials))


def parse(name: str) -> OwnedName:
    """The name back from its text."""
    pid, started, serial = map(int, name.split("-"))
    return OwnedName(Owner(pid, started), serial)
