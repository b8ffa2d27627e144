"""The ingress processes of a server. They are children of the supervisor, so that they and the connections of
their clients survive the front, which decides how many run. The supervisor connects each of them to every new
front over a socket pair of its own, so that messages of one front cannot reach another.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Final

from gpuserve.core.errors import StartupError
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.reactor import Channel, Reactor, channel_pair
from gpuserve.supervisor.processes.child_process import spawn
from gpuserve.supervisor.processes.child_supervision import MonitoredChild
from gpuserve.supervisor.processes.front_monitor import FrontMonitor
from gpuserve.supervisor.processes.log_lines import LogLines

logger = logging.getLogger(__name__)

#: The spare process is started this long after the last one was used, so that the CPUs first serve the
#: ingress process that comes up.
SPARE_PAUSE_S: Final = 0.25
_MODULE: Final = "gpuserve.front.ingress"
_FIELDS: Final = {"model": "", "instance": "front"}


class IngressProcesses:
    """The ingress processes by number, and one spare process that has imported everything and waits for a
    front. With ``relay_output`` the output of the processes goes through the supervisor.
    """

    def __init__(self, reactor: Reactor, front: FrontMonitor, lines: LogLines, *, relay_output: bool) -> None:
        self._reactor = reactor
        self._front = front
        self._lines = lines
        self._relay_output = relay_output
        self._running: dict[int, MonitoredChild] = {}
        #: Numbers of the processes that the present front knows.
        self._connected: set[int] = set()
        self._spare: MonitoredChild | None = None
        self._is_spare_due = False
        self._is_closed = False
        #: Number of requested starts, by number of the process.
        self._starts: Counter[int] = Counter()

    def start(self, number: int) -> None:
        """Connect an ingress process to the present front. Start the process if it is not running."""
        child, survived = self._running.get(number), number in self._running
        try:
            if child is None:
                self._starts[number] += 1
                child, self._spare = self._spare, None
                if child is not None:
                    self._schedule_spare()
                child = self._running[number] = child or self._spawn()
            self._connect(number, child, survived=survived)
        except (StartupError, OSError) as error:
            pid = child.process.pid if child is not None else 0
            self._front.send(messages.IngressDown(number, pid, str(error)))

    def front_lost(self) -> None:
        """Note that the front has ended; the next front asks for the processes that it needs."""
        self._connected.clear()

    def front_ready(self) -> None:
        """Start a spare process if the front uses ingress processes."""
        if self._running:
            self._schedule_spare()

    def close(self) -> None:
        """Kill and reap all ingress processes, and start no more."""
        self._is_closed = True
        children = [*self._running.values(), *([] if self._spare is None else [self._spare])]
        self._running.clear()
        self._spare = None
        for child in children:
            child.process.kill()
        for child in children:
            child.close()

    def _connect(self, number: int, child: MonitoredChild, *, survived: bool) -> None:
        ours, theirs = channel_pair()
        with ours, theirs:
            if not child.send(messages.AttachFront(), [theirs.fileno()]):
                child.process.kill()  # _on_died reports its end
            self._connected.add(number)
            restarts = self._starts[number] - 1
            message = messages.IngressUp(number, child.process.pid, restarts, survived)
            self._front.send(message, [ours.fileno(), child.process.pidfd])

    def _spawn(self) -> MonitoredChild:
        process, (control,) = spawn(_MODULE, channels=1, relay_output=self._relay_output, shows_stacks=False)
        channel = Channel(control, messages.CONTROL)
        child = MonitoredChild(process, channel, _FIELDS, self._reactor, lines=self._lines)
        # An ingress process sends nothing here, and its pidfd reports its end.
        child.open(child.stop_listening, partial(self._on_died, child))
        return child

    def _on_died(self, child: MonitoredChild) -> None:
        reason, pid = child.exit_reason(), child.process.pid
        child.close()
        if child is self._spare:
            self._spare = None
            self._schedule_spare()
            return
        number = next(number for number, one in self._running.items() if one is child)
        del self._running[number]
        if number in self._connected:
            self._connected.discard(number)
            self._front.send(messages.IngressDown(number, pid, reason))
        else:
            logger.error("ingress process %d ended while it had no front: %s", number, reason)

    def _schedule_spare(self) -> None:
        if self._spare is None and not self._is_spare_due and not self._is_closed:
            self._is_spare_due = True
            self._reactor.call_later(SPARE_PAUSE_S, self._start_spare)

    def _start_spare(self) -> None:
        self._is_spare_due = False
        if self._is_closed or self._spare is not None:
            return
        try:
            self._spare = self._spawn()
        except StartupError:  # resources are short; a dead ingress process is replaced without a spare
            self._schedule_spare()
