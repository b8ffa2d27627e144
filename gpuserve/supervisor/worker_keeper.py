"""Keeps one instance alive: starts its worker, hears it load, starts it again when it dies. The worker is a
process; where the callable has to stay in this one (``isolation="thread"``), it is a thread.

It does not know the front: what happens is told to a ``WorkerEvents``.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from gpuserve.devices.names import CPU, OWN_GPU
from gpuserve.errors import StartupError
from gpuserve.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.channel import Channel
from gpuserve.supervisor.life import InstanceLife, InstanceState, LifeEvent
from gpuserve.supervisor.live_instance import LiveInstance
from gpuserve.supervisor.processes import Child, spawn
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.relay import OutputRelay
from gpuserve.supervisor.threads import start_thread
from gpuserve_worker import wire
from gpuserve_worker.lifecycle import EXIT_DEVICE

logger = logging.getLogger(__name__)


class WorkerEvents(Protocol):
    """Who hears of an instance. Called in the reactor's thread."""

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None:
        """A new state, or a new phase of loading."""

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """Its callable is loaded; ``live()`` is there to be handed on."""

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """It is dead, for ``reason``. Its successor is already planned unless it is stopping."""

    def instance_unrecoverable(self, worker: WorkerKeeper, text: str) -> None:
        """Its callable raised ``UnrecoverableError``; what becomes of it is for the model's policy to say."""


