"""The driver's virtual memory management: memory of a device that is named by a handle, leaves the process as
a descriptor, and is mapped into addresses that were reserved before. The memory exists as long as a handle, a
descriptor or a mapping of it does, in any process.

An address of the device stands for one of the host, where the file is mapped: so tensors of torch over an
address find whatever is mapped there, and end the process where nothing is, or where they must not write.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cuda_simulation import errors, owners
from cuda_simulation.blocks import BLOCK_NBYTES, Layout
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.memory import Allocation, Block, Origin
from cuda_simulation.misuse import undefined
from cuda_simulation.visible import Device

if TYPE_CHECKING:
    from cuda_simulation.context import Context

GRANULARITY: Final = BLOCK_NBYTES
#: ``CU_MEM_ACCESS_FLAGS_PROT_…`` -> protection of the pages.
_ACCESS: Final = {0: 0, 1: mmap.PROT_READ, 3: mmap.PROT_READ | mmap.PROT_WRITE}
_MAP_FIXED: Final = 0x10
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class _Range:
    """Reserved addresses; ``host`` is where they are on the host, ``mapped`` what is there."""

    block: Block
    host: int
    nbytes: int
    mapped: Allocation | None = None


class VirtualMemory:
    """The handles and the reserved addresses of this process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._serials = itertools.count(0x7000)
        self._lock = threading.RLock()
        #: Handle -> its descriptor, and the device.
        self._handles: dict[int, tuple[int, Device]] = {}
        self._ranges: dict[int, _Range] = {}

    def create(self, ordinal: int, nbytes: int) -> int:
        """Raises CUDARuntimeError: not a multiple of the granularity, or more than the device has left."""
        if not nbytes or nbytes % GRANULARITY:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        device = self._context.numbered(ordinal)
        foreign = self._context.view.gpu(device.uuid).foreign_memory
        return self._new(self._context.files.create_held(device, nbytes, foreign), device)

    def export(self, handle: int) -> int:
        """A descriptor, which is the caller's."""
        return os.dup(self._handle(handle)[0])

    def open(self, fd: int) -> int:
        """The handle of a descriptor of this process or another one. Raises CUDARuntimeError: it is none."""
        uuid = self._context.files.device_of_held(fd)
        known = [one for one in self._context.devices if one.uuid == uuid]
        if not known:
            raise CUDARuntimeError(errors.INVALID_DEVICE if uuid else errors.INVALID_VALUE)
        return self._new(os.dup(fd), known[0])

    def release(self, handle: int) -> None:
        fd, _ = self._handle(handle)
        del self._handles[handle]
        os.close(fd)

    def reserve(self, nbytes: int) -> int:
        if not nbytes or nbytes % GRANULARITY:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        host = _mapped(0, nbytes, 0, -1)
        content = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(host), np.uint8)
        device = self._context.device
        block = self._context.addresses.block(device, Origin.IMPORTED, owners.new_name(), content)
        self._ranges[block.address] = _Range(block, host, nbytes)
        return block.address

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole allocation, without access. Raises CUDARuntimeError: something is there."""
        fd, device = self._handle(handle)
        place = self._range(address, nbytes)
        if place.mapped is not None or os.fstat(fd).st_size != nbytes:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        _mapped(place.host, nbytes, 0, fd)
        block = Block(address, device, Origin.IMPORTED, place.block.name, place.block.content, Layout(nbytes))
        place.mapped = Allocation(address, nbytes, block)

    def set_access(self, address: int, nbytes: int, ordinal: int, access: int) -> None:
        """Raises CUDARuntimeError: nothing is mapped there, or the access is not supported."""
        place = self._range(address, nbytes)
        if place.mapped is None or access not in _ACCESS:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        if place.mapped.device != self._context.numbered(ordinal):
            raise CUDARuntimeError(errors.PEER_ACCESS_UNSUPPORTED)
        if access == 1 and (status := self._context.view.now.failures.get("cuMemSetAccess for reading", 0)):
            raise CUDARuntimeError(status)
        _libc.mprotect(place.host, nbytes, _ACCESS[access])
        addresses = self._context.addresses
        if access and addresses.at(address) is None:
            addresses.put(place.mapped)
        (addresses.read_only.add if access == 1 else addresses.read_only.discard)(address)

    def unmap(self, address: int, nbytes: int) -> None:
        """Whoever unmaps what the device still uses does what is not defined."""
        place = self._range(address, nbytes)
        if place.mapped is None:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        if self._context.streams.unfinished_on(place.mapped.device):
            undefined("memory is unmapped while work of the device may use it")
        if self._context.addresses.at(address) is not None:
            self._context.addresses.remove(place.mapped)
        self._context.addresses.read_only.discard(address)
        place.mapped = None
        _mapped(place.host, nbytes, 0, -1)

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back. Raises CUDARuntimeError: something is mapped there."""
        place = self._range(address, nbytes)
        if place.mapped is not None:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        del self._ranges[address]
        _libc.munmap(place.host, nbytes)

    def _new(self, fd: int, device: Device) -> int:
        with self._lock:
            handle = next(self._serials)
            self._handles[handle] = fd, device
        return handle

    def _handle(self, handle: int) -> tuple[int, Device]:
        try:
            return self._handles[handle]
        except KeyError:
            raise CUDARuntimeError(errors.INVALID_VALUE) from None

    def _range(self, address: int, nbytes: int) -> _Range:
        place = self._ranges.get(address)
        if place is None or place.nbytes != nbytes:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        return place


def _mapped(address: int, nbytes: int, protection: int, fd: int) -> int:
    """Map a file, or nothing, over pages that were mapped before; at any address where it is 0."""
    flags = (mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) | (
        _MAP_FIXED if address else 0
    )
    found = _libc.mmap(address or None, nbytes, protection, flags, fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise CUDARuntimeError(errors.MEMORY_ALLOCATION)
    return int(found)
