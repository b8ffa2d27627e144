"""Torch on the stand-in: tensors of the CPU, over the memory of the device or not, which say that they are on
the GPU. Their DLPack capsules are real. ``install`` has ``torch.from_dlpack`` give them.

Torch computes at once on the CPU, so each operation first waits for all work of the device.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import torch
from cuda_simulation.context import current

_CUDA = 2
_real_from_dlpack = torch.from_dlpack
_real_as_tensor = torch.as_tensor
_real_to = torch.Tensor.to


class DeviceTensor(torch.Tensor):
    """A tensor that is on the GPU, for whoever asks."""

    __module__ = "torch"
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cupy.cuda.runtime.deviceSynchronize()
        return super().__torch_function__(func, types, args, kwargs or {})

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **options: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__dlpack__()


class _OfDevice(np.ndarray[Any, Any]):
    """Device memory where this process has it mapped. ``array`` keeps it."""

    array: Any


def _from_dlpack(array: Any) -> Any:
    if not isinstance(array, cupy.ndarray):
        return _real_from_dlpack(array)
    context = current()
    memory = context.accessible(array.data.ptr, array.nbytes, context.device) if array.size else None
    host = _OfDevice(array.shape, array.dtype, memory)
    host.array = array
    return _real_from_dlpack(host).as_subclass(DeviceTensor)


def _as_tensor(value: Any, *args: Any, **kwargs: Any) -> Any:
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None or isinstance(value, torch.Tensor):
        return _real_as_tensor(value, *args, **kwargs)
    context, dtype = current(), np.dtype(interface["typestr"])
    nbytes = dtype.itemsize * int(np.prod(interface["shape"]))
    memory = context.accessible(interface["data"][0], nbytes, context.device)
    host = _OfDevice(interface["shape"], dtype, memory)
    host.array = value
    return _real_from_dlpack(host).as_subclass(DeviceTensor)


def _to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy to the GPU is one on the host, which only this process has."""
    if args and isinstance(args[0], str | torch.device) and str(args[0]).startswith("cuda"):
        args = ("cpu", *args[1:])
    return _real_to(tensor, *args, **kwargs)


def install() -> None:
    """Have torch take arrays of the stand-in."""
    torch.from_dlpack, torch.as_tensor, torch.Tensor.to = _from_dlpack, _as_tensor, _to
