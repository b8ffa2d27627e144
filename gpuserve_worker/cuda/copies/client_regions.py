"""Clients' regions of device memory, as a worker sees them: opened by ``DeviceRegions``, and closed when
nobody refers to them any more. Copies from and to them begin here and are waited for elsewhere. Who registers
what is the front's business.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from gpuserve_worker.calling.failure import client_text
from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.opened import Mapped, OpenedMemories, OpenedMemory, OpenState
from gpuserve_worker.cuda.device.page_locks import address_of
from gpuserve_worker.cuda.device.runtime import Copy, CudaError
from gpuserve_worker.memory.regions import NOT_THERE, ClientRegions, RegionError, check_inside
from gpuserve_worker.protocol.payloads import Place

#: ``cudaErrorDeviceUninitialized``: CUDA's word for a handle of the very process, or of one it cannot see.
_OWN_OR_UNSEEN: Final = 201
_NOT_FROM_HERE: Final = "; expected a handle from another process, in a PID namespace that the server sees"


class CudaMemoryRegion:
    """``nbytes`` of device memory, which CUDA keeps until they are closed here, whoever dies meanwhile.
    Whatever is done with it waits while its handle is being opened.
    """

    def __init__(self, device: CudaDevice, regions: DeviceRegions, memory: OpenedMemory, nbytes: int) -> None:
        self._device = device
        self._regions = regions
        self._memory = memory
        self._nbytes = nbytes
        #: Once it is known that it can be used.
        self._mapped: Mapped | None = None

    def refusal(self) -> str:
        """Why it cannot be used, in one sentence; nothing where it can. Raises ``CudaError`` where that is
        the device's doing, which is lost.
        """
        try:
            mapped = self._memory.mapped(self._nbytes)
        except ValueError as error:
            return str(error)
        except CudaError as error:
            # Some codes say of a handle what they say of a device elsewhere: the device itself knows.
            if error.is_sticky and self._device.why_lost() is not None:
                raise
            hint = _NOT_FROM_HERE if error.code == _OWN_OR_UNSEEN else ""
            return f"CUDA could not open its handle: {client_text(error)}{hint}"
        if not mapped.is_here:
            return "its memory is on another device than the one given"
        self._mapped = mapped
        return ""

    @property
    def is_there(self) -> bool:
        return self._mapped is not None or not self.refusal()

    @property
    def opening(self) -> OpenedMemory | None:
        """What is waited for, where its handle is being opened."""
        return self._memory if self._memory.state is OpenState.OPENING else None

    def address(self, place: Place) -> int:
        """Where a place is on the device. Raises ``ValueError`` where it is not in the region,
        ``RegionError`` where that cannot be used.
        """
        check_inside(place, self._nbytes)
        return self._there().address + place.offset

    def lease(self) -> MemoryLease:
        return self._regions.lease(self._memory)

    def begin_copy(self, place: Place, to: int, stream: int) -> None:
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
        """Have the bytes of a place put into memory, and copy them to the device; waits for that."""
        to, device = self.address(place), self._device
        device.enter()
        block = device.host.blocks.take(place.nbytes)
        try:
            put(block.memory[: place.nbytes])
            self._copy(to, block.address, place.nbytes, Copy.HOST_TO_DEVICE, device.d2h)
            device.runtime.record(block.event, device.d2h)
            with copying():
                device.runtime.wait(block.event)
        finally:
            device.host.blocks.give(block)

    def check(self, place: Place) -> None:
        """Do nothing where it is there: device memory does not shrink."""
        self._there()

    def close(self) -> None:
        self._regions.close(self._memory)

    def _there(self) -> Mapped:
        if self._mapped is None and (problem := self.refusal()):
            raise RegionError(f"{NOT_THERE}: {problem}")
        assert self._mapped is not None, "nothing was found against it"
        return self._mapped

    def _copy(self, to: int, source: int, nbytes: int, kind: Copy, stream: int) -> None:
        if nbytes:
            with copying():
                self._device.enter()
                self._device.runtime.copy(to, source, nbytes, kind, stream)


class DeviceRegions:
    """The clients' regions of device memory that one front told of; ``known`` has those of every kind.
    ``fail`` is told what ends the worker.
    """

    def __init__(
        self, device: CudaDevice, known: ClientRegions, fail: Callable[[BaseException], None]
    ) -> None:
        self._device = device
        self._known = known
        self._fail = fail
        self._memories = OpenedMemories(device.runtime, device.number, device.opened.thread)
        #: What arrays were over that have died since.
        self._returned: deque[OpenedMemory] = deque()

    @property
    def any_open(self) -> bool:
        """Whether there are any, or may be when they are open."""
        return len(self._memories) > 0

    @property
    def any_opening(self) -> bool:
        return bool(self._memories.opening)

    def get(self, number: int) -> CudaMemoryRegion | None:
        """The region of that number, if it is of device memory and can be used, once that is known."""
        region = self._known.get(number) if self.any_open else None
        return region if isinstance(region, CudaMemoryRegion) and region.is_there else None

    def opening(self, number: int) -> OpenedMemory | None:
        region = self._known.get(number)
        return region.opening if isinstance(region, CudaMemoryRegion) else None

    def open(self, nbytes: int, raw_handle: bytes, told: Callable[[str], None]) -> CudaMemoryRegion:
        """The region of ``nbytes`` behind a handle. ``told`` hears why it cannot be used, or nothing, from
        the thread that opens it.
        """
        self._take_back()
        memory = self._memories.open(raw_handle)
        region = CudaMemoryRegion(self._device, self, memory, nbytes)
        self._memories.thread.later(partial(self._tell, region, told))
        return region

    def lease(self, memory: OpenedMemory) -> MemoryLease:
        self._take_back()
        self._memories.hold(memory)
        memory.is_read_in_place = True
        return MemoryLease(partial(self._returned.append, memory))  # no lock, and no CUDA

    def close(self, memory: OpenedMemory) -> None:
        self._take_back()
        self._memories.let_go(memory)

    def _tell(self, region: CudaMemoryRegion, told: Callable[[str], None]) -> None:
        try:
            told(region.refusal())
        except BaseException as error:  # it is the loop that is to raise it
            self._fail(error)

    def _take_back(self) -> None:
        with suppress(IndexError):  # another thread may take from it, too
            while self._returned:
                self._memories.let_go(self._returned.popleft())


def end_reads(device: CudaDevice) -> None:
    """Wait for the copies to the host that were begun, of all regions; raises as ``copying``."""
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
