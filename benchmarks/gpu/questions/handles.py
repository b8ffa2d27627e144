"""Handles of memory between processes: what opens, what does not, and what is left of the device."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from typing import Final

import numpy as np

from benchmarks.gpu.questions.asking import MIB, TO_HOST, Answer, ms_of, runtime_of_device, status_of

_LAZY_PEER_ACCESS: Final = 1
#: A process with allocations of these sizes: it prints their handles, and frees those that it is told.
EXPORTER: Final = """
import sys, json
from cupy.cuda import runtime
runtime.setDevice(0)
memory = [runtime.malloc(int(one)) for one in sys.argv[1:]]
for position, address in enumerate(memory):
    runtime.memset(address, position + 1, 64)
runtime.deviceSynchronize()
print(json.dumps([bytes(runtime.ipcGetMemHandle(one)).hex() for one in memory]), flush=True)
for line in sys.stdin:
    runtime.free(memory[int(line)])
    print("freed", flush=True)
"""


def handles() -> Answer:
    """What handles of another process open, when they are closed, and when their memory or maker is gone."""
    runtime = runtime_of_device()
    sizes = (64, 64, 2 * MIB, 32 * MIB)
    command = [sys.executable, "-c", EXPORTER, *map(str, sizes)]
    found: Answer = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdin is not None
        assert exporter.stdout is not None
        made = [bytes.fromhex(one) for one in json.loads(exporter.stdout.readline())]
        opened: list[int] = []
        for position, nbytes in enumerate(sizes):
            took_ms = ms_of(lambda one=made[position]: opened.append(runtime.ipcOpenMemHandle(one)))
            found[f"open {nbytes} bytes, number {position}"] = {
                "open_ms": took_ms,
                "range": _range(opened[-1]),
                "right": _first_byte(opened[-1]) == position + 1,
            }
        found["opened again, the same address"] = runtime.ipcOpenMemHandle(made[3]) == opened[3]
        found["closed inside"] = status_of(runtime.ipcCloseMemHandle, opened[3] + 512)
        found["closed once of twice"] = status_of(runtime.ipcCloseMemHandle, opened[3])
        found["close_ms"] = ms_of(runtime.ipcCloseMemHandle, opened[3])
        found["closed once too often"] = status_of(runtime.ipcCloseMemHandle, opened[3])
        for position in (0, 3):
            exporter.stdin.write(f"{position}\n")
            exporter.stdin.flush()
            exporter.stdout.readline()
            found[f"open after {sizes[position]} bytes, freed there"] = status_of(
                runtime.ipcOpenMemHandle, made[position]
            )
        exporter.kill()
    found["read what a dead process had, open here"] = status_of(_first_byte, opened[2])
    found["open what a dead process had"] = status_of(runtime.ipcOpenMemHandle, made[2])
    found["shm"] = [one for one in os.listdir("/dev/shm") if one.startswith("cuda")]
    found["device then"] = status_of(runtime.deviceSynchronize)
    return found


def _range(at: int) -> list[int]:
    """The driver's word on the allocation around an address: its code, our offset in it, its size."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    code = ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(at))
    return [int(code), at - base.value, nbytes.value]


def _first_byte(at: int) -> int:
    target = np.zeros(1, np.uint8)
    runtime_of_device().memcpy(target.ctypes.data, at, 1, TO_HOST)
    return int(target[0])


def own_handle() -> Answer:
    """The codes for a process's own handle, and for handles of memory and events of other kinds."""
    runtime, cupy = runtime_of_device(), importlib.import_module("cupy")
    at = runtime.malloc(MIB)
    event = cupy.cuda.Event(disable_timing=True)
    return {
        "its own": status_of(runtime.ipcOpenMemHandle, runtime.ipcGetMemHandle(at)),
        "inside is the same": runtime.ipcGetMemHandle(at + 4096) == runtime.ipcGetMemHandle(at),
        "of mallocAsync": status_of(lambda: runtime.ipcGetMemHandle(runtime.mallocAsync(MIB, 0))),
        "of cupy's pool": status_of(lambda: runtime.ipcGetMemHandle(cupy.zeros(MIB, "u1").data.ptr)),
        "of an event not for it": status_of(lambda: runtime.ipcGetEventHandle(event.ptr)),
    }


def bad_handle(text: str) -> Answer:
    """The code for 64 bytes that are no handle, by cupy and by the driver; whether the device works then."""
    runtime = runtime_of_device()
    code = status_of(runtime.ipcOpenMemHandle, bytes.fromhex(text))
    driver_code, _ = open_by_driver(bytes.fromhex(text))
    then = status_of(runtime.deviceSynchronize)
    return {"status": code, "the driver's": driver_code, "device then": then}


class _Handle(ctypes.Structure):
    """As the driver takes it: by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def open_by_driver(handle: bytes) -> tuple[int, int]:
    """The driver's code, and the address; other threads run meanwhile."""
    address = ctypes.c_uint64()
    opens = ctypes.CDLL("libcuda.so.1").cuIpcOpenMemHandle_v2
    code = opens(ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
    return int(code), address.value


def close_by_driver(address: int) -> None:
    """What ``open_by_driver`` opened."""
    ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle(ctypes.c_uint64(address))
