"""What processes that share a GPU do to each other, with MPS and without, and what of the host's memory the
GPU reaches by itself.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from benchmarks.gpu.questions.asking import (
    MIB,
    TO_DEVICE,
    TO_HOST,
    Answer,
    address_of,
    answer,
    runtime_of_device,
    status_of,
    stream_and_event,
)
from gpuserve.core.errors import StartupError
from gpuserve.devices.mps import LOGS, MpsDaemon

#: ``cudaDevAttr…``: HMM or ATS is there where the first is 1.
_ATTRIBUTES: Final = {
    "pageableMemoryAccess": 88,
    "pageableMemoryAccessUsesHostPageTables": 100,
    "concurrentManagedAccess": 89,
    "hostNativeAtomicSupported": 86,
    "canUseHostPointerForRegisteredMem": 91,
}


def host_pointers() -> Answer:
    """Whether the GPU reaches memory of the host that is not locked (HMM, ATS), and what it reads there."""
    runtime, cupy = runtime_of_device(), importlib.import_module("cupy")
    found: Answer = {}
    for name, number in _ATTRIBUTES.items():
        try:
            found[name] = int(runtime.deviceGetAttribute(number, 0))
        except runtime.CUDARuntimeError as error:
            found[name] = str(error)
    if found["pageableMemoryAccess"] != 1:
        return found
    plain = np.arange(MIB, dtype=np.float32)
    memory = cupy.cuda.UnownedMemory(plain.ctypes.data, plain.nbytes, plain, 0)
    array = cupy.ndarray(plain.shape, plain.dtype, cupy.cuda.MemoryPointer(memory, 0))
    return {**found, "a kernel reads it right": bool((cupy.asnumpy(array * 2) == plain * 2).all())}


def bad_host_pointer(way: str) -> Answer:
    """The code for a copy from or to host memory that is not there, and whether the device works then."""
    runtime = runtime_of_device()
    memory, device = mmap.mmap(-1, 64 * MIB), runtime.malloc(MIB)
    host = address_of(memory) + 32 * MIB  # where nothing small is put afterwards
    memory.close()
    ends = (device, host) if way == "from" else (host, device)
    stream, event = stream_and_event(runtime)
    kind = TO_DEVICE if way == "from" else TO_HOST
    code = status_of(runtime.memcpyAsync, *ends, MIB, kind, stream)
    runtime.eventRecord(event, stream)
    return {"status": code, "a wait for it": status_of(runtime.eventSynchronize, event),
            "device then": status_of(runtime.deviceSynchronize)}  # fmt: skip


# ---- several processes --------------------------------------------------------------------------

#: Seconds that processes are measured for.
_SECONDS: Final = 1.0
_COUNT: Final = 4
#: A process that computes small kernels, or long ones, as long as it is told, and prints what it saw.
_COMPUTES: Final = """
import json, sys, time
import cupy
runtime = cupy.cuda.runtime
runtime.setDevice(0)
small, large = cupy.ones(1 << 12, cupy.float32), cupy.ones(int(sys.argv[2]), cupy.float32)
def rounds(seconds):
    took, until = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        if sys.argv[1] == "small":
            for _ in range(10):
                cupy.add(small, 1, out=small)
        else:
            for _ in range(20):
                cupy.add(large, 1, out=large)
        runtime.streamSynchronize(0)
        took.append(time.perf_counter() - began)
    return sorted(took)
