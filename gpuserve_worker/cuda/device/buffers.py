"""Reused device memory for the inputs of batches, and the cache of free memory by size.

A buffer is reused when the last array over it is deleted and the device work of that moment is done. Arrays
are deleted in any thread and inside any line, so the deletion takes no lock and calls no CUDA: it puts the
buffer into a queue with the ticket of the work that may still use it.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.runtime import CudaError, Progress, Runtime

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

    def pop(self, nbytes: int) -> _Item | None:
        """Return the smallest item that is large enough, the longest unused first, or None."""
        most = max(nbytes, 1) * self._slack
        fitting = [one for one in self._entries if nbytes <= one[0] <= most]
        if not fitting:
            return None
        entry = min(fitting, key=lambda one: one[0])
        self._entries.remove(entry)
        self.nbytes -= entry[0]
        return entry[1]

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
            self._free(self._shelf.surplus())
        return buffer if buffer is not None else self._new(size)

    def lease(self, buffer: Buffer) -> MemoryLease:
        return MemoryLease(partial(self.recycle, buffer))

    def recycle(self, buffer: Buffer) -> None:
        """Queue a buffer for reuse after its last array was deleted. The device may still use the buffer."""
        if self._closed:
            with suppress(CudaError):  # finalizers must not raise
                self._free([buffer])
        else:
            self._returned.append((self._progress.next_ticket, buffer))

    def trim(self) -> int:
        """Free all unused buffers, for which CUDA waits for the device. Return the number of freed bytes."""
        with self._lock:
            while self._returned:
                _, buffer = self._returned.popleft()
                self._shelf.put(buffer.nbytes, buffer)
            nbytes = self._shelf.nbytes
            self._free(self._shelf.empty())
        return nbytes

    def close(self) -> None:
        """Free unused buffers now, and the others when their last array is deleted."""
        self._closed = True
        self.trim()

    def _sort_in(self) -> None:
        while self._returned and self._progress.is_complete(self._returned[0][0]):
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
