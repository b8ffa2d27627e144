"""Keeps the front process alive on the same listeners, and hands on what it says (``control/messages``)."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import DEFAULT, LOG, LogSettings
from gpuserve.control import messages
from gpuserve.control.channel import Channel
from gpuserve.control.operator import AnswerOutcome, VerbOutcome
from gpuserve.control.reactor import Reactor
from gpuserve.errors import RequestError, StartupError
from gpuserve.journal.event_journal import EventJournal
from gpuserve.journal.kinds import EventKind
from gpuserve.supervisor.core.front_pulse import FrontPulse
from gpuserve.supervisor.core.kept_child import KeptChild
from gpuserve.supervisor.core.life import LiveInstance
from gpuserve.supervisor.core.listeners import Listeners
from gpuserve.supervisor.core.log_lines import LogLines
from gpuserve.supervisor.core.processes import Child
from gpuserve.supervisor.core.server_life import SettingsInForce
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: A front that lived shorter than this is started again only after ``RESTART_DELAY_S``.
STEADY_S = 5.0
RESTART_DELAY_S = 1.0
#: A front has this much more time to say how something went than it has to do it.
ANSWER_TIMEOUT_S = 1.0
_FIELDS = {"model": "", "instance": "front"}

#: Starts a front; gives it and our end of its control socket.
StartFront: TypeAlias = Callable[[], tuple[Child, socket.socket]]
#: Tells the client how a load or unload went; None where it went well.
Answer: TypeAlias = Callable[[RequestError | None], None]


class FrontEvents(Protocol):
    """Who looks after the front. Called in the reactor's thread."""

    def front_started(self) -> None:
        """A front runs and has its settings; it is to be told all that the one before it knew."""

    def front_ready(self) -> None:
        """The front accepts connections, whether or not every model is loaded."""

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """The front died; another is planned, unless it was to end. ``hopeless``: it cannot even start."""


