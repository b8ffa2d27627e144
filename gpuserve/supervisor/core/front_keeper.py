"""Keeps the front process alive on the same listeners, and hands what it says to whoever does something about
it. What a message means is in ``control/messages.py``.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gpuserve.control import messages
from gpuserve.control.channel import Channel
from gpuserve.control.operator import AnswerOutcome, Tell, VerbOutcome
from gpuserve.control.reactor import Reactor
from gpuserve.errors import RequestError, StartupError
from gpuserve.settings import logs
from gpuserve.settings.log import DEFAULT, LOG, LogSettings
from gpuserve.supervisor.core.kept_child import KeptChild
from gpuserve.supervisor.core.life import LiveInstance
from gpuserve.supervisor.core.listeners import Listeners
from gpuserve.supervisor.core.processes import Child
from gpuserve.supervisor.core.server_life import SettingsInForce
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: A front that lived shorter than this is started again only after ``RESTART_DELAY_S``.
STEADY_S = 5.0
RESTART_DELAY_S = 1.0
_FIELDS = {"model": "", "instance": "front"}

#: Starts a front; gives it and our end of its control socket.
StartFront: TypeAlias = Callable[[], tuple[Child, socket.socket]]
#: Tells the client how a load or unload went; None where it went well.
Answer: TypeAlias = Callable[[RequestError | None], None]


class FrontEvents(Protocol):
    """Who looks after the front itself."""

    def front_started(self) -> None:
        """A front runs and has its settings; it is to be told all that the one before it knew."""

    def front_ready(self) -> None:
        """The front accepts connections, whether or not every model is loaded."""

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """The front died without being told to; a new one is planned. ``hopeless``: it cannot even start."""


class EndEvents(Protocol):
    """Who carries out the end of the server."""

    def front_drained(self, unfinished: int) -> None:
        """The front has answered ``Drain``."""

    def front_ended(self) -> None:
        """The front died after it was told to."""


class RetireEvents(Protocol):
    """Who keeps the workers of the server's own models."""

    def retired(self, number: int) -> None:
        """A generation that ``ServeModel`` left out has nothing in flight any more."""

    def instance_retired(self, number: int, instance: str) -> None:
        """The front has answered ``RetireInstance``."""


class ClientLoads(Protocol):
    """Who loads and unloads models for clients."""

    def load(self, model: str, changes: dict[str, Any], answer: Answer) -> None:
        """Load a model with these changes to its declaration."""

    def unload(self, model: str, answer: Answer) -> None:
        """Unload every version of a model."""


class AdminVerbs(Protocol):
    """Who does what operators ask for by the admin API, and asks the front for it."""

    def ask(self, verb: str, arguments: dict[str, Any], tell: Tell, answer: AnswerOutcome) -> None:
        """Do what a verb says; ``tell`` hears how it goes on, ``answer`` once how it ended."""

    def told(self, message: messages.Quiesced | messages.Census) -> None:
        """The front has answered ``Quiesce`` or ``TakeCensus``."""


