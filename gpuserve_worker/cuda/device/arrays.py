"""The arrays on a device that a callable is given, and those that it returns: CuPy's, torch's, and any that
speak ``__cuda_array_interface__`` or DLPack. No byte of an input or an output is copied here, but where an
output has to be made contiguous or of another type.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuserve_worker.calling.torch_tensors import CARRIERS, from_device
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Events, Runtime
from gpuserve_worker.protocol.tensor import BF16, element_count, numpy_dtype

#: The legacy default stream, as ``__cuda_array_interface__`` and DLPack name it.
_LEGACY_STREAM: Final = 1


#: References to the memory of a CuPy array: its pointer's, and the one that asks.
_MEMORY: Final = 2
#: References to the base of a view: the view's, and the one that asks.
_BASE: Final = 2
#: References to the storage of a torch tensor: the tensor's, and the one that asks.
_STORAGE: Final = 2
#: Where it is imported, a compiled callable may replay a graph of kernels that writes to the memory of what
#: it has returned before, without a reference to that.
_GRAPHS: Final = "torch._inductor.cudagraph_trees"


class MemoryLease:
    """Lives as long as any array over some memory. ``on_end`` is called when the last one has died: in any
    thread and in the middle of any line, so it may take no lock.
    """

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._on_end()


class CudaArrays:
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
        """The streams on which libraries compute in this thread: the default one, and the current ones."""
        streams = {DEFAULT_STREAM, int(self._cupy.cuda.get_current_stream().ptr)}
        try:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                streams.add(int(torch.cuda.current_stream().cuda_stream))
        except AttributeError:  # it is being imported by another thread
            pass
        return streams

    def join(self) -> None:
        for stream in self.streams():
            self._follow(stream)

    def read(self, value: Any) -> Any:
        """A value on the device as a CuPy array over the same memory; the default stream waits for the work
        that makes it. What the value is may raise anything.
        """
        array = value if isinstance(value, self._cupy.ndarray) else self._of_another(value)
        self._follow(self._cupy.cuda.get_current_stream().ptr)  # which DLPack has let wait for the producer's
        if array.data.device_id != self._number:  # the default stream is not that of its device
            raise ValueError(f"it is on device {array.data.device_id}, expected device {self._number}")
        return array

    def is_kept(self, value: Any) -> bool:
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
        """A CuPy array over the same memory; CuPy's own way would wait on the host for its stream."""
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
        if stream is None or stream in {DEFAULT_STREAM, _LEGACY_STREAM}:
            return
        event = self._events.take()
        self._runtime.record(event, stream)
        self._runtime.stream_waits(DEFAULT_STREAM, event)
        self._events.give(event)


def is_kept(value: Any, cupy_array: type) -> bool:
    """Whether anybody but the answer that holds it refers to an array of the device. Such a callable, or its
    framework, may write to it again, as to an output buffer of its own: its next call then has to wait until
    the copy is made. Told by who refers to the array and to its memory; where that cannot be told, it counts
    as kept. To be called, as ``_references`` does, by a function that was given the value out of that answer.
    """
    if sys.getrefcount(value) > _references():
        return True
    if isinstance(value, cupy_array):
        return _is_shared(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or _GRAPHS in sys.modules:
        return True
    return _is_shared_storage(torch, value)


def _is_shared(array: Any) -> bool:
    """Whether another array than a CuPy array and its base has the same memory."""
    base = array.base
    if base is None:
        return sys.getrefcount(array.data.mem) > _MEMORY
    del base  # it would count
    return sys.getrefcount(array.base) > _BASE or sys.getrefcount(array.data.mem) > _MEMORY + 1


def _is_shared_storage(torch: Any, tensor: Any) -> bool:
    try:
        users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    except (AttributeError, RuntimeError, NotImplementedError):  # no part of torch's interface
        return True
    return int(users) > _STORAGE


@functools.cache
def _references() -> int:
    """How many references to a value there are in ``is_kept`` if nobody but a mapping holds it."""
    answer = {"": object()}
    return _checked(answer[""])


def _checked(value: object) -> int:
    """Stands for ``OutputRules`` in the chain of calls."""
    return _asked(value)


def _asked(value: object) -> int:
    """Stands for ``CudaArrays.is_kept`` in the chain of calls."""
    return _counted(value)


def _counted(value: object) -> int:
    """Stands for ``is_kept`` in the chain of calls."""
    return sys.getrefcount(value)
