"""Kernels: numpy's functions, executed on the current stream over device memory, some time later.

A kernel knows the places of its arrays and keeps no array: memory that goes back to its owner while the
kernel waits is overwritten, as it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib
from cuda_simulation import errors
from cuda_simulation.context import Context, current, entry
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.reads import Read
from cuda_simulation.visible import Device

from cupy.cuda.stream import get_current_stream


@dataclass(frozen=True)
class Layout:
    """Where an array is, and how it lies there."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def bounds(self) -> tuple[int, int]:
        """The first byte and the one after the last, from the address."""
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(0, one) for one in reach), sum(max(0, one) for one in reach) + self.dtype.itemsize

    def content(self, context: Context, device: Device, *, writes: bool = False) -> np.ndarray[Any, Any]:
        """The array, at the time of the kernel. Raises CUDARuntimeError: there is no such memory."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        first, end = self.bounds()
        memory = context.accessible(self.address + first, end - first, device, writes=writes)
        return np.ndarray(self.shape, self.dtype, memory, -first, self.strides)


def require(library: str) -> None:
    """Do nothing where cupy finds a library of CUDA's, if it has to look. Raises DynamicLibNotFoundError."""
    if current().view.now.libraries_looked_up:
        load_nvidia_dynamic_lib(library)


@entry("launchKernel")
def launch(function: Callable[..., Any], operands: Sequence[Any], target: Layout) -> None:
    """Queue ``target[...] = function(*operands)``; operands that are no Layout are passed on."""

    def assign(content: np.ndarray[Any, Any], *values: Any) -> None:
        np.copyto(content, function(*values), casting="unsafe")

    assign.__qualname__ = getattr(function, "__qualname__", function.__name__)
    launch_in_place(assign, target, operands)


@entry("launchKernel")
def launch_in_place(function: Callable[..., object], target: Layout, operands: Sequence[Any]) -> None:
    """Queue ``function(target, *operands)``, which changes the target."""
    context = current()
    if context.view.now.shared_runtime and (status := context.thread.last_error):
        context.thread.last_error = 0
        raise CUDARuntimeError(status)
    require("nvrtc")
    context.compile(
        (function.__qualname__, *[one.dtype for one in (target, *operands) if type(one) is Layout])
    )
    device, stream = context.device, context.stream(get_current_stream().ptr)
    if stream.device != device:
        raise CUDARuntimeError(errors.INVALID_RESOURCE_HANDLE)
    reads = [_read(one, context, device) for one in operands]

    def begin() -> None:
        for one in reads:
            one.begin()

    def effect() -> None:
        with np.errstate(all="ignore"):
            function(target.content(context, device, writes=True), *(one.end() for one in reads))

    context.launch(stream, effect, begin)


def _read(operand: Any, context: Context, device: Device) -> Read | _Constant:
    if isinstance(operand, Layout):
        return Read(lambda: operand.content(context, device))
    return _Constant(operand)


@dataclass(frozen=True)
class _Constant:
    """An operand that the kernel was given with its launch."""

    value: Any

    def begin(self) -> None:
        """It is there already."""

    def end(self) -> Any:
        return self.value
