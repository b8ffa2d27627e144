"""Keeps one instance alive: starts its worker process, hears it load, starts it again when it dies.

It does not know the front: what happens is told to a ``WorkerEvents``.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from typing import Any, Protocol

from gpuserve.devices import device_environment
from gpuserve.model import InstanceSpec, ModelSpec
from gpuserve.supervisor.channel import Channel, channel_pair
from gpuserve.supervisor.life import InstanceLife, InstanceState, LifeEvent
from gpuserve.supervisor.processes import ChildProcess, spawn
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.relay import OutputRelay
from gpuserve_worker import wire

logger = logging.getLogger(__name__)


class WorkerEvents(Protocol):
    """Who hears of an instance. Called in the reactor's thread."""

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None:
        """A new state, or a new phase of loading."""

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """Its callable is loaded; ``link`` and ``process`` are there to be handed on."""

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """It is dead, for ``reason``. Its successor is already planned unless it is stopping."""


class WorkerKeeper:
    """One instance and its successive worker processes.

    ``link`` is the front's end of the link to the present process. It stays open here, so that a
    front can die and be replaced without the worker noticing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        instance: InstanceSpec,
        reactor: Reactor,
        events: WorkerEvents,
        *,
        relay_output: bool,
        load_timeout_s: float,
    ) -> None:
        self.spec = spec
        self.instance = instance
        self.life = InstanceLife(f"{spec.name}/{instance.name}")
        self.process: ChildProcess | None = None
        self.link: socket.socket | None = None
        self._reactor = reactor
        self._events = events
        self._relay_output = relay_output
        self._load_timeout_s = load_timeout_s
        self._boot: Channel | None = None
        self._relay: OutputRelay | None = None
        self._load_failure = ""
        self._fields = {"model": spec.name, "instance": instance.name, "device": instance.device}

    def start(self) -> None:
        """Start the worker process and send it its model."""
        boot, their_boot = channel_pair()
        link, their_link = channel_pair()
        with their_boot, their_link:
            process = spawn(
                "gpuserve_worker",
                [str(their_boot.fileno()), str(their_link.fileno())],
                [their_boot.fileno(), their_link.fileno()],
                environment=device_environment(self.instance.device),
                relay_output=self._relay_output,
            )
        self.process, self.link, self._boot = process, link, Channel(boot, wire.WORKER)
        self._load_failure = ""
        self._reactor.watch(process.pidfd, self._on_died)
        self._reactor.watch(boot.fileno(), self._on_boot)
        if process.output is not None:
            self._relay = OutputRelay(process.output, self._fields)
            self._reactor.watch(process.output, self._on_output)
        self._boot.send(self._init())
        self._move(LifeEvent.SPAWNED, "starting")
        if self._load_timeout_s > 0:
            self._reactor.call_later(self._load_timeout_s, lambda: self._on_load_timeout(process))

    def stop(self) -> None:
        """Let it finish the batch at hand and exit; no successor."""
        if self.life.state is InstanceState.STOPPED:
            return
        self._move(LifeEvent.STOP, "")
        if self._boot is not None:
            self._boot.send(wire.Stop())

    def kill(self) -> None:
        """End it now."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Reap a worker that was killed, if there is one, and close all that belongs to it."""
        if self.process is not None:
            self.process.exit_reason()
            self._close()

    def _init(self) -> wire.Init:
        spec = self.spec
        return wire.Init(
            wire.PROTOCOL,
            spec.name,
            spec.version,
            self.instance.name,
            self.instance.device,
            self.instance.source,
            spec.inputs,
            spec.outputs,
            spec.max_batch_size,
            spec.strict,
            spec.read_only_inputs,
        )

    def _move(self, event: LifeEvent, phase: str) -> None:
        self.life.apply(event, time.monotonic())
        self._events.instance_changed(self, phase)

    def _on_boot(self) -> None:
        assert self._boot is not None
        message = self._boot.receive()
        if message is None:
            self._reactor.unwatch(self._boot.fileno())
        else:
            self._heard(message)

    def _heard(self, message: Any) -> None:
        match message:
            case wire.Phase(name):
                self._events.instance_changed(self, name)
            case wire.Ready(load_s):
                logger.info("loaded in %.2f s", load_s, extra=self._fields)
                self._move(LifeEvent.LOADED, "")
                self._events.instance_ready(self)
            case wire.LoadFailed(text, traceback):
                self._load_failure = text
                self._log(logging.ERROR, f"could not be loaded: {text}", traceback)
            case wire.Log(level, text, traceback):
                self._log(level, text, traceback)
            case _:
                raise wire.WireError(f"a worker said {type(message).__name__} on its boot socket")

    def _log(self, level: int, text: str, traceback: str) -> None:
        if not logger.isEnabledFor(level):
            return
        record = logger.makeRecord(logger.name, level, "", 0, text, (), None, extra=self._fields)
        # A traceback of another process: every Formatter of the standard library shows exc_text.
        record.exc_text = traceback or None
        logger.handle(record)

    def _on_output(self) -> None:
        assert self._relay is not None
        if not self._relay.read_some():
            self._reactor.unwatch(self._relay.fd)

    def _on_load_timeout(self, process: ChildProcess) -> None:
        if process is self.process and self.life.state is InstanceState.LOADING:
            self._load_failure = f"not loaded within {self._load_timeout_s:g} s"
            process.kill()

    def _on_died(self) -> None:
        assert self.process is not None
        self._drain_boot()
        reason = self._load_failure or self.process.exit_reason()
        stopping = self.life.state is InstanceState.STOPPING
        self._close()
        self._move(LifeEvent.DIED, "")
        if not stopping:
            backoff_s = self.life.backoff_s(time.monotonic())
            logger.warning("died (%s); next start in %.1f s", reason, backoff_s, extra=self._fields)
            self._reactor.call_later(backoff_s, self._on_due)
        self._events.instance_lost(self, reason)

    def _drain_boot(self) -> None:
        """What the worker said just before it died is still in the socket: LoadFailed, most of all."""
        assert self._boot is not None
        self._reactor.unwatch(self._boot.fileno())
        while select.select([self._boot], [], [], 0)[0]:
            message = self._boot.receive()
            if message is None:
                return
            # A worker that said Ready and died at once never was.
            if not isinstance(message, wire.Ready):
                self._heard(message)

    def _on_due(self) -> None:
        if self.life.state is InstanceState.WAITING:
            self._move(LifeEvent.DUE, "")
            self.start()

    def _close(self) -> None:
        assert self.process is not None
        assert self.link is not None
        assert self._boot is not None
        self._reactor.unwatch(self.process.pidfd)
        if self._relay is not None:
            self._reactor.unwatch(self._relay.fd)
            self._relay.drain()
        self.process.close()
        self.link.close()
        self._boot.close()
        self.process = self.link = self._boot = self._relay = None
