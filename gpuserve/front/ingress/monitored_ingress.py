"""One monitored ingress process of a front and its successors: start, heartbeat, connections and totals.

The supervisor starts the processes on request. A process that has survived the previous front brings its
connections along::

    DOWN ──start──► STARTING ──first status──► UP ──stop──► ENDING ──► ENDED
      ▲                 │                       │
      └──── it died ────┴───────────────────────┘        (any) ──stop──► ENDED
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from gpuserve.core.event_log import EventKind
from gpuserve.core.states import StepTable
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.channel_messages import IngressStatus
from gpuserve.front.ingress.ipc_channel import IpcChannel
from gpuserve.front.ingress.proxied_requests import IngressSession
from gpuserve.front.net.admission import Admission
from gpuserve.front.net.server import IngressCounts
from gpuserve.supervisor.control.heartbeat import LoopWatchdog, cpu_times, describe_process_state
from gpuserve_worker.protocol.stack_signals import request_stacks

logger = logging.getLogger(__name__)

#: An ingress process without heartbeat for this time gets no connection while another has one: it sends four
#: heartbeats a second.
SILENT_S: Final = 2.0
#: The times without heartbeat after which it is killed, asked for its stacks, and forced to show them.
HUNG_S: Final = 30.0
STACKS_S: Final = 10.0
FORCED_STACKS_S: Final = 25.0
#: The period of the heartbeat checks.
HEARTBEAT_CHECK_S: Final = 1.0
#: A process that lived this long did not die of its start.
_YOUNG_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 30.0
#: The longest back-off of a process that comes up and dies young, since clients wait for it.
_SERVED_PAUSE_S: Final = 0.25


class IngressState(enum.Enum):
    """The state of an ingress process. Only a process that is up gets connections."""

    DOWN = "DOWN"
    STARTING = "STARTING"
    UP = "UP"
    ENDING = "ENDING"
    ENDED = "ENDED"


STEPS: Final = StepTable(
    "ingress process",
    {
        IngressState.DOWN: {IngressState.STARTING, IngressState.ENDED},
        IngressState.STARTING: {IngressState.UP, IngressState.DOWN, IngressState.ENDING},
        IngressState.UP: {IngressState.DOWN, IngressState.ENDING},
        IngressState.ENDING: {IngressState.ENDED},
        IngressState.ENDED: set(),
    },
)


class AcceptedConnection(NamedTuple):
    """An admitted connection without an ingress process. It waits until ``until_s`` if none is up."""

    accepted: socket.socket
    address: str | None
    tls: bool
    until_s: float


class RunningIngress:
    """A running ingress process, its channel, and its session."""

    def __init__(self, process: IngressHandle, channel: IpcChannel, served: IngressSession) -> None:
        self.process = process
        self.channel = channel
        self.served = served
        #: The handlers of its messages.
        self.handlers: Mapping[type, Callable[[Any], None]] = {}
        self.started_at = asyncio.get_running_loop().time()
        #: The number of shutdown notices sent, and its connections, by the addresses of their clients.
        self.n_notices = 0
        self.addresses: Counter[str | None] = Counter()
        #: Connections that it has not received yet, which another process gets if it dies.
        self.on_their_way: deque[AcceptedConnection] = deque()
        self.silence = LoopWatchdog()
        self.is_asked = False
        self.is_forced = False
        #: The time of the last heartbeat, as of the last check.
        self.checked_at = -1.0

    def on_received(self, received: messages.ReceivedConnections) -> None:
        for _ in range(received.n):
            self.on_their_way.popleft().accepted.close()


class IngressOwner(Protocol):
    """The owner of the monitored processes, as each of them sees it."""

    admission: Admission
    #: Makes the session of a process, records an event, and asks the supervisor for a process by its number.
    serve: Callable[[IpcChannel], IngressSession]
    record_event: Callable[..., None]
    request_start: Callable[[int], None]

    def requeue(self, accepted: Iterable[AcceptedConnection]) -> None:
        """Queue connections of a dead process again, before all others."""

    def first_messages(self, process: MonitoredIngress) -> Iterator[Any]:
        """Yield the messages that a connected process gets before all others."""

    def broadcast(self, sender: MonitoredIngress, message: Any) -> None:
        """Send a message to the other processes."""

    def on_change(self) -> None:
        """Note that a process has another state or more room."""


class MonitoredIngress:
    """The ingress process of one number, kept up from ``start`` to ``stop``. On request of ``front`` the
    supervisor starts it, or connects the one that survived the previous front; ``on_up`` or ``on_down``
    answers.
    """

    def __init__(self, number: int, front: IngressOwner) -> None:
        self.number = number
        self.state = IngressState.DOWN
        self.n_open = 0
        self.last_heard_at = 0.0
        self.tally = IngressTally()
        #: Whether its process had a front before this one.
        self.has_survived = False
        self._front = front
        self._running: RunningIngress | None = None
        self._backoff = RestartBackoff()
        self._loop = asyncio.get_running_loop()

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.process.pid

    @property
    def n_unaware(self) -> int:
        """Return the number of connections whose clients may not know of the shutdown."""
        if self._running is None:
            return 0
        return self.tally.n_unaware(self._running.n_notices, self.n_open)

    def start(self) -> None:
        if self.state is not IngressState.DOWN:
            return
        self._enter(IngressState.STARTING)
        self._front.request_start(self.number)

    def on_up(self, process: IngressHandle, sock: socket.socket, restarts: int, *, survived: bool) -> None:
        """Send the first messages to a new process, and take over its pidfd and socket."""
        self.has_survived = survived
        channel = IpcChannel(sock, self._on_message, self._on_lost)
        running = self._running = RunningIngress(process, channel, self._front.serve(channel))
        running.handlers = {
            **running.served.handlers,
            messages.HeldConnections: self._on_held,
            messages.IngressStatus: self._on_status,
            messages.ReceivedConnections: running.on_received,
            messages.ClosedConnections: self._on_closed,
            messages.SpentTokens: lambda message: self._front.broadcast(self, message),
        }
        self.tally.restarted(restarts)
        channel.open()
        for message in self._front.first_messages(self):
            channel.post(message)
        running.served.open()
        if self.state is IngressState.ENDING:  # stopped while the process started
            channel.post(messages.StopIngress())

    def on_down(self, pid: int, reason: str) -> None:
        """Handle the end of a process; ``pid`` is 0 if the process could not be started."""
        if self._running is not None and self._running.process.pid == pid:
            self._on_end(reason)
        elif self._running is None and self.state is IngressState.STARTING:
            self._on_death(reason, 0.0)
        elif self._running is None and self.state is IngressState.ENDING:
            self._enter(IngressState.ENDED)

    def assign(self, one: AcceptedConnection) -> None:
        """Send a connection to the process, and take over its socket."""
        assert self._running is not None
        self._running.addresses[one.address] += 1
        self._running.on_their_way.append(one)
        self.n_open += 1
        self._running.channel.send(messages.Connect(one.address, one.tls), (one.accepted.fileno(),))

    def post(self, message: Any) -> None:
        """Send a message whose content the first messages of later processes include."""
        if self._running is not None:
            self._running.channel.post(message)

    def announce(self) -> None:
        if self._running is not None:
            self._running.n_notices += 1
            self.post(messages.AnnounceShutdown(self._running.n_notices))

    def stop(self) -> None:
        """Have the process close its connections and exit, without a successor."""
        self.post(messages.StopIngress())
        is_none = self._running is None and self.state is IngressState.DOWN
        self._enter(IngressState.ENDED if is_none else IngressState.ENDING)

    def kill(self) -> None:
        if self._running is not None:
            self._running.process.kill()

    def check_heartbeat(self) -> None:
        """Log the stacks of a process without heartbeat, and kill it after ``HUNG_S``."""
        if self._running is None:
            return
        running, pid = self._running, self._running.process.pid
        has_spoken = running.checked_at != self.last_heard_at
        running.checked_at = self.last_heard_at
        times = None if has_spoken else cpu_times(pid)
        silent_s = running.silence.poll(has_spoken, self._loop.time(), HEARTBEAT_CHECK_S, times)
        if not silent_s:
            running.is_asked = running.is_forced = False
        elif silent_s >= STACKS_S and not running.is_asked:
            running.is_asked = True
            text = "ingress process %d has sent no heartbeat for %.3g s: %s"
            logger.warning(text, self.number, silent_s, describe_process_state(pid))
            running.process.show_stacks()
        elif silent_s >= FORCED_STACKS_S and not running.is_forced:
            running.is_forced = True
            running.process.show_stacks(forced=True)
        if silent_s >= HUNG_S:
            logger.error("killed ingress process %d: no heartbeat for %g s", self.number, HUNG_S)
            self._front.record_event(EventKind.INGRESS_HUNG, door=self.number, pid=self.pid, silent_s=HUNG_S)
            self.kill()

    # ---- what is heard ------------------------------------------------------------------------

    def _on_message(self, message: Any, fds: list[int]) -> None:
        assert self._running is not None
        if fds:
            self._running.served.attach(message, fds)
        else:
            self._running.handlers[type(message)](message)

    def _on_held(self, holding: messages.HeldConnections) -> None:
        """Count the connections that the process kept from the previous front."""
        assert self._running is not None
        for address in holding.addresses:
            self._running.addresses[address] += 1
            self.n_open += 1
            self._front.admission.readmit(address)

    def _on_status(self, status: messages.IngressStatus) -> None:
        self.last_heard_at = self._loop.time()
        self.tally.record(status)
        if self.state is IngressState.STARTING:
            if self.tally.restarts:
                logger.info("ingress process %d is up again", self.number)
            self._enter(IngressState.UP)

    def _on_closed(self, left: messages.ClosedConnections) -> None:
        assert self._running is not None
        for address in left.addresses:
            self._running.addresses[address] -= 1
            self.n_open -= 1
            self._front.admission.release(address)
        self._running.addresses += Counter()  # drops addresses without connections

    def _on_lost(self) -> None:
        """Kill the process, whose channel is closed: it is ending, or unusable."""
        assert self._running is not None
        self._running.process.kill()

    def _on_end(self, reason: str) -> None:
        running = self._running
        assert running is not None
        running.channel.drain_and_close()  # it may have sent more messages
        self._running = None
        running.served.close()
        running.process.close()
        self.tally.end()
        running.addresses -= Counter(one.address for one in running.on_their_way)
        for address in running.addresses.elements():
            self._front.admission.release(address)
        self.n_open = 0
        if self.state is IngressState.ENDING:
            self._enter(IngressState.ENDED)
        else:
            text = f"{reason}, with {running.addresses.total()} connections"
            self._on_death(text, self._loop.time() - running.started_at)
        self._front.requeue(running.on_their_way)

    def _on_death(self, reason: str, lived_s: float) -> None:
        pause_s = self._backoff.pause_s(lived_s, came_up=self.state is IngressState.UP)
        when = f"in {pause_s:g} s" if pause_s else "at once"
        logger.error("ingress process %d ended (%s); it is started again %s", self.number, reason, when)
        self._front.record_event(
            EventKind.INGRESS_DIED, door=self.number, reason=reason, restart_in_s=pause_s
        )
        self._enter(IngressState.DOWN)
        self._loop.call_later(pause_s, self.start)

    def _enter(self, state: IngressState) -> None:
        self.state = STEPS.step(self.state, state, self.number)
        self._front.on_change()


class IngressHandle(NamedTuple):
    """A child of the supervisor, with a pidfd owned by the front."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def show_stacks(self, *, forced: bool = False) -> None:
        """Make the process log the stacks of its threads; if ``forced``, at the risk of a crash."""
        request_stacks(self.pid, self.pidfd, forced=forced)

    def close(self) -> None:
        os.close(self.pidfd)


