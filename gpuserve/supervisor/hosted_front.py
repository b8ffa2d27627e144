"""A front inside somebody else's ASGI server, seen by the supervisor as if it were a process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from gpuserve.supervisor.channel import channel_pair
from gpuserve.supervisor.processes import Child


class HostedFront:
    """The face of ``processes.ChildProcess``. ``pidfd`` is an eventfd that tells the front's end."""

    #: Its stdout and stderr are those of the host.
    output: int | None = None
    #: No signal ends it without the process.
    killed = False
    #: Nor is there a status without one.
    exit_status: int | None = None

    def __init__(self, theirs: socket.socket) -> None:
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._theirs = theirs
        # The host may tell the end after the supervisor has closed all; the number may be another file's.
        self._closing = threading.Lock()

    @property
    def pid(self) -> int:
        """The host."""
        return os.getpid()

    def ended(self) -> None:
        """The front has quit; called by the host."""
        with self._closing:
            if self.pidfd >= 0:
                os.eventfd_write(self.pidfd, 1)

    def exit_reason(self) -> str:
        """Why it ended."""
        return "its server ended it"

    def kill(self) -> None:
        """Take its control socket away: it hears that the supervisor is gone."""
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)
        self.ended()

    def close(self) -> None:
        """Close what the supervisor holds of it."""
        with self._closing:
            os.close(self.pidfd)
            self.pidfd = -1


def start_in(
    host: Callable[[socket.socket, HostedFront], None],
) -> Callable[[bool], tuple[Child, socket.socket]]:
    """How a supervisor starts a front in ``host``, which is given its control socket, from any thread."""

    def start(_relay_output: bool) -> tuple[Child, socket.socket]:
        ours, theirs = channel_pair()
        front = HostedFront(theirs)
        host(theirs, front)
        return front, ours

    return start