rounds(0.05)
for line in iter(lambda: (print("ready", flush=True), sys.stdin.readline())[1], ""):
    took = rounds(float(line))
    print(json.dumps({"rounds/s": len(took) / sum(took), "median_ms": 1e3 * took[len(took) // 2],
                      "p99_ms": 1e3 * took[int(0.99 * len(took))], "longest_ms": 1e3 * took[-1]}), flush=True)
"""


class _Computing:
    """A process that computes when it is told to."""

    def __init__(self, stack: ExitStack, kind: str, environment: Mapping[str, str]) -> None:
        # The stand-in computes on the CPU.
        elements = 1 << (16 if "CUDA_STAND_IN" in os.environ else 26)
        command = [sys.executable, "-c", _COMPUTES, kind, str(elements)]
        self.process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
        )
        stack.callback(self.process.kill)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin: IO[str] = self.process.stdin
        self._stdout: IO[str] = self.process.stdout

    def is_ready(self) -> bool:
        return self._stdout.readline() == "ready\n"

    def begin(self, seconds: float) -> None:
        self._stdin.write(f"{seconds}\n")
        self._stdin.flush()

    def seen(self) -> Answer:
        found = json.loads(self._stdout.readline() or "{}")
        return {name: round(value, 3) for name, value in found.items()}


def two_processes() -> Answer:
    """How long a process waits for small kernels while another computes long ones, what a context takes, and
    whether NVML knows both by their own ids.
    """
    runtime, found = runtime_of_device(), dict[str, Any]()
    with ExitStack() as stack:
        free_nbytes = runtime.memGetInfo()[0]
        small = _Computing(stack, "small", {})
        if not small.is_ready():
            return {"failed": "the other process ended"}
        found["memory of a process, MiB"] = (free_nbytes - runtime.memGetInfo()[0]) // MIB
        small.begin(_SECONDS)
        found["alone"] = small.seen()
        large = _Computing(stack, "large", {})
        large.is_ready()
        small.is_ready()
        large.begin(3 * _SECONDS)
        time.sleep(_SECONDS / 2)
        small.begin(_SECONDS)
        found["beside long kernels"] = small.seen()
        found["the long ones"] = large.seen()
        pids = {os.getpid(), small.process.pid, large.process.pid}
        listed = set(_listed_nbytes())
        found["NVML lists"] = {"of these": len(pids & listed), "in all": len(listed)}
        found["PID namespace"] = os.readlink("/proc/self/ns/pid")
    return found


def _listed_nbytes() -> dict[int, int]:
    """The bytes of each process that NVML lists."""
    library = importlib.import_module("pynvml")
    library.nvmlInit()
    gpu = library.nvmlDeviceGetHandleByIndex(0)
    listed = library.nvmlDeviceGetComputeRunningProcesses(gpu)
    return {int(one.pid): int(one.usedGpuMemory or 0) for one in listed}


def small_instances() -> Answer:
    """Rounds of small kernels a second of one process and of four, without MPS and with it; and with it
    whether handles open, and what the others see of one that touches memory that is not there.
    """
    found: Answer = {"1 process": _rates(1, {}), f"{_COUNT} processes": _rates(_COUNT, {})}
    with _mps() as (environment, reason):
        if reason:
            return {**found, "MPS": reason}
        found["1 process, MPS"] = _rates(1, environment)
        found[f"{_COUNT} processes, MPS"] = _rates(_COUNT, environment)
        handles = answer(["handles"], 20.0, environment)
        found["handles, MPS"] = {
            name: one for name, one in handles.items() if name == "failed" or name.startswith("open ")
        }
        found["beside a fault, MPS"] = _beside_a_fault(environment)
    return found


def _rates(count: int, environment: Mapping[str, str]) -> Answer:
    with ExitStack() as stack:
        all_of_them = [_Computing(stack, "small", environment) for _ in range(count)]
        if [one for one in all_of_them if not one.is_ready()]:
            return {"failed": "a process ended before it computed"}
        for one in all_of_them:
            one.begin(_SECONDS)
        seen = [one.seen() for one in all_of_them]
    if not all(seen):
        return {"failed": "a process ended while it computed"}
    return {
        "rounds/s, all": round(sum(one["rounds/s"] for one in seen)),
        "p99_ms, worst": max(one["p99_ms"] for one in seen),
    }


#: A process that lays memory and sends its descriptor, maps a descriptor that it inherits, or uses no more
#: than the context of the device. It prints what it saw, and waits for a line before it ends.
_SHARES: Final = """
import json, os, socket, sys, time
import numpy as np
from gpuserve_worker.cuda.device.runtime import Copy, CudaError, load_runtime
from gpuserve_worker.cuda.device.shared_memory import SharedDeviceMemory
from gpuserve_worker.memory.device_copies import Source
from gpuserve_worker.protocol.sealed_memory import ExportedMemory
role, nbytes, fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
runtime = load_runtime()
runtime.use_device(0)
space = SharedDeviceMemory(runtime, 0)
values = np.arange(nbytes // 4, dtype=np.uint32)
found = {}
class device_bytes:
    def __init__(self, address, nbytes):
        data = {"data": (address, False), "version": 3}
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", **data}
def sees(address):
    seen = np.zeros_like(values)
    runtime.copy(seen.ctypes.data, address, nbytes, Copy.DEVICE_TO_HOST, 0)
    runtime.synchronize()
    return bool((seen == values).all())
began = time.perf_counter()
if role == "lay":
    address, memory = space.lay([Source(0, nbytes, values.ctypes.data, False, values)], nbytes)
    socket.send_fds(socket.socket(fileno=fd), [b"."], [memory.fd])
elif role != "nothing":
    memory = ExportedMemory(fd, nbytes, space.uuid)
    address = space.map(memory)
found["ms"] = round(1e3 * (time.perf_counter() - began), 2)
if role == "map":
    found["right"] = sees(address)
    space.unmap(address, nbytes)
    found["the same address again, right"] = space.map(memory, address) == address and sees(address)
    try:
        import torch
        if torch.cuda.is_available():
            storage = torch.as_tensor(device_bytes(address, nbytes), device="cuda:0").untyped_storage()
            found["a tensor of torch lies there"] = storage.data_ptr() == address
    except ImportError:
        pass
    del memory
if role == "write":
    try:
        runtime.clear(address, 4096, 0)
        runtime.synchronize()
        found["a write"] = "was done"
    except CudaError as error:
        found["a write"] = str(error)
else:
    found["free_nbytes"] = runtime.memory_nbytes()[0]
print(json.dumps(found), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def shared_memory() -> Answer:
    """Whether memory of the device outlives its process as a descriptor of a process without CUDA, what other
    processes map by the descriptor, whether they can write, and when the memory is free.
    """
    nbytes, found = 256 * MIB, dict[str, Any]()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, ExitStack() as stack:

        def started(role: str, fd: int = -1) -> tuple[subprocess.Popen[str], Answer]:
            command = [sys.executable, "-c", _SHARES, role, str(nbytes), str(fd)]
            fds, pipe = [fd] if fd >= 0 else [], subprocess.PIPE
            process = subprocess.Popen(command, text=True, pass_fds=fds, stdin=pipe, stdout=pipe)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, json.loads(process.stdout.readline() or '{"failed": "the process ended"}')

        def seen(role: str, fd: int = -1) -> Answer:
            process, answer = started(role, fd)
            process.kill()
            process.wait()
            return answer

        def taken_mib() -> int:
            return int(free_nbytes - seen("nothing")["free_nbytes"]) // MIB

        free_nbytes = seen("nothing")["free_nbytes"]
        found["lay"] = seen("lay", there.fileno())
        if "failed" in found["lay"]:
            return {"failed": "memory cannot be shared, see the log"}
        _, (fd, *_), _, _ = socket.recv_fds(here, 1, 1)
        taken = {"held by a descriptor alone": taken_mib()}
        mapper, found["map, after the loader was killed"] = started("map", fd)
        found["write"] = seen("write", fd)
        os.close(fd)
        taken["mapped, with a context"] = taken_mib()
        found["NVML counts for who maps, MiB"] = _listed_nbytes().get(mapper.pid, 0) // MIB
        mapper.kill()
        mapper.wait()
        taken["after all"] = taken_mib()
    return {**found, "less is free, MiB": taken}


_FAULTS: Final = """
import cupy
memory = cupy.cuda.UnownedMemory(1 << 40, 4096, None, 0)
array = cupy.ndarray((1024,), "f4", cupy.cuda.MemoryPointer(memory, 0))
cupy.add(array, 1, out=array)
cupy.cuda.runtime.deviceSynchronize()
"""


def _beside_a_fault(environment: Mapping[str, str]) -> Answer:
    with ExitStack() as stack:
        other = _Computing(stack, "small", environment)
        if not other.is_ready():
            return {"failed": "the other process ended"}
        command = [sys.executable, "-c", _FAULTS]
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        other.begin(_SECONDS / 4)
        lines = done.stderr.strip().splitlines()
        return {"it": lines[-1] if lines else done.returncode, "the other goes on": bool(other.seen()),
                "a new one": bool("failed" not in _rates(1, environment))}  # fmt: skip


@contextmanager
def _mps() -> Iterator[tuple[Mapping[str, str], str]]:
    """An MPS server of our own, or one that runs, for processes with this environment; else why there is
    none.
    """
    daemon = MpsDaemon("on")
    try:
        environment = daemon.variables(0.0)
    except StartupError as error:
        yield {}, str(error)
        return
    try:
        yield environment, ""
        for log in Path(environment.get(LOGS, os.devnull)).glob("*.log"):
            sys.stderr.write(log.read_text(errors="replace")[-2000:])
    finally:
        daemon.close()
