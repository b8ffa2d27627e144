"""The path of batches whose inputs or outputs are on a GPU: ``CudaPath``, and which workers have it. No code
of the user's is there yet when it is opened.
"""

from __future__ import annotations

import importlib.util
from functools import partial

from gpuserve_worker.calling.callable import LoadError
from gpuserve_worker.calling.failure import client_text
from gpuserve_worker.cuda.copies.cuda_session import CudaSession
from gpuserve_worker.cuda.copies.staging import Staging, device_inputs
from gpuserve_worker.cuda.cuda_loop import CudaLoop
from gpuserve_worker.cuda.device.device import CudaDevice, open_device
from gpuserve_worker.cuda.device.runtime import CudaError, CudaUnavailable
from gpuserve_worker.cuda.recovery import CudaRecovery
from gpuserve_worker.cuda.stopwatch import CudaStopwatch
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import BF16, TensorSpec
from gpuserve_worker.protocol.wire import Init
from gpuserve_worker.running.execution import Execution
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.supervision import Reporter


class CudaPath:
    """Implements ``WorkerDevicePath`` on one GPU."""

    def __init__(self, device: CudaDevice, staging: Staging) -> None:
        self._device = device
        self._staging = staging
        self.page_locks = device.host.locks
        self.spares = device.host.spare
        self.reader = device.arrays
        self.new_watch = partial(CudaStopwatch, device)
        self.open_session = partial(CudaSession, device, staging)
        self.enter_beside = device.enter_beside
        self.close = device.close

    def new_loop(self, link: Link, model: Model, reporter: Reporter) -> CudaLoop:
        return CudaLoop(link, model, self._device, reporter)

    def new_recovery(self, execution: Execution, model: Model, reporter: Reporter) -> CudaRecovery:
        return CudaRecovery(self._device, execution, model, reporter)


def open_cuda(init: Init, reporter: Reporter) -> CudaPath | None:
    """The path to a worker's GPU; None where CUDA cannot be used, and ``LoadError`` where it has to be."""
    needed = init.array != "numpy" or any(TensorSpec(*one).memory == "gpu" for one in init.inputs)
    if not needed and importlib.util.find_spec("cupy") is None:
        return None
    try:
        number = int(init.device.partition(":")[2] or 0)
        device = open_device(number, reporter.warning, init.lent_limit_nbytes)
        if init.array == "cupy":
            _check_types(init, device)
        device.host.spare.make()  # while nobody waits for an answer
    except (CudaUnavailable, CudaError) as error:
        if needed:
            raise LoadError(
                f"device {init.device} of the worker cannot be used: {client_text(error)}"
            ) from None
        reporter.warning(f"outputs on the device cannot be taken from there: {client_text(error)}")
        return None
    names = device_inputs(TensorSpec(*one) for one in init.inputs)
    return CudaPath(device, Staging(device, names, init.array, read_only=init.read_only_inputs))


def _check_types(init: Init, device: CudaDevice) -> None:
    """Do nothing if CuPy has all types of the inputs. Raises ``LoadError`` where it has not."""
    for spec in (TensorSpec(*one) for one in init.inputs):
        if spec.memory != "gpu" or spec.datatype != BF16:
            continue
        try:
            device.arrays.over(device.arrays.memory(0, 0, None), 0, BF16, (0,), "cupy")
        except (TypeError, ValueError):
            raise LoadError(
                f"input {spec.name!r} is BF16, which this version of CuPy has no arrays of: expected CuPy 14 "
                "or newer, or array torch"
            ) from None
