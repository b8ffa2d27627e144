"""The functions of NVML that find GPUs and MIG instances, and say what and where they are."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda_simulation.machine import Gpu, Mig

from pynvml._errors import CODES, NVMLError, entry, library
from pynvml._structures import PciInfo, c_nvmlDevice_t

NVML_DEVICE_MIG_DISABLE = 0
NVML_DEVICE_MIG_ENABLE = 1
NVML_AFFINITY_SCOPE_NODE = 0
NVML_AFFINITY_SCOPE_SOCKET = 1
NVML_P2P_CAPS_INDEX_READ = 0
NVML_P2P_CAPS_INDEX_WRITE = 1
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
NVML_P2P_STATUS_NOT_SUPPORTED = 5
_MAX_MIG = 7
_WORD_BITS = 64


def gpu_of(handle: Any) -> Gpu:
    """The GPU of a handle, or of its MIG instance. Raises NVMLError: it is lost, or this is no handle."""
    if not isinstance(handle, c_nvmlDevice_t):
        raise NVMLError(CODES["NVML_ERROR_INVALID_ARGUMENT"])
    gpu = library.gpu(handle._uuid)
    if gpu.lost:
        raise NVMLError(CODES["NVML_ERROR_GPU_IS_LOST"])
    return gpu


def mig_of(handle: Any) -> Mig | None:
    """The MIG instance of a handle; None for one of a GPU."""
    found = [one for one in gpu_of(handle).mig if one.uuid == handle._uuid]
    return found[0] if found else None


def refused(name: str) -> NVMLError:
    """The error of that name."""
    return NVMLError(CODES[f"NVML_ERROR_{name}"])


@entry
def nvmlInit() -> None:
    library.initialise()


@entry
def nvmlInitWithFlags(flags: int) -> None:
    library.initialise()


@entry
def nvmlShutdown() -> None:
    library.shut_down()


@entry
def nvmlSystemGetDriverVersion() -> str:
    return library.view.now.driver_version or ""


@entry
def nvmlSystemGetCudaDriverVersion() -> int:
    return library.view.now.cuda_version


@entry
def nvmlSystemGetNVMLVersion() -> str:
    return f"13.{library.view.now.driver_version}"


@entry
def nvmlDeviceGetCount() -> int:
    return len(library.gpus())


@entry
def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t:
    gpus = library.gpus()
    if not 0 <= index < len(gpus):
        raise refused("INVALID_ARGUMENT")
    return _handle(gpus[index])


@entry
def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> c_nvmlDevice_t:
    wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
    for gpu in library.gpus():
        if wanted == gpu.uuid or any(wanted == one.uuid for one in gpu.mig):
            gpu_of(c_nvmlDevice_t(wanted))
            return c_nvmlDevice_t(wanted)
    raise refused("NOT_FOUND")


@entry
def nvmlDeviceGetHandleByPciBusId(pciBusId: str | bytes) -> c_nvmlDevice_t:
    wanted = pciBusId.decode() if isinstance(pciBusId, bytes) else pciBusId
    for gpu in library.gpus():
        if _pci(gpu.pci_bus_id) == _pci(wanted):
            return _handle(gpu)
    raise refused("NOT_FOUND")


@entry
def nvmlDeviceGetIndex(handle: Any) -> int:
    return [gpu.uuid for gpu in library.gpus()].index(gpu_of(handle).uuid)


@entry
def nvmlDeviceGetMinorNumber(handle: Any) -> int:
    return [gpu.uuid for gpu in library.gpus()].index(gpu_of(handle).uuid)


@entry
def nvmlDeviceGetUUID(handle: Any) -> str:
    gpu_of(handle)
    return str(handle._uuid)


@entry
def nvmlDeviceGetName(handle: Any) -> str:
    mig = mig_of(handle)
    return gpu_of(handle).name + (f" MIG {mig.gpu_instance}g" if mig else "")


@entry
def nvmlDeviceGetPciInfo(handle: Any) -> PciInfo:
    bus_id = gpu_of(handle).pci_bus_id
    domain, bus, device = _pci(bus_id)
    return PciInfo(bus_id.upper(), domain, bus, device)


@entry
def nvmlDeviceGetCudaComputeCapability(handle: Any) -> tuple[int, int]:
    major, minor = gpu_of(handle).compute_capability
    return major, minor


@entry
def nvmlDeviceGetMigMode(device: Any) -> list[int]:
    """[now, after the next reset]"""
    gpu = gpu_of(device)
    if not gpu.mig_capable:
        raise refused("NOT_SUPPORTED")
    return [int(bool(gpu.mig))] * 2


@entry
def nvmlDeviceGetMaxMigDeviceCount(device: Any) -> int:
    return _MAX_MIG if gpu_of(device).mig_capable else 0


@entry
def nvmlDeviceGetMigDeviceHandleByIndex(device: Any, index: int) -> c_nvmlDevice_t:
    gpu = gpu_of(device)
    if not gpu.mig_capable:
        raise refused("NOT_SUPPORTED")
    if index >= len(gpu.mig):
        raise refused("NOT_FOUND")
    return c_nvmlDevice_t(gpu.mig[index].uuid)


@entry
def nvmlDeviceIsMigDeviceHandle(device: Any) -> ctypes.c_uint:
    return ctypes.c_uint(mig_of(device) is not None)


@entry
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(migDevice: Any) -> c_nvmlDevice_t:
    _instance(migDevice)
    return _handle(gpu_of(migDevice))


@entry
def nvmlDeviceGetGpuInstanceId(device: Any) -> int:
    return _instance(device).gpu_instance


@entry
def nvmlDeviceGetComputeInstanceId(device: Any) -> int:
    return _instance(device).compute_instance


@entry
def nvmlDeviceGetNumaNodeId(handle: Any) -> int:
    """Only where the GPU's memory is a node itself."""
    node = gpu_of(handle).own_numa_node
    if node is None:
        raise refused("NOT_SUPPORTED")
    return node