class FrontKeeper:
    """The front and its successors, from ``start()`` to ``close()``."""

    def __init__(
        self,
        reactor: Reactor,
        listeners: Listeners,
        settings: SettingsInForce,
        journal: EventJournal,
        lines: LogLines,
        start_front: StartFront,
    ) -> None:
        self.ready = False
        self._journal = journal
        self._lines = lines
        self._reactor = reactor
        self._listeners = listeners
        self._settings = settings
        self._start_front = start_front
        self._events: FrontEvents  # these from start() on
        self._obey: Callable[[Any], None]
        self._pulse: FrontPulse  # of the present front
        self._child: KeptChild | None = None
        self._epoch = 0
        self._started_at = 0.0
        self._ending = False
        self._killed_young = False

    @property
    def child(self) -> KeptChild | None:
        return self._child

    @property
    def process(self) -> Child | None:
        return None if self._child is None else self._child.process

    @property
    def restarts(self) -> int:
        return max(0, self._epoch - 1)

    def start(self, events: FrontEvents, obey: Callable[[Any], None]) -> None:
        """Start the first front, or raise ``StartupError``. ``obey`` is given what fronts ask for."""
        self._events = events
        self._obey = obey
        self._start()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the present front, if there is one. The descriptors stay the caller's."""
        if self._child is not None and not self._child.send(message, fds):
            logger.error("the front does not read what it is told, and is ended")
            self._child.process.kill()

    def offer(self, message: Any) -> bool:
        """Send what can wait, if there is a front that has room for it now, and say whether it was sent."""
        return self._child is not None and self._child.channel.offer(message)

    def instance_up(self, generation: int, instance: LiveInstance) -> None:
        message = messages.InstanceUp(generation, *instance[:4])
        self.send(message, [instance.link_fd, instance.pidfd])

    def adjust(self, changes: dict[str, Any]) -> None:
        """Change settings of the server, by name, for this front and every one after it. A log level replaces
        what clients have changed of the log.
        """
        self._settings.adjust(changes)
        wire = self._settings.now.to_wire()
        self.send(messages.Adjust({name: wire[name] for name in changes}))
        if "log_level" in changes:
            time_format = self._settings.changed.get(LOG, {}).get("log_format", DEFAULT)
            log = LogSettings.of_level(changes["log_level"], time_format)._asdict()
            self._settings_changed(LOG, log)
            self.send(messages.Changed(LOG, log))

    def outcome_to(self, ticket: int) -> AnswerOutcome:
        epoch = self._epoch

        def answer(outcome: VerbOutcome) -> None:
            if epoch == self._epoch:  # else whoever asked lost its connection, and what it began goes on
                self.send(messages.Outcome(ticket, *outcome))

        return answer

    def answer_to(self, ticket: int) -> Answer:
        answer = self.outcome_to(ticket)
        well = VerbOutcome()
        return lambda error: answer(VerbOutcome(error.code.value, str(error)) if error else well)

    def answer_due_s(self, timeout_s: float) -> float:
        """Return how long to wait until the front has said how that went for which it has ``timeout_s``."""
        return 0.0 if self._child is None else timeout_s + ANSWER_TIMEOUT_S

    def quit(self) -> None:
        """Ask the front to exit; ``front_lost`` answers, and no other is started."""
        self._ending = True
        if self._child is not None:
            self._pulse.unwatch()
        self.send(messages.Quit())

    def kill(self) -> None:
        self._ending = True
        if self._child is not None:
            self._child.process.kill()

    def close(self) -> None:
        """Reap a front that was killed, if there is one, and close all that belongs to it."""
        if self._child is not None:
            self._child.close()
            self._pulse.close()
            self._child = None
            self.ready = False

    def _start(self) -> None:
        self._epoch += 1
        self._started_at = time.monotonic()
        self.ready = False
        process, control = self._start_front()
        channel = Channel(control, messages.CONTROL)
        self._child = KeptChild(process, channel, _FIELDS, self._reactor, lines=self._lines)
        timeout_s = self._settings.now.hang_timeout_s
        self._pulse = FrontPulse(self._child, self._reactor, self._journal, timeout_s)
        self._child.open(self._on_message, self._on_died)
        roles = tuple(self._listeners.sockets)
        fds = [self._listeners.sockets[role].fileno() for role in roles]
        self.send(messages.Setup(self._epoch, self._settings.now.to_wire(), roles), [*fds, *self._pulse.fds])
        self._pulse.open()
        for kind, settings in self._settings.changed.items():
            self.send(messages.Changed(kind, settings))
        self._events.front_started()

    def _on_message(self) -> None:
        child = self._child
        assert child is not None
        try:
            message = child.channel.receive()
        except (WireError, OSError) as error:
            self._end_broken(child, error)
            return
        try:
            self._heard(child, message)  # an OSError of what the front asked for is not the front's fault
        except WireError as error:
            self._end_broken(child, error)

    def _end_broken(self, child: KeptChild, error: Exception) -> None:
        logger.error("the front broke the protocol and is ended: %s", error)
        child.stop_listening()
        child.process.kill()

    def _heard(self, child: KeptChild, message: Any) -> None:
        match message:
            case None:
                child.stop_listening()
            case messages.FrontReady():
                self.ready = True
                self._pulse.watch()
                self._events.front_ready()
            case messages.Changed(str(kind), dict(settings)):
                self._settings_changed(kind, settings)
            case _:
                self._obey(message)

    def _settings_changed(self, kind: str, settings: dict[str, Any]) -> None:
        """Remember changed settings for the next front; those of the log hold here as well."""
        self._settings.changed[kind] = settings
        if kind == LOG:
            logs.adjust(LogSettings(**settings))

    def _on_died(self) -> None:
        assert self._child is not None
        reason = self._child.exit_reason()
        was_ready, young = self.ready, time.monotonic() - self._started_at < STEADY_S
        hopeless = not was_ready and not self._may_try_again(self._child.process)
        pid = self._child.process.pid
        self.close()
        if not self._ending:
            delay_s = RESTART_DELAY_S if young and not was_ready else 0.0
            when = f"in {delay_s:.1f} s" if delay_s else "at once"
            logger.warning("the front died (%s); it starts again %s", reason, when)
            self._journal.tell(EventKind.FRONT_DIED, reason=reason, pid=pid, restart_in_s=delay_s)
            self._reactor.call_later(delay_s, self._restart)
        self._events.front_lost(reason, hopeless)

    def _may_try_again(self, dead: Child) -> bool:
        """A front that says why it cannot start will say so again; one that was killed gets a second try."""
        again = dead.killed and not self._killed_young
        self._killed_young = True
        return again

    def _restart(self) -> None:
        if self._ending:
            return
        try:
            self._start()
        except (StartupError, OSError, MemoryError, RuntimeError) as error:
            # Processes, memory or descriptors were lacking: that passes.
            logger.error("%s; next try in %.1f s", error, RESTART_DELAY_S)
            if self._child is not None:
                self._child.process.kill()
                self._child.close()
                self._child = None
            self._reactor.call_later(RESTART_DELAY_S, self._restart)
