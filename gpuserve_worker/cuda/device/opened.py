"""Memory of devices that other processes made, as a worker sees it: opened by its ``cudaIpcMemHandle_t``,
once however many use it, and closed with the last of them. CUDA takes its time for both, so a thread of its
own does them: whoever needs what is being opened waits for that, and nobody else does. A borrower: whose
memory it is, and who may read what, is not decided here.

::

            opened            nobody uses it
    OPENING ──────► OPEN ────────────────────► CLOSED
       └──────► REFUSED
"""

from __future__ import annotations

import copy
import enum
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from gpuserve_worker.cuda.device.background import Background
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, HANDLE_NBYTES, CudaError, Runtime


class OpenState(enum.Enum):
    """What can be done with memory of another process."""

    OPENING = "it is waited for"
    OPEN = "it can be used"
    REFUSED = "it cannot be used, and is not there any more"
    CLOSED = "nobody uses it any more"


#: What may follow a state.
NEXT: Final = {
    OpenState.OPENING: (OpenState.OPEN, OpenState.REFUSED),
    OpenState.OPEN: (OpenState.CLOSED,),
}


class Mapped(NamedTuple):
    """``nbytes`` of a device from ``address`` to the end of their allocation. ``is_here``: on this very
    device; ``is_own``: of this very process.
    """

    address: int
    nbytes: int
    is_here: bool
    is_own: bool


class OpenedMemory:
    """Memory of another process, which is opened by the thread of its ``OpenedMemories``. ``users`` are who
    was given it, and the arrays over it; the last one closes it. ``is_read_in_place``: work that nobody
    waited for may still read it.
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
        """Where it is, for who wants ``nbytes`` of it; waits while it is being opened. Raises ``ValueError``
        where it has less, ``CudaError`` where its owner is gone, or this device cannot reach it.
        """
        if self._found is None:
            self._is_settled.wait()
        found = self._found
        if not isinstance(found, Mapped):
            assert found is not None, "what is settled has been found out"
            raise copy.copy(found)  # each keeps alive what it went through
        if nbytes > found.nbytes:
            raise ValueError(f"expected at most {found.nbytes} bytes, which its allocation has, got {nbytes}")
        return found

    def wait(self) -> None:
        """Wait until it is open, or is known not to be."""
        self._is_settled.wait()

    def settle(self, found: Mapped | Exception) -> None:
        """Tell those who wait where it is, or why it is not there."""
        self._advance(OpenState.OPEN if isinstance(found, Mapped) else OpenState.REFUSED)
        self._found = found
        self._is_settled.set()

    def close(self) -> None:
        self._advance(OpenState.CLOSED)

    def _advance(self, state: OpenState) -> None:
        assert state in NEXT.get(self.state, ()), f"{state.name} after {self.state.name}"
        self.state = state


class OpenedMemories:
    """The handles that are open in this process, each once. ``own`` are those that lead to memory of its own,
    which CUDA does not open. Any thread may use it, but none that collects.
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
        #: Those that are waited for. Its operations are atomic.
        self.opening: set[OpenedMemory] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes) -> OpenedMemory:
        """The memory of a handle, for one more user. What is put to the thread after this finds it
        settled.
        """
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

    def let_go(self, memory: OpenedMemory) -> None:
        """Use it no more. Who wants the handle after its last user has it opened again, behind its end."""
        with self._lock:
            memory.users -= 1
            if memory.users:
                return
            self._forget(memory)
        self.thread.later(partial(self._close, memory))

    def close(self) -> None:
        """Close what nobody uses, and end the thread."""
        self.thread.wait()
        self.thread.close()

    def _forget(self, memory: OpenedMemory) -> None:
        if self._open.get(memory.handle) is memory:
            del self._open[memory.handle]

    # ---- in the thread --------------------------------------------------------------------

    def _settle(self, memory: OpenedMemory) -> None:
        try:
            memory.settle(self._mapped(memory.handle))
        except Exception as error:  # a fault of ours is for who needs the memory to raise, too
            with self._lock:
                self._forget(memory)
            memory.settle(copy.copy(error))
        self.opening.discard(memory)

    def _close(self, memory: OpenedMemory) -> None:
        if memory.state is OpenState.REFUSED:
            return
        memory.close()
        mapped = memory.mapped()
        if mapped.is_own:
            return
        with suppress(CudaError):  # the device cannot be used any more, which whoever uses it next sees, too
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
            return False  # of a device that this process does not see
