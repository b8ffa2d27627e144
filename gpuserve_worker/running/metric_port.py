"""A worker's metrics on its link: what the callable counted leaves in batches, by a thread that is there once
something was counted. No batch waits for it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from gpuserve_worker.calling.metrics import MetricRegistry
from gpuserve_worker.protocol import wire

if TYPE_CHECKING:
    from gpuserve_worker.running.session import FrontSession

#: What is counted within this time leaves together.
_GATHER_S: Final = 0.05


class MetricPort:
    """Tells each front of the metrics of one worker."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._session: FrontSession | None = None
        self._due = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        #: Held while it is told: by it, what one front was told is not told to another as well.
        self._lock = threading.Lock()

    def attached(self, session: FrontSession) -> None:
        """Tell all of it to a front that has taken the link over."""
        with self._lock:
            self._session = session
            self._registry.start_over()
        self._registry.follow(self._wake)

    def close(self) -> None:
        self._ended.set()
        self._due.set()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpuserve-metrics", daemon=True)
            self._thread.start()
        self._due.set()

    def _run(self) -> None:
        with suppress(OSError):  # the front is gone; the worker's loop sees that
            while self._due.wait() and not self._ended.wait(_GATHER_S):
                self._due.clear()
                self._tell()

    def _tell(self) -> None:
        with self._lock:
            assert self._session is not None  # nobody follows before
            changes = self._registry.take()
            if changes and not self._session.send(wire.Metrics(changes)):
                self._registry.start_over()
