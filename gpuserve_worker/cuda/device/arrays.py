"""Arrays on a device: those that a callable is given, and those that it returns, of CuPy, torch and any
library with ``__cuda_array_interface__`` or DLPack. Bytes are copied only to make an output contiguous or to
change its type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Events, Runtime
from gpuserve_worker.protocol.tensor import BF16, CARRIERS, element_count, from_device, numpy_dtype

#: The legacy default stream, as ``__cuda_array_interface__`` and DLPack name it.
_LEGACY_STREAM: Final = 1


class MemoryLease:
    """A lease that lives as long as any array over some memory. ``on_end`` is called when the last array is
    deleted: in any thread and inside any line, so it must not acquire a lock.
    """

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._on_end()


def converted_tensor(torch: Any, tensor: Any, dtype: np.dtype[Any]) -> Any:
    """Return a contiguous tensor of this type with the values of a tensor, on its device."""
    return tensor.detach().resolve_neg().to(getattr(torch, dtype.name)).contiguous()


class CudaArrays:
    """The factory of arrays over one device's memory, and the reader of arrays of every library."""

    def __init__(self, runtime: Runtime, events: Events, number: int) -> None:
        self._cupy = runtime.cupy
        self._runtime = runtime
        self._events = events
        self._number = number

    def memory(self, address: int, nbytes: int, owner: object) -> Any:
        """Return device memory for ``over``. Any array over the memory keeps ``owner`` alive."""
        return self._cupy.cuda.UnownedMemory(address, nbytes, owner, self._number)

    def over(self, memory: Any, offset: int, datatype: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return a writable array over ``memory``, of torch if ``kind`` is "torch", else of CuPy."""
        carrier = CARRIERS.get(datatype) if kind == "torch" else None
        pointer = self._cupy.cuda.MemoryPointer(memory, offset)
        array = self._cupy.ndarray(shape, carrier or numpy_dtype(datatype), pointer)
        return from_device(array, datatype) if kind == "torch" else array

    def streams(self) -> set[int]:
        """Return this thread's computing streams: the default stream and the libraries' current ones."""
        streams = {DEFAULT_STREAM, int(self._cupy.cuda.get_current_stream(self._number).ptr)}
        try:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                streams.add(int(torch.cuda.current_stream().cuda_stream))
        except AttributeError:  # another thread is importing torch
            pass
        return streams

    def join(self) -> None:
        for stream in self.streams():
            self._follow(stream)

    def read(self, value: Any) -> Any:
        """Return a device value as a CuPy array over the same memory, and order the default stream after the
        work that computes it. The value's own code may raise anything.
        """
        array = value if isinstance(value, self._cupy.ndarray) else self._of_another(value)
        self._follow(
            self._cupy.cuda.get_current_stream(self._number).ptr
        )  # DLPack has ordered this stream after the producer's
        if array.data.device_id != self._number:  # the default stream belongs to another device
            raise ValueError(f"it is on device {array.data.device_id}, expected device {self._number}")
        return array

    def as_dtype(self, array: Any, dtype: np.dtype[Any], value: Any = None) -> Any:
        """Return a contiguous array of this type on the device, the same array if it is one already.
        Otherwise ``array`` must be kept until the default stream has read it, because its library may reuse
        the memory on another stream. ``value`` is the object that ``array`` was read from: torch converts its
        own tensors, since CuPy would first compile a kernel.
        """
        if array.dtype == dtype and array.flags.c_contiguous:
            return array
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self.read(converted_tensor(torch, value, dtype))
        with self._cupy.cuda.Stream.null:
            return self._cupy.ascontiguousarray(array, dtype)

    def _of_another(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            tensor = value.detach().resolve_neg()
            if tensor.dtype == torch.bfloat16:
                return self._cupy.from_dlpack(tensor.view(torch.int16)).view(numpy_dtype(BF16))
            if tensor.dtype == torch.bool:
                return self._cupy.from_dlpack(tensor.view(torch.uint8)).view(np.dtype(bool))
            return self._cupy.from_dlpack(tensor)
        if hasattr(value, "__cuda_array_interface__"):
            return self._of_interface(value)
        return self._cupy.from_dlpack(value)

    def _of_interface(self, value: Any) -> Any:
        """Return a CuPy array over the same memory. CuPy's own conversion would block the host on the array's
        stream.
        """
        given = value.__cuda_array_interface__
        if given.get("mask") is not None:
            raise ValueError("a masked array cannot be sent")
        shape, dtype = tuple(given["shape"]), np.dtype(given["typestr"])
        self._follow(given.get("stream"))
        nbytes = dtype.itemsize * element_count(shape)
        # -1: CUDA determines the device of the address.
        memory = self._cupy.cuda.UnownedMemory(
            given["data"][0], nbytes, value, -1 if nbytes else self._number
        )
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray(shape, dtype, pointer, strides=given.get("strides"))

    def _follow(self, stream: int | None) -> None:
        if stream is None or stream in {DEFAULT_STREAM, _LEGACY_STREAM}:
            return
        event = self._events.acquire()
        self._runtime.record(event, stream)
        self._runtime.stream_wait_event(DEFAULT_STREAM, event)
        self._events.release(event)
