"""What page-locking takes, by the pages and by when they are mapped, and what else is held up by it."""

from __future__ import annotations

import functools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.questions.asking import (
    EVENTS,
    MIB,
    TO_DEVICE,
    TO_HOST,
    Answer,
    address_of,
    ms_of,
    runtime_of_device,
    seconds_of,
    status_of,
)

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
    found = _beside(runtime, functools.partial(runtime.hostRegister, at, _NBYTES, 0))
    took_s = seconds_of(_copy, runtime, device, at)
    found["copies to the device, GB/s"] = round(_COPIES * _NBYTES / took_s / 1e9, 2)
    found["unlock_ms"] = ms_of(runtime.hostUnregister, at)
    runtime.free(device)
    return found


def _copy(runtime: Any, device: int, host: int) -> None:
    for _ in range(_COPIES):
        runtime.memcpyAsync(device, host, _NBYTES, TO_DEVICE, 0)
    runtime.deviceSynchronize()


def _beside(runtime: Any, lock: Callable[[], object]) -> Answer:
    """How long locking takes, and the longest call of a thread that records events meanwhile."""
    event, begun, over = runtime.eventCreateWithFlags(EVENTS["sleep"]), threading.Event(), threading.Event()
    longest_ms = 0.0

    def record() -> None:
        nonlocal longest_ms
        runtime.setDevice(0)
        runtime.eventRecord(event, 0)  # the first one takes longer
        begun.set()
        while not over.wait(0.0001):
            longest_ms = max(longest_ms, ms_of(runtime.eventRecord, event, 0))

    other = threading.Thread(target=record)
    other.start()
    begun.wait()
    lock_ms = ms_of(lock)
    over.set()
    other.join()
    return {"lock_ms": lock_ms, "longest call beside it, ms": longest_ms}


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
