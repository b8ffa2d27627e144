"""Host memory of the worker's own, for what lies where the device cannot copy from by itself: written by the
host, and then copied to the device. No copy is made here.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from gpuserve_worker.cuda.device.background import Background
from gpuserve_worker.cuda.device.page_locks import PageLocker, address_of
from gpuserve_worker.cuda.device.runtime import CudaError, Events, Runtime
from gpuserve_worker.cuda.device.shelf import Shelf, size_class

#: So many times what is asked for may a block have that is used again.
SPARE: Final = 2
#: What is kept: so much, or so many of the largest, because to lock one takes longer than to copy it.
RETAINED_NBYTES: Final = 64 << 20
_RETAINED_BLOCKS: Final = 4


class HostBlock(NamedTuple):
    """Memory of our own. ``event`` comes when what was copied from it last is on the device."""

    memory: memoryview
    address: int
    event: int


class HostBlocks:
    """The blocks of one device. Any thread may take one."""

    def __init__(self, runtime: Runtime, events: Events, background: Background, locks: PageLocker) -> None:
        self._runtime = runtime
        self._events = events
        self._background = background
        self._locks = locks
        self._shelf: Shelf[HostBlock] = Shelf(RETAINED_NBYTES, SPARE)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> HostBlock:
        """A block of at least so many bytes, and of few more: a large one is for who needs it."""
        size = size_class(nbytes)
        with self._lock:
            self._shelf.limit_nbytes = max(self._shelf.limit_nbytes, _RETAINED_BLOCKS * size)
            block = self._shelf.take(size, lambda one: self._runtime.has_come(one.event))
        return self._new(size) if block is None else block

    def give(self, block: HostBlock) -> None:
        """Let a block be used again when its event, which has been recorded, has come."""
        with self._lock:
            self._shelf.put(len(block.memory), block)
            surplus = self._shelf.surplus()
        for one in surplus:
            self._background.later(partial(self._drop, one))

    def close(self) -> None:
        with self._lock:
            left = self._shelf.empty()
        for block in left:
            self._drop(block)

    def _new(self, size: int) -> HostBlock:
        memory = memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
        self._locks.lock(memory)
        return HostBlock(memory, address_of(memory), self._events.take())

    def _drop(self, block: HostBlock) -> None:
        with suppress(CudaError):  # nothing is copied any more
            self._runtime.wait(block.event)
        self._events.give(block.event)
        self._locks.unlock(block.memory)
