"""A region of shared memory that a client registered: what it is, and what it may be used for.

::

    OPENING ──(a worker opened it: CUDA)──► REGISTERED ──(unregister)──► LEAVING ──(last use ended)──► gone
       └──────(it could not)──► gone

A region that leaves is still listed, but no new request may name it. Which regions there are is in
``regions``.
"""

from __future__ import annotations

import enum
import os
from typing import Final, NamedTuple

from gpuserve_worker import wire


class RegionKind(enum.Enum):
    """What memory a region is of; the value is how error texts call it."""

    SYSTEM = "system"
    CUDA = "CUDA"


class Life(enum.Enum):
    """What a region may be used for."""

    OPENING = "OPENING"
    REGISTERED = "REGISTERED"
    LEAVING = "LEAVING"


TRANSITIONS: Final[dict[Life, frozenset[Life]]] = {
    Life.OPENING: frozenset({Life.REGISTERED}),
    Life.REGISTERED: frozenset({Life.LEAVING}),
    Life.LEAVING: frozenset(),
}


class RegionStatus(NamedTuple):
    """A region as its clients are told of it. ``key`` and ``offset`` are of system memory only."""

    name: str
    nbytes: int
    key: str = ""
    offset: int = 0
    device_id: int = 0


class Region:
    """One region. ``message`` makes it known to a worker; ``fd`` rides beside it, None for CUDA.

    ``device`` is the device whose memory it is, "" for the host's. ``uses`` counts the places in it that
    requests under way name.
    """

    def __init__(
        self,
        kind: RegionKind,
        number: int,
        status: RegionStatus,
        message: wire.Region | wire.CudaRegion,
        fd: int | None,
    ) -> None:
        self.kind = kind
        self.device = f"cuda:{status.device_id}" if kind is RegionKind.CUDA else ""
        self.number = number
        self.status = status
        self.message = message
        self.fd = fd
        self.life = Life.OPENING
        self.uses = 0

    def enter(self, life: Life) -> None:
        """Go on to the next part of its life."""
        if life not in TRANSITIONS[self.life]:
            raise RuntimeError(f"a region that is {self.life.value} cannot become {life.value}")
        self.life = life

    def close(self) -> None:
        """Close its file."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
