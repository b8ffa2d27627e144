"""Host memory for copies from and to a device: page locks, copies in progress, reused blocks, and the
background thread of slow operations.

CUDA locks one or two GB a second, so mappings are locked in the background. Until then copies from and to
them work as with any memory, but slower::

                 its turn comes          CUDA has done it
    WAITING ───────────────────► LOCKING ───────────────► LOCKED
       │                            │ └─(CUDA refused)───► REFUSED
       └──(its owner unlocks it)────┴──► UNWANTED ◄───────┘

Memory that is unlocked while CUDA locks it stays mapped until the locking ends, and is unlocked then. No
thread waits for that.
"""

from __future__ import annotations

import ctypes
import enum
import math
import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from gpuserve_worker.cuda.device.arrays import SizedCache, size_class
from gpuserve_worker.cuda.device.runtime import CudaError, Runtime
from gpuserve_worker.memory.segments import SpareSegment, touch

#: A thread that does not end within this time is blocked by a device that no longer responds.
_JOIN_S: Final = 5.0


class Background:
    """A thread for slow operations that no request waits for; ``enter`` selects the device in it."""

    def __init__(self, enter: Callable[[], None], name: str = "gs-background") -> None:
        self._enter = enter
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def later(self, job: Callable[[], None]) -> None:
        """Enqueue a job. After ``close()`` jobs are ignored."""
        self._queue.put(job)
        with self._lock:
            if self._thread is None and not self._is_over:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Block until all jobs enqueued before are done."""
        done = threading.Event()
        self.later(done.set)
        done.wait()

    def close(self) -> None:
        """Finish the running job and drop the others."""
        with self._lock:
            self._is_over = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(_JOIN_S)

    def _run(self) -> None:
        with suppress(CudaError):  # every use of the device raises the error again
            self._enter()
        while (job := self._queue.get()) is not None and not self._is_over:
            job()
            del job  # the job may refer to memory that is to be unmapped


#: (address, nbytes)
Span: TypeAlias = "tuple[int, int]"


class HostCopies:
    """The copies in progress from and to host memory, by the event of their end. Any thread may call any
    method: each step is one operation on a dict.

    Memory must not be unlocked or unmapped while the device reads or writes it. Waiting for a whole stream
    would also wait for the callables of later batches.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._spans: dict[int, Sequence[Span]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self, event: int, spans: Sequence[Span]) -> None:
        """Record copies from and to ``spans``, which the event follows."""
        self._spans[event] = spans

    def end(self, event: int) -> None:
        """Forget an event that is complete, before its next use."""
        self._spans.pop(event, None)

    def wait(self, address: int, nbytes: int) -> None:
        """Wait for the copies from and to this memory, and for no others. Raise ``CudaError``."""
        for event, spans in list(self._spans.items()):
            if any(at < address + nbytes and address < at + length for at, length in spans):
                self._runtime.wait(event)


def address_of(memory: Any) -> int:
    """Return the address of a buffer's first byte, or 0 for an empty buffer."""
    if not len(memory):
        return 0
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    except TypeError:  # the memory is read-only
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class LockStage(enum.Enum):
    """The stage of a mapping between the request to lock it and its end."""

    WAITING = "its turn has not come"
    LOCKING = "CUDA is at it"
    LOCKED = "copies run by themselves"
    REFUSED = "CUDA would not"
    UNWANTED = "its owner has given it up"


#: The possible next stages of each stage.
NEXT_LOCK_STAGE: Final = {
    LockStage.WAITING: (LockStage.LOCKING, LockStage.UNWANTED),
    LockStage.LOCKING: (LockStage.LOCKED, LockStage.REFUSED, LockStage.UNWANTED),
    LockStage.LOCKED: (LockStage.UNWANTED,),
    LockStage.REFUSED: (LockStage.UNWANTED,),
}


class IllegalStage(Exception):
    """A transition that a stage does not allow: a defect of the worker."""


