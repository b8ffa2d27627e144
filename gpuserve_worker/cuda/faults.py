"""What a failure on a worker with a device has to do with the device: whether its memory did not suffice, in
which case there may be more when all caches are emptied, and whether the process can use it any more.

CUDA's errors come in the exceptions of whatever library the callable uses. None of them is imported here.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Final

from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.runtime import CudaError
from gpuserve_worker.failure import INTERNAL, DeviceError
from gpuserve_worker.wire import WireFailure

#: (package, class) of the exceptions that mean it, whatever their text says.
_OUT_OF_MEMORY: Final = frozenset({("cupy", "OutOfMemoryError"), ("torch", "OutOfMemoryError")})
#: Where the text tells: the words of the runtime and of the driver, those of torch, and what cuBLAS, cuDNN,
#: cuSOLVER, cuSPARSE, cuFFT and cuRAND have in common.
_TEXTS: Final = (
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
)
#: ``cudaErrorStreamCapture...``: of a graph that a thread of the callable is making just now.
_CAPTURE: Final = range(900, 909)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or the one that it was raised from, says that the device's memory did not
    suffice.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(map(_says_out_of_memory, causes))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, DeviceError):
        return error.is_out_of_memory
    names = {(one.__module__.partition(".")[0], one.__name__) for one in type(error).__mro__}
    if names & _OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def free_memory(device: Device) -> None:
    """Have every cache of the device's memory given up, as far as nothing is in it.

    Raises:
        CudaError: the device cannot be used any more.
    """
    gc.collect()  # what the callable made may be in a cycle, as the frames of what it raised are
    device.buffers.trim()
    device.runtime.cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def why_lost(device: Device) -> str | None:
    """Why this process can use its device no more, in CUDA's words; None where it can."""
    first = _error_of(device)
    if first is None or first.is_sticky:
        return None if first is None else str(first)
    second = _error_of(device)  # what earlier work did wrong is told once, unless it stays
    stays = second is not None and not second.is_out_of_memory and second.code not in _CAPTURE
    return str(second) if stays else None


def _error_of(device: Device) -> CudaError | None:
    """What waiting for all work of the device gives."""
    try:
        device.enter()
        device.runtime.synchronize()
    except CudaError as error:
        return error
    return None


class Loss:
    """Whether the process can use its device no more, which several threads may find out at once. ``text``
    says why.
    """

    def __init__(self, device: Device, model: str, instance: str) -> None:
        self._device = device
        self._of = f"the device of instance {instance!r} of model {model!r}"
        self._lock = threading.Lock()
        self._has_blamed = False
        self.text = ""

    def find(self) -> bool:
        """Look at the device, after a failure of any kind; whether it is lost."""
        with self._lock:
            self.text = self.text or why_lost(self._device) or ""
        return bool(self.text)

    def take_blame(self) -> bool:
        """Whether no other batch was found to be to blame before."""
        with self._lock:
            is_first, self._has_blamed = not self._has_blamed, True
        return is_first

    def failure(self) -> WireFailure:
        """What the batch is told that is to blame."""
        return WireFailure(INTERNAL, f"{self._of} failed while it ran this request: {self.text}")

    def last_words(self) -> str:
        """What the log is told."""
        return f"{self._of} can be used by this process no more, which ends: {self.text}"
