"""Host memory as the device sees it: what is page-locked, and reads and writes that cannot crash the process
when memory is gone by then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any, Final

import numpy as np

from cuda_simulation import errors
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.memory import Bytes, poisoned

READ_ONLY: Final = 0x08
#: process_vm_readv moves at most 2 GiB.
_CHUNK: Final = 1 << 30


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_writev.restype = ctypes.c_ssize_t


def read(address: int, target: Bytes) -> bool:
    """Fill ``target`` from this process's memory at an address; False where there is none."""
    return _moved(_libc.process_vm_readv, address, target)


def write(address: int, source: Bytes) -> bool:
    """Put ``source`` at an address of this process's memory; False where there is none."""
    return _moved(_libc.process_vm_writev, address, source)


def _moved(call: Any, address: int, own: Bytes) -> bool:
    for start in range(0, own.nbytes, _CHUNK):
        nbytes = min(_CHUNK, own.nbytes - start)
        here, there = _Piece(own.ctypes.data + start, nbytes), _Piece(address + start, nbytes)
        moved = call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved != nbytes:
            return False
    return True


class PageLocked:
    """The page-locked ranges of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ranges: dict[int, int] = {}
        self._allocated: dict[int, mmap.mmap] = {}

    def register(self, address: int, nbytes: int, flags: int) -> None:
        """Raises CUDARuntimeError: the range is not memory, or a part of it is page-locked already."""
        if nbytes <= 0 or not _is_mapped(address, nbytes, for_writing=not flags & READ_ONLY):
            raise CUDARuntimeError(errors.INVALID_VALUE)
        with self._lock:
            if any(
                address < start + size and start < address + nbytes for start, size in self._ranges.items()
            ):
                raise CUDARuntimeError(errors.HOST_MEMORY_ALREADY_REGISTERED)
            self._ranges[address] = nbytes

    def unregister(self, address: int) -> int:
        """How many bytes that were. Raises CUDARuntimeError: nothing was registered at that address."""
        with self._lock:
            if address in self._allocated or address not in self._ranges:
                raise CUDARuntimeError(errors.HOST_MEMORY_NOT_REGISTERED)
            return self._ranges.pop(address)

    def allocate(self, nbytes: int) -> int:
        """Page-locked memory of its own, full of ``POISON``; 0 for no bytes."""
        if nbytes == 0:
            return 0
        memory = mmap.mmap(-1, nbytes)
        address = int(poisoned(np.frombuffer(memory, np.uint8)).ctypes.data)
        with self._lock:
            self._ranges[address], self._allocated[address] = nbytes, memory
        return address

    def free(self, address: int) -> None:
        """Raises CUDARuntimeError: it is no memory from ``allocate``."""
        with self._lock:
            if self._allocated.pop(address, None) is None:
                raise CUDARuntimeError(errors.INVALID_VALUE)
            del self._ranges[address]

    def holds(self, address: int, nbytes: int = 1) -> bool:
        """Whether the whole range is page-locked."""
        with self._lock:
            return any(
                start <= address and address + nbytes <= start + size for start, size in self._ranges.items()
            )


def _is_mapped(address: int, nbytes: int, *, for_writing: bool) -> bool:
    """Whether the process has all pages of the range."""
    reached = address
    with open("/proc/self/maps") as file:
        for line in file:
            bounds, mode = line.split()[:2]
            start, end = (int(one, 16) for one in bounds.split("-"))
            if start <= reached < end and mode[0] == "r" and (mode[1] == "w" or not for_writing):
                reached = end
            if reached >= address + nbytes:
                return True
    return False