@entry
def nvmlDeviceGetCpuAffinity(handle: Any, cpuSetSize: int) -> Any:
    return _bits(gpu_of(handle).cpus, cpuSetSize)


@entry
def nvmlDeviceGetCpuAffinityWithinScope(handle: Any, cpuSetSize: int, scope: int) -> Any:
    return _bits(gpu_of(handle).cpus, cpuSetSize)


@entry
def nvmlDeviceGetMemoryAffinity(handle: Any, nodeSetSize: int, scope: int) -> Any:
    node = gpu_of(handle).numa_node
    if node is None:
        raise refused("NOT_SUPPORTED")
    return _bits([node], nodeSetSize)


@entry
def nvmlDeviceGetP2PStatus(device1: Any, device2: Any, p2pIndex: int) -> int:
    pair = {gpu_of(device1).uuid, gpu_of(device2).uuid}
    if len(pair) < 2:
        raise refused("INVALID_ARGUMENT")
    now = library.view.now
    if p2pIndex == NVML_P2P_CAPS_INDEX_NVLINK:
        return 0 if any(pair <= set(bridge) for bridge in now.nvlinks) else NVML_P2P_STATUS_NOT_SUPPORTED
    return 0 if now.peer_access else NVML_P2P_STATUS_NOT_SUPPORTED


def _instance(handle: Any) -> Mig:
    found = mig_of(handle)
    if found is None:
        raise refused("NOT_SUPPORTED")
    return found


def _handle(gpu: Gpu) -> c_nvmlDevice_t:
    """Raises NVMLError: the GPU is lost."""
    made = c_nvmlDevice_t(gpu.uuid)
    gpu_of(made)
    return made


def _pci(bus_id: str) -> tuple[int, int, int]:
    domain, bus, rest = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)


def _bits(numbers: Any, words: int) -> Any:
    """An array of ctypes with the bits of these numbers."""
    masks = [0] * words
    for number in numbers:
        if number // _WORD_BITS < words:
            masks[number // _WORD_BITS] |= 1 << number % _WORD_BITS
    return (ctypes.c_ulonglong * words)(*masks)
