"""What the machine is like before anything is copied: imports, contexts, kernels, NVML, its own memory."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from benchmarks.gpu.questions.asking import MIB, Answer, median_us, ms_of, runtime_of_device, seconds_of


def imports() -> Answer:
    """Seconds; those of torch only where it is installed."""
    found: Answer = {}
    for name in ("numpy", "cupy", "torch"):
        try:
            found[name] = round(seconds_of(importlib.import_module, name), 2)
        except ImportError as error:
            found[name] = str(error)
    return found


def context() -> Answer:
    """What the first call of a process takes, and what is left of the memory then."""
    runtime = importlib.import_module("cupy").cuda.runtime
    first_s = round(seconds_of(runtime.setDevice, 0), 3)
    free, total = runtime.memGetInfo()
    versions = {"runtime": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}
    return {"setDevice_s": first_s, "free_nbytes": free, "total_nbytes": total, **versions}


def kernels() -> Answer:
    """The first kernel is compiled, the next are only launched."""
    runtime_of_device()
    cupy = importlib.import_module("cupy")
    one = cupy.zeros(4, cupy.float32)
    found: Answer = {"first_s": round(seconds_of((one * 2).get), 3)}
    found["next_us"] = median_us(lambda: one * 2, 500)
    nvrtc = getattr(cupy.cuda, "nvrtc", None)  # the stand-in compiles nothing
    return {**found, "nvrtc": list(nvrtc.getVersion()) if nvrtc else []}


def nvml() -> Answer:
    """The code with which NVML answers what the server asks again and again, and ms; 0 is an answer."""
    library = importlib.import_module("pynvml")
    library.nvmlInit()
    gpu = library.nvmlDeviceGetHandleByIndex(0)
    field = getattr(library, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 0)
    questions: dict[str, tuple[object, ...]] = {
        "MemoryInfo": (), "UtilizationRates": (), "PowerUsage": (), "EnforcedPowerLimit": (),
        "RemappedRows": (),
        "TotalEnergyConsumption": (), "RetiredPagesPendingStatus": (), "Temperature": (0,), "MigMode": (),
        "TotalEccErrors": (1, 0), "CurrentClocksEventReasons": (), "ComputeRunningProcesses": (),
        "FieldValues": ([field],), "CpuAffinity": (4,), "MemoryAffinity": (4, 0), "SupportedEventTypes": (),
    }  # fmt: skip
    found: Answer = {}
    for name, args in questions.items():
        try:
            took_ms = ms_of(getattr(library, f"nvmlDeviceGet{name}"), gpu, *args)
            found[name] = [0, took_ms]
        except library.NVMLError as error:
            found[name] = [int(error.value), str(error)]
        except AttributeError as error:
            found[name] = [-1, str(error)]
    found["Xid events"] = [_event_code(library, gpu), "of a wait of 50 ms"]
    return found


def _event_code(library: Any, gpu: Any) -> int:
    """With which a wait for Xids ends in which none comes."""
    events = library.nvmlEventSetCreate()
    try:
        library.nvmlDeviceRegisterEvents(gpu, library.nvmlEventTypeXidCriticalError, events)
        library.nvmlEventSetWait_v2(events, 50)
    except library.NVMLError as error:
        return int(error.value)
    return 0


def host_memory() -> Answer:
    """GB/s of one thread that copies memory of the host."""
    source, target = np.ones(64 * MIB, np.uint8), np.ones(64 * MIB, np.uint8)
    took_s = min(seconds_of(np.copyto, target, source) for _ in range(5))
    return {"copy": round(64 * MIB / took_s / 1e9, 1)}
