"""Callables that work on the device without a network: an echo, kernels of a known length, and faults.

Inputs are CuPy arrays. cupy is imported when a worker makes one of them, not before.
"""

from __future__ import annotations

import os
from typing import Any, Final

from gpuserve.decorators import batch

_SPIN: Final = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""
#: No allocation is anywhere near; a kernel that reads it ends in an illegal access.
_NOWHERE: Final = 0x10_0000_0000


class Spin:
    """Keeps one multiprocessor of the device busy for a time, and leaves its memory and its copies alone.

    Where kernels cannot be compiled, a kernel of any length takes its place.
    """

    def __init__(self, seconds: float) -> None:
        import cupy

        self._ns = cupy.uint64(int(seconds * 1e9))
        self._kernel = cupy.RawKernel(_SPIN, "spin") if hasattr(cupy, "RawKernel") else None
        self._other = cupy.zeros(1, cupy.float32)

    def launch(self) -> None:
        """Put it into the default stream."""
        if self._kernel is None:
            self._other += 1
        else:
            self._kernel((1,), (1,), (self._ns,))


class Echo:
    """y = x, after ``seconds`` of compute; 0 is none."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._spin = Spin(seconds) if seconds else None

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        if self._spin is not None:
            self._spin.launch()
        return {"y": x}


class Faulty:
    """Does to the device what the first element of its input says; otherwise y = x + 1 and the process id.

    1: a kernel reads where no memory is. 2: more memory is asked for than there is.
    """

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        """``x`` FP32 [rows, n]."""
        import cupy

        match int(x[0, 0]):
            case 1:
                bad = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(_NOWHERE, x.nbytes, self, 0), 0)
                x = cupy.ndarray(x.shape, x.dtype, bad)
            case 2:
                _, total_nbytes = cupy.cuda.runtime.memGetInfo()
                cupy.empty(2 * total_nbytes, cupy.uint8)
            case _:
                pass
        return {"y": x + 1, "pid": cupy.full((x.shape[0], 1), os.getpid(), cupy.int32)}


class Hungry:
    """y = x, with memory for one row: for more it asks for more than the device has, and holds nothing."""

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        """``x`` FP32 [rows, n]."""
        import cupy

        if x.shape[0] > 1:
            _, total_nbytes = cupy.cuda.runtime.memGetInfo()
            cupy.empty(2 * total_nbytes, cupy.uint8)
        return {"y": x + 0}
