"""One short-lived process that tries CUDA. What its word means is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuserve.errors import StartupError
from gpuserve.supervisor.processes import ChildProcess, spawn
from gpuserve.supervisor.reactor import Reactor
from gpuserve_worker.lifecycle import EXIT_DEVICE

#: A process that has not opened a device by then cannot.
TIMEOUT_S: Final = 20.0
_MODULE: Final = "gpuserve_worker.cuda.probe"


class CudaProbe:
    """Owner of one process at a time: ``close()`` leaves none. ``answer``: whether it could use CUDA."""

    def __init__(self, reactor: Reactor, answer: Callable[[bool], None]) -> None:
        self._reactor = reactor
        self._answer = answer
        self._process: ChildProcess | None = None

    @property
    def is_asking(self) -> bool:
        """Whether an answer is to come."""
        return self._process is not None

    def ask(self) -> None:
        """Start one. Without a process to be had there is no answer, which says nothing of CUDA."""
        try:
            process, _ = spawn(_MODULE, channels=0, relay_output=False)
        except StartupError:
            return
        self._process = process
        self._reactor.watch(process.pidfd, self._on_ended)
        self._reactor.call_later(TIMEOUT_S, lambda: self._on_timeout(process))

    def close(self) -> None:
        """End it; its answer is not waited for."""
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)

    def _on_timeout(self, process: ChildProcess) -> None:
        if process is self._process:
            process.kill()

    def _on_ended(self) -> None:
        assert self._process is not None
        process = self._process
        self._reap(process)
        self._answer(not process.killed and process.exit_status != EXIT_DEVICE)

    def _reap(self, process: ChildProcess) -> None:
        self._reactor.unwatch(process.pidfd)
        process.exit_reason()
        process.close()
        self._process = None