class WorkerKeeper:
    """One instance and its successive worker processes.

    ``link`` is the front's end of the link to the present process. It stays open here, so that a
    front can die and be replaced without the worker noticing. ``slots`` is how many batches it takes at
    once, and ``load_s`` how long it took to load, as it said then. ``generation`` is the load of the model
    that it belongs to. ``why_lost`` says why no worker may run on a GPU, given its UUID; "" where it may.
    """

    def __init__(
        self,
        spec: ModelSpec,
        instance: InstanceSpec,
        reactor: Reactor,
        events: WorkerEvents,
        *,
        relay_output: bool,
        load_timeout_s: Callable[[], float],
        generation: int = 0,
        why_lost: Callable[[str], str] = lambda uuid: "",
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.instance = instance
        self.life = InstanceLife(f"{spec.name}/{instance.name}")
        self.process: Child | None = None
        self.link: socket.socket | None = None
        self.slots = 1
        self.load_s = 0.0
        #: How often in a row its workers ended because they could not use their device.
        self.device_failures = 0
        self._why_lost = why_lost
        self._reactor = reactor
        self._events = events
        self._relay_output = relay_output
        self._load_timeout_s = load_timeout_s
        self._boot: Channel | None = None
        self._relay: OutputRelay | None = None
        self._last_words = ""
        self._in_thread = "object" in instance.source
        self._fields = {"model": spec.name, "instance": instance.name, "device": instance.device}

    def start(self) -> None:
        """Start the worker process and send it its model; on a GPU that is lost, wait until it is back.

        Raises:
            StartupError: there is no process to be had.
        """
        if reason := self.why_lost():
            self._move(LifeEvent.FENCE, "")
            self._events.instance_lost(self, reason)
            return
        process, (boot, link) = self._launch()
        self.process, self.link, self._boot = process, link, Channel(boot, wire.WORKER)
        self._last_words = ""
        self._reactor.watch(process.pidfd, self._on_died)
        self._reactor.watch(boot.fileno(), self._on_boot)
        self._relay = OutputRelay(process.output, self._fields, self._reactor)
        self._relay.open()
        self._move(LifeEvent.SPAWNED, "starting")
        self._tell(self._init())
        timeout_s = self._load_timeout_s()
        if timeout_s > 0:
            self._reactor.call_later(timeout_s, lambda: self._on_load_timeout(process, timeout_s))

    def _launch(self) -> tuple[Child, list[socket.socket]]:
        if self._in_thread:
            return start_thread(self.life.name, self.instance.source)
        return spawn(
            "gpuserve_worker",
            channels=2,
            environment=self.instance.placement.environment(),
            relay_output=self._relay_output,
        )

    def live(self) -> LiveInstance | None:
        """The loaded worker, where there is one."""
        if self.life.state is not InstanceState.READY or self.link is None or self.process is None:
            return None
        pid, pidfd = self.process.pid, self.process.pidfd
        link_fd = self.link.fileno()
        return LiveInstance(self.spec.name, self.instance.name, pid, self.slots, link_fd, pidfd, self.load_s)

    def restart_in_s(self) -> float:
        """How long until its successor is started; for ever where it has been stopped."""
        if self.life.state in {InstanceState.STOPPING, InstanceState.STOPPED, InstanceState.FENCED}:
            return math.inf
        return self.life.backoff_s(time.monotonic())

    @property
    def gpu_uuid(self) -> str:
        """Of its GPU; "" for none, or where it is not known."""
        return self.instance.placement.gpu_uuid

    def why_lost(self) -> str:
        """Why its GPU cannot be used; "" where it can."""
        return self._why_lost(self.gpu_uuid) if self.gpu_uuid else ""

    def fence(self) -> None:
        """Its GPU is lost: its worker is ended, and has no successor until ``release()``."""
        if self.life.state is InstanceState.WAITING:
            self._move(LifeEvent.FENCE, "")
            self._events.instance_lost(self, self.why_lost())
        elif self.life.state in {InstanceState.LOADING, InstanceState.READY}:
            self.kill()

    def release(self) -> None:
        """Its GPU is back, if it was lost."""
        if self.life.state is InstanceState.FENCED:
            self._move(LifeEvent.RELEASE, "")
            self._start_again()

    def stop(self) -> None:
        """Let it finish the batch at hand and exit; no successor."""
        if self.life.state is InstanceState.STOPPED:
            return
        self._move(LifeEvent.STOP, "")
        self._tell(wire.Stop())

    def kill(self) -> None:
        """End it now."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """Reap a worker that was killed, if there is one, and close all that belongs to it."""
        if self.process is not None:
            self.process.exit_reason()
            self._close()

    def _tell(self, message: wire.Message) -> None:
        if self._boot is None:
            return
        try:
            self._boot.send(message)
        except TimeoutError:
            self._end_broken("it does not read its boot socket")

    def _init(self) -> wire.Init:
        spec, placement = self.spec, self.instance.placement
        return wire.Init(
            wire.PROTOCOL,
            spec.name,
            spec.version,
            self.instance.name,
            self._device(),
            {} if self._in_thread else self.instance.source,
            spec.inputs,
            spec.outputs,
            spec.max_batch_size,
            spec.batching.preferred_batch_sizes,
            spec.decoupled,
            spec.concurrency,
            spec.strict,
            spec.read_only_inputs,
            spec.warmup,
            spec.array,
            placement.cpus,
            placement.numa_node,
        )

    def _device(self) -> str:
        """The instance's device as its worker sees it; a thread has all GPUs of this process."""
        device = self.instance.device
        return device if device == CPU or self._in_thread else OWN_GPU

    def _move(self, event: LifeEvent, phase: str) -> None:
        self.life.apply(event, time.monotonic())
        self._events.instance_changed(self, phase)

    def _on_boot(self) -> None:
        assert self._boot is not None
        try:
            message = self._boot.receive()
            if message is None:
                self._reactor.unwatch(self._boot.fileno())
            else:
                self._heard(message)
        except (wire.WireError, OSError) as error:
            self._end_broken(str(error))

    def _heard(self, message: Any) -> None:
        """Obey a message. User code runs in the process that sent it, so its fields are looked at too.

        Raises:
            WireError: it is not one that a worker sends, or not now.
        """
        match message:
            case wire.Phase(str(name)):
                self._events.instance_changed(self, name)
            case wire.Ready(float(load_s), int(slots)) if self.life.state is InstanceState.LOADING:
                logger.info("loaded in %.2f s", load_s, extra=self._fields)
                self.slots = slots
                self.load_s = load_s
                self.device_failures = 0
                self._move(LifeEvent.LOADED, "")
                self._events.instance_ready(self)
            case wire.Ready() if self.life.state is InstanceState.STOPPING:
                pass  # it crossed our Stop
            case wire.LoadFailed(str(text), str(traceback)):
                self._last_words = text
                self._log(logging.ERROR, f"could not be loaded: {text}", traceback)
            case wire.Unrecoverable(str(text)) if self.life.state is InstanceState.READY:
                self._last_words = f"its callable cannot go on: {text}"
                self._log(logging.ERROR, self._last_words, "")
                self._events.instance_unrecoverable(self, text)
            case wire.Unrecoverable() if self.life.state is InstanceState.STOPPING:
                pass  # it ends anyway
            case wire.Log(int(level), str(text), str(traceback)):
                self._log(level, text, traceback)
            case _:
                raise wire.WireError(f"{type(message).__name__} in state {self.life.state.name}")

    def _end_broken(self, what: str) -> None:
        """Such a worker is ended, and its successor comes by the usual way."""
        logger.error("the worker broke the protocol and is ended: %s", what, extra=self._fields)
        if self._boot is not None:
            self._reactor.unwatch(self._boot.fileno())
        self.kill()

    def _log(self, level: int, text: str, traceback: str) -> None:
        if not logger.isEnabledFor(level):
            return
        record = logger.makeRecord(logger.name, level, "", 0, text, (), None, extra=self._fields)
        # A traceback of another process: every Formatter of the standard library shows exc_text.
        record.exc_text = traceback or None
        logger.handle(record)

    def _on_load_timeout(self, process: Child, timeout_s: float) -> None:
        if process is self.process and self.life.state is InstanceState.LOADING:
            self._last_words = f"not loaded within {timeout_s:g} s"
            process.kill()

    def _on_died(self) -> None:
        assert self.process is not None
        self._drain_boot()
        exit_reason = self.process.exit_reason()  # which also reaps it
        if self.process.exit_status == EXIT_DEVICE:
            self.device_failures += 1
        reason = self._last_words or exit_reason
        self._close()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        stopping = self.life.state is InstanceState.STOPPING
        self._move(LifeEvent.DIED, "")
        if not stopping and (why_lost := self.why_lost()):
            self._move(LifeEvent.FENCE, "")
            reason = why_lost
            logger.warning("ended (%s); it starts again when that is over", reason, extra=self._fields)
        elif not stopping:
            backoff_s = self.life.backoff_s(time.monotonic())
            logger.warning("died (%s); next start in %.1f s", reason, backoff_s, extra=self._fields)
            self._reactor.call_later(backoff_s, self._on_due)
        self._events.instance_lost(self, reason)

    def _drain_boot(self) -> None:
        """What the worker said just before it died is still in the socket: LoadFailed, most of all."""
        assert self._boot is not None
        self._reactor.unwatch(self._boot.fileno())
        try:
            while self._boot.pending() and (message := self._boot.receive()) is not None:
                # A worker that said Ready and died at once never was.
                if not isinstance(message, wire.Ready):
                    self._heard(message)
        except (wire.WireError, OSError) as error:
            logger.error("the worker broke the protocol: %s", error, extra=self._fields)

    def _on_due(self) -> None:
        if self.life.state is not InstanceState.WAITING:
            return
        self._move(LifeEvent.DUE, "")
        self._start_again()

    def _start_again(self) -> None:
        try:
            self.start()
        except StartupError as error:  # out of processes, memory or descriptors: that passes
            self._lost(str(error))

    def _close(self) -> None:
        assert self.process is not None
        assert self.link is not None
        assert self._boot is not None
        self._reactor.unwatch(self.process.pidfd)
        self._reactor.unwatch(self._boot.fileno())
        if self._relay is not None:
            self._relay.close()
        self.process.close()
        self.link.close()
        self._boot.close()
        self.process = self.link = self._boot = self._relay = None
