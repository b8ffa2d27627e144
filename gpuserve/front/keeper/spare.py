"""A door's process that is started before one is needed: it has imported all and waits for its ``DoorSetup``,
so that another is up in milliseconds when one dies, and not after a start of Python. What a door is told, and
what becomes of it, is not known here.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from gpuserve.front.keeper.door_process import DoorProcess, start_door

#: So long after one was taken the next is started: first the cores are for the door that comes up.
PAUSE_S: Final = 0.25


class SpareDoor:
    """At most one process that waits, from ``keep`` to ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: tuple[DoorProcess, socket.socket] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def keep(self) -> None:
        """Have one soon, and after each that is taken another."""
        self._timer = self._loop.call_later(PAUSE_S, self._start)

    def take(self) -> tuple[DoorProcess, socket.socket]:
        """The one that waits, or else a new one. OSError: there is none, and none can be started."""
        waiting = self._let_go()
        if waiting is None:
            return start_door()
        self.keep()
        return waiting

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting = self._let_go()
        if waiting is not None:
            process, passage = waiting
            passage.close()
            process.kill()
            process.reap()

    def _start(self) -> None:
        self._timer = None
        try:
            process, _ = self._waiting = start_door()
        except OSError:  # there is no room for it now; a door that dies is started as ever
            self.keep()
        else:
            self._loop.add_reader(process.pidfd, self._on_end)

    def _on_end(self) -> None:
        """It died while it waited, which nobody has noticed yet: another takes its place."""
        waiting = self._let_go()
        assert waiting is not None
        process, passage = waiting
        passage.close()
        process.reap()
        self.keep()

    def _let_go(self) -> tuple[DoorProcess, socket.socket] | None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._loop.remove_reader(waiting[0].pidfd)
        return waiting
