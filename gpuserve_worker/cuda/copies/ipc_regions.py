"""One front's use of device memory of other processes: clients' regions, and exports of other workers.

Copies start here and are waited for elsewhere. The front registers regions and decides about access.
``device/ipc_memory.py`` has the memory that is common to all fronts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.host_memory import address_of
from gpuserve_worker.cuda.device.ipc_memory import (
    ExportBlock,
    Mapped,
    OpenedHandles,
    OpenedMemory,
    OpenState,
)
from gpuserve_worker.cuda.device.runtime import Copy, CudaError
from gpuserve_worker.inference.failure import client_text
from gpuserve_worker.memory.client_regions import NOT_THERE, ClientRegions, RegionError, check_inside
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import DeviceLoan, Place

#: ``cudaErrorDeviceUninitialized``: CUDA's error for a handle of the same process, or of a process that is
#: not visible.
_OWN_OR_UNSEEN: Final = 201
_NOT_FROM_HERE: Final = "; expected a handle from another process, in a PID namespace that the server sees"


class CudaMemoryRegion:
    """A client's region of ``nbytes`` of device memory, which CUDA keeps until it is closed here, even if its
    owner dies. Every use blocks while the handle is being opened.
    """

    def __init__(self, device: CudaDevice, regions: DeviceRegions, memory: OpenedMemory, nbytes: int) -> None:
        self._device = device
        self._regions = regions
        self._memory = memory
        self._nbytes = nbytes
        #: Set when the region is known to be usable.
        self._mapped: Mapped | None = None

    def refusal(self) -> str:
        """Return why the region cannot be used, or ""; raise ``CudaError`` if the device is lost."""
        try:
            mapped = self._memory.mapped(self._nbytes)
        except ValueError as error:
            return str(error)
        except CudaError as error:
            # Some error codes can mean the handle or the device, so the device is tested.
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
        """The memory, if its handle is being opened."""
        return self._memory if self._memory.state is OpenState.OPENING else None

    def address(self, place: Place) -> int:
        """Return a place's address; ``ValueError``: outside the region, ``RegionError``: not usable."""
        check_inside(place, self._nbytes)
        return self._there().address + place.offset

    def lease(self) -> MemoryLease:
        return self._regions.lease(self._memory)

    def start_copy(self, place: Place, to: int, stream: int) -> None:
        self._copy(to, self.address(place), place.nbytes, Copy.DEVICE_TO_DEVICE, stream)

    def start_write(self, place: Place, source: int, kind: Copy, stream: int) -> None:
        """Start a copy to a place, from the device or from page-locked memory. Raise as ``write``."""
        self._copy(self.address(place), source, place.nbytes, kind, stream)

    def start_read(self, place: Place, target: memoryview) -> bool:
        self._copy(
            address_of(target), self.address(place), place.nbytes, Copy.DEVICE_TO_HOST, self._device.h2d
        )
        return True

    def read(self, place: Place, target: memoryview) -> None:
        self.start_read(place, target)
        wait_copies(self._device, self._device.h2d)

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Fill a host buffer by calling ``put``, copy it to a place and wait for the copy."""
        to, device = self.address(place), self._device
        device.enter()
        block = device.host.blocks.acquire(place.nbytes)
        try:
            put(block.memory[: place.nbytes])
            self._copy(to, block.address, place.nbytes, Copy.HOST_TO_DEVICE, device.d2h)
            wait_copies(device, device.d2h)
        finally:
            device.host.blocks.release_block(block)

    def check(self, place: Place) -> None:
        """Raise ``RegionError`` unless the region can be used. Device memory does not shrink."""
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
    """The clients' device regions of one front; ``known``: of all kinds; ``fail`` ends the worker."""

    def __init__(
        self, device: CudaDevice, known: ClientRegions, fail: Callable[[BaseException], None]
    ) -> None:
        self._device = device
        self._known = known
        self._fail = fail
        self._memories = OpenedHandles(device.runtime, device.number, device.opened.thread)
        #: Memory whose arrays have been deleted since.
        self._returned: deque[OpenedMemory] = deque()

    @property
    def any_open(self) -> bool:
        """True if any region is open or being opened."""
        return len(self._memories) > 0

    @property
    def any_opening(self) -> bool:
        return bool(self._memories.opening)

    def get(self, number: int) -> CudaMemoryRegion | None:
        """Return the region of a number if it is usable device memory; block until that is known."""
        region = self._known.get(number) if self.any_open else None
        return region if isinstance(region, CudaMemoryRegion) and region.is_there else None

    def opening(self, number: int) -> OpenedMemory | None:
        region = self._known.get(number)
        return region.opening if isinstance(region, CudaMemoryRegion) else None

    def open(self, nbytes: int, raw_handle: bytes, told: Callable[[str], None]) -> CudaMemoryRegion:
        """Return the region of ``nbytes`` behind a handle. ``told`` is called in the opening thread with ""
        or the reason why the region cannot be used.
        """
        self._release_returned()
        memory = self._memories.open(raw_handle)
        region = CudaMemoryRegion(self._device, self, memory, nbytes)
        self._memories.thread.later(partial(self._tell, region, told))
        return region

    def lease(self, memory: OpenedMemory) -> MemoryLease:
        self._release_returned()
        self._memories.hold(memory)
        memory.is_read_in_place = True
        return MemoryLease(partial(self._returned.append, memory))  # safe in a finalizer: no lock, no CUDA

    def close(self, memory: OpenedMemory) -> None:
        self._release_returned()
        self._memories.release_memory(memory)

    def _tell(self, region: CudaMemoryRegion, told: Callable[[str], None]) -> None:
        try:
            told(region.refusal())
        except BaseException as error:  # the loop raises it
            self._fail(error)

    def _release_returned(self) -> None:
        with suppress(IndexError):  # another thread may have emptied the queue
            while self._returned:
                self._memories.release_memory(self._returned.popleft())


