"""Arrays on a device, inputs and outputs of callables: of CuPy, torch and any library with
``__cuda_array_interface__`` or DLPack. Bytes are copied only to make an output contiguous or to change its
type.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, Events, Progress, Runtime
from gpuserve_worker.protocol.tensor import BF16, CARRIERS, element_count, from_device, numpy_dtype

_Item = TypeVar("_Item")

#: Smaller sizes are rounded up to this one.
_SMALLEST_NBYTES: Final = 64 << 10


class SizedCache(Generic[_Item]):
    """A cache of free memory by size, least recently used first. Not thread-safe. The cache keeps up to
    ``limit_nbytes``; an item is not used for a request smaller than its size divided by ``slack``.
    """

    def __init__(self, limit_nbytes: int, slack: int = 4) -> None:
        self.limit_nbytes = limit_nbytes
        self._slack = slack
        self._entries: list[tuple[int, _Item]] = []
        self.nbytes = 0
        #: The fewest bytes that were free at any time since ``unused``.
        self._least_nbytes = 0

    def put(self, nbytes: int, item: _Item) -> None:
        self._entries.append((nbytes, item))
        self.nbytes += nbytes

    def pop(self, nbytes: int) -> _Item | None:
        """Return the smallest item that is large enough, the longest unused first, or None."""
        found, least_nbytes = -1, (nbytes or 1) * self._slack + 1
        for position, (size, _) in enumerate(self._entries):
            if nbytes <= size < least_nbytes:
                found, least_nbytes = position, size
        if found < 0:
            return None
        self.nbytes -= least_nbytes
        self._least_nbytes = min(self._least_nbytes, self.nbytes)
        return self._entries.pop(found)[1]

    def surplus(self) -> list[_Item]:
        return self._drop(self.limit_nbytes)

    def empty(self) -> list[_Item]:
        return self._drop(0)

    def unused(self) -> list[_Item]:
        """Drop as many bytes as were free at all times since the last call, the longest unused first."""
        dropped = self._drop(self.nbytes - self._least_nbytes)
        self._least_nbytes = self.nbytes
        return dropped

    def _drop(self, limit_nbytes: int) -> list[_Item]:
        dropped = []
        while self.nbytes > limit_nbytes and self._entries:
            nbytes, item = self._entries.pop(0)
            self.nbytes -= nbytes
            dropped.append(item)
        self._least_nbytes = min(self._least_nbytes, self.nbytes)
        return dropped


def size_class(nbytes: int) -> int:
    """Return the size to allocate: at most an eighth more, so that batches of similar sizes share memory."""
    if nbytes <= _SMALLEST_NBYTES:
        return _SMALLEST_NBYTES
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


#: Alignment of tensors in a buffer, that of CUDA's own allocations.
ALIGNMENT: Final = 256


class Buffer(NamedTuple):
    """``nbytes`` of device memory at ``address``."""

    address: int
    nbytes: int


class Buffers:
    """The buffers of one device, for any thread. ``retained_nbytes`` are kept for later batches."""

    def __init__(self, runtime: Runtime, progress: Progress, retained_nbytes: int) -> None:
        self._runtime = runtime
        self._progress = progress
        #: Buffers in the order of their return, with the ticket of the last work that may use them.
        self._returned: deque[tuple[int, Buffer]] = deque()
        self._shelf: SizedCache[Buffer] = SizedCache(retained_nbytes)
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes`` that the device no longer uses."""
        size = size_class(nbytes)
        with self._lock:
            self._sort_in()
            buffer = self._shelf.pop(size)
            if buffer is None and self._returned:
                self._progress.poll()
                self._sort_in()
                buffer = self._shelf.pop(size)
            if self._shelf.nbytes > self._shelf.limit_nbytes:
                self._free(self._shelf.surplus())
        return buffer if buffer is not None else self._new(size)

    def recycle(self, buffer: Buffer, ticket: int | None = None) -> None:
        """Queue a buffer for reuse after its last array was deleted. The device may use the buffer until the
        work of ``ticket``, or its present work, is complete.
        """
        if self._closed:
            with suppress(CudaError):  # finalizers must not raise
                self._free([buffer])
        else:
            self._returned.append((self._progress.next_ticket if ticket is None else ticket, buffer))

    def trim(self) -> int:
        """Free all unused buffers, for which CUDA waits for the device. Return the number of freed bytes."""
        with self._lock:
            while self._returned:
                _, buffer = self._returned.popleft()
                self._shelf.put(buffer.nbytes, buffer)
            nbytes = self._shelf.nbytes
            self._free(self._shelf.empty())
        return nbytes

    def shrink(self) -> None:
        """Free buffers that no batch has needed since the last call. CUDA may wait for the device."""
        with self._lock:
            if self._returned:
                self._progress.poll()
            self._sort_in()
            self._free(self._shelf.unused())

    def close(self) -> None:
        """Free unused buffers now, and the others when their last array is deleted."""
        self._closed = True
        self.trim()

    def _sort_in(self) -> None:
        completed = self._progress.completed
        while self._returned and self._returned[0][0] <= completed:
            _, buffer = self._returned.popleft()
            self._shelf.put(buffer.nbytes, buffer)

    def _new(self, nbytes: int) -> Buffer:
        try:
            address = self._runtime.allocate(nbytes)
        except CudaError as error:
            if not error.is_out_of_memory or not self.trim():
                raise
            address = self._runtime.allocate(nbytes)
        return Buffer(address, nbytes)

    def _free(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._runtime.free(buffer.address)


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


class BufferLease:
    """A lease on a buffer that lives as long as any array over the buffer. ``ticket``, once known, is that of
    the last work of the device that uses the buffer.
    """

    __slots__ = ("_buffer", "_buffers", "ticket")

    def __init__(self, buffers: Buffers, buffer: Buffer) -> None:
        self._buffers = buffers
        self._buffer = buffer
        self.ticket: int | None = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._buffers.recycle(self._buffer, self.ticket)


class CudaArrays:
    """The factory of arrays over one device's memory, and the reader of arrays of every library."""

    def __init__(self, runtime: Runtime, events: Events, number: int) -> None:
        self._cupy = runtime.cupy
        self.array_type = runtime.cupy.ndarray
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
        """Order the default stream after this thread's computing streams."""
        for stream in self.streams():
            if stream:
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
        self._events.release_event(event)
