"""Asks a child for the stacks of its threads, and reads what it writes. Nobody says when that is complete, so
it is when no more comes. What stacks say is in ``stack_text.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeAlias

from gpuserve.control.process_state import STOPPED, state_of
from gpuserve.control.reactor import Reactor
from gpuserve.supervisor.core.processes import Child
from gpuserve.supervisor.core.stack_text import told, why_silent

#: A hundred threads of a hundred frames would be more; nobody reads that.
MAX_NBYTES: Final = 48 << 10
#: How often it is looked whether more has come, and how long nothing may come before that is all.
_LOOK_S: Final = 0.02
_QUIET_LOOKS: Final = 3
#: A process that is stopped, or whose machine is busy, is not waited for longer.
_PATIENCE_LOOKS: Final = 25

#: Takes the text; called once.
TakeStacks: TypeAlias = Callable[[str], None]


class ChildStacks:
    """The stacks of one child, until ``close()``. Who asks while another does gets the same answer."""

    def __init__(self, process: Child, reactor: Reactor) -> None:
        self._process = process
        self._reactor = reactor
        self._waiting: list[TakeStacks] = []
        self._nbytes = 0
        self._looks = 0
        self._quiet_looks = 0
        self._is_closed = False

    def ask(self, take: TakeStacks) -> None:
        """Ask the child. ``take`` gets its stacks, or the reason why there are none."""
        self._waiting.append(take)
        if len(self._waiting) > 1:
            return
        self._nbytes = self._looks = self._quiet_looks = 0
        fd = self._process.stacks
        if fd is not None and state_of(self._process.pid) not in STOPPED:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)  # of the child's descriptor as well: both are one open file
            if self._process.ask_stacks():
                self._reactor.call_later(_LOOK_S, self._look)
                return
        self._answer(why_silent(self._process.pid))

    def close(self) -> None:
        """Answer who still waits: the child has ended."""
        self._is_closed = True
        self._answer(why_silent(self._process.pid))

    def _look(self) -> None:
        if self._is_closed:
            return
        assert self._process.stacks is not None
        nbytes = os.fstat(self._process.stacks).st_size
        self._looks += 1
        self._quiet_looks = self._quiet_looks + 1 if 0 < nbytes == self._nbytes else 0
        self._nbytes = nbytes
        if self._quiet_looks < _QUIET_LOOKS and self._looks < _PATIENCE_LOOKS:
            self._reactor.call_later(_LOOK_S, self._look)
            return
        text = os.pread(self._process.stacks, MAX_NBYTES, 0).decode("utf-8", "replace")
        self._answer(told(text) if text else why_silent(self._process.pid))

    def _answer(self, text: str) -> None:
        waiting, self._waiting = self._waiting, []
        for take in waiting:
            take(text)
