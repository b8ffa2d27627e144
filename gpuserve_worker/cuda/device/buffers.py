"""Memory of the device for the inputs of batches, used again and again: when the last array over a buffer has
died, and the work that was under way by then is done. Arrays die in any thread and in the middle of any line,
so what happens then takes no lock: an event is recorded, and the buffer put into a queue. No copy is made
here.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import Final, NamedTuple

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, Runtime
from gpuserve_worker.cuda.device.shelf import Shelf, size_class

#: Tensors begin on this boundary in a buffer, as CUDA's own allocations do.
ALIGNMENT: Final = 256


class Buffer(NamedTuple):
    """``nbytes`` of the device at ``address``. The event ``released`` comes when they may be given again."""

    address: int
    nbytes: int
    released: int


class Buffers:
    """The buffers of one device, for any thread. ``retained_nbytes`` of them are kept for later batches."""

    def __init__(self, runtime: Runtime, retained_nbytes: int) -> None:
        self._runtime = runtime
        self._returned: deque[Buffer] = deque()
        #: Those whose last array died in a thread that had another device, or could not use this one.
        self._unmarked: deque[Buffer] = deque()
        self._shelf: Shelf[Buffer] = Shelf(retained_nbytes)
        self._lock = threading.Lock()
        self._closed = False

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``, on which the device is at work no more."""
        with self._lock:
            self._sort_in()
            # Copies into what is still worked on would wait for the callable; they are to run beside it.
            buffer = self._shelf.take(size_class(nbytes), lambda one: self._runtime.has_come(one.released))
        return buffer if buffer is not None else self._new(size_class(nbytes))

    def lease(self, buffer: Buffer) -> MemoryLease:
        return MemoryLease(partial(self.take_back, buffer))

    def take_back(self, buffer: Buffer) -> None:
        """Reuse a buffer that no array is over any more; the device may still be at work on it."""
        try:
            self._runtime.record(buffer.released, DEFAULT_STREAM)
            if self._closed:
                self._free([buffer])
                return
        except CudaError:  # nothing is raised in the middle of any line
            self._unmarked.append(buffer)
            return
        self._returned.append(buffer)

    def trim(self) -> int:
        """Give up all that no array is over, and wait for the device: how many bytes that were."""
        with self._lock:
            self._sort_in()
            nbytes = self._shelf.nbytes
            self._free(self._shelf.empty())
        return nbytes

    def close(self) -> None:
        """Give up what no array is over now, and what else there is when its last array dies."""
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
