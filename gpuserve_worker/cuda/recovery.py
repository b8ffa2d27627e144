"""What a worker on a GPU does after a failure: whether the batch is run again because memory did not suffice,
whether this process can use the device any more, and which batch is to blame. No callable is called here.

CUDA's errors come in the exceptions of whatever library the callable uses. None of them is imported here.
For a second run the caches are emptied, and the batch is cut in two where it has several requests. It needs
new inputs, since the callable may have written to the first: large ones on the host are there only once, so
that batch fails at once unless they are read-only.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from typing import Final

from gpuserve_worker.calling.failure import INTERNAL, DeviceFailure, client_text, log_text
from gpuserve_worker.cuda.copies.staging import device_inputs
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES
from gpuserve_worker.protocol.wire import Run, Split, WireFailure, requests
from gpuserve_worker.running.execution import Execution
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.session import FrontSession
from gpuserve_worker.running.splitting import BatchPart, split_batch
from gpuserve_worker.running.supervision import Reporter

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
#: What cupy raises where it finds a library of CUDA's neither among the packages nor elsewhere: that of
#: cuda-pathfinder from cupy 14 on, and the words of those before.
_NOT_FOUND: Final = ("cuda", "DynamicLibNotFoundError")
_NOT_LOADED: Final = "CuPy failed to load"


def is_without_library(error: BaseException) -> bool:
    """Whether an exception says that cupy has not all of CUDA's libraries, as its compiler."""
    if _NOT_FOUND in _names(error):
        return True
    return isinstance(error, RuntimeError | ImportError) and _NOT_LOADED in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that the device's memory did not suffice."""
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
    """(package, class) of an exception and of what it is derived from."""
    return {(one.__module__.partition(".")[0], one.__name__) for one in type(error).__mro__}


def free_memory(device: CudaDevice) -> None:
    """Have every cache of the device's memory given up, as far as nothing is in it."""
    gc.collect()  # what the callable made may be in a cycle, as the frames of what it raised are
    device.buffers.trim()
    device.runtime.cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Loss:
    """Whether the process can use its device no more, and why (``text``). Any thread may find it out."""

    def __init__(self, device: CudaDevice, model: str, instance: str) -> None:
        self._device = device
        self._of = f"the device of instance {instance!r} of model {model!r}"
        self._lock = threading.Lock()
        self._has_blamed = False
        self.text = ""

    def find(self) -> bool:
        """Look at the device, after a failure of any kind; whether it is lost."""
        with self._lock:
            self.text = self.text or self._device.why_lost() or ""
        return bool(self.text)

    def take_blame(self) -> bool:
        with self._lock:
            is_first, self._has_blamed = not self._has_blamed, True
        return is_first

    def failure(self) -> WireFailure:
        return WireFailure(INTERNAL, f"{self._of} failed while it ran this request: {self.text}")

    def last_words(self) -> str:
        return f"{self._of} can be used by this process no more, which ends: {self.text}"


class CudaRecovery:
    """Implements ``Recovery`` on a GPU, for one model."""

    def __init__(self, device: CudaDevice, execution: Execution, model: Model, reporter: Reporter) -> None:
        self._device = device
        self._execution = execution
        self._model = model
        self._reporter = reporter
        self._on_device = device_inputs(model.context.inputs)
        self.loss = Loss(device, model.name, model.context.instance)

    @property
    def device_is_lost(self) -> bool:
        return bool(self.loss.text)

    def is_worth_it(self, error: BaseException, run: Run, *, was_alone: bool) -> bool:
        if not is_out_of_memory(error) or (
            was_alone and (len(run.requests) == 1 or not self._model.context.batching)
        ):
            return False
        return self._model.read_only_inputs or all(
            name in self._on_device or datatype == BYTES or isinstance(payload, bytes)
            for name, datatype, _, payload in run.inputs
        )

    def parts(self, session: FrontSession, run: Run) -> list[BatchPart]:
        free_memory(self._device)
        inputs = self._execution.read_inputs(session, run)
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
        self._reporter.error(f"{text}: {log_text(error)}")
        return WireFailure("RESOURCE_EXHAUSTED", text)

    async def judge(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed | None:
        was_known = self.device_is_lost
        if not was_known and not await asyncio.to_thread(self.loss.find):
            return failed
        if not was_known:
            self._reporter.error(self.loss.last_words())
        if was_alone and self.loss.take_blame():
            return failed._replace(failure=self.loss.failure())
        return None


def _rows(run: Run) -> int:
    return sum(one.rows for one in requests(run.requests))
