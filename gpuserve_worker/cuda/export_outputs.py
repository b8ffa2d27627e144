"""Outputs that stay on the device for the workers that read them: copied into exports on the stream of
outputs, within the device. Nothing waits for the copies here.
"""

from __future__ import annotations

from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.exchange import Exchange
from gpuserve_worker.cuda.runtime import Copy
from gpuserve_worker.outputs import Output
from gpuserve_worker.payloads import INLINE_NBYTES, Exported


def begin_export(device: Device, exchange: Exchange, output: Output) -> Exported | None:
    """Begin to copy an output to where other workers can read it. None where it has to go to the host: it is
    there in part, there is no room, or it is so small that it travels in a message.

    Raises:
        CudaError: the device cannot be used any more.
    """
    array = device.runtime.cupy.ndarray
    if output.nbytes <= INLINE_NBYTES or not all(isinstance(part, array) for part in output.parts):
        return None
    block = exchange.keep(output.nbytes)
    if block is None:
        return None
    to = block.address
    for part in output.parts:
        if part.nbytes:
            device.runtime.copy(to, part.data.ptr, part.nbytes, Copy.DEVICE_TO_DEVICE, device.d2h)
        to += part.nbytes
    return block.place
