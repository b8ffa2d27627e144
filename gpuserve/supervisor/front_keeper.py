"""Keeps the front process alive on the same listeners, and tells each new one all it must know."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from gpuserve import logs
from gpuserve.errors import RequestError, StartupError
from gpuserve.log_settings import DEFAULT, LOG, LogSettings
from gpuserve.settings import ServerSettings
from gpuserve.spec import ModelSpec
from gpuserve.supervisor import messages
from gpuserve.supervisor.channel import Channel
from gpuserve.supervisor.listeners import Listeners
from gpuserve.supervisor.live_instance import LiveInstance
from gpuserve.supervisor.operator.outcome import AnswerOutcome, Outcome
from gpuserve.supervisor.processes import Child
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.relay import OutputRelay
from gpuserve_worker.wire import WireError

logger = logging.getLogger(__name__)

#: A front that lived shorter than this is started again only after ``RESTART_DELAY_S``.
STEADY_S = 5.0
RESTART_DELAY_S = 1.0
_FIELDS = {"model": "", "instance": "front"}


#: Starts a front, whose output is relayed or not; it, and our end of its control socket.
StartFront: TypeAlias = Callable[[bool], tuple[Child, socket.socket]]


#: Tells the client how it went: nothing where it went well.
Answer: TypeAlias = Callable[[RequestError | None], None]


class FrontEvents(Protocol):
    """Who hears of the front. Called in the reactor's thread."""

    def front_ready(self) -> None:
        """It accepts connections (not: every model is loaded)."""

    def front_drained(self, unfinished: int) -> None:
        """The answer to ``drain()``."""

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """It died without being told to; a new one is planned. ``hopeless``: it cannot even start."""

    def front_ended(self) -> None:
        """It died after it was told to."""

    def generation_retired(self, generation: int) -> None:
        """The answer to ``serve_model()`` for one that it left out."""

    def instance_retired(self, generation: int, instance: str) -> None:
        """The answer to ``retire_instance()``."""

    def load_asked(self, model: str, changes: dict[str, Any], answer: Answer) -> None:
        """A client wants a model loaded."""

    def unload_asked(self, model: str, answer: Answer) -> None:
        """A client wants a model unloaded."""

    def operator_asked(self, verb: str, arguments: dict[str, Any], answer: AnswerOutcome) -> None:
        """An operator asks by the admin API; see ``OperatorVerbs``."""

    def operator_told(self, message: messages.Quiesced | messages.Census) -> None:
        """The answer to ``quiesce()`` or ``take_census()``."""

    def gpus_lost(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """These GPUs cannot be used, and no others: (UUID, device, reason)."""


class FrontKeeper:
    """The front and its successors. ``announce`` repeats to a new front what the old one knew."""

    def __init__(
        self,
        settings: ServerSettings,
        listeners: Listeners,
        reactor: Reactor,
        events: FrontEvents,
        announce: Callable[[FrontKeeper], None],
        *,
        start_front: StartFront,
        relay_output: bool,
    ) -> None:
        self.process: Child | None = None
        self.ready = False
        self._settings = settings
        self._listeners = listeners
        self._reactor = reactor
        self._events = events
        self._announce = announce
        self._start_front = start_front
        self._relay_output = relay_output
        self._relay: OutputRelay | None = None
        self._channel: Channel | None = None
        self._epoch = 0
        self._started_at = 0.0
        self._ending = False
        self._killed_young = False
        #: Settings that clients have changed, by their kind.
        self._changed: dict[str, dict[str, Any]] = {}

    @property
    def restarts(self) -> int:
        """How many fronts there were before this one."""
        return max(0, self._epoch - 1)

    def start(self) -> None:
        """Start a front and tell it everything.

        Raises:
            StartupError: there is no process to be had.
        """
        self._epoch += 1
        self._started_at = time.monotonic()
        self.ready = False
        process, control = self._start_front(self._relay_output)
        self.process, self._channel = process, Channel(control, messages.CONTROL)
        self._reactor.watch(process.pidfd, self._on_died)
        self._reactor.watch(control.fileno(), self._on_message)
        self._relay = OutputRelay(process.output, _FIELDS, self._reactor)
        self._relay.open()
        roles = tuple(self._listeners.sockets)
        fds = [self._listeners.sockets[role].fileno() for role in roles]
        self._send(messages.Setup(self._epoch, self._settings.to_wire(), roles), fds)
        for kind, settings in self._changed.items():
            self._send(messages.Changed(kind, settings))
        self._announce(self)

    def add_model(self, generation: int, spec: ModelSpec, *, attached: bool, served: bool) -> None:
        """A generation of a model exists, of this server or of an attached program."""
        self._send(messages.AddModel(generation, spec.to_wire(), attached, served))

    def remove_model(self, generation: int) -> None:
        """A generation is no more."""
        self._send(messages.RemoveModel(generation))

    def serve_model(self, model: str, generations: Sequence[int], timeout_s: float) -> None:
        """These get the model's requests; ``generation_retired`` answers for each that did until now."""
        self._send(messages.ServeModel(model, tuple(generations), timeout_s))

    def resize(self, generation: int, spec: ModelSpec) -> None:
        """A generation has other instances."""
        self._send(messages.Resize(generation, spec.to_wire()))

    def retire_instance(self, generation: int, instance: str, timeout_s: float) -> None:
        """An instance is to finish what it has; ``instance_retired`` answers."""
        self._send(messages.RetireInstance(generation, instance, timeout_s))

    def model_states(self, model: str, states: Sequence[tuple[int, str, str]]) -> None:
        """What the repository index says of a model."""
        self._send(messages.ModelStates(model, tuple(states)))

    def instance_up(self, generation: int, instance: LiveInstance) -> None:
        """A worker may be given batches."""
        message = messages.InstanceUp(
            generation, instance.name, instance.pid, instance.slots, instance.load_s
        )
        self._send(message, [instance.link_fd, instance.pidfd])

    def instance_down(self, generation: int, instance: str, reason: str, restart_in_s: float) -> None:
        """A worker is gone."""
        self._send(messages.InstanceDown(generation, instance, reason, restart_in_s))

    def lost_gpus(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """What the front before it said of GPUs."""
        self._send(messages.LostGpus(tuple(gpus)))

    def cuda_state(self, works: bool) -> None:
        """Whether a new process can use CUDA."""
        self._send(messages.CudaState(works))

    def adjust(self, changes: dict[str, Any]) -> None:
        """Settings of the server are others, by name, for this front and every one after it. A log level goes
        over what clients have changed of the log.
        """
        self._settings = dataclasses.replace(self._settings, **changes)
        wire = self._settings.to_wire()
        self._send(messages.Adjust({name: wire[name] for name in changes}))
        if "log_level" in changes:
            time_format = self._changed.get(LOG, {}).get("log_format", DEFAULT)
            log = LogSettings.of_level(changes["log_level"], time_format)._asdict()
            self._settings_changed(LOG, log)
            self._send(messages.Changed(LOG, log))

    def serving(self) -> None:
        """All models of the start are loaded."""
        self._send(messages.Serving())

    def drain(self, timeout_s: float, lame_duck_s: float, *, notice: bool) -> None:
        """Ask it to finish what it has, once the lame duck is over; ``front_drained`` answers."""
        self._send(messages.Drain(timeout_s, lame_duck_s, notice))

    def quiesce(self, ticket: int, timeout_s: float, lame_duck_s: float) -> None:
        """Ask it to be out of service, and to say when nothing waits or runs; see ``messages.Quiesce``."""
        self._send(messages.Quiesce(ticket, timeout_s, lame_duck_s))

    def resume(self) -> None:
        """Ask it to be in service again."""
        self._send(messages.Resume())

    def take_census(self, ticket: int) -> None:
        """Ask it what waits and runs."""
        self._send(messages.TakeCensus(ticket))

    def quit(self) -> None:
        """Ask it to exit; ``front_ended`` answers. There will be no other."""
        self._ending = True
        self._send(messages.Quit())

    def kill(self) -> None:
        """End it now."""
        self._ending = True
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Reap a front that was killed, if there is one, and close all that belongs to it."""
        if self.process is not None:
            self.process.exit_reason()
            self._close()

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        if self._channel is None or self.process is None:
            return
        try:
            self._channel.send(message, fds)
        except TimeoutError:
            logger.error("the front does not read what it is told, and is ended")
            self.process.kill()

    def _on_message(self) -> None:
        assert self._channel is not None
        assert self.process is not None
        try:
            self._heard(self._channel.receive())
        except (WireError, OSError) as error:
            logger.error("the front broke the protocol and is ended: %s", error)
            self._reactor.unwatch(self._channel.fileno())
            self.process.kill()

    def _heard(self, message: Any) -> None:
        assert self._channel is not None
        match message:
            case None:
                self._reactor.unwatch(self._channel.fileno())
            case messages.FrontReady():
                self.ready = True
                self._events.front_ready()
            case messages.Drained(int(unfinished)):
                self._events.front_drained(unfinished)
            case messages.Retired(int(generation)):
                self._events.generation_retired(generation)
            case messages.InstanceRetired(int(generation), str(instance)):
                self._events.instance_retired(generation, instance)
            case messages.LoadModel(int(ticket), str(model), dict(changes)):
                self._events.load_asked(model, changes, self._answer_to(ticket))
            case messages.UnloadModel(int(ticket), str(model)):
                self._events.unload_asked(model, self._answer_to(ticket))
            case messages.Operate(int(ticket), str(verb), dict(arguments)):
                self._events.operator_asked(verb, arguments, self._outcome_to(ticket))
            case messages.Quiesced() | messages.Census():
                self._events.operator_told(message)
            case messages.LostGpus(tuple(gpus)):
                self._events.gpus_lost(gpus)
            case messages.Changed(str(kind), dict(settings)):
                self._settings_changed(kind, settings)
            case other:
                raise WireError(f"the front said {type(other).__name__}")

    def _settings_changed(self, kind: str, settings: dict[str, Any]) -> None:
        """Settings have been changed: the next front is told, and those of the log hold here as well."""
        self._changed[kind] = settings
        if kind == LOG:
            logs.adjust(LogSettings(**settings))

    def _answer_to(self, ticket: int) -> Answer:
        epoch = self._epoch

        def answer(error: RequestError | None) -> None:
            if epoch != self._epoch:  # whoever asked lost its connection with that front
                return
            code, text = ("", "") if error is None else (error.code.value, str(error))
            self._send(messages.LoadResult(ticket, code, text))

        return answer

    def _outcome_to(self, ticket: int) -> AnswerOutcome:
        epoch = self._epoch

        def answer(outcome: Outcome) -> None:
            if epoch == self._epoch:  # else whoever asked lost its connection, and what it began goes on
                self._send(messages.OperateResult(ticket, *outcome))

        return answer

    def _on_died(self) -> None:
        assert self.process is not None
        reason = self.process.exit_reason()
        was_ready, young = self.ready, time.monotonic() - self._started_at < STEADY_S
        hopeless = not was_ready and not self._may_try_again()
        self._close()
        if self._ending:
            self._events.front_ended()
            return
        delay_s = RESTART_DELAY_S if young and not was_ready else 0.0
        logger.warning("the front died (%s); next start in %.1f s", reason, delay_s)
        self._reactor.call_later(delay_s, self._restart)
        self._events.front_lost(reason, hopeless)

    def _may_try_again(self) -> bool:
        """A front that says why it cannot start will say so again; one that was killed gets a second try."""
        assert self.process is not None
        again = self.process.killed and not self._killed_young
        self._killed_young = True
        return again

    def _restart(self) -> None:
        if self._ending:
            return
        try:
            self.start()
        except StartupError as error:  # out of processes, memory or descriptors: that passes
            logger.error("%s; next try in %.1f s", error, RESTART_DELAY_S)
            self._reactor.call_later(RESTART_DELAY_S, self._restart)

    def _close(self) -> None:
        assert self.process is not None
        assert self._channel is not None
        self._reactor.unwatch(self.process.pidfd)
        self._reactor.unwatch(self._channel.fileno())
        if self._relay is not None:
            self._relay.close()
        self.process.close()
        self._channel.close()
        self.process = self._channel = self._relay = None
        self.ready = False
