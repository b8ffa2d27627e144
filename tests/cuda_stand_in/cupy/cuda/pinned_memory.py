"""The stand-in for ``cupy.cuda.pinned_memory``: page-locked memory of the host."""

from __future__ import annotations

import ctypes
from typing import Any

from cupy.cuda import runtime

#: cupy rounds what it takes from its pool to this.
_UNIT = 512


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

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self._bytes = (ctypes.c_uint8 * (mem.size - offset)).from_address(self.ptr)
        self._bytes._keeps = mem  # views of it keep the memory

    def size(self) -> int:
        return len(self._bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size(),), "typestr": "|u1", "data": (self.ptr, False), "version": 3}


class PinnedMemoryPool:
    """Keeps freed memory for the next of the same size."""

    def __init__(self) -> None:
        #: Appending and popping are atomic: objects die in the middle of any line.
        self._free: dict[int, list[PinnedMemory]] = {}

    def malloc(self, size: int) -> PinnedMemoryPointer:
        rounded = max(1, -(-size // _UNIT)) * _UNIT
        kept = self._free.setdefault(rounded, [])
        try:
            memory = kept.pop()
        except IndexError:
            memory = PinnedMemory(rounded)
        return PinnedMemoryPointer(_Lent(memory, kept), 0)

    def free_all_blocks(self) -> None:
        self._free.clear()

    def n_free_blocks(self) -> int:
        return sum(map(len, self._free.values()))


class _Lent:
    """What the pool lends, until the object dies."""

    def __init__(self, memory: PinnedMemory, kept: list[PinnedMemory]) -> None:
        self._memory, self._kept = memory, kept
        self.ptr, self.size = memory.ptr, memory.size

    def __del__(self) -> None:
        self._kept.append(self._memory)


default_pool = PinnedMemoryPool()


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    return default_pool.malloc(size)
