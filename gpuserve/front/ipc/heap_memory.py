"""Heap memory of a front or ingress process: the budget for request bodies, and the trimming of the
heap.

A tensor takes pages of its model's arena as its bytes arrive, and claims cost nothing. All other bytes of
bodies lie on the heap, in one budget (``Intake``) for all connections.

Unused memory goes back to the machine: arena memory after a burst, and heap memory. malloc keeps memory that
is freed in the middle of the heap, and by our thresholds 64 MiB at its end, because allocating from the
machine again costs more than most requests. So the heap is trimmed only if it keeps a lot of unused memory,
and while the process has little else to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from gpuserve.core.errors import NoMemory
from gpuserve_worker.memory.arena import INTAKE_SHARE, ORPHANS, SHARE_OF_FREE, Block, OutOfMemory
from gpuserve_worker.memory.segments import SPARED_NBYTES, available_nbytes

logger = logging.getLogger(__name__)

#: The most of a block that is reserved ahead of its bytes: the event loop clears it in a few milliseconds.
AHEAD_NBYTES: Final = 2 << 20
#: The size of the objects of a request whose body arrives in parts, and of a request that a coroutine serves.
REQUEST_NBYTES: Final = 1 << 10
AWAITED_NBYTES: Final = 4 << 10
#: The growth of the budget's use after which the machine is asked again for its available memory.
_RECHECK_NBYTES: Final = 8 << 20
_LOG_PERIOD_S: Final = 10.0


class Intake:
    """The budget of heap memory for request bodies. ``refused`` counts requests that found no memory."""

    def __init__(
        self, limit_nbytes: int, available_nbytes: Callable[[], int | None] = available_nbytes
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0
        #: Whether readers that can wait should do so before they read more.
        self.is_crowded = False
        self.refused = 0
        self._by_source: dict[str | bytes, int] = {}
        self._available_nbytes = available_nbytes
        self._allowed_nbytes = 0
        self._logged_at = -math.inf

    def change(self, nbytes: int, source: str | bytes = "") -> None:
        """Add ``nbytes``, perhaps negative, to the use by ``source`` (""); raises NoMemory."""
        total = self.nbytes + nbytes
        of_source = nbytes if source else 0
        if source in self._by_source:
            of_source += self._by_source[source]
        if nbytes <= 0:
            self._allowed_nbytes = min(self._allowed_nbytes, total + _RECHECK_NBYTES)
        elif total > self.limit_nbytes:
            raise self.refusal(
                f"the bodies of requests under way hold {self.nbytes} bytes, expected at most "
                f"{self.limit_nbytes} with {nbytes} more (max_intake_nbytes)"
            )
        elif of_source > SHARE_OF_FREE * (self.limit_nbytes - total):
            raise self.refusal(
                f"the bodies of requests from this address hold {of_source - nbytes} bytes, expected at most "
                f"{SHARE_OF_FREE} times what of {self.limit_nbytes} is free with {nbytes} more "
                "(max_intake_nbytes)"
            )
        elif total > self._allowed_nbytes:
            left = self._available_nbytes()
            # Bodies will need as much memory again: when they are parsed, for batches, and for answers.
            needed_nbytes = nbytes + _RECHECK_NBYTES + max(SPARED_NBYTES, total)
            if left is not None and left < needed_nbytes:
                raise self.refusal(
                    f"its machine or control group has {left} bytes left, and {needed_nbytes} are needed"
                )
            self._allowed_nbytes = total + _RECHECK_NBYTES
        self.nbytes = total
        if of_source:
            self._by_source[source] = of_source
        elif source in self._by_source:
            del self._by_source[source]
        self.is_crowded = 2 * total > self.limit_nbytes

    def refusal(self, why: str) -> NoMemory:
        """Return the error of a request that finds no memory, count the request, and log it now and then."""
        self.refused += 1
        if time.monotonic() - self._logged_at >= _LOG_PERIOD_S:
            self._logged_at = time.monotonic()
            logger.warning("refused requests for lack of memory, %d so far: %s", self.refused, why)
        return NoMemory(f"the server has no memory for the request now: {why}")


class Share:
    """A request's part of an intake budget, until reduced to 0; with bytes, ``objects_nbytes`` are added."""

    __slots__ = ("_intake", "_objects_nbytes", "_source", "nbytes")

    memory_kind = INTAKE_SHARE

    def __init__(self, intake: Intake, source: str | bytes = "", objects_nbytes: int = 0) -> None:
        self._intake = intake
        self._source = source
        self._objects_nbytes = objects_nbytes
        self.nbytes = 0

    def __del__(self) -> None:
        if self.nbytes:
            ORPHANS.add(self)

    def reclaim(self) -> None:
        self.hold(0)

    def hold(self, nbytes: int) -> None:
        """Hold ``nbytes`` from now on. Raises NoMemory if there is no room; the share is unchanged then."""
        held_nbytes = self.nbytes
        if nbytes != held_nbytes:
            more = nbytes - held_nbytes
            if not (nbytes and held_nbytes):
                more += self._objects_nbytes if nbytes else -self._objects_nbytes
            self._intake.change(more, self._source)
            self.nbytes = nbytes

    def reserve(self, block: Block, nbytes: int) -> int:
        """Reserve ``nbytes`` of a claimed block, and some ahead; returns their number. Raises NoMemory."""
        try:
            return block.reserve(min(block.nbytes, nbytes + min(nbytes, AHEAD_NBYTES)), self._source)
        except OutOfMemory as error:
            raise self._intake.refusal(str(error)) from error


