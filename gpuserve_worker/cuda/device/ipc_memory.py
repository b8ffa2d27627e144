"""Device memory shared between processes by CUDA IPC: the worker's exports, and opened memory of other
processes.

``OpenedHandles`` opens each ``cudaIpcMemHandle_t`` once, and closes it after its last user. CUDA needs time
for both, so they run in a thread; only users of a handle that is being opened wait for it::

            opened            last user released it
    OPENING ──────► OPEN ────────────────────► CLOSED
       └──────► REFUSED

``ExportPool`` allocates memory for outputs that stay on the device for other workers. It never uses a
framework's pool, because a handle exposes its whole allocation::

    free ──allocate──► lent ──(the front says that no worker reads it)──► free
                        └──(the front is gone)──► lost: the end of its use is unknown
"""

from __future__ import annotations

import copy
import enum
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.host_memory import Background
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, HANDLE_NBYTES, CudaError, Events, Runtime
from gpuserve_worker.memory.segments import Allocator
from gpuserve_worker.protocol.wire import Exported, ExportSegment


class OpenState(enum.Enum):
    """The state of memory of another process."""

    OPENING = "it is waited for"
    OPEN = "it can be used"
    REFUSED = "it cannot be used, and is not there any more"
    CLOSED = "nobody uses it any more"


#: The possible next states of each state.
NEXT_OPEN_STATE: Final = {
    OpenState.OPENING: (OpenState.OPEN, OpenState.REFUSED),
    OpenState.OPEN: (OpenState.CLOSED,),
}


class Mapped(NamedTuple):
    """``nbytes`` from ``address`` to an allocation's end. ``is_here``: on this device; ``is_own``: ours."""

    address: int
    nbytes: int
    is_here: bool
    is_own: bool


class OpenedMemory:
    """Memory of another process, opened by the thread of its ``OpenedHandles``. ``users`` counts the objects
    and arrays that use it; the last one closes it. ``is_read_in_place``: device work that no thread waited
    for may still read it.
    """

    __slots__ = ("_found", "_is_settled", "handle", "is_read_in_place", "state", "users")

    def __init__(self, handle: bytes) -> None:
        self.handle = handle
        self.state = OpenState.OPENING
        self.users = 0
        self.is_read_in_place = False
        self._found: Mapped | Exception | None = None
        self._is_settled = threading.Event()

    def mapped(self, nbytes: int = 0) -> Mapped:
        """Return the location of the memory, for a user of ``nbytes``; block while it is being opened. Raise
        ``ValueError`` if it is smaller, ``CudaError`` if its owner is gone or this device cannot reach it.
        """
        if self._found is None:
            self._is_settled.wait()
        found = self._found
        if not isinstance(found, Mapped):
            assert found is not None, "what is settled has been found out"
            raise copy.copy(found)  # an exception keeps its frames alive, so each user gets a copy
        if nbytes > found.nbytes:
            raise ValueError(f"expected at most {found.nbytes} bytes, which its allocation has, got {nbytes}")
        return found

    def wait(self) -> None:
        """Block until the memory is open or known to be unavailable."""
        self._is_settled.wait()

    def wait_idle(self, found: Mapped | Exception) -> None:
        """Set the location or the error, and wake the waiting threads."""
        self._advance(OpenState.OPEN if isinstance(found, Mapped) else OpenState.REFUSED)
        self._found = found
        self._is_settled.set()

    def close(self) -> None:
        self._advance(OpenState.CLOSED)

    def _advance(self, state: OpenState) -> None:
        assert state in NEXT_OPEN_STATE.get(self.state, ()), f"{state.name} after {self.state.name}"
        self.state = state


class OpenedHandles:
    """The open handles of this process, each once. ``own`` are the handles of this process's own memory,
    which CUDA does not open. Any thread may use it, but no finalizer.
    """

    def __init__(
        self, runtime: Runtime, number: int, thread: Background, own: Mapping[bytes, int] | None = None
    ) -> None:
        self._runtime = runtime
        self._number = number
        self._own = {} if own is None else own
        self._open: dict[bytes, OpenedMemory] = {}
        self._lock = threading.Lock()
        self.thread = thread
        #: Memories that are being opened. Operations on the set are atomic.
        self.opening: set[OpenedMemory] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes) -> OpenedMemory:
        """Return the memory of a handle for one more user; later jobs of the thread find it settled."""
        with self._lock:
            memory = self._open.get(handle)
            if memory is None:
                memory = self._open[handle] = OpenedMemory(handle)
                self.opening.add(memory)
                self.thread.later(partial(self._settle, memory))
            memory.users += 1
        return memory

    def hold(self, memory: OpenedMemory) -> None:
        with self._lock:
            memory.users += 1

    def release_memory(self, memory: OpenedMemory) -> None:
        """Release the memory for one user. A later user of the handle opens it again, after it is closed."""
        with self._lock:
            memory.users -= 1
            if memory.users:
                return
            self._forget(memory)
        self.thread.later(partial(self._close, memory))

    def close(self) -> None:
        """Close unused memory, and end the thread."""
        self.thread.wait()
        self.thread.close()

    def _forget(self, memory: OpenedMemory) -> None:
        if self._open.get(memory.handle) is memory:
            del self._open[memory.handle]

    # ---- in the background thread ---------------------------------------------------------

    def _settle(self, memory: OpenedMemory) -> None:
        try:
            memory.wait_idle(self._mapped(memory.handle))
        except Exception as error:  # defects of gpuserve are raised in the users of the memory too
            with self._lock:
                self._forget(memory)
            memory.wait_idle(copy.copy(error))
        self.opening.discard(memory)

    def _close(self, memory: OpenedMemory) -> None:
        if memory.state is OpenState.REFUSED:
            return
        memory.close()
        mapped = memory.mapped()
        if mapped.is_own:
            return
        with suppress(CudaError):  # the device is lost, which its next user detects
            if memory.is_read_in_place:
                self._runtime.synchronize_stream(DEFAULT_STREAM)
            self._runtime.close_memory(mapped.address)

    def _mapped(self, handle: bytes) -> Mapped:
        if len(handle) != HANDLE_NBYTES:
            raise ValueError(f"a handle has {len(handle)} bytes, expected {HANDLE_NBYTES}")
        own = self._own.get(handle)
        address = self._runtime.open_memory(handle) if own is None else own
        try:
            start, nbytes = self._runtime.address_range(address)
            is_here = self._is_here(address)
        except BaseException:
            if own is None:
                self._runtime.close_memory(address)
            raise
        return Mapped(address, start + nbytes - address, is_here, own is not None)

    def _is_here(self, address: int) -> bool:
        try:
            return self._runtime.device_of(address) == self._number
        except CudaError as error:
            if error.is_sticky:
                raise
            return False  # memory of a device that this process does not see


