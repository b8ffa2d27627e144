"""The thread in which ``execute`` of a decoupled model runs, one call after the other, while another passes
on the responses that it sends. It knows what the thread knew that made it.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable


class ExecuteThread:
    """Runs what it is given in turn. It begins with the first, and is a daemon: a call may never return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=lambda: context.run(self._run), name="gpuserve-execute", daemon=True
            )
            self._thread.start()
        self._calls.put(call)

    def close(self) -> None:
        """Wait until what it was given has run."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # the requests in it are not kept until the next one comes
