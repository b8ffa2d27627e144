"""Monitor of the front process. ``FrontMonitor`` starts the front, restarts it on the same listeners, and
exchanges messages with it (``control/front_messages.py``). ``FrontHeartbeat`` kills a front whose event loop
is blocked. ``FrontEventFeed`` sends the front the events of the server.
``IngressProcesses`` are children of the supervisor, so that they and their connections survive the front.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import LOG, LogSettings, log_with_text
from gpuserve.core.errors import RequestError, StartupError
from gpuserve.core.event_log import KEPT_BY_FRONT, EventKind, EventLog, RecentEvents
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.front_messages import EventBatch
from gpuserve.supervisor.control.heartbeat import (
    Heartbeat,
    LoopWatchdog,
    cpu_times,
    describe_process_state,
    heartbeat_period_s,
)
from gpuserve.supervisor.control.operator_protocol import OnOutcome, VerbOutcome
from gpuserve.supervisor.control.reactor import Channel, Reactor, channel_pair
from gpuserve.supervisor.processes.child_process import Child, spawn
from gpuserve.supervisor.processes.child_supervision import LogLines, MonitoredChild
from gpuserve.supervisor.processes.lifecycle import LiveInstance, LiveSettings
from gpuserve.supervisor.processes.listeners import Listeners
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: A front that died younger than this, before it was ready, is restarted only after ``RESTART_DELAY_S``.
STEADY_S = 5.0
RESTART_DELAY_S = 1.0
#: Time that a front gets for an answer, in addition to the time for the operation.
ANSWER_TIMEOUT_S = 1.0
#: A blocked front is reported after this time, or after a third of ``hang_timeout_s`` if that is less.
REPORT_AFTER_S: Final = 10.0
_REPORT_PART: Final = 3
#: Events in one message, and the delay before another try if the front has no room for a message.
_EVENTS_PER_MESSAGE: Final = 20
_RETRY_S: Final = 0.1
_FIELDS: Final = {"model": "", "instance": "front"}

#: Starts a front, and returns it with our end of its control socket.
StartFront: TypeAlias = Callable[[], tuple[Child, socket.socket]]
#: Receives the result of a load or unload for the client: an error, or None for success.
Answer: TypeAlias = Callable[[RequestError | None], None]


class FrontCallbacks(Protocol):
    """The callbacks of a front monitor. They are called in the reactor's thread."""

    def front_started(self) -> None:
        """Send everything to a new front that the earlier one knew; the front has its settings already."""

    def front_ready(self) -> None:
        """Note that the front accepts connections, whether or not every model is loaded."""

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """Note the front's death; another start is planned unless it was to end, or is ``hopeless``."""


