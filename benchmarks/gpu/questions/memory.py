"""Copies between host and device, page-locking, and handles of memory between processes: what each costs."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.questions.asking import (
    EVENTS,
    MIB,
    NON_BLOCKING,
    TO_DEVICE,
    TO_HOST,
    Answer,
    address_of,
    beside,
    median_us,
    memfd,
    ms_of,
    records,
    runtime_of_device,
    seconds_of,
    status_of,
)


def page_locks() -> Answer:
    """Milliseconds of locking memory as arenas have it, once for each process that maps it."""
    runtime, found = runtime_of_device(), {}
    for nbytes in (64 << 10, 16 * MIB, 256 * MIB):
        fd = memfd(nbytes)
        for name in ("first mapping", "second mapping"):
            memory = mmap.mmap(fd, nbytes)
            at = address_of(memory)
            found[f"{nbytes >> 10} KiB, {name}"] = {
                "lock_ms": ms_of(runtime.hostRegister, at, nbytes, 0),
                "unlock_ms": ms_of(runtime.hostUnregister, at),
                "again_ms": ms_of(runtime.hostRegister, at, nbytes, 0),
            }
    return {**found, "memfd of 256 MiB, ms": ms_of(memfd, 256 * MIB)}


def bandwidth() -> Answer:
    """GB/s by where the host's memory is from: what locked memfds cost is told from what our code costs."""
    runtime, found = runtime_of_device(), {}
    cupy = importlib.import_module("cupy")
    for nbytes in (MIB, 16 * MIB, 256 * MIB):
        own = [cupy.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
        maps = [mmap.mmap(memfd(nbytes), nbytes) for _ in range(2)]
        for one in maps:
            runtime.hostRegister(address_of(one), nbytes, 0)
        device = [runtime.malloc(nbytes) for _ in range(2)]
        for source, hosts in (
            ("hostAlloc", [one.ptr for one in own]),
            ("memfd, locked", [*map(address_of, maps)]),
        ):
            for name, rate in _rates(runtime, device, hosts, nbytes).items():
                found[f"{nbytes // MIB} MiB {name}, {source}"] = rate
        for one in maps:
            runtime.hostUnregister(address_of(one))
        for at in device:
            runtime.free(at)
    return found


def _rates(runtime: Any, device: list[int], hosts: list[int], nbytes: int) -> Answer:
    """GB/s to the device, to the host, and both ways at once."""
    count = max(8, (2 << 30) // nbytes)
    streams = [runtime.streamCreateWithFlags(NON_BLOCKING) for _ in range(2)]

    def move(kinds: tuple[int, ...]) -> None:
        for index in range(count):
            for stream, kind in zip(streams, kinds, strict=False):
                # Both ways at once, each has memory of its own at both ends.
                place = index % 2 if len(kinds) == 1 else kind - 1
                ends = device[place], hosts[place]
                runtime.memcpyAsync(*(ends if kind == TO_DEVICE else ends[::-1]), nbytes, kind, stream)
        for stream in streams:
            runtime.streamSynchronize(stream)

    found: Answer = {}
    ways = {"to the device": (TO_DEVICE,), "to the host": (TO_HOST,), "both ways": (TO_DEVICE, TO_HOST)}
    for name, kinds in ways.items():
        move(kinds)
        took_s = sorted(seconds_of(move, kinds) for _ in range(3))[1]
        found[name] = round(len(kinds) * count * nbytes / took_s / 1e9, 2)
    return found


def calls() -> Answer:
    """Microseconds of a call from Python, and until a waiter wakes, asleep and not."""
    runtime = runtime_of_device()
    stream = runtime.streamCreateWithFlags(NON_BLOCKING)
    device, host = runtime.malloc(MIB), importlib.import_module("cupy").cuda.alloc_pinned_memory(MIB)
    events = {name: runtime.eventCreateWithFlags(flags) for name, flags in EVENTS.items()}
    found: Answer = {
        "setDevice": median_us(lambda: runtime.setDevice(0)),
        "eventRecord": median_us(lambda: runtime.eventRecord(events["sleep"], stream)),
        "eventRecord, default stream": median_us(lambda: runtime.eventRecord(events["sleep"], 0)),
        "eventQuery": median_us(lambda: runtime.eventQuery(events["sleep"])),
        "streamWaitEvent": median_us(lambda: runtime.streamWaitEvent(0, events["sleep"])),
        "memcpyAsync of 4 KiB": median_us(
            lambda: runtime.memcpyAsync(device, host.ptr, 4096, TO_DEVICE, stream)
        ),
    }
    runtime.deviceSynchronize()
    for nbytes in (4096, 32 << 10, 256 << 10, MIB):
        for name, event in events.items():

            def there(nbytes: int = nbytes, event: int = event) -> None:
                runtime.memcpyAsync(device, host.ptr, nbytes, TO_DEVICE, stream)
                runtime.eventRecord(event, stream)
                runtime.eventSynchronize(event)

            found[f"copy of {nbytes >> 10} KiB and wait, {name}"] = median_us(there, 500)
    return found


def allocations() -> Answer:
    """Milliseconds of taking memory of the device from the driver, and of giving it back."""
    runtime, found = runtime_of_device(), {}
    made: list[int] = []

    def take(nbytes: int) -> None:
        made.append(runtime.malloc(nbytes))

    for nbytes in (64 << 10, 32 * MIB, 256 * MIB):
        rounds = [(ms_of(take, nbytes), ms_of(runtime.free, made[-1])) for _ in range(5)]
        malloc_ms, free_ms = (sorted(one)[2] for one in zip(*rounds, strict=True))
        found[f"{nbytes >> 10} KiB"] = {"malloc_ms": malloc_ms, "free_ms": free_ms}
    return found


_NBYTES: Final = 256 * MIB
_COPIES: Final = 8
_SMALL: Final = "small pages"
_HUGE: Final = "huge pages"
_RESERVED: Final = "MFD_HUGETLB"
#: MADV_POPULATE_WRITE.
_POPULATE_WRITE: Final = 23
_SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def locking() -> Answer:
    """Milliseconds of locking 256 MiB by their pages, and the longest call of another thread meanwhile."""
    runtime = runtime_of_device()
    found: Answer = {"shmem_enabled": _SHMEM_ENABLED.read_text().strip()}
    for pages in (_SMALL, _HUGE, _RESERVED):
        for is_mapped in (True, False):
            name = f"{pages}, {'mapped before' if is_mapped else 'not mapped'}"
            try:
                found[name] = _locked(runtime, _mapping(pages, is_mapped=is_mapped))
            except OSError as error:
                found[name] = str(error)
    return {**found, "copies from what is being locked": _copied_meanwhile(runtime)}


def _mapping(pages: str, *, is_mapped: bool) -> mmap.mmap:
    """Memory as arenas have it; that of other processes is not mapped before it is locked."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if pages == _RESERVED else 0)
    fd = os.memfd_create("facts", flags)
    try:
        os.ftruncate(fd, _NBYTES)
        memory = mmap.mmap(fd, _NBYTES)
        if pages == _HUGE:
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_POPULATE_WRITE)
        if not is_mapped:
            memory.close()
            memory = mmap.mmap(fd, _NBYTES)
        return memory
    finally:
        os.close(fd)


def _locked(runtime: Any, memory: mmap.mmap) -> Answer:
    at, device = address_of(memory), runtime.malloc(_NBYTES)
    seen = beside(lambda: runtime.hostRegister(at, _NBYTES, 0), records)
    found = {"lock_ms": seen["took_ms"], "longest call beside it, ms": seen["without_a_turn_ms"]}
    took_s = seconds_of(_copy, runtime, device, at)
    found["copies to the device, GB/s"] = round(_COPIES * _NBYTES / took_s / 1e9, 2)
    found["unlock_ms"] = ms_of(runtime.hostUnregister, at)
    runtime.free(device)
    return found


def _copy(runtime: Any, device: int, host: int) -> None:
    for _ in range(_COPIES):
        runtime.memcpyAsync(device, host, _NBYTES, TO_DEVICE, 0)
    runtime.deviceSynchronize()


def _copied_meanwhile(runtime: Any) -> Answer:
    """The codes of copies from memory that another thread locks, and whether all came as they were."""
    memory, part = _mapping(_SMALL, is_mapped=False), 4 * MIB
    host, back = np.frombuffer(memory, np.uint8), np.zeros(part, np.uint8)
    host[:part] = np.arange(part, dtype=np.uint8)
    device = runtime.malloc(part)
    other = threading.Thread(target=runtime.hostRegister, args=(address_of(memory), _NBYTES, 0))
    other.start()
    codes: list[int] = []
    are_right = True
    while other.is_alive() or not codes:
        codes.append(status_of(runtime.memcpyAsync, device, host.ctypes.data, part, TO_DEVICE, 0))
        codes.append(status_of(runtime.memcpy, back.ctypes.data, device, part, TO_HOST))
        are_right = are_right and bool((back == host[:part]).all())
    other.join()
    runtime.hostUnregister(address_of(memory))
    runtime.free(device)
    return {"copies": len(codes), "codes": sorted(set(codes)), "are right": are_right}


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


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def open_by_driver(handle: bytes) -> tuple[int, int]:
    """The driver's code, and the address; other threads run meanwhile."""
    address = ctypes.c_uint64()
    opens = ctypes.CDLL("libcuda.so.1").cuIpcOpenMemHandle_v2
    code = opens(ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
    return int(code), address.value


def close_by_driver(address: int) -> None:
    ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle(ctypes.c_uint64(address))
