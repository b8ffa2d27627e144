"""A segment that is made before it is needed: to reserve one, clear it and lock it for a device takes longer
than most batches. Which arena gets it is the arenas' business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from gpuserve_worker.memory.arena import SEGMENT_NBYTES, SPARED_NBYTES, ArenaSegment
from gpuserve_worker.memory.available import available_nbytes


class SegmentLocks(Protocol):
    """Who locks the pages of the segment."""

    def lock_now(self, memory: memoryview) -> None: ...

    def unlock(self, memory: memoryview) -> None: ...


class SpareSegment:
    """At most one segment of ``SEGMENT_NBYTES``, whole and locked. ``later`` is who makes the next one when
    it is taken. Any thread may use it.
    """

    def __init__(self, locks: SegmentLocks, later: Callable[[Callable[[], None]], None]) -> None:
        self._locks = locks
        self._later = later
        self._segment: ArenaSegment | None = None
        self._lock = threading.Lock()
        self._is_over = False

    def make(self) -> None:
        """Have one ready, unless there is one, or the machine has no memory for it."""
        if self._segment is not None or (segment := _made()) is None:
            return
        self._locks.lock_now(segment.view)
        with self._lock:
            if not self._is_over and self._segment is None:
                self._segment = segment
                return
        self._give_up(segment)

    def take(self) -> ArenaSegment | None:
        """The one that is ready, None where none is. The next one is on its way then."""
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None:
            self._later(self.make)
        return segment

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            segment, self._segment = self._segment, None
        if segment is not None:
            self._give_up(segment)

    def _give_up(self, segment: ArenaSegment) -> None:
        self._locks.unlock(segment.view)
        segment.close()


def _made() -> ArenaSegment | None:
    available = available_nbytes()
    if available is not None and available < SEGMENT_NBYTES + SPARED_NBYTES:
        return None
    try:
        segment = ArenaSegment(SEGMENT_NBYTES, is_claim=False)
    except OSError:
        return None
    try:
        segment.reserve(0, SEGMENT_NBYTES)
    except OSError:
        segment.close()
        return None
    return segment
