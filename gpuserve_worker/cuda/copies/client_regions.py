"""Clients' regions of device memory, as a worker sees them: opened by their ``cudaIpcMemHandle_t``, each
once however many names it has, and closed when nobody refers to it any more.

Copies from and to them begin here and are waited for elsewhere. Who registers what is the front's business.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from gpuserve_worker.calling.failure import client_text
from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.page_locks import address_of
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Copy, CudaError
from gpuserve_worker.memory.regions import ClientRegions, RegionError, check_inside
from gpuserve_worker.protocol.payloads import Place

#: ``cudaErrorDeviceUninitialized``: CUDA's word for a handle of the very process, or of one it cannot see.
_OWN_OR_UNSEEN: Final = 201
_NOT_FROM_HERE: Final = "; expected a handle from another process, in a PID namespace that the server sees"


class OpenMemory:
    """Memory of another process, open here: ``nbytes`` of the device from ``address`` to the end of its
    allocation. ``users`` are the regions and the arrays over them; the last one closes it.
    ``is_read_in_place``: an array was over it, so the device may be at work on it when nobody refers to it
    any more.
    """

    __slots__ = ("address", "handle", "is_read_in_place", "nbytes", "users")

    def __init__(self, handle: bytes, address: int, nbytes: int) -> None:
        self.handle = handle
        self.address = address
        self.nbytes = nbytes
        self.users = 0
        self.is_read_in_place = False


class OpenMemories:
    """The handles that are open, one entry for each. Any thread may use it."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._open: dict[bytes, OpenMemory] = {}
        self._returned: deque[OpenMemory] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes, nbytes: int) -> OpenMemory:
        """The memory of a handle for one more user, who wants ``nbytes`` of it.

        Raises:
            CudaError: it cannot be opened.
            RegionError: it is another device's, or not as large.
        """
        with self._lock:
            self._take_back()
            memory = self._open.get(handle)
            if memory is None:
                memory = self._opened(handle)
            memory.users += 1
            if nbytes <= memory.nbytes:
                return memory
            self._leave(memory)
        raise RegionError(f"expected at most {memory.nbytes} bytes, which its allocation has, got {nbytes}")

    def close(self, memory: OpenMemory) -> None:
        """Let one user go; the last one closes the memory."""
        with self._lock:
            self._take_back()
            self._leave(memory)

    def lease(self, memory: OpenMemory) -> MemoryLease:
        """A lease that keeps the memory open for as long as it lives."""
        with self._lock:
            self._take_back()
            memory.users += 1
            memory.is_read_in_place = True
        return MemoryLease(partial(self._returned.append, memory))  # no lock, and no CUDA

    def _opened(self, handle: bytes) -> OpenMemory:
        runtime = self._device.runtime
        self._device.enter()
        address = runtime.open_memory(handle)
        try:
            if runtime.device_of(address) != self._device.number:
                raise RegionError("its memory is on another device than the one given")
            start, nbytes = runtime.address_range(address)
        except BaseException:
            runtime.close_memory(address)
            raise
        memory = self._open[handle] = OpenMemory(handle, address, start + nbytes - address)
        return memory

    def _take_back(self) -> None:
        """Let go of memory whose arrays have died since."""
        while self._returned:
            self._leave(self._returned.popleft())

    def _leave(self, memory: OpenMemory) -> None:
        memory.users -= 1
        if memory.users:
            return
        del self._open[memory.handle]
        runtime = self._device.runtime
        with suppress(CudaError):  # the device cannot be used any more, which whoever uses it next sees, too
            self._device.enter()
            if memory.is_read_in_place:
                runtime.synchronize_stream(DEFAULT_STREAM)
            runtime.close_memory(memory.address)


