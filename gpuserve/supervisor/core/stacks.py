"""Asks a child for the stacks of its threads and reads them from a file that both share.

The child does not mark the end of its stacks: they count as complete when the file has stopped growing. How
stacks are parsed and shown is in ``stack_text.py``.
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
#: Interval between two looks at the size of the file; looks without growth after which it is complete.
_LOOK_S: Final = 0.02
_QUIET_LOOKS: Final = 3
#: Looks at an empty file, 1 s, before the child is forced: C code probably holds its GIL. A child that merely
#: lacks CPU time should answer sooner, because the forced signal can crash a child whose threads run. A child
#: that is ended anyway is forced after 0.1 s.
_FORCE_LOOKS: Final = 50
_FORCE_ENDING_LOOKS: Final = 5
#: Looks after which a child that is forced too is not waited for any longer.
_MAX_LOOKS: Final = 75

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
        self._force_looks = _FORCE_LOOKS
        self._quiet_looks = 0
        self._is_closed = False

    def ask(self, take: TakeStacks, *, is_ending: bool = False) -> None:
        """Ask the child for its stacks.

        Args:
            take: called once with the stacks, or with the reason why there are none.
            is_ending: whether the child is killed afterwards, so that a crash of it would do no harm.
        """
        self._waiting.append(take)
        if len(self._waiting) > 1:
            return
        self._force_looks = _FORCE_ENDING_LOOKS if is_ending else _FORCE_LOOKS
        self._nbytes = self._looks = self._quiet_looks = 0
        fd = self._process.stacks
        if fd is not None and state_of(self._process.pid) not in STOPPED:
            os.lseek(fd, 0, os.SEEK_SET)  # of the child's descriptor as well: both are one open file
            os.ftruncate(fd, 0)  # last: a child that still answers an earlier request may write at any time
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
        if not nbytes and self._looks == self._force_looks:
            self._process.ask_stacks(forced=True)
        if self._quiet_looks < _QUIET_LOOKS and self._looks < _MAX_LOOKS:
            self._reactor.call_later(_LOOK_S, self._look)
            return
        text = os.pread(self._process.stacks, MAX_NBYTES, 0).decode("utf-8", "replace").replace("\0", "")
        self._answer(told(text) if text else why_silent(self._process.pid))

    def _answer(self, text: str) -> None:
        waiting, self._waiting = self._waiting, []
        for take in waiting:
            take(text)
