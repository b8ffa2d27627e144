"""The process of a door as a front sees it: the supervisor starts and reaps it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NamedTuple

from gpuserve_worker.protocol.stacks import FORCED_STACKS_SIGNAL, STACKS_SIGNAL


class DoorProcess(NamedTuple):
    """A child of the supervisor, and a pidfd of it that is the front's."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def show_stacks(self, *, forced: bool = False) -> None:
        """Ask the process to log the stacks of its threads; if ``forced``, at the risk of a crash."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, FORCED_STACKS_SIGNAL if forced else STACKS_SIGNAL)

    def close(self) -> None:
        os.close(self.pidfd)
