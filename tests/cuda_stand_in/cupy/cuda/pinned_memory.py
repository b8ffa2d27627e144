"""The stand-in for ``cupy.cuda.pinned_memory``: page-locked memory of the host."""

from __future__ import annotations

import ctypes
from typing import Any

from cupy.cuda import runtime


class PinnedMemory:
    """Page-locked memory, freed with the object."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self.size = size
        self.ptr = 0
        self.ptr = runtime.hostAlloc(size, flags)

    def __del__(self) -> None:
        if self.ptr:
            try:
                runtime.freeHost(self.ptr)
            except runtime.CUDARuntimeError:
                pass


class PinnedMemoryPointer:
    """A place in page-locked memory; also a buffer."""

    def __init__(self, mem: PinnedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self._bytes = (ctypes.c_uint8 * (mem.size - offset)).from_address(self.ptr)
        self._bytes._keeps = mem  # views of it keep the memory

    def size(self) -> int:
        return len(self._bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size(),), "typestr": "|u1", "data": (self.ptr, False), "version": 3}


class PinnedMemoryPool:
    """Gives page-locked memory; keeps none."""

    def malloc(self, size: int) -> PinnedMemoryPointer:
        return PinnedMemoryPointer(PinnedMemory(size), 0)

    def free_all_blocks(self) -> None:
        """There are none."""

    def n_free_blocks(self) -> int:
        return 0


default_pool = PinnedMemoryPool()


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    return default_pool.malloc(size)