class GpuEvents(Protocol):
    """Who keeps workers off lost GPUs."""

    def gpus_lost(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """These GPUs cannot be used, and no others: (UUID, device, reason)."""


@dataclass(frozen=True)
class FrontAudience:
    """Who hears what a front says: each part what it acts on. Called in the reactor's thread."""

    front: FrontEvents
    end: EndEvents
    models: RetireEvents
    loads: ClientLoads
    operator: AdminVerbs
    gpus: GpuEvents


class FrontKeeper:
    """The front and its successors, from ``start()`` to ``close()``."""

    def __init__(
        self, reactor: Reactor, listeners: Listeners, settings: SettingsInForce, start_front: StartFront
    ) -> None:
        self.ready = False
        self._reactor = reactor
        self._listeners = listeners
        self._settings = settings
        self._start_front = start_front
        self._audience: FrontAudience  # from start() on
        self._child: KeptChild | None = None
        self._epoch = 0
        self._started_at = 0.0
        self._ending = False
        self._killed_young = False
        #: Settings that clients have changed, by their kind.
        self._changed: dict[str, dict[str, Any]] = {}

    @property
    def process(self) -> Child | None:
        """The present front; None between two of them."""
        return None if self._child is None else self._child.process

    @property
    def restarts(self) -> int:
        """How many fronts there were before this one."""
        return max(0, self._epoch - 1)

    def start(self, audience: FrontAudience) -> None:
        """Start the first front; the audience is that of its successors as well.

        Raises:
            StartupError: the process could not be started.
        """
        self._audience = audience
        self._start()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message to the present front, if there is one. The descriptors stay the caller's."""
        if self._child is not None and not self._child.send(message, fds):
            logger.error("the front does not read what it is told, and is ended")
            self._child.process.kill()

    def instance_up(self, generation: int, instance: LiveInstance) -> None:
        """Hand a loaded worker to the front."""
        name, pid, slots, load_s = instance.name, instance.pid, instance.slots, instance.load_s
        message = messages.InstanceUp(generation, name, pid, slots, load_s)
        self.send(message, [instance.link_fd, instance.pidfd])

    def adjust(self, changes: dict[str, Any]) -> None:
        """Change settings of the server, by name, for this front and every one after it. A log level replaces
        what clients have changed of the log.
        """
        self._settings.adjust(changes)
        wire = self._settings.now.to_wire()
        self.send(messages.Adjust({name: wire[name] for name in changes}))
        if "log_level" in changes:
            time_format = self._changed.get(LOG, {}).get("log_format", DEFAULT)
            log = LogSettings.of_level(changes["log_level"], time_format)._asdict()
            self._settings_changed(LOG, log)
            self.send(messages.Changed(LOG, log))

    def quit(self) -> None:
        """Ask the front to exit; ``front_ended`` answers, and no other is started."""
        self._ending = True
        self.send(messages.Quit())

    def kill(self) -> None:
        """Kill the front; no other is started."""
        self._ending = True
        if self._child is not None:
            self._child.process.kill()

    def close(self) -> None:
        """Reap a front that was killed, if there is one, and close all that belongs to it."""
        if self._child is not None:
            self._child.close()
            self._child = None
            self.ready = False

    def _start(self) -> None:
        self._epoch += 1
        self._started_at = time.monotonic()
        self.ready = False
        process, control = self._start_front()
        self._child = KeptChild(process, Channel(control, messages.CONTROL), _FIELDS, self._reactor)
        self._child.open(self._on_message, self._on_died)
        roles = tuple(self._listeners.sockets)
        fds = [self._listeners.sockets[role].fileno() for role in roles]
        self.send(messages.Setup(self._epoch, self._settings.now.to_wire(), roles), fds)
        for kind, settings in self._changed.items():
            self.send(messages.Changed(kind, settings))
        self._audience.front.front_started()

    def _on_message(self) -> None:
        assert self._child is not None
        try:
            self._heard(self._child, self._child.channel.receive())
        except (WireError, OSError) as error:
            logger.error("the front broke the protocol and is ended: %s", error)
            self._child.stop_listening()
            self._child.process.kill()

    def _heard(self, child: KeptChild, message: Any) -> None:
        told = self._audience
        match message:
            case None:
                child.stop_listening()
            case messages.FrontReady():
                self.ready = True
                told.front.front_ready()
            case messages.Drained(int(unfinished)):
                told.end.front_drained(unfinished)
            case messages.Retired(int(generation)):
                told.models.retired(generation)
            case messages.InstanceRetired(int(generation), str(instance)):
                told.models.instance_retired(generation, instance)
            case messages.LoadModel(int(ticket), str(model), dict(changes)):
                told.loads.load(model, changes, self._answer_to(ticket))
            case messages.UnloadModel(int(ticket), str(model)):
                told.loads.unload(model, self._answer_to(ticket))
            case messages.Operate(int(ticket), str(verb), dict(arguments)):
                told.operator.ask(verb, arguments, lambda _: None, self._outcome_to(ticket))
            case messages.Quiesced(int(), int(), bool()) | messages.Census(int()):
                told.operator.told(message)
            case messages.LostGpus(tuple(gpus)):
                told.gpus.gpus_lost(gpus)
            case messages.Changed(str(kind), dict(settings)):
                self._settings_changed(kind, settings)
            case other:
                raise WireError(f"the front said {type(other).__name__}")

    def _settings_changed(self, kind: str, settings: dict[str, Any]) -> None:
        """Remember changed settings for the next front; those of the log hold here as well."""
        self._changed[kind] = settings
        if kind == LOG:
            logs.adjust(LogSettings(**settings))

    def _answer_to(self, ticket: int) -> Answer:
        epoch = self._epoch

        def answer(error: RequestError | None) -> None:
            if epoch != self._epoch:  # whoever asked lost its connection with that front
                return
            code, text = ("", "") if error is None else (error.code.value, str(error))
            self.send(messages.LoadResult(ticket, code, text))

        return answer

    def _outcome_to(self, ticket: int) -> AnswerOutcome:
        epoch = self._epoch

        def answer(outcome: VerbOutcome) -> None:
            if epoch == self._epoch:  # else whoever asked lost its connection, and what it began goes on
                self.send(messages.OperateResult(ticket, *outcome))

        return answer

    def _on_died(self) -> None:
        assert self._child is not None
        reason = self._child.exit_reason()
        was_ready, young = self.ready, time.monotonic() - self._started_at < STEADY_S
        hopeless = not was_ready and not self._may_try_again(self._child.process)
        self.close()
        if self._ending:
            self._audience.end.front_ended()
            return
        delay_s = RESTART_DELAY_S if young and not was_ready else 0.0
        logger.warning("the front died (%s); next start in %.1f s", reason, delay_s)
        self._reactor.call_later(delay_s, self._restart)
        self._audience.front.front_lost(reason, hopeless)

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
        except StartupError as error:  # out of processes, memory or descriptors: that passes
            logger.error("%s; next try in %.1f s", error, RESTART_DELAY_S)
            self._reactor.call_later(RESTART_DELAY_S, self._restart)