def choose_ingress(processes: Iterable[MonitoredIngress], now: float) -> MonitoredIngress | None:
    """Return the process with the fewest connections, if possible of those with a recent heartbeat."""
    candidates = list(processes)
    alive = [one for one in candidates if now - one.last_heard_at < SILENT_S]
    return min(alive or candidates, key=lambda one: one.n_open, default=None)


class RestartBackoff:
    """The back-off before a restart: none at first, short for a process that dies young repeatedly, and
    growing for one that does not even come up.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_s(self, lived_s: float, *, came_up: bool) -> float:
        if lived_s >= _YOUNG_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        if came_up:
            self._pause_s = _SERVED_PAUSE_S
            return min(pause_s, _SERVED_PAUSE_S)
        self._pause_s = min(_LONGEST_PAUSE_S, max(1.0, 2 * pause_s))
        return pause_s


#: The fields of ``IngressStatus`` that only grow.
_COUNTED: Final = ("n_requests", "cpu_s", "refused", "late", "limited", "intake_refused", "reclaimed")
#: The status before the first report.
_NOTHING = IngressStatus(0, 0, 0, 0, 0.0, 0, 0, {}, {}, {}, 0, 0, 0, 0, {})


class IngressTally:
    """The totals of an ingress process and its predecessors with the same number."""

    def __init__(self) -> None:
        self.restarts = 0
        self._last = _NOTHING
        self.counts = _counts(_NOTHING, 0)

    @property
    def counted(self) -> dict[str, Any]:
        """Return the totals that the next process with this number continues."""
        return {name: getattr(self._last, name) for name in _COUNTED}

    def record(self, status: IngressStatus) -> None:
        self._last = status
        self.counts = _counts(status, self.restarts)

    def end(self) -> None:
        """Keep the totals of a process that has ended."""
        self.record(_NOTHING._replace(**self.counted))

    def restarted(self, restarts: int) -> None:
        """Set the number of processes started under this number after the first."""
        self.restarts = restarts
        self.counts = self.counts._replace(restarts=restarts)

    def n_unaware(self, n_notices: int, n_open: int) -> int:
        """Return how many of ``n_open`` connections are not known to be aware of notice ``n_notices``."""
        if not n_notices:
            return 0
        return n_open if self._last.notice < n_notices else self._last.n_unaware


def _counts(said: IngressStatus, restarts: int) -> IngressCounts:
    fields = {name: getattr(said, name) for name in IngressCounts._fields if name != "restarts"}
    return IngressCounts(restarts=restarts, **fields)
