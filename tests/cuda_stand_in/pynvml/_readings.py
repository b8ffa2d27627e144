"""The functions of NVML that read counters of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda_simulation.memory import MemoryFiles

from pynvml._devices import gpu_of, mig_of, refused
from pynvml._errors import CODES, entry, library
from pynvml._structures import FieldContent, FieldValue, Memory, ProcessInfo, Utilization

NVML_TEMPERATURE_GPU = 0
NVML_FEATURE_DISABLED = 0
NVML_FEATURE_ENABLED = 1
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_SINGLE_BIT_ECC = 0
NVML_DOUBLE_BIT_ECC = 1
NVML_VOLATILE_ECC = 0
NVML_AGGREGATE_ECC = 1
NVML_MEMORY_LOCATION_DEVICE_MEMORY = 2
NVML_MEMORY_LOCATION_DRAM = 2
NVML_COMPUTEMODE_DEFAULT = 0
NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
NVML_COMPUTEMODE_PROHIBITED = 2
NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_GPU_RECOVERY_ACTION_NONE = 0
NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 2
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P = 3
NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 4
nvmlClocksEventReasonGpuIdle = 1
nvmlClocksEventReasonSwPowerCap = 4
nvmlClocksEventReasonHwSlowdown = 8
nvmlClocksEventReasonSwThermalSlowdown = 32
nvmlClocksEventReasonHwThermalSlowdown = 64
nvmlClocksEventReasonHwPowerBrakeSlowdown = 128
nvmlMemory_v2 = 0x2000028

#: Added to the process ids in a container: the kernel has no pid that is so large.
_HOST_PIDS = 1 << 23


@entry
def nvmlDeviceGetMemoryInfo(handle: Any, version: int | None = None) -> Memory:
    gpu, mig = gpu_of(handle), mig_of(handle)
    files = MemoryFiles(library.view.directory)
    if mig:
        total, used = mig.memory, files.used(mig.uuid)
    else:
        uuids = [gpu.uuid, *(one.uuid for one in gpu.mig)]
        total, used = gpu.memory, gpu.foreign_memory + sum(map(files.used, uuids))
    return Memory(total, total - used, used, version or 0)


@entry
def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[ProcessInfo]:
    gpu = gpu_of(handle)
    found = MemoryFiles(library.view.directory).of_processes(handle._uuid)
    more = _HOST_PIDS if library.view.now.in_container else 0
    listed = {more + pid: nbytes for pid, nbytes in found.items() if pid}
    listed |= dict.fromkeys(gpu.foreign_pids, gpu.foreign_memory)
    return [ProcessInfo(pid, nbytes) for pid, nbytes in sorted(listed.items())]


@entry
def nvmlDeviceGetUtilizationRates(handle: Any) -> Utilization:
    gpu = _whole(handle)
    return Utilization(gpu.utilization, gpu.memory_utilization)


@entry
def nvmlDeviceGetTemperature(handle: Any, sensor: int) -> int:
    return int(_whole(handle).temperature)


@entry
def nvmlDeviceGetPowerUsage(handle: Any) -> int:
    """Milliwatts."""
    return int(_whole(handle).power_mw)


@entry
def nvmlDeviceGetEnforcedPowerLimit(handle: Any) -> int:
    """Milliwatts."""
    return int(_whole(handle).power_limit_mw)


@entry
def nvmlDeviceGetTotalEnergyConsumption(handle: Any) -> int:
    """Millijoules."""
    return int(_whole(handle).energy_mj)


@entry
def nvmlDeviceGetEccMode(handle: Any) -> list[int]:
    """[now, after the next reset]"""
    return [int(gpu_of(handle).ecc)] * 2


@entry
def nvmlDeviceGetTotalEccErrors(handle: Any, errorType: int, counterType: int) -> int:
    return _ecc(handle, errorType)


@entry
def nvmlDeviceGetMemoryErrorCounter(handle: Any, errorType: int, counterType: int, locationType: int) -> int:
    return _ecc(handle, errorType)


@entry
def nvmlDeviceGetRemappedRows(device: Any) -> tuple[int, int, int, int]:
    """Corrected, uncorrected, pending, failed."""
    corrected, uncorrected, pending, failed = _whole(device).remapped_rows
    return corrected, uncorrected, pending, failed


@entry
def nvmlDeviceGetRetiredPagesPendingStatus(device: Any) -> int:
    return int(_whole(device).retired_pages_pending)


@entry
def nvmlDeviceGetComputeMode(handle: Any) -> int:
    return int(gpu_of(handle).compute_mode)


@entry
def nvmlDeviceGetCurrentClocksEventReasons(handle: Any) -> int:
    return int(_whole(handle).clocks_event_reasons)


@entry
def nvmlDeviceGetCurrentClocksThrottleReasons(handle: Any) -> int:
    return int(_whole(handle).clocks_event_reasons)


@entry
def nvmlDeviceGetFieldValues(handle: Any, fieldIds: Sequence[int]) -> list[FieldValue]:
    """Of the fields there is only what the driver wants done with the GPU."""
    action = int(gpu_of(handle).recovery_action)
    return [
        FieldValue(field, 0, FieldContent(action))
        if field == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        else FieldValue(field, CODES["NVML_ERROR_NOT_SUPPORTED"], FieldContent(0))
        for field in fieldIds
    ]


def _ecc(handle: Any, kind: int) -> int:
    gpu = _whole(handle)
    if not gpu.ecc:
        raise refused("NOT_SUPPORTED")
    return int(gpu.ecc_uncorrected if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else gpu.ecc_corrected)


def _whole(handle: Any) -> Any:
    """The GPU of a handle. Raises NVMLError: the handle is of a MIG instance, which has no such counters."""
    if mig_of(handle):
        raise refused("NOT_SUPPORTED")
    return gpu_of(handle)
