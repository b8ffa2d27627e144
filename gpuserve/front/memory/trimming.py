"""What nobody uses any more goes back to the machine: memory of arenas that a burst took, and of the heap.
malloc keeps what is freed in the middle of the heap, and our thresholds have it keep 64 MiB at the end as
well, because to take memory from the machine again costs more than most requests. So the heap is trimmed only
where it has kept a good deal, and while there is little else to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from gpuserve_worker.memory.orphans import ORPHANS

logger = logging.getLogger(__name__)

#: How often it is looked. What was not used from one look to the next is given back.
LOOK_S: Final = 2.0
#: What malloc may keep for later.
SLACK_NBYTES: Final = 32 << 20
#: A front has twice as many objects as one that was just started; a full collection takes 5 ms up to here.
_MANY_BLOCKS: Final = 500_000
#: The front is busy where it takes more of a CPU than this.
BUSY: Final = 0.5


class Taken(NamedTuple):
    """What the process takes of the machine alone, and what of it is in use as malloc knows."""

    nbytes: int
    used_nbytes: int


class Heap:
    """Judges when the heap is worth trimming. Pure: what the process takes comes in."""

    def __init__(self) -> None:
        #: The least that was taken and not in use: the interpreter's own, and what cannot be given back.
        self._rest_nbytes: int | None = None
        self._cpu_s = 0.0
        self._looked_at = 0.0

    def is_worth_trimming(self, taken: Taken, cpu_s: float, now: float) -> bool:
        """Whether malloc keeps much, and the process has the time; it has used so much of a CPU so far."""
        is_busy = cpu_s - self._cpu_s > BUSY * (now - self._looked_at)
        self._cpu_s, self._looked_at = cpu_s, now
        rest_nbytes = taken.nbytes - taken.used_nbytes
        if self._rest_nbytes is None or rest_nbytes < self._rest_nbytes:
            self._rest_nbytes = rest_nbytes
        return not is_busy and rest_nbytes - self._rest_nbytes > SLACK_NBYTES

    def trimmed(self, taken: Taken) -> None:
        """It was, and this is taken now: there is no more to be had."""
        self._rest_nbytes = taken.nbytes - taken.used_nbytes


class _MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())
    hblkhd: int
    uordblks: int


class Malloc:
    """The memory of this process, as glibc and the kernel know it."""

    def __init__(self) -> None:
        #: Kept open: a process that has no descriptor left needs it most.
        self._statm = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115
        libc = ctypes.CDLL(None)
        self._trim = libc.malloc_trim
        #: From glibc 2.33 on. Without it all counts as in no use: the heap is trimmed each time it has grown.
        self._info = getattr(libc, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo

    def trim(self) -> Taken:
        """Give back what is free, and say what is left: at once, before more is taken or freed."""
        self._trim(0)
        return self.taken()

    def taken(self) -> Taken:
        _, resident, shared, *_ = os.pread(self._statm.fileno(), 256, 0).split()
        info = None if self._info is None else self._info()
        used_nbytes = 0 if info is None else info.uordblks + info.hblkhd
        return Taken((int(resident) - int(shared)) * mmap.PAGESIZE, used_nbytes)


def reclaim_orphans() -> None:
    """Give back the memory whose owners were deleted before they did so."""
    for kind, n in ORPHANS.reclaim().items():
        logger.error("defect of the server: reclaimed %d x %s, which no owner gave back", n, kind)


async def keep_trim(shrink_arenas: Callable[[], None]) -> None:
    """Give back what can be, for ever."""
    heap, malloc, was_crowded = Heap(), Malloc(), False
    heap.is_worth_trimming(malloc.taken(), time.process_time(), time.monotonic())  # before there is any burst
    while True:
        await asyncio.sleep(LOOK_S)
        reclaim_orphans()
        shrink_arenas()
        is_crowded = sys.getallocatedblocks() > _MANY_BLOCKS
        is_worth_it = heap.is_worth_trimming(malloc.taken(), time.process_time(), time.monotonic())
        # A burst may come and go between two looks: then it is known by what it left alone.
        if not is_crowded and (was_crowded or is_worth_it):
            gc.collect()  # drops the lists of free objects, each of which keeps the MiB that it lies in
        was_crowded = is_crowded
        if is_worth_it:
            # Some 0.3 ms a MiB; the loop goes on meanwhile, but for what is large enough for malloc.
            heap.trimmed(await asyncio.to_thread(malloc.trim))
