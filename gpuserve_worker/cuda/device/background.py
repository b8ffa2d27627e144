"""What takes long and nobody waits for, done one after the other in a thread of its own beside the loop. What
is done there is not known here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpuserve_worker.cuda.device.runtime import CudaError

#: A thread that does not end within this time waits for a device that does not answer any more.
_JOIN_S: Final = 5.0


class Background:
    """A thread, made when there is something to do. ``enter`` makes the device the current one there. Any
    thread may put something here.
    """

    def __init__(self, enter: Callable[[], None], name: str = "gs-background") -> None:
        self._enter = enter
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def later(self, job: Callable[[], None]) -> None:
        """Have something done; nothing any more after ``close()``."""
        self._queue.put(job)
        with self._lock:
            if self._thread is None and not self._is_over:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when all is done that was put here before."""
        done = threading.Event()
        self.later(done.set)
        done.wait()

    def close(self) -> None:
        """Let what is under way end, and leave the rest."""
        with self._lock:
            self._is_over = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(_JOIN_S)

    def _run(self) -> None:
        with suppress(CudaError):  # whatever uses the device says so again
            self._enter()
        while (job := self._queue.get()) is not None and not self._is_over:
            job()
            del job  # it may refer to memory that is to be unmapped
