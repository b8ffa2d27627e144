"""What questions are asked with, and those about the machine before anything is copied."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

MIB: Final = 1 << 20
TO_DEVICE: Final = 1
TO_HOST: Final = 2
NON_BLOCKING: Final = 1
#: ``cudaEventDisableTiming``, and with ``cudaEventBlockingSync``: a waiter spins, or sleeps.
EVENTS: Final = {"spin": 2, "sleep": 3}
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

#: The key of an answer that is none.
FAILED: Final = "failed"
#: For a question that was told to end, to end what it has started.
_GRACE_S: Final = 5.0
_TAIL: Final = 600

Answer = dict[str, Any]


def answer(question: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Ask a question in a process of its own. Return the answer, or how the process ended without one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.questions.asked", *question],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_S)
        return {FAILED: f"no answer in {timeout_s:.0f} s"}
    finally:
        process.kill()
    if process.returncode:
        return {FAILED: f"status {process.returncode}: {errors.strip()[-_TAIL:]}"}
    found: Answer = json.loads(output.splitlines()[-1])
    return found


def runtime_of_device() -> Any:
    """CUDA's runtime, with the first device as this thread's."""
    runtime = importlib.import_module("cupy").cuda.runtime
    runtime.setDevice(0)
    return runtime


def seconds_of(call: Callable[..., object], *args: object) -> float:
    began_at = time.perf_counter()
    call(*args)
    return time.perf_counter() - began_at


def ms_of(call: Callable[..., object], *args: object) -> float:
    return round(1e3 * seconds_of(call, *args), 3)


def median_us(call: Callable[[], object], count: int = 1000) -> float:
    """Microseconds of the middle one of so many calls."""
    return round(1e6 * sorted(seconds_of(call) for _ in range(count))[count // 2], 2)


def status_of(call: Callable[..., object], *args: object) -> int:
    """The number of CUDA's error; 0 where there was none."""
    try:
        call(*args)
    except importlib.import_module("cupy").cuda.runtime.CUDARuntimeError as error:
        return int(error.status)
    return 0


def memfd(nbytes: int) -> int:
    """Memory as arenas have it."""
    fd = os.memfd_create("facts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def address_of(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def stream_and_event(runtime: Any) -> tuple[int, int]:
    """Return a stream of its own, and an event whose waiter sleeps."""
    return runtime.streamCreateWithFlags(NON_BLOCKING), runtime.eventCreateWithFlags(EVENTS["sleep"])


def sleeps() -> Callable[[], object]:
    """What a thread of Python needs: the interpreter."""
    return lambda: None


def records() -> Callable[[], object]:
    """What a thread that uses the device needs: the driver, too."""
    runtime = runtime_of_device()
    stream, event = stream_and_event(runtime)
    return lambda: runtime.eventRecord(event, stream)


def beside(call: Callable[[], object], other: Callable[[], Callable[[], object]]) -> Answer:
    """How long a call takes, and how long another thread was without a turn meanwhile, in ms."""
    longest_s, stop, begun = [0.0], threading.Event(), threading.Event()

    def run() -> None:
        step, ended_at = other(), time.perf_counter()
        begun.set()
        while not stop.is_set():
            time.sleep(0.0001)
            step()
            began_at, ended_at = ended_at, time.perf_counter()
            longest_s[0] = max(longest_s[0], ended_at - began_at)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    time.sleep(0.02)
    longest_s[0] = 0.0
    took_ms = ms_of(call)
    stop.set()
    thread.join()
    return {"took_ms": took_ms, "without_a_turn_ms": round(1e3 * longest_s[0], 3)}


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