#: Tensors below this size are passed on as bytes, and never lie in a block.
LARGE_NBYTES: Final = 64 << 10


class ArrivingTensor:
    """The memory of a tensor of ``nbytes`` that arrives in parts: ``block``, or the heap if that is None. The
    memory grows with the bytes that arrive, not by what a client announces.
    """

    __slots__ = ("_heap", "_nbytes", "_reserved_nbytes", "_share", "block", "filled_nbytes")

    def __init__(self, nbytes: int, block: Block | None, share: Share) -> None:
        self.block = block
        self.filled_nbytes = 0
        self._nbytes = nbytes
        self._heap = bytearray()
        self._reserved_nbytes = 0
        self._share = share

    @property
    def missing_nbytes(self) -> int:
        return self._nbytes - self.filled_nbytes

    def fill(self, part: bytes | bytearray | memoryview) -> int:
        """Copy as much of a part as there is room for. Return the number of copied bytes. Raise NoMemory."""
        copied = min(len(part), self._nbytes - self.filled_nbytes)
        end = self.filled_nbytes + copied
        if self.block is None:
            self._heap += part[:copied]
        else:
            if end > self._reserved_nbytes:
                self._reserved_nbytes = self._share.reserve(self.block, end)
            self.block.view[self.filled_nbytes : end] = part[:copied]
        self.filled_nbytes = end
        return copied

    def data(self) -> bytes | memoryview | Block:
        if self.block is not None:
            return self.block
        return bytes(self._heap) if self._nbytes < LARGE_NBYTES else memoryview(self._heap)


#: The period of the trimmer. Arena memory that was unused for one period is released.
TRIM_PERIOD_S: Final = 2.0
#: The unused memory that malloc may keep.
SLACK_NBYTES: Final = 32 << 20
#: After a burst has ended by so much since the last trimming, the trimming is repeated.
ENDED_NBYTES: Final = 8 << 20
#: Objects that a collection of the youngest generation waits for, then collections that one of the next
#: generation waits for. A request leaves nothing in a reference cycle and frees what it made: a hundred
#: thousand in a row cause one young collection. A burst of objects that stay, such as open streams, causes a
#: full one every 100,000 objects.
GC_THRESHOLDS: Final = (5000, 10, 1)
#: The objects of a busy process, twice those of a new one.
_MANY_BLOCKS: Final = 400_000
#: The threshold of full collections while they pause, which no process reaches.
_NO_FULL_COLLECTION: Final = (1 << 31) - 1
#: The longest pause of full collections.
_PAUSE_S: Final = 600.0
#: The process is busy if it uses more than this part of a CPU.
BUSY: Final = 0.5


class MemoryUse(NamedTuple):
    """The private memory of the process, and the part of it in use according to malloc."""

    nbytes: int
    used_nbytes: int


