"""The server as the machine sees it: the memory and the open descriptors of all its processes."""

from __future__ import annotations

import os
from typing import NamedTuple

from benchmarks.processes import tree


class Held(NamedTuple):
    """What a server holds at one moment; a page that several of its processes have counts once."""

    nbytes: int
    descriptors: int


def held(root_pid: int) -> Held:
    """What the process and its descendants hold; nothing where they are gone."""
    nbytes = descriptors = 0
    for one in tree(root_pid):
        try:
            nbytes += one.memory.pss_nbytes
            descriptors += len(os.listdir(f"/proc/{one.pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Held(nbytes, descriptors)
