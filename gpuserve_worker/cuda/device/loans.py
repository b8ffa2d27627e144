"""What other workers keep on their devices, as a worker sees it that was lent some of it: opened once, read
in place or copied from, and closed when no array is over it any more.

A borrower: whose it is, and who may read what, is the business of ``exports.py`` and the front.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.exports import OF_THIS_PROCESS
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, Events, Runtime

#: Of a ``cudaIpcMemHandle_t``.
_HANDLE_NBYTES: Final = 64


class OpenedExport:
    """A segment of another worker, open here. ``users`` are the fronts that lent it, and the arrays over it;
    ``is_here`` says that it is on this very device, ``is_own`` that this process made it.
    """

    __slots__ = ("address", "handle", "is_here", "is_own", "nbytes", "users")

    def __init__(self, handle: bytes, address: int, nbytes: int, *, is_own: bool, is_here: bool) -> None:
        self.handle = handle
        self.address = address
        self.nbytes = nbytes
        self.is_own = is_own
        self.is_here = is_here
        self.users = 0


class OpenedExports:
    """The segments of others that are open in this process. Any thread may use it, but none that collects."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime = runtime
        self._number = number
        self._open: dict[bytes, OpenedExport] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes, nbytes: int) -> OpenedExport:
        """A segment for one more user.

        Raises:
            CudaError: it cannot be opened: its owner is gone, or this device cannot reach it.
            ValueError: it is not as large as it was said to be.
        """
        with self._lock:
            opened = self._open.get(handle)
            if opened is None:
                opened = self._open[handle] = self._opened(handle, nbytes)
            opened.users += 1
            return opened

    def hold(self, opened: OpenedExport) -> None:
        """Add one more user of an open segment."""
        with self._lock:
            opened.users += 1

    def let_go(self, opened: OpenedExport) -> None:
        """Let one user go; the last one closes the segment. The device is through with it by now."""
        with self._lock:
            opened.users -= 1
            if opened.users:
                return
            del self._open[opened.handle]
            if not opened.is_own:
                with suppress(CudaError):  # whoever uses the device next sees it, too
                    self._runtime.close_memory(opened.address)

    def _opened(self, handle: bytes, nbytes: int) -> OpenedExport:
        own = OF_THIS_PROCESS.get(handle)
        if own is not None:
            return OpenedExport(handle, own, nbytes, is_own=True, is_here=self._is_here(own))
        if len(handle) != _HANDLE_NBYTES:
            raise ValueError(f"a handle has {len(handle)} bytes, expected {_HANDLE_NBYTES}")
        address = self._runtime.open_memory(handle)
        try:
            start, whole = self._runtime.address_range(address)
            if start + whole < address + nbytes:
                raise ValueError(f"an export has {whole} bytes, expected {nbytes}")
            is_here = self._is_here(address)
        except BaseException:
            self._runtime.close_memory(address)
            raise
        return OpenedExport(handle, address, nbytes, is_own=False, is_here=is_here)

    def _is_here(self, address: int) -> bool:
        try:
            return self._runtime.device_of(address) == self._number
        except CudaError as error:
            if error.is_sticky:
                raise
            return False  # of a device that this process does not see


#: An event of the device, the segment that its work reads, and what the front waits for the end of.
_Return: TypeAlias = "tuple[int, OpenedExport, object]"


class Returns:
    """Waits for the device to be through with what was read in place, in a thread of its own, and then lets
    go of it. Nothing that is put here makes who puts it wait.
    """

    def __init__(self, runtime: Runtime, number: int, events: Events, opened: OpenedExports) -> None:
        self._runtime = runtime
        self._number = number
        self._events = events
        self._opened = opened
        #: Arrays die in the middle of any line, and this queue can be put to from there.
        self._queue: queue.SimpleQueue[_Return | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def lease(self, opened: OpenedExport, of_batch: object) -> MemoryLease:
        """What every array over a part of the segment refers to. ``of_batch`` lives until the last of them
        has died, and the device is through with what it does with them. Raises ``CudaError`` where there is
        no event to be had.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gs-returns", daemon=True)
            self._thread.start()
        self._opened.hold(opened)
        return MemoryLease(partial(self.put, self._events.take(), opened, of_batch))

    def put(self, event: int, opened: OpenedExport, of_batch: object) -> None:
        """Let go of a segment once the device is through with it: its last array has died."""
        with suppress(CudaError):  # which everybody else sees, too; this may be in the middle of any line
            self._runtime.record(event, DEFAULT_STREAM)
        self._queue.put((event, opened, of_batch))

    def close(self) -> None:
        """End the thread, once it has let go of what is there now."""
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