class _Pages:
    """One mapping to be locked. ``memory`` keeps it mapped."""

    def __init__(self, memory: memoryview, address: int, *, is_lent: bool) -> None:
        self.memory = memory
        self.address = address
        self.nbytes = len(memory)
        self.is_lent = is_lent
        self.stage = LockStage.WAITING

    def is_wanted(self) -> bool:
        return self.stage is not LockStage.UNWANTED

    def advance(self, stage: LockStage) -> None:
        if stage not in NEXT_LOCK_STAGE.get(self.stage, ()):
            raise IllegalStage(f"memory of {self.nbytes} bytes: {stage.name} after {self.stage.name}")
        self.stage = stage


class PageLocker:
    """A page locker of mappings, each of which begins on a page. Any thread may call any method; only
    ``lock_now`` and ``unlock`` can block. At most ``limit_nbytes`` are locked at once (0: no limit), and of
    clients' memory at most ``lent_limit_nbytes``. Memory beyond the limits stays unlocked.
    """

    def __init__(
        self,
        runtime: Runtime,
        background: Background,
        uses: HostCopies,
        lent_limit_nbytes: int,
        warn: Callable[[str], None],
        limit_nbytes: int = 0,
    ) -> None:
        self._runtime = runtime
        self._background = background
        self._uses = uses
        self._lent_left_nbytes = lent_limit_nbytes
        self._left_nbytes = limit_nbytes or math.inf
        self._warn = warn
        self._warned = False
        self._known: dict[int, _Pages] = {}
        #: Never held during calls of CUDA.
        self._lock = threading.Lock()

    def lock(self, memory: memoryview) -> None:
        """Schedule the locking of a mapping. Only the first refusal of the worker's life is logged."""
        pages = self._add(memory, is_lent=False)
        if pages is not None:
            self._background.later(partial(self._lock_pages, pages))

    def lock_now(self, memory: memoryview) -> None:
        pages = self._add(memory, is_lent=False)
        if pages is not None:
            self._lock_pages(pages)

    def lock_lent(self, memory: memoryview) -> bool:
        """Schedule the locking of a client's memory. Return False if that would exceed the limit."""
        pages = self._add(memory, is_lent=True)
        if pages is not None:
            self._background.later(partial(self._lock_pages, pages))
        return pages is not None

    @property
    def locked_nbytes(self) -> int:
        return sum(one.nbytes for one in tuple(self._known.values()) if one.stage is LockStage.LOCKED)

    def is_locked(self, memory: memoryview) -> bool:
        pages = self._known.get(address_of(memory))
        return pages is not None and pages.stage is LockStage.LOCKED

    def unlock(self, memory: memoryview) -> None:
        """Unlock a mapping before it is unmapped, after the copies from and to it have ended."""
        with self._lock:
            pages = self._known.pop(address_of(memory), None)
            if pages is None:
                return
            stage = pages.stage
            pages.advance(LockStage.UNWANTED)
            self._left_nbytes += pages.nbytes
            if pages.is_lent:
                self._lent_left_nbytes += pages.nbytes
        with suppress(CudaError):  # the device is lost, and its locks with it
            self._uses.wait(pages.address, pages.nbytes)
            if stage is LockStage.LOCKED:
                self._runtime.page_unlock(pages.address)
        if stage is not LockStage.LOCKING:
            pages.memory.release()

    def _add(self, memory: memoryview, *, is_lent: bool) -> _Pages | None:
        """Add a mapping. Return None if it is known already, or would exceed a limit."""
        address, nbytes = address_of(memory), len(memory)
        with self._lock:
            if address in self._known or (is_lent and nbytes > self._lent_left_nbytes):
                return None
            if nbytes <= self._left_nbytes:
                self._left_nbytes -= nbytes
                self._lent_left_nbytes -= nbytes if is_lent else 0
                # A separate view, so that the release of the given one does not affect it.
                pages = self._known[address] = _Pages(memory[:], address, is_lent=is_lent)
                return pages
        self._tell(nbytes, "gpu_locked_nbytes of the server leaves this process no more")
        return None

    def _lock_pages(self, pages: _Pages) -> None:
        with self._lock:
            if not pages.is_wanted():
                return
            pages.advance(LockStage.LOCKING)
        stage = self._tried(pages)
        with self._lock:
            if pages.is_wanted():
                pages.advance(stage)
                return
        if stage is LockStage.LOCKED:
            with suppress(CudaError):
                self._runtime.page_unlock(pages.address)
        pages.memory.release()

    def _tried(self, pages: _Pages) -> LockStage:
        # Populate the pages first: CUDA would do so holding locks that every other call of the process waits
        # for.
        touch(pages.address, pages.nbytes)
        try:
            self._runtime.page_lock(pages.address, pages.nbytes)
        except CudaError as error:
            self._tell(pages.nbytes, f"CUDA refused: {error}")
            return LockStage.REFUSED
        return LockStage.LOCKED

    def _tell(self, nbytes: int, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"{nbytes} bytes of host memory are not page-locked, so copies to and from the device are "
                f"slower: {reason}"
            )


