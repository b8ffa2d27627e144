"""The part of ``cupy.cuda.runtime`` about devices."""

from __future__ import annotations

from typing import Any, Final

from cuda_simulation import errors
from cuda_simulation.context import current, entry
from cuda_simulation.errors import CUDARuntimeError

from cupy.cuda import _runtime_constants as constants

#: Of the runtime that cupy was built for.
_RUNTIME_VERSION: Final = 13000
_WARP: Final = 32
#: Attributes that do not depend on the device's place.
_ATTRIBUTES: Final = {
    constants.cudaDevAttrMaxThreadsPerBlock: 1024,
    constants.cudaDevAttrGpuOverlap: 1,
    constants.cudaDevAttrMultiProcessorCount: 132,
    constants.cudaDevAttrIntegrated: 0,
    constants.cudaDevAttrCanMapHostMemory: 1,
    constants.cudaDevAttrConcurrentKernels: 1,
    constants.cudaDevAttrAsyncEngineCount: 3,
    constants.cudaDevAttrUnifiedAddressing: 1,
    constants.cudaDevAttrManagedMemory: 1,
    constants.cudaDevAttrHostNativeAtomicSupported: 0,
    constants.cudaDevAttrPageableMemoryAccess: 0,
    constants.cudaDevAttrConcurrentManagedAccess: 1,
    constants.cudaDevAttrPageableMemoryAccessUsesHostPageTables: 0,
    constants.cudaDevAttrCanUseHostPointerForRegisteredMem: 1,
    constants.cudaDevAttrHostRegisterSupported: 1,
    constants.cudaDevAttrHostRegisterReadOnlySupported: 1,
    constants.cudaDevAttrMemoryPoolsSupported: 1,
}


@entry(uses_device=False, keeps_lock=True)
def getDeviceCount() -> int:
    return len(current().devices)


@entry(uses_device=False, keeps_lock=True)
def getDevice() -> int:
    return current().thread.ordinal


def setDevice(device: int) -> None:
    _select(device)
    _make_context()


@entry("setDevice", uses_device=False, keeps_lock=True)
def _select(device: int) -> None:
    current().numbered(device)
    current().thread.ordinal = device


@entry(keeps_lock=True)
def _make_context() -> None:
    """Since CUDA 12 the choice of a device makes its context."""


@entry()
def deviceSynchronize() -> None:
    context = current()
    context.scheduler.wait(context.streams.unfinished_on(context.device))


@entry(keeps_lock=True)
def memGetInfo() -> tuple[int, int]:
    context = current()
    device = context.device
    used = context.files.used(device.uuid) + context.view.gpu(device.uuid).foreign_memory
    return device.memory - used, device.memory


@entry(uses_device=False, keeps_lock=True)
def getDeviceProperties(device: int) -> dict[str, Any]:
    chosen = current().numbered(device)
    gpu = current().view.gpu(chosen.uuid)
    domain, bus, slot = _pci(gpu.pci_bus_id)
    major, minor = gpu.compute_capability
    return {
        "name": gpu.name.encode(),
        "uuid": bytes.fromhex(chosen.uuid.partition("-")[2].replace("-", "")),
        "totalGlobalMem": chosen.memory,
        "major": major,
        "minor": minor,
        "pciDomainID": domain,
        "pciBusID": bus,
        "pciDeviceID": slot,
        "warpSize": _WARP,
        "multiProcessorCount": _ATTRIBUTES[constants.cudaDevAttrMultiProcessorCount],
        "asyncEngineCount": _ATTRIBUTES[constants.cudaDevAttrAsyncEngineCount],
        "ECCEnabled": int(gpu.ecc),
        "integrated": 0,
        "unifiedAddressing": 1,
        "concurrentKernels": 1,
        "canMapHostMemory": 1,
        "managedMemory": 1,
    }


@entry(uses_device=False, keeps_lock=True)
def deviceGetAttribute(attrib: int, device: int) -> int:
    gpu = current().view.gpu(current().numbered(device).uuid)
    domain, bus, slot = _pci(gpu.pci_bus_id)
    places = {
        constants.cudaDevAttrEccEnabled: int(gpu.ecc),
        constants.cudaDevAttrPciDomainId: domain,
        constants.cudaDevAttrPciBusId: bus,
        constants.cudaDevAttrPciDeviceId: slot,
    }
    try:
        return {**_ATTRIBUTES, **places}[attrib]
    except KeyError:
        raise CUDARuntimeError(errors.INVALID_VALUE) from None


@entry(uses_device=False, keeps_lock=True)
def deviceGetPCIBusId(device: int) -> str:
    """CUDA's has four digits of the domain, where NVML's has eight."""
    return current().view.gpu(current().numbered(device).uuid).pci_bus_id[-len("0000:00:00.0") :]


@entry(uses_device=False, keeps_lock=True)
def deviceGetByPCIBusId(pci_bus_id: str) -> int:
    context = current()
    wanted = _pci(pci_bus_id)
    for ordinal, device in enumerate(context.devices):
        if _pci(context.view.gpu(device.uuid).pci_bus_id) == wanted:
            return ordinal
    raise CUDARuntimeError(errors.INVALID_DEVICE)


def driverGetVersion() -> int:
    """0 without a driver; never fails."""
    machine = current().view.now
    return 0 if machine.driver_version is None else machine.cuda_version


def runtimeGetVersion() -> int:
    return _RUNTIME_VERSION


@entry(uses_device=False, keeps_lock=True)
def deviceCanAccessPeer(device: int, peerDevice: int) -> int:
    context = current()
    return int(context.can_reach(context.numbered(device), context.numbered(peerDevice)))


@entry(keeps_lock=True)
def deviceEnablePeerAccess(peerDevice: int) -> None:
    context = current()
    device, peer = context.device, context.numbered(peerDevice)
    if (device, peer) in context.peers:
        raise CUDARuntimeError(errors.PEER_ACCESS_ALREADY_ENABLED)
    if not context.can_reach(device, peer):
        raise CUDARuntimeError(errors.PEER_ACCESS_UNSUPPORTED)
    context.peers.add((device, peer))


@entry(keeps_lock=True)
def deviceDisablePeerAccess(peerDevice: int) -> None:
    context = current()
    pair = (context.device, context.numbered(peerDevice))
    if pair not in context.peers:
        raise CUDARuntimeError(errors.PEER_ACCESS_NOT_ENABLED)
    context.peers.remove(pair)


def _pci(bus_id: str) -> tuple[int, int, int]:
    """Domain, bus and slot."""
    domain, bus, rest = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
