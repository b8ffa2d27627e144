"""Which workers open their device, and what becomes of one that cannot be opened. No code of the user's is
there yet.
"""

from __future__ import annotations

import importlib.util

from gpuserve_worker.callable import LoadError
from gpuserve_worker.cuda.device import Device, open_device
from gpuserve_worker.cuda.runtime import CudaError, CudaUnavailable
from gpuserve_worker.failure import client_text
from gpuserve_worker.reporting import Report
from gpuserve_worker.tensor import BF16, TensorSpec
from gpuserve_worker.wire import Init


def device_of(init: Init, report: Report) -> Device | None:
    """The device of a worker that has one. None where no input has to be there, and cupy is not installed.

    Raises:
        LoadError: inputs have to be there, and cannot.
    """
    needed = init.array != "numpy" or any(TensorSpec(*one).memory == "gpu" for one in init.inputs)
    if not needed and importlib.util.find_spec("cupy") is None:
        return None
    try:
        device = open_device(int(init.device.partition(":")[2] or 0), report.warning)
        if init.array == "cupy":
            _check_types(init, device)
    except (CudaUnavailable, CudaError) as error:
        if needed:
            raise LoadError(
                f"device {init.device} of the worker cannot be used: {client_text(error)}"
            ) from None
        report.warning(f"outputs on the device cannot be taken from there: {client_text(error)}")
        return None
    return device


def _check_types(init: Init, device: Device) -> None:
    """Do nothing if CuPy has all types of the inputs.

    Raises:
        LoadError: it has not.
    """
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
