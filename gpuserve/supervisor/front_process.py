"""How a front process is started, by its keeper or ahead of it. What it is told is in ``front_keeper.py``.

``gpuserve serve`` imports this before all else, so it must stay light.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from gpuserve.errors import StartupError
from gpuserve.supervisor.processes import Child, spawn


def front_process(relay_output: bool) -> tuple[Child, socket.socket]:
    """The usual front: a process of its own; it, and our end of its control socket.

    Raises:
        StartupError: the process could not be started.
    """
    process, (control,) = spawn("gpuserve.front", channels=1, relay_output=relay_output)
    return process, control


class EarlyFront:
    """A front that is started before the configuration is read: importing what each needs takes as long.

    Until it has a keeper it waits on its control socket, and ends when that is closed. Its output is
    relayed.
    """

    def __init__(self) -> None:
        self._waiting: tuple[Child, socket.socket] | None = None

    def start(self) -> None:
        """Start it. Where that fails, ``take`` tries again, and says why it cannot."""
        with suppress(StartupError):
            self._waiting = front_process(relay_output=True)

    def take(self, relay_output: bool) -> tuple[Child, socket.socket]:
        """Hand it to a keeper, the first time; after that start others. A ``StartFront``.

        Raises:
            StartupError: the process could not be started.
        """
        waiting, self._waiting = self._waiting, None
        return waiting or front_process(relay_output)

    def close(self) -> None:
        """End it, if nobody has taken it."""
        if self._waiting is None:
            return
        (process, control), self._waiting = self._waiting, None
        process.kill()
        process.exit_reason()
        process.close()
        control.close()
