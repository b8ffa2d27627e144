"""An instance that may be given batches, as its keeper shows it to a front: its own worker or one of an
attached program alike.
"""

from __future__ import annotations

from typing import NamedTuple


class LiveInstance(NamedTuple):
    """A loaded worker. ``link_fd`` is the front's end of its link; it and ``pidfd`` stay the keeper's.
    Its callable took ``load_s`` to load.
    """

    model: str
    name: str
    pid: int
    slots: int
    link_fd: int
    pidfd: int
    load_s: float
