"""The part of ``cupy.cuda.runtime`` about memory and copies."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_simulation import copies, errors
from cuda_simulation.context import current, entry
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.memory import Allocation, Origin
from cuda_simulation.scheduler import Operation

from cupy.cuda import _runtime_constants as constants


@dataclass(frozen=True)
class PointerAttributes:
    """Whose memory a pointer is of."""

    device: int
    devicePointer: int
    hostPointer: int
    type: int = -1


@entry()
def malloc(size: int) -> int:
    return current().allocate(size, Origin.MALLOC).address if size else 0


@entry()
def free(ptr: int) -> None:
    """Waits for all that is queued on the device."""
    if ptr:
        context = current()
        allocation = _owned(ptr)
        context.spend(context.view.now.malloc_s)
        before = context.streams.unfinished_on(allocation.device)
        release = Operation(
            allocation.device.gpu_uuid, effect=lambda: context.memory.release(allocation), after=before
        )
        context.scheduler.submit(release)
        context.scheduler.wait([release])


@entry()
def mallocAsync(size: int, stream: int) -> int:
    """Usable on other streams after the stream has come so far; that is not watched here."""
    current().stream(stream)
    return current().allocate(size, Origin.POOL).address if size else 0


@entry()
def freeAsync(ptr: int, stream: int) -> None:
    context = current()
    allocation = _owned(ptr)
    context.launch(context.stream(stream), lambda: context.memory.release(allocation))


@entry()
def hostAlloc(size: int, flags: int) -> int:
    _spend_locking(size)
    return current().page_locked.allocate(size)


@entry()
def freeHost(ptr: int) -> None:
    context = current()
    if ptr:
        for device in context.devices:
            context.scheduler.wait(context.streams.unfinished_on(device))
        context.page_locked.free(ptr)


@entry()
def hostRegister(ptr: int, size: int, flags: int) -> None:
    current().page_locked.register(ptr, size, flags)
    _spend_locking(size)


@entry()
def hostUnregister(ptr: int) -> None:
    _spend_locking(current().page_locked.unregister(ptr))


@entry()
def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    copies.copy(current(), dst, src, size, kind, current().stream(0), wait=True)


@entry()
def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    copies.copy(current(), dst, src, size, kind, current().stream(stream), wait=False)


@entry()
def memcpyPeer(dst: int, dstDevice: int, src: int, srcDevice: int, size: int) -> None:
    memcpyPeerAsync(dst, dstDevice, src, srcDevice, size, 0)


@entry()
def memcpyPeerAsync(dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:
    context = current()
    for address, ordinal in ((dst, dstDevice), (src, srcDevice)):
        found = context.addresses.around(address, size)
        if found is None or found.device != context.numbered(ordinal):
            raise CUDARuntimeError(errors.INVALID_VALUE)
    copies.copy(context, dst, src, size, constants.memcpyDeviceToDevice, context.stream(stream), wait=False)


@entry()
def memcpy2D(dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int) -> None:
    for row in range(height):
        memcpy(dst + row * dpitch, src + row * spitch, width, kind)


@entry()
def memcpy2DAsync(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    for row in range(height):
        memcpyAsync(dst + row * dpitch, src + row * spitch, width, kind, stream)


@entry()
def memset(ptr: int, value: int, size: int) -> None:
    copies.fill(current(), ptr, value, size, current().stream(0))


@entry()
def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    copies.fill(current(), ptr, value, size, current().stream(stream))


@entry(keeps_lock=True)
def pointerGetAttributes(ptr: int) -> PointerAttributes:
    context = current()
    found = context.addresses.around(ptr)
    if found is not None:
        seen = found.device in context.devices
        ordinal = context.devices.index(found.device) if seen else constants.cudaInvalidDeviceId
        return PointerAttributes(ordinal, ptr, 0, constants.memoryTypeDevice)
    if context.page_locked.holds(ptr):
        return PointerAttributes(context.thread.ordinal, ptr, ptr, constants.memoryTypeHost)
    return PointerAttributes(constants.cudaInvalidDeviceId, 0, ptr, constants.memoryTypeUnregistered)


def _spend_locking(nbytes: int) -> None:
    """The time that it takes to lock pages, or to let go of them."""
    context = current()
    speed = context.view.now.page_lock_bytes_per_s
    context.spend(nbytes / speed if speed else 0.0)


def _owned(address: int) -> Allocation:
    """What the process allocated at an address, and not what it imported."""
    found = current().addresses.at(address)
    if found is None or found.origin is Origin.IMPORTED:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    return found
