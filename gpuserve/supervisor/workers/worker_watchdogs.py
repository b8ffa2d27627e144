"""Watchdogs of one worker: the report of a call that is overdue, and the limit of a load."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from gpuserve.config.settings.logs import log_with_text
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_process import Child
from gpuserve.supervisor.processes.child_supervision import MonitoredChild, user_frame

logger = logging.getLogger(__name__)


class Hang(NamedTuple):
    """A call that has not returned. ``limit_s`` is the model's ``execution_timeout_s``, after which the
    worker is killed. With 0 there is no limit, and the call is only reported.
    """

    instance: str
    pid: int
    ran_s: float
    limit_s: float


def report_overdue_call(process: Child, hang: Hang, fields: dict[str, str], stacks: str) -> None:
    """Log the overdue call with the stacks of its process. Kill the process if the call has a limit."""
    text = f"the callable is not back after {hang.ran_s:.1f} s"
    if not hang.limit_s:
        text += "; execution_timeout_s would end it"
    elif process.can_be_killed:
        text += f", and execution_timeout_s is {hang.limit_s:g} s: the worker is killed and replaced"
    else:
        text += f", and execution_timeout_s is {hang.limit_s:g} s: its thread cannot be killed, and gets "
        text += "nothing more; another takes its place when the callable returns"
    log_with_text(logger, logging.ERROR if hang.limit_s else logging.WARNING, text, stacks, fields)
    if hang.limit_s:
        process.kill()


#: Interval between two reports of a slow load, and the least number of reports within the limit of a load.
REPORT_INTERVAL_S: Final = 10.0
_MIN_REPORTS: Final = 3


class SlowLoad(NamedTuple):
    """A load that still runs: its duration, its phase, and the line of user code that it is at, or ""."""

    loading_s: float
    phase: str
    place: str


#: Called with each report of a slow load.
OnSlowLoad: TypeAlias = Callable[[SlowLoad], None]


@dataclass(eq=False)
class LoadWatchdog:
    """Watchdog of one worker's load, until ``end()``. It reports a slow load, and kills the worker after
    ``timeout_s``; 0 is no limit. ``verdict`` is the reason if it killed the worker, else "".
    """

    _child: MonitoredChild
    _reactor: Reactor
    _timeout_s: float
    _fields: dict[str, str]
    _on_slow: OnSlowLoad
    phase: str = "starting"
    _unreached: str = "not loaded"
    verdict: str = ""
    _is_over: bool = False
    _started_at: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self._schedule_report()
        if self._timeout_s > 0:
            self._reactor.call_later(self._timeout_s, self._on_timeout)

    def end(self) -> None:
        self._is_over = True

    def _schedule_report(self) -> None:
        def request_report() -> None:
            if not self._is_over:
                self._child.stacks.ask(self._report)
                self._schedule_report()

        delay_s = min(REPORT_INTERVAL_S, self._timeout_s / _MIN_REPORTS or REPORT_INTERVAL_S)
        self._reactor.call_later(delay_s, request_report)

    def _report(self, stacks: str) -> None:
        if self._is_over:
            return
        slow = SlowLoad(time.monotonic() - self._started_at, self.phase, user_frame(stacks))
        where = f", at {slow.place}" if slow.place else ""
        limit = f"; it is ended after {self._timeout_s:g} s (load_timeout_s)" if self._timeout_s else ""
        text = f"still {slow.phase} after {slow.loading_s:.1f} s{where}{limit}"
        logger.info("%s", text, extra=self._fields)
        self._on_slow(slow)

    def _on_timeout(self) -> None:
        def kill(stacks: str) -> None:
            if not self._is_over:
                self.verdict = f"{self._unreached} within {self._timeout_s:g} s"
                text = f"{self.verdict} (load_timeout_s)"
                log_with_text(logger, logging.ERROR, text, stacks, self._fields)
                self._child.process.kill()

        if not self._is_over:
            self._child.stacks.ask(kill, is_ending=True)