#: Limit of a reused block's size, relative to the requested size.
SPARE: Final = 2
#: Memory that is kept: this size, or this many of the largest blocks, because locking a block takes longer
#: than copying it.
RETAINED_NBYTES: Final = 64 << 20
_RETAINED_BLOCKS: Final = 4


class HostBlock(NamedTuple):
    """Host memory of the worker."""

    memory: memoryview
    address: int


class HostBlocks:
    """Reused host memory for data that a device cannot read directly, copied there first. Thread-safe."""

    def __init__(self, background: Background, locks: PageLocker) -> None:
        self._background = background
        self._locks = locks
        self._shelf: SizedCache[HostBlock] = SizedCache(RETAINED_NBYTES, SPARE)
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> HostBlock:
        """Return a block of at least ``nbytes``. A much larger block is left for larger requests."""
        size = size_class(nbytes)
        with self._lock:
            self._shelf.limit_nbytes = max(self._shelf.limit_nbytes, _RETAINED_BLOCKS * size)
            block = self._shelf.pop(size)
        return self._new(size) if block is None else block

    def release_block(self, block: HostBlock) -> None:
        """Return a block for reuse. The copies from it must have ended."""
        with self._lock:
            self._shelf.put(len(block.memory), block)
            if self._shelf.nbytes <= self._shelf.limit_nbytes:
                return
            surplus = self._shelf.surplus()
        self._unlock_later(surplus)

    def shrink(self) -> None:
        """Free blocks that no batch has needed since the last call, and keep no more than at the start."""
        with self._lock:
            unused = self._shelf.unused()
            self._shelf.limit_nbytes = RETAINED_NBYTES
        self._unlock_later(unused)

    def _unlock_later(self, blocks: Iterable[HostBlock]) -> None:
        for one in blocks:
            self._background.later(partial(self._locks.unlock, one.memory))

    def close(self) -> None:
        with self._lock:
            left = self._shelf.empty()
        for block in left:
            self._locks.unlock(block.memory)

    def _new(self, size: int) -> HostBlock:
        memory = memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
        self._locks.lock(memory)
        return HostBlock(memory, address_of(memory))


class HostMemory:
    """The host memory of one ``CudaDevice``. ``locks`` are for mappings of others, ``blocks`` are the
    worker's own memory, ``uses`` are copies in progress, and ``spare`` is the segment for the next arena that
    grows.
    """

    def __init__(
        self,
        runtime: Runtime,
        enter: Callable[[], None],
        lent_limit_nbytes: int,
        warn: Callable[[str], None],
        locked_limit_nbytes: int = 0,
    ) -> None:
        self._background = Background(enter)
        self.uses = HostCopies(runtime)
        limits = lent_limit_nbytes, warn, locked_limit_nbytes
        self.locks = PageLocker(runtime, self._background, self.uses, *limits)
        self.blocks = HostBlocks(self._background, self.locks)
        self.spare = SpareSegment(self.locks, self._background.later)
        self.later = self._background.later

    def wait(self) -> None:
        """Block until all scheduled locking is done, so that copies can be measured."""
        self._background.wait()

    def close(self) -> None:
        self._background.close()
        self.blocks.close()
        self.spare.close()
