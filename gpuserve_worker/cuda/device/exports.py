"""Memory of the device that other processes may see: the outputs that stay there for the workers that read
them. Allocated by itself, never from a framework's pool, since a handle shows the whole of an allocation.

The owner's side; whoever reads is in ``loans.py``. Bytes are not copied here::

    free ──allocate──► lent ──(the front says that nobody reads it)──► free
                        └──(the front is gone)──► lost: nobody could say when its readers are through
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from gpuserve_worker.cuda.device.runtime import CudaError, Runtime
from gpuserve_worker.memory.arena import Allocator
from gpuserve_worker.protocol.wire import Exported, ExportSegment

#: Blocks begin on this boundary, as CUDA's own allocations do.
ALIGNMENT: Final = 512
#: What a segment measures at least, and in what steps: below 2 MiB allocations share what a handle shows.
SEGMENT_NBYTES: Final = 32 << 20
_STEP_NBYTES: Final = 2 << 20

#: Where the handles of this very process lead, which CUDA opens in others only: a worker may read what it
#: made itself, and workers that are threads share a process.
OF_THIS_PROCESS: Final[dict[bytes, int]] = {}


#: Tells a front of a segment. Every front has its own.
Announce: TypeAlias = Callable[[ExportSegment], object]


class ExportBlock(NamedTuple):
    """A part of a segment, on its way to whoever reads it."""

    address: int
    place: Exported


class _Owned(NamedTuple):
    address: int
    segment: ExportSegment
    allocator: Allocator


class ExportPool:
    """The exports of one device. Any thread may use it. Up to ``limit_nbytes`` of the device are its own, and
    are kept: to give an allocation up, all who opened it would have to have closed it before.
    """

    def __init__(self, runtime: Runtime, limit_nbytes: int) -> None:
        self._runtime = runtime
        self._limit_nbytes = limit_nbytes
        self._owned: list[_Owned] = []
        self._lent: dict[tuple[int, int], int] = {}
        self._front: Announce | None = None
        self._lock = threading.Lock()

    def start(self, front: Announce) -> None:
        """A front wants outputs to be kept: it is told of every segment there is, and of those to come.
        Nothing happens where there is no memory for the first one, or none that can be exported.
        """
        with self._lock:
            if not self._owned:
                self._add(SEGMENT_NBYTES)
            for one in self._owned:
                front(one.segment)
            self._front = front

    def allocate(self, nbytes: int, front: Announce) -> ExportBlock | None:
        """A block for a front, not cleared; None: there is no room, or that front has no exports."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            if self._front != front:
                return None
            for one in self._owned:
                offset = one.allocator.allocate(size)
                if offset is not None:
                    return self._lend(one, offset, nbytes, size)
            added = self._add(size)
            if added is None:
                return None
            front(added.segment)
            offset = added.allocator.allocate(size)
            assert offset is not None, "a new segment has room for the block it was made for"
            return self._lend(added, offset, nbytes, size)

    def free(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Take blocks back that nobody reads any more: (segment, offset) each; ``KeyError``: not lent."""
        with self._lock:
            for segment, offset in blocks:
                size = self._lent.pop((segment, offset))
                self._owned[segment].allocator.free(offset, size)

    def withdraw(self, front: Announce) -> None:
        """A front is gone. What is lent may still be in use by workers that run its batches: it is lost."""
        with self._lock:
            if self._front != front:
                return
            self._front = None
            self._lent.clear()

    def close(self) -> None:
        """Keep nothing more, in a process that goes on. The memory stays until that ends: others may have it
        open, and CUDA does not say what becomes of them if it were freed.
        """
        with self._lock:
            self._front = None
            self._owned.clear()
            self._lent.clear()

    def _lend(self, owned: _Owned, offset: int, nbytes: int, size: int) -> ExportBlock:
        number = owned.segment.segment
        self._lent[number, offset] = size
        return ExportBlock(owned.address + offset, Exported(number, offset, nbytes))

    def _add(self, nbytes: int) -> _Owned | None:
        size = max(SEGMENT_NBYTES, -(-nbytes // _STEP_NBYTES) * _STEP_NBYTES)
        if sum(one.segment.nbytes for one in self._owned) + size > self._limit_nbytes:
            return None
        try:
            address, handle = self._exported(size)
        except CudaError as error:
            if error.is_sticky:
                raise
            return None
        owned = _Owned(address, ExportSegment(len(self._owned), size, handle), Allocator(size))
        self._owned.append(owned)
        OF_THIS_PROCESS[handle] = address
        return owned

    def _exported(self, nbytes: int) -> tuple[int, bytes]:
        address = self._runtime.allocate(nbytes)
        try:
            return address, self._runtime.export_memory(address)
        except CudaError:
            self._runtime.free(address)
            raise