class TrimPolicy:
    """Decides when trimming the heap is worth it. Pure: measurements are arguments.

    Memory that malloc does not have in use is unused, or full of the interpreter's small objects. So what
    remains after a trimming during a burst says nothing about what can be released after the burst.
    """

    def __init__(self) -> None:
        #: The least memory not in use so far: the interpreter's own, and memory that cannot be released.
        self._least_nbytes: int | None = None
        #: The memory not in use that remained after the last trimming.
        self._trimmed_nbytes = 0
        self._cpu_s = 0.0
        self._measured_at = 0.0

    def is_worth_trimming(self, use: MemoryUse, cpu_s: float, now: float) -> bool:
        """Return whether malloc keeps much memory, and the process has used little of a CPU recently."""
        is_busy = cpu_s - self._cpu_s > BUSY * (now - self._measured_at)
        self._cpu_s, self._measured_at = cpu_s, now
        rest_nbytes = use.nbytes - use.used_nbytes
        if self._least_nbytes is None:
            self._least_nbytes = self._trimmed_nbytes = rest_nbytes
        self._least_nbytes = min(self._least_nbytes, rest_nbytes)
        more_nbytes = rest_nbytes - self._trimmed_nbytes
        has_changed = more_nbytes > SLACK_NBYTES or more_nbytes < -ENDED_NBYTES
        return not is_busy and has_changed and rest_nbytes - self._least_nbytes > SLACK_NBYTES

    def trimmed(self, use: MemoryUse) -> None:
        """Record the memory that remains after trimming, of which no more can be released now."""
        self._trimmed_nbytes = use.nbytes - use.used_nbytes


class _MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())
    hblkhd: int
    uordblks: int


class Malloc:
    """The memory of this process, as measured by glibc and the kernel."""

    def __init__(self) -> None:
        #: Kept open, because a process without free descriptors needs it most.
        self._statm = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115
        libc = ctypes.CDLL(None)
        self._trim = libc.malloc_trim
        #: Since glibc 2.33. Without it all memory counts as unused: the heap is trimmed whenever it has
        #: grown.
        self._info = getattr(libc, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo

    def trim(self) -> MemoryUse:
        """Release free memory. Returns the remaining memory, measured before other code runs."""
        self._trim(0)
        return self.memory_use()

    def memory_use(self) -> MemoryUse:
        _, resident, shared, *_ = os.pread(self._statm.fileno(), 256, 0).split()
        info = None if self._info is None else self._info()
        used_nbytes = 0 if info is None else info.uordblks + info.hblkhd
        return MemoryUse((int(resident) - int(shared)) * mmap.PAGESIZE, used_nbytes)


def reclaim_orphans() -> None:
    """Release memory whose owners were deleted without releasing it, and log the defect."""
    for kind, n in ORPHANS.reclaim().items():
        logger.error("server defect: reclaimed %d x %s, which no owner released", n, kind)


def pause_full_collections(phase: str, info: dict[str, int]) -> None:
    """Stop full garbage collections while the process has many objects. A garbage collector's callback.

    A million objects take 130 ms to visit, and the event loop waits meanwhile. ``trim_periodically`` resumes
    full collections when the burst is over.
    """
    if phase == "stop" and info["generation"] == 2 and sys.getallocatedblocks() > _MANY_BLOCKS:
        gc.set_threshold(*GC_THRESHOLDS[:2], _NO_FULL_COLLECTION)


async def trim_periodically(shrink_arenas: Callable[[], None]) -> None:
    """Release unused memory periodically, for ever."""
    policy, malloc, paused_at = TrimPolicy(), Malloc(), math.inf
    # The base line, before any burst.
    policy.is_worth_trimming(malloc.memory_use(), time.process_time(), time.monotonic())
    while True:
        await asyncio.sleep(TRIM_PERIOD_S)
        reclaim_orphans()
        shrink_arenas()
        now = time.monotonic()
        is_worth_it = policy.is_worth_trimming(malloc.memory_use(), time.process_time(), now)
        is_paused = gc.get_threshold()[2] == _NO_FULL_COLLECTION
        paused_at = min(paused_at, now) if is_paused else math.inf
        is_crowded = sys.getallocatedblocks() > _MANY_BLOCKS
        if now - paused_at > _PAUSE_S if is_crowded else is_paused or is_worth_it:
            gc.set_threshold(*GC_THRESHOLDS)
            gc.collect()  # drops the lists of free objects, each of which keeps the MiB that it lies in
            paused_at = math.inf
        if is_worth_it:
            # Some 0.3 ms per MiB. The event loop goes on meanwhile, but for allocations large enough for
            # malloc.
            policy.trimmed(await asyncio.to_thread(malloc.trim))