@dataclass(eq=False)
class FrontMonitor:
    """The front process and its successors, from ``start()`` to ``close()``."""

    _reactor: Reactor
    _listeners: Listeners
    _settings: LiveSettings
    _event_log: EventLog
    _lines: LogLines
    _start_front: StartFront

    def __post_init__(self) -> None:
        self.ready = False
        self._callbacks: FrontCallbacks  # set by start(), like the next
        self._on_request: Callable[[Any], None]
        self._heartbeat: FrontHeartbeat  # of the present front
        self.child: MonitoredChild | None = None
        self._epoch = 0
        self._started_at = 0.0
        self._ending = False
        self._killed_young = False

    @property
    def process(self) -> Child | None:
        return None if self.child is None else self.child.process

    @property
    def restarts(self) -> int:
        return max(0, self._epoch - 1)

    def start(self, callbacks: FrontCallbacks, on_request: Callable[[Any], None]) -> None:
        """Start the first front. Raise ``StartupError`` on failure. ``on_request`` gets its messages."""
        self._callbacks = callbacks
        self._on_request = on_request
        self._start()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the present front, if there is one. The caller keeps the descriptors."""
        if self.child is not None and not self.child.send(message, fds):
            logger.error("killed the front: it does not read its control socket")
            self.child.process.kill()

    def offer(self, message: Any) -> bool:
        """Send a message if the front has room for it now. Return whether the message was sent."""
        return self.child is not None and self.child.channel.offer(message)

    def instance_up(self, generation: int, instance: LiveInstance) -> None:
        message = messages.InstanceUp(generation, *instance[:4], instance.follower_pids)
        self.send(message, [instance.link_fd, instance.pidfd])

    def adjust(self, changes: dict[str, Any]) -> None:
        """Change settings of the server, by name. A log level replaces log settings of clients."""
        self._settings.adjust(changes)
        wire = self._settings.current.to_wire()
        self.send(messages.Adjust({name: wire[name] for name in changes}))
        if "log_level" in changes:
            log = self._settings.current.log_settings()._asdict()
            if earlier := self._settings.changed.get(LOG):
                log["log_format"] = earlier["log_format"]
            self._settings_changed(LOG, log)
            self.send(messages.Changed(LOG, log))

    def outcome_to(self, ticket: int) -> OnOutcome:
        epoch = self._epoch

        def answer(outcome: VerbOutcome) -> None:
            if epoch == self._epoch:  # else the client's connection was lost with the earlier front
                self.send(messages.Outcome(ticket, *outcome))

        return answer

    def answer_to(self, ticket: int) -> Answer:
        answer = self.outcome_to(ticket)
        success = VerbOutcome()
        return lambda error: answer(VerbOutcome(error.code.value, str(error)) if error else success)

    def answer_due_s(self, timeout_s: float) -> float:
        """Return how long to wait for the front's answer to an operation that may take ``timeout_s``."""
        return 0.0 if self.child is None else timeout_s + ANSWER_TIMEOUT_S

    def quit(self) -> None:
        """Ask the front to exit. ``front_lost`` is called at its end, and no other front is started."""
        self._ending = True
        if self.child is not None:
            self._heartbeat.unwatch()
        self.send(messages.Quit())

    def kill(self) -> None:
        self._ending = True
        if self.child is not None:
            self.child.process.kill()

    def close(self) -> None:
        """Reap the front, if there is one, after it was killed, and close its descriptors."""
        if self.child is not None:
            self.child.close()
            self._heartbeat.close()
            self.child = None
            self.ready = False

    def _start(self) -> None:
        self._epoch += 1
        self._started_at = time.monotonic()
        self.ready = False
        process, control = self._start_front()
        channel = Channel(control, messages.CONTROL)
        self.child = MonitoredChild(process, channel, _FIELDS, self._reactor, lines=self._lines)
        timeout_s = self._settings.current.hang_timeout_s
        self._heartbeat = FrontHeartbeat(self.child, self._reactor, self._event_log, timeout_s)
        self.child.open(self._on_message, self._on_died)
        roles = tuple(self._listeners.sockets)
        fds = [self._listeners.sockets[role].fileno() for role in roles]
        setup = messages.Setup(self._epoch, self._settings.current.to_wire(), roles)
        self.send(setup, [*fds, *self._heartbeat.fds])
        self._heartbeat.start()
        for kind, settings in self._settings.changed.items():
            self.send(messages.Changed(kind, settings))
        self._callbacks.front_started()
        self.send(messages.Listen())

    def _on_message(self) -> None:
        child = self.child
        assert child is not None
        try:
            message = child.channel.receive()
        except (WireError, OSError) as error:
            self._kill_broken(child, error)
            return
        try:
            self._handle(child, message)  # an OSError while the request is handled is not the front's fault
        except WireError as error:
            self._kill_broken(child, error)

    def _kill_broken(self, child: MonitoredChild, error: Exception) -> None:
        logger.error("killed the front: it broke the protocol: %s", error)
        child.stop_listening()
        child.process.kill()

    def _handle(self, child: MonitoredChild, message: Any) -> None:
        match message:
            case None:
                child.stop_listening()
            case messages.FrontReady():
                self.ready = True
                self._heartbeat.watch()
                self._callbacks.front_ready()
            case messages.Changed(str(kind), dict(settings)):
                self._settings_changed(kind, settings)
            case _:
                self._on_request(message)

    def _settings_changed(self, kind: str, settings: dict[str, Any]) -> None:
        """Store changed settings for the next front. Log settings apply to this process as well."""
        self._settings.changed[kind] = settings
        if kind == LOG:
            logs.adjust(LogSettings(**settings))

    def _on_died(self) -> None:
        assert self.child is not None
        reason = self.child.exit_reason()
        was_ready, young = self.ready, time.monotonic() - self._started_at < STEADY_S
        # A front that exits by itself would do so again. A front that was killed gets a second try.
        hopeless = not was_ready and (not self.child.process.killed or self._killed_young)
        self._killed_young |= not was_ready
        pid = self.child.process.pid
        self.close()
        if not self._ending:
            delay_s = RESTART_DELAY_S if young and not was_ready else 0.0
            when = f"in {delay_s:.1f} s" if delay_s else "at once"
            logger.warning("the front died (%s); it starts again %s", reason, when)
            self._event_log.record(EventKind.FRONT_DIED, reason=reason, pid=pid, restart_in_s=delay_s)
            self._reactor.call_later(delay_s, self._restart)
        self._callbacks.front_lost(reason, hopeless)

    def _restart(self) -> None:
        if self._ending:
            return
        try:
            self._start()
        except (StartupError, OSError, MemoryError, RuntimeError) as error:
            # Processes, memory or descriptors were lacking, which may pass.
            logger.error("%s; next try in %.1f s", error, RESTART_DELAY_S)
            if self.child is not None:
                self.child.process.kill()
                self.child.close()
                self.child = None
            self._reactor.call_later(RESTART_DELAY_S, self._restart)