class CudaMemoryRegion:
    """One region: ``nbytes`` of device memory. Made by ``open_region``.

    Whoever made the memory may free it or die at any time: CUDA keeps it until it is closed here.
    """

    def __init__(self, device: CudaDevice, memories: OpenMemories, memory: OpenMemory, nbytes: int) -> None:
        self._device = device
        self._memories = memories
        self._memory = memory
        self._nbytes = nbytes

    def address(self, place: Place) -> int:
        """Where a place is on the device. Raises ``ValueError`` where it is not in the region."""
        check_inside(place, self._nbytes)
        return self._memory.address + place.offset

    def lease(self) -> MemoryLease:
        return self._memories.lease(self._memory)

    def begin_copy(self, place: Place, to: int, stream: int) -> None:
        """Begin to copy a place to memory of the device; raises as ``write``."""
        self._copy(to, self.address(place), place.nbytes, Copy.DEVICE_TO_DEVICE, stream)

    def begin_write(self, place: Place, source: int, kind: Copy, stream: int) -> None:
        """Begin to copy to a place, from the device or from page-locked memory; raises as ``write``."""
        self._copy(self.address(place), source, place.nbytes, kind, stream)

    def begin_read(self, place: Place, target: memoryview) -> bool:
        self._copy(
            address_of(target), self.address(place), place.nbytes, Copy.DEVICE_TO_HOST, self._device.h2d
        )
        return True

    def read(self, place: Place, target: memoryview) -> None:
        self.begin_read(place, target)
        end_reads(self._device)

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Have the bytes of a place put into memory, copy them to the device, and wait until they are there.

        Raises:
            RegionError: the copy could not be made.
            CudaError: the device cannot be used any more.
            ValueError: the place is not in the region.
        """
        to, device = self.address(place), self._device
        device.enter()
        block = device.host_blocks.take(place.nbytes)
        try:
            put(block.memory[: place.nbytes])
            self._copy(to, block.address, place.nbytes, Copy.HOST_TO_DEVICE, device.d2h)
            device.runtime.record(block.event, device.d2h)
            with copying():
                device.runtime.wait(block.event)
        finally:
            device.host_blocks.give(block)

    def check(self, place: Place) -> None:
        """Do nothing: device memory does not shrink."""

    def close(self) -> None:
        self._memories.close(self._memory)

    def _copy(self, to: int, source: int, nbytes: int, kind: Copy, stream: int) -> None:
        if nbytes:
            with copying():
                self._device.enter()
                self._device.runtime.copy(to, source, nbytes, kind, stream)


class DeviceRegions:
    """The clients' regions of device memory that one front told of; ``known`` has those of every kind."""

    def __init__(self, device: CudaDevice, known: ClientRegions) -> None:
        self._device = device
        self._known = known
        self._memories = OpenMemories(device)

    @property
    def any_open(self) -> bool:
        return len(self._memories) > 0

    def open(self, nbytes: int, raw_handle: bytes) -> CudaMemoryRegion:
        return open_region(self._device, self._memories, nbytes, raw_handle)

    def get(self, number: int) -> CudaMemoryRegion | None:
        """The region of that number, if it is open and of device memory."""
        region = self._known.get(number) if self.any_open else None
        return region if isinstance(region, CudaMemoryRegion) else None


def open_region(device: CudaDevice, memories: OpenMemories, nbytes: int, handle: bytes) -> CudaMemoryRegion:
    """The region of ``nbytes`` behind a handle.

    Raises:
        RegionError: there is no such memory, or no such memory of this device.
        CudaError: the device cannot be used any more.
    """
    try:
        memory = memories.open(handle, nbytes)
    except CudaError as error:
        if error.is_sticky:
            raise
        hint = _NOT_FROM_HERE if error.code == _OWN_OR_UNSEEN else ""
        raise RegionError(f"CUDA could not open its handle: {client_text(error)}{hint}") from None
    return CudaMemoryRegion(device, memories, memory, nbytes)


def end_reads(device: CudaDevice) -> None:
    """Wait for the copies to the host that were begun, of all regions.

    Raises:
        RegionError: one could not be made.
        CudaError: the device cannot be used any more.
    """
    event = device.events.take()
    with copying():
        device.runtime.record(event, device.h2d)
        device.runtime.wait(event)
    device.events.give(event)


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """What CUDA refuses within is told to the client, as long as the device can be used."""
    try:
        yield
    except CudaError as error:
        if error.is_sticky:
            raise
        raise RegionError(f"a region of CUDA memory could not be copied: {client_text(error)}") from None
