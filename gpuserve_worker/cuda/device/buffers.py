"""Reused device memory for the inputs of batches, and the cache of free memory by size.

A buffer is reused when the last array over it is deleted and the device work of that moment is done. Arrays
are deleted in any thread and inside any line, so the deletion takes no lock: it records an event and puts the
buffer into a queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, Runtime

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

    def put(self, nbytes: int, item: _Item) -> None:
        self._entries.append((nbytes, item))
        self.nbytes += nbytes

    def pop(self, nbytes: int, is_ready: Callable[[_Item], bool]) -> _Item | None:
        """Return the smallest item that is large enough and ready, the longest unused first, or None."""
        most = max(nbytes, 1) * self._slack
        fitting = [one for one in self._entries if nbytes <= one[0] <= most]
        fitting.sort(key=lambda one: one[0])
        for entry in fitting:  # query CUDA for as few items as possible
            if is_ready(entry[1]):
                self._entries.remove(entry)
                self.nbytes -= entry[0]
                return entry[1]
        return None

    def surplus(self) -> list[_Item]:
        return self._drop(self.limit_nbytes)

    def empty(self) -> list[_Item]:
        return self._drop(0)

    def _drop(self, limit_nbytes: int) -> list[_Item]:
        dropped = []
        while self.nbytes > limit_nbytes and self._entries:
            nbytes, item = self._entries.pop(0)
            self.nbytes -= nbytes
            dropped.append(item)
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
    """``nbytes`` of device memory at ``address``. The memory may be reused after the event ``released``."""

    address: int
    nbytes: int
    released: int


class Buffers:
    """The buffers of one device, for any thread. ``retained_nbytes`` are kept for later batches."""

    def __init__(self, runtime: Runtime, retained_nbytes: int) -> None:
        self._runtime = runtime
        self._returned: deque[Buffer] = deque()
        #: Buffers whose last array was deleted in a thread with another device, or without use of this one.
        self._unmarked: deque[Buffer] = deque()
        self._shelf: SizedCache[Buffer] = SizedCache(retained_nbytes)
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes`` that the device no longer uses."""
        with self._lock:
            self._sort_in()
            # Copies into a buffer in use would wait for the callable; they are to run beside it.
            buffer = self._shelf.pop(size_class(nbytes), lambda one: self._runtime.is_complete(one.released))
        return buffer if buffer is not None else self._new(size_class(nbytes))

    def lease(self, buffer: Buffer) -> MemoryLease:
        return MemoryLease(partial(self.recycle, buffer))

    def recycle(self, buffer: Buffer) -> None:
        """Queue a buffer for reuse after its last array was deleted. The device may still use the buffer."""
        try:
            self._runtime.record(buffer.released, DEFAULT_STREAM)
            if self._closed:
                self._free([buffer])
                return
        except CudaError:  # finalizers must not raise
            self._unmarked.append(buffer)
            return
        self._returned.append(buffer)

    def trim(self) -> int:
        """Free all unused buffers, waiting for the device. Return the number of freed bytes."""
        with self._lock:
            self._sort_in()
            nbytes = self._shelf.nbytes
            self._free(self._shelf.empty())
        return nbytes

    def close(self) -> None:
        """Free unused buffers now, and the others when their last array is deleted."""
        self._closed = True
        self.trim()

    def _sort_in(self) -> None:
        while self._unmarked:
            buffer = self._unmarked.popleft()
            self._runtime.record(buffer.released, DEFAULT_STREAM)
            self._returned.append(buffer)
        while self._returned:
            buffer = self._returned.popleft()
            self._shelf.put(buffer.nbytes, buffer)
        self._free(self._shelf.surplus())

    def _new(self, nbytes: int) -> Buffer:
        try:
            address = self._runtime.allocate(nbytes)
        except CudaError as error:
            if not error.is_out_of_memory or not self.trim():
                raise
            address = self._runtime.allocate(nbytes)
        return Buffer(address, nbytes, self._runtime.create_event())

    def _free(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._runtime.free(buffer.address)
            self._runtime.destroy_event(buffer.released)
