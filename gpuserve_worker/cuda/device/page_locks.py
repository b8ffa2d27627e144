"""The pages of host memory that are locked, so that copies from and to a device run by themselves. CUDA locks
one or two GB a second, so all but the first segment are locked in the background, and copied from and to
meanwhile as any memory is: more slowly. No copy is made here.

::

                 its turn comes          CUDA has done it
    WAITING ───────────────────► LOCKING ───────────────► LOCKED
       │                            │ └─(CUDA would not)─► REFUSED
       └──(its owner gives it up)───┴──► UNWANTED ◄─────────┘

What is given up while CUDA is at it stays mapped until it is locked, and is unlocked then; nobody waits.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from gpuserve_worker.cuda.device.background import Background
from gpuserve_worker.cuda.device.host_uses import HostUses
from gpuserve_worker.cuda.device.runtime import CudaError, Runtime
from gpuserve_worker.memory.touching import touch


def address_of(memory: Any) -> int:
    """Where the bytes of a buffer begin; 0 where there are none."""
    if not len(memory):
        return 0
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class LockStage(enum.Enum):
    """Where memory stands between the wish to have it locked and its end."""

    WAITING = "its turn has not come"
    LOCKING = "CUDA is at it"
    LOCKED = "copies run by themselves"
    REFUSED = "CUDA would not"
    UNWANTED = "its owner has given it up"


#: Where memory may go on to from each stage.
NEXT: Final = {
    LockStage.WAITING: (LockStage.LOCKING, LockStage.UNWANTED),
    LockStage.LOCKING: (LockStage.LOCKED, LockStage.REFUSED, LockStage.UNWANTED),
    LockStage.LOCKED: (LockStage.UNWANTED,),
    LockStage.REFUSED: (LockStage.UNWANTED,),
}


class IllegalStage(Exception):
    """A step that cannot happen at a stage: a defect of the worker."""


class _Pages:
    """One mapping. ``memory`` keeps it from being unmapped."""

    def __init__(self, memory: memoryview, address: int, *, is_lent: bool) -> None:
        self.memory = memory
        self.address = address
        self.nbytes = len(memory)
        self.is_lent = is_lent
        self.stage = LockStage.WAITING

    def is_wanted(self) -> bool:
        return self.stage is not LockStage.UNWANTED

    def advance(self, stage: LockStage) -> None:
        if stage not in NEXT.get(self.stage, ()):
            raise IllegalStage(f"memory of {self.nbytes} bytes: {stage.name} after {self.stage.name}")
        self.stage = stage


class PageLocker:
    """Locks mappings, each of which begins on a page. Any thread may call any method, and none waits for CUDA
    but ``lock_now``. Of memory that clients lend, ``lent_limit_nbytes`` are locked at once.
    """

    def __init__(
        self,
        runtime: Runtime,
        background: Background,
        uses: HostUses,
        lent_limit_nbytes: int,
        warn: Callable[[str], None],
    ) -> None:
        self._runtime = runtime
        self._background = background
        self._uses = uses
        self._lent_left_nbytes = lent_limit_nbytes
        self._warn = warn
        self._warned = False
        self._known: dict[int, _Pages] = {}
        #: Never held while CUDA is at work.
        self._lock = threading.Lock()

    def lock(self, memory: memoryview) -> None:
        """Have a mapping locked soon. A refusal is logged, once in the life of the worker."""
        pages = self._add(memory, is_lent=False)
        if pages is not None:
            self._background.later(partial(self._lock_pages, pages))

    def lock_now(self, memory: memoryview) -> None:
        pages = self._add(memory, is_lent=False)
        if pages is not None:
            self._lock_pages(pages)

    def lock_lent(self, memory: memoryview) -> bool:
        """Have a client's memory locked soon; False where that would be more than the limit."""
        pages = self._add(memory, is_lent=True)
        if pages is not None:
            self._background.later(partial(self._lock_pages, pages))
        return pages is not None

    def is_locked(self, memory: memoryview) -> bool:
        pages = self._known.get(address_of(memory))
        return pages is not None and pages.stage is LockStage.LOCKED

    def unlock(self, memory: memoryview) -> None:
        """The inverse, before the mapping goes away. The copies from and to it end first, and no others."""
        with self._lock:
            pages = self._known.pop(address_of(memory), None)
            if pages is None:
                return
            stage = pages.stage
            pages.advance(LockStage.UNWANTED)
            if pages.is_lent:
                self._lent_left_nbytes += pages.nbytes
        with suppress(CudaError):  # the device is gone, and the locks with it
            self._uses.wait(pages.address, pages.nbytes)
            if stage is LockStage.LOCKED:
                self._runtime.page_unlock(pages.address)
        if stage is not LockStage.LOCKING:
            pages.memory.release()

    def _add(self, memory: memoryview, *, is_lent: bool) -> _Pages | None:
        """None: it is known already, or a client's for which there is no room."""
        address = address_of(memory)
        with self._lock:
            if address in self._known or (is_lent and len(memory) > self._lent_left_nbytes):
                return None
            if is_lent:
                self._lent_left_nbytes -= len(memory)
            # A view of its own, which whoever releases the other one does not release.
            pages = self._known[address] = _Pages(memory[:], address, is_lent=is_lent)
        return pages

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
        # CUDA would map them with locks of its own held, which every other call of the process waits for.
        touch(pages.address, pages.nbytes)
        try:
            self._runtime.page_lock(pages.address, pages.nbytes)
        except CudaError as error:
            self._tell(pages.nbytes, error)
            return LockStage.REFUSED
        return LockStage.LOCKED

    def _tell(self, nbytes: int, error: CudaError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"CUDA could not page-lock {nbytes} bytes of shared memory, so copies to and from the device "
                f"are slower: {error}"
            )
