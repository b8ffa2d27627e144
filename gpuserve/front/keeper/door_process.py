"""The process of a door: how it is started, how its death is known, how it is ended. Not what it does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Final

from gpuserve.control.channel import channel_pair
from gpuserve_worker.protocol.stacks import STACKS_SIGNAL

_MODULE: Final = "gpuserve.front.door"


class DoorProcess:
    """A child of the front, in its process group: who ends the group of a front ends its doors. It logs to
    the front's stderr. ``pidfd`` becomes readable when it ends.
    """

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        self._process = process
        self.pidfd = pidfd

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads to the log."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, STACKS_SIGNAL)

    def reap(self) -> str:
        """Why it ended, after its end: "exit status 1" or "signal SIGKILL"."""
        os.close(self.pidfd)
        status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
        return f"signal {-status}"


def start_door() -> tuple[DoorProcess, socket.socket]:
    """A door that waits for its ``Setup``, and our end of its passage. Raises OSError: there is no
    descriptor, no memory or no process left; nothing stays open.
    """
    ours, theirs = channel_pair()
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        fd = theirs.fileno()
        # -P keeps the current directory off its import path, where a user may have a numpy.py.
        command = [sys.executable, "-P", "-m", _MODULE, str(fd)]
        process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        undo.pop_all()
    return DoorProcess(process, pidfd), ours