class FrontHeartbeat:
    """The heartbeat of one front, and ours for it, from ``start()`` to ``close()``. With ``timeout_s`` 0 no
    front is killed. A front is watched from ``watch()`` on, when it accepts connections.
    """

    def __init__(
        self, child: MonitoredChild, reactor: Reactor, event_log: EventLog, timeout_s: float
    ) -> None:
        self._child = child
        self._reactor = reactor
        self._event_log = event_log
        self._timeout_s = timeout_s
        self._fronts = Heartbeat()
        self._ours = Heartbeat()
        #: The descriptors that the front receives: its own heartbeat, and ours.
        self.fds = (self._fronts.fd, self._ours.fd)
        self._watchdog = LoopWatchdog()
        self._is_watched = self._is_reported = self._is_closed = False

    def start(self) -> None:
        if self._is_closed:
            return
        self._ours.beat()
        period_s = heartbeat_period_s(self._timeout_s)
        has_beaten = self._fronts.has_beaten()
        times = None if has_beaten else cpu_times(self._child.process.pid)
        silent_s = self._watchdog.poll(has_beaten, time.monotonic(), period_s, times)
        if self._is_watched:
            self._check(silent_s)
        self._reactor.call_later(period_s, self.start)

    def watch(self) -> None:
        self._watchdog = LoopWatchdog()
        self._is_watched = True

    def unwatch(self) -> None:
        self._is_watched = False

    def close(self) -> None:
        self._is_closed = True
        self._fronts.close()
        self._ours.close()

    def _check(self, silent_s: float) -> None:
        report_after_s = min(REPORT_AFTER_S, self._timeout_s / _REPORT_PART or REPORT_AFTER_S)
        if not silent_s:
            self._is_reported = False
        elif not self._is_reported and silent_s >= report_after_s:
            self._is_reported = True
            self._child.stacks.ask(partial(self._report, silent_s))
        if self._timeout_s and silent_s >= self._timeout_s:
            self._is_watched = False
            pid = self._child.process.pid
            text = "killed the front: its event loop was blocked for %.3g s (hang_timeout_s): %s"
            logger.error(text, silent_s, describe_process_state(pid))
            self._event_log.record(EventKind.FRONT_HUNG, pid=pid, silent_s=round(silent_s, 3), replaced=True)
            self._child.process.kill()

    def _report(self, silent_s: float, stacks: str) -> None:
        pid = self._child.process.pid
        then = f"; it is replaced after {self._timeout_s:g} s (hang_timeout_s)" if self._timeout_s else ""
        text = f"the front's event loop is blocked for {silent_s:.3g} s: {describe_process_state(pid)}{then}"
        log_with_text(logger, logging.WARNING, text, stacks, {"model": "", "instance": "front"})
        self._event_log.record(EventKind.FRONT_HUNG, pid=pid, silent_s=round(silent_s, 3), replaced=False)


class FrontEventFeed:
    """The feed of ``recent`` events to the present front; a new front gets the events that are kept."""

    def __init__(self, recent: RecentEvents, front: FrontMonitor, reactor: Reactor) -> None:
        self._recent = recent
        self._front = front
        self._reactor = reactor
        #: Number of the last event that was sent.
        self._sent = 0
        self._is_retry_planned = False

    def open(self) -> None:
        self._recent.subscribe(lambda _: self._send())

    def front_ready(self) -> None:
        """Send a new front the kept events."""
        self._sent = 0
        self._send()

    def _send(self) -> None:
        if self._is_retry_planned or not self._front.ready:
            return
        events = self._recent.after(self._sent)[-KEPT_BY_FRONT:]
        for start in range(0, len(events), _EVENTS_PER_MESSAGE):
            batch = events[start : start + _EVENTS_PER_MESSAGE]
            if not self._front.offer(EventBatch(tuple(event.to_wire() for event in batch))):

                def retry() -> None:
                    self._is_retry_planned = False
                    self._send()

                self._is_retry_planned = True
                self._reactor.call_later(_RETRY_S, retry)
                return
            self._sent = batch[-1].number


# ---- ingress processes ----------------------------------------------------------------------------


#: The spare process is started this long after the last one was used, so that the CPUs first serve the
#: ingress process that comes up.
SPARE_PAUSE_S: Final = 0.25
_MODULE: Final = "gpuserve.front.ingress"


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