def wait_copies(device: CudaDevice, stream: int) -> None:
    """Wait for the started copies from or to the host, of all regions. Raise as ``copying``."""
    event = device.events.acquire()
    with copying():
        device.runtime.record(event, stream)
        device.runtime.wait(event)
    device.events.release_event(event)


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Convert CUDA's errors in the block to ``RegionError``, unless the device is lost."""
    try:
        yield
    except CudaError as error:
        if error.is_sticky:
            raise
        raise RegionError(f"a region of CUDA memory could not be copied: {client_text(error)}") from None


class ExportUnavailable(RegionError):
    """An export of another worker cannot be read here. The text is one sentence for the client."""

    code = "UNAVAILABLE"


class _LentMemory(NamedTuple):
    """``nbytes`` of another worker's memory."""

    memory: OpenedMemory
    nbytes: int

    def mapped(self) -> Mapped:
        """Return where the memory is, once known; raise ``ExportUnavailable`` if it cannot be read."""
        try:
            return self.memory.mapped(self.nbytes)
        except (CudaError, ValueError) as error:
            raise ExportUnavailable(client_text(error)) from None


class ExportExchange:
    """The exports of a worker for one front, and the exports of other workers that this front lends. ``send``
    sends to the front; ``fail`` ends the worker with an error.
    """

    def __init__(
        self,
        device: CudaDevice,
        send: Callable[[wire.Message], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._device = device
        self._send = send
        self._fail = fail
        self._lent: dict[int, _LentMemory] = {}

    # ---- the owner's side -----------------------------------------------------------------

    def keep(self, nbytes: int) -> ExportBlock | None:
        """Return memory for an output that stays on the device, or None if the output must go to the host."""
        return self._device.exports.allocate(nbytes, self._send)

    # ---- the borrower's side --------------------------------------------------------------

    @property
    def has_loans(self) -> bool:
        return bool(self._lent)

    def opened(self, loan: DeviceLoan) -> OpenedMemory:
        """Return the memory of a loan; block until it is open. Raise ``ExportUnavailable`` if it could not be
        opened, ``ValueError`` if the bytes were not lent.
        """
        lent = self._lent.get(loan.segment)
        try:
            mapped = None if lent is None else lent.mapped()
        except ExportUnavailable as gone:
            raise ExportUnavailable(
                f"an output of the step before cannot be read on this device: {gone}"
            ) from None
        outside = mapped is None or min(loan.offset, loan.nbytes) < 0
        if lent is None or mapped is None or outside or loan.offset + loan.nbytes > mapped.nbytes:
            raise ValueError(f"no {loan.nbytes} bytes at {loan.offset} of lent export {loan.segment}")
        return lent.memory

    def opening(self, segment: int) -> OpenedMemory | None:
        """Return the memory of a lent segment if it is being opened, otherwise None."""
        lent = self._lent.get(segment)
        return lent.memory if lent is not None and lent.memory.state is OpenState.OPENING else None

    # ---- messages -------------------------------------------------------------------------

    def process_message(self, message: wire.Message) -> bool:
        """Process a message about exports; False for others. Raise ``KeyError`` for unknown memory."""
        match message:
            case wire.StartExports():
                with suppress(CudaError):  # without exports, outputs go to the host
                    self._device.enter()
                    self._device.exports.start(self._send)
            case wire.FreeExports(blocks):
                self._device.exports.free(blocks)
            case wire.LendExport(segment, nbytes, handle):
                opened = self._device.opened
                lent = self._lent[segment] = _LentMemory(opened.open(handle), nbytes)
                opened.thread.later(partial(self._tell, segment, lent))
            case wire.UnlendExport(segment):
                self._close(segment)
            case _:
                return False
        return True

    def _tell(self, segment: int, lent: _LentMemory) -> None:
        """Report the outcome of an opening to the front, in the opening thread."""
        problem = ""
        try:
            lent.mapped()
        except ExportUnavailable as gone:
            problem = str(gone)
        except BaseException as error:  # the loop raises it
            self._fail(error)
            return
        with suppress(OSError):  # the front is gone
            self._send(wire.ExportOpened(segment, problem))

    def _close(self, segment: int) -> None:
        self._device.opened.release_memory(self._lent.pop(segment).memory)

    def retire(self) -> None:
        self._device.exports.withdraw(self._send)

    def close(self) -> None:
        """Close what the front lent, except for memory under arrays. No batch of the front runs any more."""
        self.retire()
        if self._lent:
            with suppress(CudaError):  # nothing is copied any more
                self._device.wait_idle()
        for segment in list(self._lent):
            self._close(segment)
