"""Host memory whose pages are locked, so that copies from and to a device run by themselves: the segments of
arenas (``LockedSegments``), and memory of our own for what lies elsewhere (``HostBlocks``). No copy is made
here.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from gpuserve_worker.cuda.device.runtime import CudaError, Events, Runtime

#: What a block of our own measures at least: many inputs that travel in messages.
_BLOCK_NBYTES: Final = 64 << 10
#: So many times what is asked for may a block have that is used again.
_SPARE: Final = 4


def address_of(memory: Any) -> int:
    """Where the bytes of a buffer begin; 0 where there are none."""
    if not len(memory):
        return 0
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class LockedSegments:
    """The segments that are locked. One that cannot be is copied from and to all the same, only slower."""

    def __init__(self, runtime: Runtime, settle: Callable[[], None], warn: Callable[[str], None]) -> None:
        self._runtime = runtime
        self._settle = settle
        self._warn = warn
        self._locked: set[int] = set()
        self._warned = False

    def lock(self, memory: memoryview) -> None:
        """Lock a mapping that begins on a page. A refusal is logged, once in the life of the worker."""
        address = address_of(memory)
        try:
            self._runtime.page_lock(address, len(memory))
        except CudaError as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"CUDA could not page-lock {len(memory)} bytes of shared memory, so copies to and from "
                    f"the device are slower: {error}"
                )
            return
        self._locked.add(address)

    def unlock(self, memory: memoryview) -> None:
        """The inverse, before the mapping goes away; copies that are under way end first."""
        address = address_of(memory)
        if address not in self._locked:
            return
        self._locked.discard(address)
        with suppress(CudaError):  # the device is gone, and the locks with it
            self._settle()
            self._runtime.page_unlock(address)


class HostBlock(NamedTuple):
    """Memory of our own. ``event`` comes when what was copied from it last is on the device."""

    memory: memoryview
    address: int
    event: int


class HostBlocks:
    """Blocks that are written by the host and then copied to the device. Any thread may take one."""

    def __init__(self, runtime: Runtime, events: Events, page_locks: LockedSegments) -> None:
        self._runtime = runtime
        self._events = events
        self._pins = page_locks
        self._blocks: list[HostBlock] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> HostBlock:
        """A block of at least so many bytes, and not of many more: a large one is for who needs it."""
        size = max(_BLOCK_NBYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            for position, block in enumerate(self._blocks):
                if size <= len(block.memory) <= _SPARE * size and self._runtime.has_come(block.event):
                    return self._blocks.pop(position)
        return self._new(size)

    def give(self, block: HostBlock) -> None:
        """Let a block be used again when its event, which has been recorded, has come."""
        with self._lock:
            self._blocks.append(block)

    def close(self) -> None:
        with self._lock:
            for block in self._blocks:
                self._pins.unlock(block.memory)
            self._blocks.clear()

    def _new(self, size: int) -> HostBlock:
        memory = memoryview(mmap.mmap(-1, size))
        block = HostBlock(memory, address_of(memory), self._events.take())
        self._pins.lock(memory)
        return block
