"""The front shows the supervisor that its loop turns, and sees whether that one's does. A supervisor that
does not replaces no worker that dies, loads nothing and hears no operator, though what is there is served.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

from gpuserve.front.service.health import ServerHealth
from gpuserve.supervisor.control.heartbeat import (
    Heartbeat,
    LoopWatchdog,
    cpu_times,
    describe_process_state,
    heartbeat_period_s,
)

logger = logging.getLogger(__name__)

#: So many times ``hang_timeout_s`` a supervisor may be silent while the front says that the server is live.
LIVE_TIMES: Final = 2
#: It is told of after this part of it.
_TELL_PART: Final = 3


class Turning:
    """The pulse of this front and that of its supervisor, whose descriptors come with ``Setup``."""

    def __init__(self, own_fd: int, supervisors_fd: int, timeout_s: float, health: ServerHealth) -> None:
        self._own = Heartbeat(own_fd)
        self._supervisors = Heartbeat(supervisors_fd)
        self._timeout_s = timeout_s
        self._health = health
        self._silence = LoopWatchdog()
        self._is_told = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        period_s = heartbeat_period_s(self._timeout_s)
        while True:
            self._own.beat()
            has_beaten = self._supervisors.has_beaten()
            times = None if has_beaten else cpu_times(os.getppid())
            self._judge(self._silence.poll(has_beaten, loop.time(), period_s, times))
            await asyncio.sleep(period_s)

    def _judge(self, silent_s: float) -> None:
        if not self._timeout_s:
            return
        if self._is_told and not silent_s:
            logger.warning("the supervisor turns again")
        if not self._is_told and silent_s >= self._timeout_s / _TELL_PART:
            pid = os.getppid()
            text = "the supervisor, process %d, has not turned for %.3g s: %s"
            logger.warning(text, pid, silent_s, describe_process_state(pid))
        self._is_told = silent_s >= self._timeout_s / _TELL_PART
        self._health.supervisor_turns(silent_s < LIVE_TIMES * self._timeout_s)
