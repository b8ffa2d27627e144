"""Recovery of a worker on a GPU after failures: a second run after the memory was too small, and the
detection of a lost device and of the batch that caused the loss. No callable is called here.

CUDA's errors come as exceptions of whatever library the callable uses; none of these libraries is imported
here. Before a second run the caches are emptied, and a batch with several requests is split in two. The run
needs new inputs, since the callable may have written to the first ones. Large inputs on the host exist only
once, so such a batch fails at once unless its inputs are read-only.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from typing import Final

from gpuserve_worker.cuda.copies.cuda_session import device_inputs
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.execution.batch_inputs import BatchPart, split_batch
from gpuserve_worker.execution.device_path import Model
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.session import FrontSession, InputReader
from gpuserve_worker.inference.failure import INTERNAL, DeviceFailure, client_text, log_text
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES
from gpuserve_worker.protocol.wire import Run, Split, WireFailure, requests

#: (package, class) of out-of-memory exceptions, whatever their text.
_OUT_OF_MEMORY: Final = frozenset({("cupy", "OutOfMemoryError"), ("torch", "OutOfMemoryError")})
#: Texts of out-of-memory errors: of the runtime, the driver, torch, and the common part of cuBLAS, cuDNN,
#: cuSOLVER, cuSPARSE, cuFFT and cuRAND.
_TEXTS: Final = (
    "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA out of memory",
    "CUDA error: out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED",
)  # fmt: skip
#: Errors of cupy for a CUDA library that is neither in a package nor elsewhere: cuda-pathfinder's from cupy
#: 14 on, and the text of earlier versions.
_NOT_FOUND: Final = ("cuda", "DynamicLibNotFoundError")
_NOT_LOADED: Final = "CuPy failed to load"


def is_without_library(error: BaseException) -> bool:
    """Return whether an exception says that a CUDA library, such as the compiler, is missing."""
    if _NOT_FOUND in _names(error):
        return True
    return isinstance(error, RuntimeError | ImportError) and _NOT_LOADED in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, says that the device's memory was too small."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(map(_says_out_of_memory, causes))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, DeviceFailure):
        return error.is_out_of_memory
    if _names(error) & _OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _names(error: BaseException) -> set[tuple[str, str]]:
    """Return (package, class) of an exception's class and its base classes."""
    return {(one.__module__.partition(".")[0], one.__name__) for one in type(error).__mro__}


def free_memory(device: CudaDevice) -> None:
    """Empty all caches of device memory."""
    gc.collect()  # the callable's objects may be in reference cycles, as are the frames of its exceptions
    device.buffers.trim()
    device.runtime.cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class DeviceLoss:
    """The loss of the device: ``text`` is the reason, "" while usable. Thread-safe."""

    def __init__(self, device: CudaDevice, model: str, instance: str) -> None:
        self._device = device
        self._of = f"the device of instance {instance!r} of model {model!r}"
        self._lock = threading.Lock()
        self._has_blamed = False
        self.text = ""

    def find(self) -> bool:
        """Check the device after a failure of any kind. Return whether it is lost."""
        with self._lock:
            if not self.text and (error := self._device.why_lost()) is not None:
                self.text = str(error)
                self._has_blamed = error.is_from_outside
        return bool(self.text)

    def claim_blame(self) -> bool:
        """Return whether the caller's batch is the first to take the blame; none does for another process."""
        with self._lock:
            is_first, self._has_blamed = not self._has_blamed, True
        return is_first

    def failure(self) -> WireFailure:
        return WireFailure(INTERNAL, f"{self._of} failed while it ran this request: {self.text}")

    def log_text_of_loss(self) -> str:
        return f"{self._of} can be used by this process no more, which ends: {self.text}"


class CudaRecovery:
    """The recovery of one model on a GPU; implements ``Recovery``."""

    def __init__(
        self, device: CudaDevice, read_inputs: InputReader, model: Model, reporter: Reporter
    ) -> None:
        self._device = device
        self._read_inputs = read_inputs
        self._model = model
        self._reporter = reporter
        self._on_device = device_inputs(model.context.inputs)
        self.loss = DeviceLoss(device, model.name, model.context.instance)

    @property
    def device_is_lost(self) -> bool:
        return bool(self.loss.text)

    def should_retry(self, error: BaseException, run: Run, *, was_alone: bool) -> bool:
        if not is_out_of_memory(error) or (
            was_alone and (len(run.requests) == 1 or not self._model.context.batching)
        ):
            return False
        if self._model.static_inputs:  # a half would begin at another address
            return False
        return self._model.read_only_inputs or all(
            name in self._on_device or datatype == BYTES or isinstance(payload, bytes)
            for name, datatype, _, payload in run.inputs
        )

    def parts(self, session: FrontSession, run: Run) -> list[BatchPart]:
        free_memory(self._device)
        inputs = self._read_inputs(session, run)
        inputs.admit()
        parts = split_batch(run, inputs)
        if len(parts) > 1:
            what = f"a batch of {_rows(run)} rows of model {self._model.name!r}"
            self._reporter.warning(
                f"the memory of the device did not suffice for {what}: it is run in two halves"
            )
            session.send(Split(run.batch_id))
        return parts

    def failure(self, error: BaseException, run: Run) -> WireFailure | None:
        if is_without_library(error):
            said = client_text(error).rstrip(":")
            text = f"Model {self._model.name!r} needs a library of CUDA that is not there ({said})"
            text += ": expected gpuserve[cuda12] or gpuserve[cuda13] installed"
            self._reporter.error(f"{text}: {log_text(error)}")
            return WireFailure(INTERNAL, text)
        if not is_out_of_memory(error):
            return None
        rows = _rows(run)
        counted = f"{rows} {'row' if rows == 1 else 'rows'}"
        text = f"The memory of the device does not suffice for {counted} of model {self._model.name!r}"
        if limit_nbytes := self._device.runtime.limit_nbytes:
            text += f", whose instances have {limit_nbytes} bytes each (gpu_memory_nbytes)"
        self._reporter.error(f"{text}: {log_text(error)}")
        return WireFailure("RESOURCE_EXHAUSTED", text)

    async def resolve_failure(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed | None:
        was_known = self.device_is_lost
        if not was_known and not await asyncio.to_thread(self.loss.find):
            return failed
        if not was_known:
            self._reporter.error(self.loss.log_text_of_loss())
        if was_alone and self.loss.claim_blame():
            return failed._replace(failure=self.loss.failure())
        return None


def _rows(run: Run) -> int:
    return sum(one.rows for one in requests(run.requests))
