"""What is lent of other workers' exports and read in place: it is let go when the device is through with it.
Who may read what is the business of ``exports.py`` and the front; opening and closing is that of
``opened.py``.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.opened import OpenedMemories, OpenedMemory
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, Events, Runtime

#: An event of the device, the segment that its work reads, and what the front waits for the end of.
_Return: TypeAlias = "tuple[int, OpenedMemory, object]"


class Returns:
    """Waits for the device to be through with what was read in place, in a thread of its own, and then lets
    go of it. Nothing that is put here makes who puts it wait.
    """

    def __init__(self, runtime: Runtime, number: int, events: Events, opened: OpenedMemories) -> None:
        self._runtime = runtime
        self._number = number
        self._events = events
        self._opened = opened
        #: Arrays die in the middle of any line, and this queue can be put to from there.
        self._queue: queue.SimpleQueue[_Return | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def lease(self, opened: OpenedMemory, of_batch: object) -> MemoryLease:
        """What every array over a part of the segment refers to. ``of_batch`` lives until the last of them
        has died, and the device is through with what it does with them.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gs-returns", daemon=True)
            self._thread.start()
        self._opened.hold(opened)
        return MemoryLease(partial(self.put, self._events.take(), opened, of_batch))

    def put(self, event: int, opened: OpenedMemory, of_batch: object) -> None:
        """Let go of a segment once the device is through with it: its last array has died."""
        with suppress(CudaError):  # which everybody else sees, too; this may be in the middle of any line
            self._runtime.record(event, DEFAULT_STREAM)
        self._queue.put((event, opened, of_batch))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with suppress(CudaError):  # every wait below says so again
            self._runtime.use_device(self._number)
            self._runtime.tolerate_captures()
        while (one := self._queue.get()) is not None:
            event, opened, of_batch = one
            with suppress(CudaError):  # the device ends with this worker
                self._runtime.wait(event)
            self._events.give(event)
            self._opened.let_go(opened)
            del one, opened, of_batch  # the front is told in this line
