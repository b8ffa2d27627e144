"""Memory of devices that other processes made, as a worker sees it: opened by its ``cudaIpcMemHandle_t``,
once however many use it, and closed with the last of them. A borrower: whose it is, and who may read what, is
the business of ``exports.py`` and the front.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, Events, Runtime

#: Of a ``cudaIpcMemHandle_t``.
_HANDLE_NBYTES: Final = 64


class OpenedMemory:
    """Memory of another process, open here: ``nbytes`` of a device from ``address`` to the end of its
    allocation. ``users`` are who was given it, and the arrays over it; the last one closes it. ``is_here``:
    it is on this very device; ``is_read_in_place``: work that nobody waited for may still read it.
    """

    __slots__ = ("address", "handle", "is_here", "is_own", "is_read_in_place", "nbytes", "users")

    def __init__(self, handle: bytes, address: int, nbytes: int, *, is_own: bool, is_here: bool) -> None:
        self.handle = handle
        self.address = address
        self.nbytes = nbytes
        self.is_own = is_own
        self.is_here = is_here
        self.is_read_in_place = False
        self.users = 0


class OpenedMemories:
    """The handles that are open in this process, each once. ``own`` are those that lead to memory of its own,
    which CUDA does not open. Any thread may use it, but none that collects.
    """

    def __init__(self, runtime: Runtime, number: int, own: Mapping[bytes, int] | None = None) -> None:
        self._runtime = runtime
        self._number = number
        self._own = {} if own is None else own
        self._open: dict[bytes, OpenedMemory] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes, nbytes: int) -> OpenedMemory:
        """The memory of a handle for one more user, who wants ``nbytes`` of it; ``ValueError``: it has less.
        Raises ``CudaError`` where its owner is gone, or this device cannot reach it.
        """
        with self._lock:
            memory = self._open.get(handle)
            if memory is None:
                memory = self._open[handle] = self._opened(handle)
            memory.users += 1
            if nbytes <= memory.nbytes:
                return memory
            self._leave(memory)
        raise ValueError(f"expected at most {memory.nbytes} bytes, which its allocation has, got {nbytes}")

    def hold(self, memory: OpenedMemory) -> None:
        with self._lock:
            memory.users += 1

    def let_go(self, memory: OpenedMemory) -> None:
        with self._lock:
            self._leave(memory)

    def _leave(self, memory: OpenedMemory) -> None:
        memory.users -= 1
        if memory.users:
            return
        del self._open[memory.handle]
        if memory.is_own:
            return
        with suppress(CudaError):  # the device cannot be used any more, which whoever uses it next sees, too
            self._runtime.use_device(self._number)
            if memory.is_read_in_place:
                self._runtime.synchronize_stream(DEFAULT_STREAM)
            self._runtime.close_memory(memory.address)

    def _opened(self, handle: bytes) -> OpenedMemory:
        if len(handle) != _HANDLE_NBYTES:
            raise ValueError(f"a handle has {len(handle)} bytes, expected {_HANDLE_NBYTES}")
        own = self._own.get(handle)
        address = self._runtime.open_memory(handle) if own is None else own
        try:
            start, nbytes = self._runtime.address_range(address)
            is_here = self._is_here(address)
        except BaseException:
            if own is None:
                self._runtime.close_memory(address)
            raise
        left = start + nbytes - address
        return OpenedMemory(handle, address, left, is_own=own is not None, is_here=is_here)

    def _is_here(self, address: int) -> bool:
        try:
            return self._runtime.device_of(address) == self._number
        except CudaError as error:
            if error.is_sticky:
                raise
            return False  # of a device that this process does not see


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
