"""What questions are asked with: CUDA's runtime by cupy, times of calls, memory as arenas have it."""

from __future__ import annotations

import fcntl
import importlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

MIB: Final = 1 << 20
TO_DEVICE: Final = 1
TO_HOST: Final = 2
NON_BLOCKING: Final = 1
#: ``cudaEventDisableTiming``, and with ``cudaEventBlockingSync``: a waiter spins, or sleeps.
EVENTS: Final = {"spin": 2, "sleep": 3}
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Answer = dict[str, Any]


def runtime_of_device() -> Any:
    """CUDA's runtime, with the first device as this thread's."""
    runtime = importlib.import_module("cupy").cuda.runtime
    runtime.setDevice(0)
    return runtime


def seconds_of(call: Callable[..., object], *args: object) -> float:
    """Of one call."""
    began_at = time.perf_counter()
    call(*args)
    return time.perf_counter() - began_at


def ms_of(call: Callable[..., object], *args: object) -> float:
    """Milliseconds of one call."""
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
    """Of a buffer."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
