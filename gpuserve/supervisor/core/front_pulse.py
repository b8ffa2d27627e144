"""Whether the loop of a front turns. One that does not is told of in the log, with its stacks, and is killed
where that goes on: its successor has the same ports and workers. The front sees whether we turn likewise.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Final

from gpuserve.config.settings.logs import log_with_text
from gpuserve.control.process_state import cpu_times, how_it_is
from gpuserve.control.pulse import Pulse, Stillness, pulse_period_s
from gpuserve.control.reactor import Reactor
from gpuserve.journal.event_journal import EventJournal
from gpuserve.journal.kinds import EventKind
from gpuserve.supervisor.core.kept_child import KeptChild

logger = logging.getLogger(__name__)

#: A front that is silent for so long is told of, or for a third of the time that it may be silent.
TELL_AFTER_S: Final = 10.0
_TELL_PART: Final = 3


class FrontPulse:
    """The pulse of one front, and ours for it, from ``open()`` to ``close()``. ``timeout_s`` 0: none is
    killed. It counts from ``watch()`` on: until a front accepts connections it may take its time.
    """

    def __init__(self, child: KeptChild, reactor: Reactor, journal: EventJournal, timeout_s: float) -> None:
        self._child = child
        self._reactor = reactor
        self._journal = journal
        self._timeout_s = timeout_s
        self._fronts = Pulse()
        self._ours = Pulse()
        self._silence = Stillness()
        self._is_watched = self._is_told = self._is_closed = False

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors that a front has besides: its own pulse, and the one that it looks at."""
        return self._fronts.fd, self._ours.fd

    def open(self) -> None:
        if self._is_closed:
            return
        self._ours.beat()
        period_s = pulse_period_s(self._timeout_s)
        has_beaten = self._fronts.has_beaten()
        times = None if has_beaten else cpu_times(self._child.process.pid)
        silent_s = self._silence.look(has_beaten, time.monotonic(), period_s, times)
        if self._is_watched:
            self._judge(silent_s)
        self._reactor.call_later(period_s, self.open)

    def watch(self) -> None:
        self._silence = Stillness()
        self._is_watched = True

    def unwatch(self) -> None:
        """Judge no more: the front is to end."""
        self._is_watched = False

    def close(self) -> None:
        self._is_closed = True
        self._fronts.close()
        self._ours.close()

    def _judge(self, silent_s: float) -> None:
        tell_after_s = min(TELL_AFTER_S, self._timeout_s / _TELL_PART or TELL_AFTER_S)
        if not silent_s:
            self._is_told = False
        elif not self._is_told and silent_s >= tell_after_s:
            self._is_told = True
            self._child.stacks.ask(partial(self._tell, silent_s))
        if self._timeout_s and silent_s >= self._timeout_s:
            self._is_watched = False
            pid = self._child.process.pid
            text = "the front has not turned for %.3g s, and is replaced (hang_timeout_s): %s"
            logger.error(text, silent_s, how_it_is(pid))
            self._journal.tell(EventKind.FRONT_HUNG, pid=pid, silent_s=round(silent_s, 3), replaced=True)
            self._child.process.kill()

    def _tell(self, silent_s: float, stacks: str) -> None:
        pid = self._child.process.pid
        then = f"; it is replaced after {self._timeout_s:g} s (hang_timeout_s)" if self._timeout_s else ""
        text = f"the front has not turned for {silent_s:.3g} s: {how_it_is(pid)}{then}"
        log_with_text(logger, logging.WARNING, text, stacks, {"model": "", "instance": "front"})
        self._journal.tell(EventKind.FRONT_HUNG, pid=pid, silent_s=round(silent_s, 3), replaced=False)
