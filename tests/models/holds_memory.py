"""A model that holds memory of its GPU from the time that it is loaded."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from gpuserve.decorators import batch


class HoldsMemory:
    def __init__(self, device: str, nbytes: int = 0) -> None:
        if device != "cpu":
            import cupy

            self.memory = cupy.empty(nbytes or 1, "u1")

    @batch
    def __call__(self, x: Any) -> Any:
        return {"y": x * 2, "pid": np.full((len(x), 1), os.getpid())}


class Sleeper(HoldsMemory):
    """Can sleep: its weights are then page-locked on the host. The answer is the weights times the input."""

    def __init__(self, device: str, nbytes: int = 0) -> None:
        import cupy

        super().__init__(device, nbytes)
        self._nbytes = nbytes
        self._weights = cupy.asarray(np.full(1024, 3, np.uint8))

    def sleep(self) -> None:
        import cupy

        nbytes = self._weights.nbytes
        self._pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        weights = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._pinned.ptr))
        self._weights.get(out=weights)
        self._weights, self.memory = weights, None

    def wake(self) -> None:
        import cupy

        self.memory = cupy.empty(self._nbytes, "u1")
        self._weights = cupy.asarray(self._weights)
        cupy.cuda.runtime.deviceSynchronize()
        del self._pinned

    @batch
    def __call__(self, x: Any) -> Any:
        return {"y": x * float(self._weights[0]), "pid": np.full((len(x), 1), os.getpid())}
