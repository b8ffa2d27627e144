"""The arrays on a device that a callable is given, and those that it returns: CuPy's, torch's, and any that
speak ``__cuda_array_interface__`` or DLPack. No byte of an input or an output is copied here, but where an
output has to be made contiguous or of another type.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from gpuserve_worker.cuda.events import Events
from gpuserve_worker.cuda.kept import is_kept
from gpuserve_worker.cuda.runtime import DEFAULT_STREAM, Runtime
from gpuserve_worker.tensor import BF16, element_count, numpy_dtype
from gpuserve_worker.torch_tensors import CARRIERS, from_device

#: The legacy default stream, as ``__cuda_array_interface__`` and DLPack name it.
_LEGACY_STREAM: Final = 1


class DeviceArrays:
    """Makes arrays over memory of one device, and reads those of every library."""

    def __init__(self, runtime: Runtime, events: Events, number: int) -> None:
        self._cupy = runtime.cupy
        self._runtime = runtime
        self._events = events
        self._number = number

    def memory(self, address: int, nbytes: int, owner: object) -> Any:
        """Memory of the device for ``over``; whatever array is made over it keeps ``owner`` alive."""
        return self._cupy.cuda.UnownedMemory(address, nbytes, owner, self._number)

    def over(self, memory: Any, offset: int, datatype: str, shape: tuple[int, ...], kind: str) -> Any:
        """A writable array over bytes of ``memory``, of CuPy or, where ``kind`` is "torch", of torch."""
        carrier = CARRIERS.get(datatype) if kind == "torch" else None
        pointer = self._cupy.cuda.MemoryPointer(memory, offset)
        array = self._cupy.ndarray(shape, carrier or numpy_dtype(datatype), pointer)
        return from_device(array, datatype) if kind == "torch" else array

    def streams(self) -> set[int]:
        """The streams on which the libraries compute in the calling thread: the default one, and what a
        callable has made the current one instead.
        """
        streams = {DEFAULT_STREAM, int(self._cupy.cuda.get_current_stream().ptr)}
        try:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                streams.add(int(torch.cuda.current_stream().cuda_stream))
        except AttributeError:  # it is being imported by another thread
            pass
        return streams

    def join(self) -> None:
        """Let the default stream wait for what is in the others of ``streams`` now."""
        for stream in self.streams():
            self._follow(stream)

    def read(self, value: Any) -> Any:
        """A value on the device as a CuPy array over the same memory; the default stream waits for the work
        that makes it.

        Raises:
            Exception: the value is none; it may be of any type.
        """
        array = value if isinstance(value, self._cupy.ndarray) else self._of_another(value)
        self._follow(self._cupy.cuda.get_current_stream().ptr)  # which DLPack has let wait for the producer's
        if array.data.device_id != self._number:  # the default stream is not that of its device
            raise ValueError(f"it is on device {array.data.device_id}, expected device {self._number}")
        return array

    def is_kept(self, value: Any) -> bool:
        """Whether the callable may write again to what it returned; see ``kept.is_kept``."""
        return is_kept(value, self._cupy.ndarray)

    def as_dtype(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """A contiguous array of these elements on the device, the same one where it is that already. Else
        ``array`` has to be kept until the default stream is through with it: its library may give the memory
        to work of another stream.
        """
        if array.dtype == dtype and array.flags.c_contiguous:
            return array
        with self._cupy.cuda.Stream.null:
            return self._cupy.ascontiguousarray(array, dtype)

    def _of_another(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._of_torch(torch, value.detach().resolve_neg())
        if hasattr(value, "__cuda_array_interface__"):
            return self._of_interface(value)
        return self._cupy.from_dlpack(value)

    def _of_torch(self, torch: Any, tensor: Any) -> Any:
        if tensor.dtype == torch.bfloat16:
            return self._cupy.from_dlpack(tensor.view(torch.int16)).view(numpy_dtype(BF16))
        if tensor.dtype == torch.bool:
            return self._cupy.from_dlpack(tensor.view(torch.uint8)).view(np.dtype(bool))
        return self._cupy.from_dlpack(tensor)

    def _of_interface(self, value: Any) -> Any:
        """CuPy's own way would wait on the host for the stream that the value names."""
        given = value.__cuda_array_interface__
        if given.get("mask") is not None:
            raise ValueError("a masked array cannot be sent")
        shape, dtype = tuple(given["shape"]), np.dtype(given["typestr"])
        self._follow(given.get("stream"))
        nbytes = dtype.itemsize * element_count(shape)
        # -1: CUDA is asked which device the address is of.
        memory = self._cupy.cuda.UnownedMemory(
            given["data"][0], nbytes, value, -1 if nbytes else self._number
        )
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray(shape, dtype, pointer, strides=given.get("strides"))

    def _follow(self, stream: int | None) -> None:
        """Let the default stream wait for what is in another one now."""
        if stream is None or stream in {DEFAULT_STREAM, _LEGACY_STREAM}:
            return
        event = self._events.take()
        self._runtime.record(event, stream)
        self._runtime.stream_waits(DEFAULT_STREAM, event)
        self._events.give(event)
