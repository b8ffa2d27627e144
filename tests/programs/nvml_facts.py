"""What NVML tells, as seen through nvidia-ml-py: each function prints what it is named after as JSON. Run
with the name of a function; needs a GPU, or the stand-in for one.
"""

import json
import sys

import pynvml as nvml


def code(call, *args):
    """The code that a call ends with; 0 for success."""
    try:
        call(*args)
    except nvml.NVMLError as error:
        return error.value
    return 0


def inventory():
    """The machine and its GPUs."""
    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    return {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": nvml.nvmlSystemGetCudaDriverVersion_v2(),
        "gpus": [_gpu(gpu) for gpu in gpus],
    }


def _gpu(gpu):
    uuid, bus_id = nvml.nvmlDeviceGetUUID(gpu), nvml.nvmlDeviceGetPciInfo(gpu).busId
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return {
        "uuid": uuid,
        "name": nvml.nvmlDeviceGetName(gpu),
        "sums up": memory.free + memory.used <= memory.total,
        "by uuid": nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid,
        "by bus": nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByPciBusId(bus_id)) == uuid,
        "temperature": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "utilization": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "power_mw": nvml.nvmlDeviceGetPowerUsage(gpu),
        "cpus": any(nvml.nvmlDeviceGetCpuAffinity(gpu, 4)),
        "mig": [nvml.nvmlDeviceGetUUID(one) for one in _instances(gpu)],
    }


def _instances(gpu):
    """Its MIG instances."""
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
        except nvml.NVMLError:
            return


def refusals():
    """Codes of calls that cannot be answered."""
    found = {"before init": code(nvml.nvmlDeviceGetCount)}
    found["init"] = code(nvml.nvmlInit)
    if found["init"]:
        return found
    return {
        **found,
        "index": code(nvml.nvmlDeviceGetHandleByIndex, 99),
        "uuid": code(nvml.nvmlDeviceGetHandleByUUID, "GPU-no-such"),
        "class": isinstance(nvml.NVMLError(nvml.NVML_ERROR_TIMEOUT), nvml.NVMLError_Timeout),
        "text": str(nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)),
    }


def xids():
    """The Xid that comes while it is waited for, and the code of waiting for another."""
    nvml.nvmlInit()
    events, gpu = nvml.nvmlEventSetCreate(), nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
    print("waits", flush=True)
    event = nvml.nvmlEventSetWait_v2(events, 30_000)
    return {
        "xid": event.eventData,
        "uuid": nvml.nvmlDeviceGetUUID(event.device),
        "then": code(nvml.nvmlEventSetWait_v2, events, 20),
    }


def lost():
    """Codes of a GPU's calls, before and after something happens to it."""
    nvml.nvmlInit()
    events, gpu = nvml.nvmlEventSetCreate(), nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
    before = code(nvml.nvmlDeviceGetPowerUsage, gpu)
    print("ready", flush=True)
    sys.stdin.readline()
    return {
        "before": before,
        "xid": nvml.nvmlEventSetWait_v2(events, 1000).eventData,
        "events": code(nvml.nvmlEventSetWait_v2, events, 1000),
        "after": code(nvml.nvmlDeviceGetPowerUsage, gpu),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
