"""The ingress processes of a server. They are children of the supervisor, so that they and the connections of
their clients survive the front. The front says how many there are and which one is to be started or ended;
the supervisor starts and reaps them, and connects each living one to every new front over a socket pair of
its own, so that nothing of one front can reach another.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from gpuserve.control import messages
from gpuserve.control.channel import Channel, channel_pair
from gpuserve.control.reactor import Reactor
from gpuserve.errors import StartupError
from gpuserve.supervisor.core.kept_child import KeptChild
from gpuserve.supervisor.core.log_lines import LogLines
from gpuserve.supervisor.core.processes import spawn

logger = logging.getLogger(__name__)

#: The spare process is started this long after the last one was used, so that the CPUs first serve the
#: ingress process that comes up.
SPARE_PAUSE_S: Final = 0.25
_MODULE: Final = "gpuserve.front.door"
_FIELDS: Final = {"model": "", "instance": "front"}


class PresentFront(Protocol):
    """The front that runs at this moment, if there is one."""

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the front; the descriptors stay the caller's."""


class IngressProcesses:
    """The ingress processes by number, and one spare that has imported everything and waits for a front.

    Args:
        front: the present front, which is told of each process that is up or has ended.
        relay_output: whether the output of the processes goes through the supervisor.
    """

    def __init__(self, reactor: Reactor, front: PresentFront, lines: LogLines, *, relay_output: bool) -> None:
        self._reactor = reactor
        self._front = front
        self._lines = lines
        self._relay_output = relay_output
        self._running: dict[int, KeptChild] = {}
        #: Those that the present front knows of.
        self._connected: set[int] = set()
        self._spare: KeptChild | None = None
        self._is_spare_due = False
        self._is_closed = False
        #: How often a process of each number was to be started.
        self._starts: Counter[int] = Counter()

    def start(self, number: int) -> None:
        """Connect the ingress process of that number to the present front; start one if none is running."""
        child, survived = self._running.get(number), number in self._running
        try:
            if child is None:
                self._starts[number] += 1
                child = self._running[number] = self._take_spare() or self._spawn()
            self._connect(number, child, survived=survived)
        except (StartupError, OSError) as error:
            pid = child.process.pid if child is not None else 0
            self._front.send(messages.IngressDown(number, pid, str(error)))

    def front_lost(self) -> None:
        """Note that the front has ended: the next one asks for the processes that it wants."""
        self._connected.clear()

    def front_ready(self) -> None:
        """Have a spare process, if the front uses ingress processes."""
        if self._running:
            self._want_spare()

    def close(self) -> None:
        """Kill and reap all ingress processes; none is started from now on."""
        self._is_closed = True
        children = [*self._running.values(), *([] if self._spare is None else [self._spare])]
        self._running.clear()
        self._spare = None
        for child in children:
            child.process.kill()
        for child in children:
            child.close()

    def _connect(self, number: int, child: KeptChild, *, survived: bool) -> None:
        ours, theirs = channel_pair()
        with ours, theirs:
            if not child.send(messages.AttachFront(), [theirs.fileno()]):
                child.process.kill()  # its end is told as any other is
            self._connected.add(number)
            restarts = self._starts[number] - 1
            message = messages.IngressUp(number, child.process.pid, restarts, survived)
            self._front.send(message, [ours.fileno(), child.process.pidfd])

    def _spawn(self) -> KeptChild:
        process, (control,) = spawn(_MODULE, channels=1, relay_output=self._relay_output, shows_stacks=False)
        channel = Channel(control, messages.CONTROL)
        child = KeptChild(process, channel, _FIELDS, self._reactor, lines=self._lines)
        # It says nothing here: what is to be read is the end of its socket, and its pidfd tells that too.
        child.open(child.stop_listening, partial(self._on_died, child))
        return child

    def _on_died(self, child: KeptChild) -> None:
        reason, pid = child.exit_reason(), child.process.pid
        child.close()
        if child is self._spare:
            self._spare = None
            self._want_spare()
            return
        number = next(number for number, one in self._running.items() if one is child)
        del self._running[number]
        if number in self._connected:
            self._connected.discard(number)
            self._front.send(messages.IngressDown(number, pid, reason))
        else:
            logger.error("ingress process %d ended while it had no front: %s", number, reason)

    # ---- the spare --------------------------------------------------------------------------

    def _take_spare(self) -> KeptChild | None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self._want_spare()
        return spare

    def _want_spare(self) -> None:
        if self._spare is None and not self._is_spare_due and not self._is_closed:
            self._is_spare_due = True
            self._reactor.call_later(SPARE_PAUSE_S, self._start_spare)

    def _start_spare(self) -> None:
        self._is_spare_due = False
        if self._is_closed or self._spare is not None:
            return
        try:
            self._spare = self._spawn()
        except StartupError:  # there is no room for it now; an ingress process that dies is started as ever
            self._want_spare()
