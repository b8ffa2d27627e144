"""The host's memory as copies from and to a device see it: what is locked, what is in use, and what is kept
for them. What is copied is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuserve_worker.cuda.device.background import Background
from gpuserve_worker.cuda.device.host_blocks import HostBlocks
from gpuserve_worker.cuda.device.host_uses import HostUses
from gpuserve_worker.cuda.device.page_locks import PageLocker
from gpuserve_worker.cuda.device.runtime import Events, Runtime
from gpuserve_worker.memory.spare_segment import SpareSegment


class HostMemory:
    """Made by ``CudaDevice``. ``locks`` are for mappings of others, ``blocks`` memory of our own; ``uses`` is
    what copies are at work on, ``spare`` the segment that the next arena to grow is given.
    """

    def __init__(
        self,
        runtime: Runtime,
        events: Events,
        enter: Callable[[], None],
        lent_limit_nbytes: int,
        warn: Callable[[str], None],
    ) -> None:
        self._background = Background(enter)
        self.uses = HostUses(runtime)
        self.locks = PageLocker(runtime, self._background, self.uses, lent_limit_nbytes, warn)
        self.blocks = HostBlocks(runtime, events, self._background, self.locks)
        self.spare = SpareSegment(self.locks, self._background.later)

    def wait(self) -> None:
        """Return when all is locked that is to be: who measures copies wants them as they are then."""
        self._background.wait()

    def close(self) -> None:
        self._background.close()
        self.blocks.close()
        self.spare.close()