#: Alignment of blocks, that of CUDA's own allocations.
ALIGNMENT: Final = 512
#: Minimal size and granularity of a segment: below 2 MiB, allocations share the memory that a handle exposes.
SEGMENT_NBYTES: Final = 32 << 20
_STEP_NBYTES: Final = 2 << 20

#: Addresses of this process's own handles. CUDA opens handles in other processes only, but a worker may read
#: its own exports, and worker threads share a process.
OF_THIS_PROCESS: Final[dict[bytes, int]] = {}


#: Function that announces a segment to a front. Every front has its own.
Announce: TypeAlias = Callable[[ExportSegment], object]


class ExportBlock(NamedTuple):
    """A part of a segment for one output."""

    address: int
    place: Exported


class _Owned(NamedTuple):
    address: int
    segment: ExportSegment
    allocator: Allocator


class ExportPool:
    """The exported memory of one device. Any thread may use it. Up to ``limit_nbytes`` of the device are
    allocated and kept: freeing an allocation would require that all other processes close it first.
    """

    def __init__(self, runtime: Runtime, limit_nbytes: int) -> None:
        self._runtime = runtime
        self._limit_nbytes = limit_nbytes
        self._owned: list[_Owned] = []
        self._lent: dict[tuple[int, int], int] = {}
        self._front: Announce | None = None
        self._lock = threading.Lock()

    def start(self, front: Announce) -> None:
        """Announce segments to a front that keeps outputs, if the first can be allocated and exported."""
        with self._lock:
            if not self._owned:
                self._add(SEGMENT_NBYTES)
            for one in self._owned:
                front(one.segment)
            self._front = front

    def allocate(self, nbytes: int, front: Announce) -> ExportBlock | None:
        """Return an undefined block for a front; None without room, or without exports for it."""
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
        """Free blocks (segment, offset) that no worker reads; raise ``KeyError`` for unknown ones."""
        with self._lock:
            for segment, offset in blocks:
                size = self._lent.pop((segment, offset))
                self._owned[segment].allocator.free(offset, size)

    def withdraw(self, front: Announce) -> None:
        """Stop exports for a lost front. Workers may still read its blocks, so these are not reused."""
        with self._lock:
            if self._front != front:
                return
            self._front = None
            self._lent.clear()

    def close(self) -> None:
        """Stop exporting, in a process that continues. The memory is not freed: others may have it open, and
        CUDA does not define the effect of freeing it then.
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


#: An event of the device, the segment that the work before it reads, and the object whose deletion notifies
#: the front.
_Return: TypeAlias = "tuple[int, OpenedMemory, object]"


class Returns:
    """A thread that releases memory read in place, after the device's reads. Enqueuing does not block."""

    def __init__(self, runtime: Runtime, number: int, events: Events, opened: OpenedHandles) -> None:
        self._runtime = runtime
        self._number = number
        self._events = events
        self._opened = opened
        #: Arrays are deleted inside any line, from where putting to this queue is safe.
        self._queue: queue.SimpleQueue[_Return | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def lease(self, opened: OpenedMemory, of_batch: object) -> MemoryLease:
        """Return the lease of arrays over a segment; ``of_batch`` ends with them and the device's use."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gs-returns", daemon=True)
            self._thread.start()
        self._opened.hold(opened)
        return MemoryLease(partial(self.put, self._events.acquire(), opened, of_batch))

    def put(self, event: int, opened: OpenedMemory, of_batch: object) -> None:
        """Release a segment when the device has finished reading it, after its last array was deleted."""
        with suppress(CudaError):  # other users of the device see the error; a finalizer must not raise
            self._runtime.record(event, DEFAULT_STREAM)
        self._queue.put((event, opened, of_batch))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with suppress(CudaError):  # every wait below raises the error again
            self._runtime.use_device(self._number)
            self._runtime.tolerate_captures()
        while (one := self._queue.get()) is not None:
            event, opened, of_batch = one
            with suppress(CudaError):  # the device ends with this worker
                self._runtime.wait(event)
            self._events.release_event(event)
            self._opened.release_memory(opened)
            del one, opened, of_batch  # this deletion notifies the front
