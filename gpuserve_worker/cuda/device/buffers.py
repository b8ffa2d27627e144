"""Memory of the device for the inputs of batches, used again and again: when the last array over a buffer has
died, and the work that was under way by then is done. Arrays die in any thread and in the middle of any line,
so what happens then takes no lock: an event is recorded, and the buffer put into a queue. No copy is made
here.
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

#: Tensors begin on this boundary in a buffer, as CUDA's own allocations do.
ALIGNMENT: Final = 256
_SMALLEST_NBYTES: Final = 64 << 10
#: A buffer is given for no less than this part of its size.
_SLACK: Final = 4


class Shelf(Generic[_Item]):
    """What is free, with its size, the longest unused first. Pure bookkeeping; not thread-safe."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._entries: list[tuple[int, _Item]] = []
        self.nbytes = 0

    def put(self, nbytes: int, item: _Item) -> None:
        self._entries.append((nbytes, item))
        self.nbytes += nbytes

    def take(self, nbytes: int, is_ready: Callable[[_Item], bool]) -> _Item | None:
        """The smallest that is large enough and ready, the longest unused first; None where none fits."""
        most = max(nbytes, 1) * _SLACK
        fitting = [one for one in self._entries if nbytes <= one[0] <= most]
        fitting.sort(key=lambda one: one[0])
        for entry in fitting:  # CUDA is asked about no more of them than have to be
            if is_ready(entry[1]):
                self._entries.remove(entry)
                self.nbytes -= entry[0]
                return entry[1]
        return None

    def surplus(self) -> list[_Item]:
        return self._drop(self._limit_nbytes)

    def empty(self) -> list[_Item]:
        return self._drop(0)

    def _drop(self, limit_nbytes: int) -> list[_Item]:
        dropped = []
        while self.nbytes > limit_nbytes and self._entries:
            nbytes, item = self._entries.pop(0)
            self.nbytes -= nbytes
            dropped.append(item)
        return dropped


class Buffer(NamedTuple):
    """``nbytes`` of the device at ``address``. The event ``arrived`` comes when what was copied into them is
    there, ``released`` when they may be given again.
    """

    address: int
    nbytes: int
    arrived: int
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
        arrived, released = self._runtime.create_event(), self._runtime.create_event()
        return Buffer(address, nbytes, arrived, released)

    def _free(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._runtime.free(buffer.address)
            self._runtime.destroy_event(buffer.arrived)
            self._runtime.destroy_event(buffer.released)


def size_class(nbytes: int) -> int:
    """The size to ask CUDA for: at most an eighth more, so that batches of similar sizes share buffers."""
    if nbytes <= _SMALLEST_NBYTES:
        return _SMALLEST_NBYTES
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step
