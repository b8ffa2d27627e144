"""Inputs that another worker kept on its device: given to the callable as they are, or copied, from device to
device. No byte of them is on the host.
"""

from __future__ import annotations

from typing import Any

from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.exchange import Exchange, ExportGone
from gpuserve_worker.cuda.runtime import Copy
from gpuserve_worker.payloads import DEVICE_LOAN, DeviceLoan, WireFailure, WireTensor
from gpuserve_worker.tensor import element_count, numpy_dtype


def loan_of(source: Any) -> DeviceLoan | None:
    """The loan that a payload, as decoded, is; None where it is none."""
    if isinstance(source, bytes) or len(source) < len(DeviceLoan._fields) or source[3] != DEVICE_LOAN:
        return None
    return DeviceLoan(*source)


def in_place(
    device: Device, exchange: Exchange, tensor: WireTensor, kind: str, of_batch: object
) -> Any | None:
    """The array over an input that may be given as it is; None where a copy has to be made. ``of_batch``
    lives until the device is through with it.

    Raises:
        CudaError: the device cannot be used any more.
        ExportGone: it could not be opened.
        ValueError: it is not inside of what was lent, or not as long as its shape says.
    """
    _, datatype, shape, source = tensor
    loan = loan_of(source)
    if loan is None or not loan.in_place or not loan.nbytes or not exchange.is_here(loan):
        return None
    if loan.nbytes != element_count(shape) * numpy_dtype(datatype).itemsize:
        raise ValueError(f"a loan of {loan.nbytes} bytes for {datatype} of shape {tuple(shape)}")
    address, lease = exchange.address(loan), exchange.lease(loan, of_batch)
    memory = device.arrays.memory(address, loan.nbytes, lease)
    return device.arrays.over(memory, 0, datatype, tuple(shape), kind)


def copy_part(
    device: Device, exchange: Exchange, loan: DeviceLoan, to: int, request: int | None
) -> WireFailure | None:
    """Begin to copy a loan to an address of the device. A request whose rows cannot be had is refused, and
    its rows are zeros.

    Raises:
        CudaError: the device cannot be used any more.
        ExportGone: they cannot be had, and are those of the whole batch.
    """
    try:
        source = exchange.address(loan)
    except ExportGone as error:
        if request is None:
            raise
        device.runtime.clear(to, loan.nbytes, device.h2d)
        return WireFailure(error.code, str(error))
    if loan.nbytes:
        device.runtime.copy(to, source, loan.nbytes, Copy.DEVICE_TO_DEVICE, device.h2d)
    return None
