"""Keeps one instance alive: starts its worker, hears it load, starts it again when it dies. The worker is a
process; where the callable has to stay in this one (``isolation="thread"``), it is a thread.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from gpuserve.config.settings.logs import REQUEST_IDS, log_with_text
from gpuserve.config.settings.server import POLL
from gpuserve.control.channel import Channel
from gpuserve.control.reactor import Reactor
from gpuserve.devices.names import CPU, OWN_GPU
from gpuserve.errors import StartupError
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.core.kept_child import KeptChild
from gpuserve.supervisor.core.life import InstanceLife, InstanceState, LifeEvent, LiveInstance
from gpuserve.supervisor.core.log_lines import LogLines
from gpuserve.supervisor.core.output_rate import OutputRate
from gpuserve.supervisor.core.processes import Child, spawn
from gpuserve.supervisor.core.server_life import SettingsInForce
from gpuserve.supervisor.core.threads import start_thread
from gpuserve.supervisor.workers.hang import Hang, tell_hang
from gpuserve.supervisor.workers.load_watch import LoadWatch, SlowLoad
from gpuserve_worker.protocol import wire
from gpuserve_worker.running.lifecycle import EXIT_DEVICE

logger = logging.getLogger(__name__)


class WorkerEvents(Protocol):
    """Who hears of instances. Called in the reactor's thread."""

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None:
        """An instance is in a new state, or in a new phase of loading."""

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """The callable of an instance is loaded; ``live()`` is there to be handed on."""

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """A worker is dead, for ``reason``. Its successor is already planned unless it is stopping."""

    def load_slow(self, worker: WorkerKeeper, slow: SlowLoad) -> None:
        """An instance still loads, and the log says so."""

    def instance_unrecoverable(self, worker: WorkerKeeper, text: str) -> None:
        """A callable raised ``UnrecoverableError``; what becomes of it is for the model's policy to say."""

    def instance_imported(self, worker: WorkerKeeper, files: Sequence[str]) -> None:
        """These are the files of the user's that a worker has imported, where that was asked for."""


@dataclass(frozen=True)
class WorkerCare:
    """What the keepers of all workers have in common. ``lost_gpus`` says why no worker may run on a GPU, by
    its UUID; ``GpuFences`` keeps it. ``lines`` keeps what workers print, where a server has them.
    ``follows_imports``: workers tell which files they import.
    """

    reactor: Reactor
    events: WorkerEvents
    settings: SettingsInForce
    relay_output: bool
    lost_gpus: dict[str, str]
    lines: LogLines | None = None
    follows_imports: bool = False


#: A delay before a start that is worth a number.
_NOTICEABLE_S: Final = 0.05


class WorkerKeeper:
    """One instance and its successive workers. ``generation`` is the load of the model that it belongs to.
    The front's end of the link to the present worker stays open here, so that a front can die and be replaced
    without the worker noticing.
    """

    def __init__(
        self, spec: ModelSpec, instance: InstanceSpec, care: WorkerCare, generation: int = 0
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.instance = instance
        self.life = InstanceLife(f"{spec.name}/{instance.name}")
        #: How often in a row its workers ended because they could not use their device.
        self.device_failures = 0
        self._care = care
        self._child: KeptChild | None = None
        self._link: socket.socket | None = None
        self._load: LoadWatch | None = None
        #: What the present worker said when it had loaded.
        self._loaded = wire.Ready(0.0, 1)
        self._last_words = ""
        self._load_failed = False
        #: The process that was the last worker, whose death has been counted.
        self._dead_pid = 0
        self._fields = {"model": spec.name, "instance": instance.name, "device": instance.device}

    @property
    def child(self) -> KeptChild | None:
        return self._child

    @property
    def process(self) -> Child | None:
        return None if self._child is None else self._child.process

    def start(self) -> None:
        """Start a worker, or raise ``StartupError``; on a GPU that is lost, wait until it is back."""
        if reason := self.why_lost():
            self._move(LifeEvent.FENCE)
            self._care.events.instance_lost(self, reason)
            return
        process, (boot, self._link) = _launch(self.life.name, self.instance, self._care.relay_output)
        settings = self._care.settings.now
        rate = OutputRate(settings.max_output_lines_per_s, settings.max_output_nbytes_per_s)
        channel = Channel(boot, wire.WORKER)
        self._child = KeptChild(process, channel, self._fields, self._care.reactor, rate, self._care.lines)
        self._child.open(self._on_boot, self._on_died)
        self._last_words, self._load_failed = "", False
        self._move(LifeEvent.SPAWNED, "starting")
        self._tell(_init(self.spec, self.instance, self._care))
        on_slow = partial(self._care.events.load_slow, self)
        timeout_s = settings.load_timeout_s
        self._load = LoadWatch(self._child, self._care.reactor, timeout_s, self._fields, on_slow)
        self._load.begin()

    def live(self) -> LiveInstance | None:
        """Describe the loaded worker for a front; None where there is none."""
        if self.life.state is not InstanceState.READY or self._link is None or self._child is None:
            return None
        process, loaded = self._child.process, self._loaded
        fds = (self._link.fileno(), process.pidfd)
        return LiveInstance(self.instance.name, process.pid, loaded.slots, loaded.load_s, *fds)

    def hung(self, hang: Hang) -> None:
        """Log where the worker stands, whose callable is not back; and where it had a limit, replace it."""
        process = self.process
        if process is None or process.pid != hang.pid or self.life.state is not InstanceState.READY:
            return  # it came back in this moment, or died
        assert self._child is not None
        tell = partial(tell_hang, process, hang, self._fields)
        self._child.stacks.ask(tell, is_ending=bool(hang.limit_s))
        if hang.limit_s:
            self._last_words = f"its callable was not back within execution_timeout_s, {hang.limit_s:g} s"
            self._move(LifeEvent.HANG)

    def excuse(self, pid: int) -> bool:
        """Leave the death of a worker, which is its client's fault, out of the restart back-off. Return
        whether the worker is dead and its successor was due later than now.
        """
        process, waits = self.process, self.life.state is InstanceState.WAITING
        if pid != (self._dead_pid if process is None else process.pid):
            return False  # another worker runs already
        waits = waits and self.life.restart_in_s(time.monotonic()) > 0
        self.life.excuse(time.monotonic())
        if waits:
            self._tell_of_successor("under an isolated request", 0.0)
            self._care.reactor.call_later(0.0, self._start_when_due)
        return waits

    def why_lost(self) -> str:
        uuid = self.instance.placement.gpu_uuid
        return self._care.lost_gpus.get(uuid, "") if uuid else ""

    def fence(self) -> None:
        """End its worker because its GPU is lost; there is no successor until ``release()``."""
        if self.life.state is InstanceState.WAITING:
            self._move(LifeEvent.FENCE)
            self._care.events.instance_lost(self, self.why_lost())
        elif self.life.state in {InstanceState.LOADING, InstanceState.READY}:
            self.kill()

    def release(self) -> None:
        """Start a worker again, if its GPU was lost: it is back."""
        self._start_again(InstanceState.FENCED, LifeEvent.RELEASE)

    def stop(self) -> None:
        """Let the worker finish the batch at hand and exit; it has no successor."""
        if self.life.state is InstanceState.STOPPED:
            return
        self._move(LifeEvent.STOP)
        self._tell(wire.Stop())

    def kill(self) -> None:
        if self._child is not None:
            self._child.process.kill()

    def close(self) -> None:
        if self._child is None:
            return
        self._child.close()
        assert self._link is not None
        self._link.close()
        self._child = self._link = None

    def discard(self) -> None:
        """End and reap the worker, here and now; it has no successor."""
        self.stop()
        self.kill()
        self.close()

    def _tell(self, message: wire.Message) -> None:
        if self._child is not None and not self._child.send(message):
            self._end_broken("it does not read its boot socket")

    def _move(self, event: LifeEvent, phase: str = "") -> None:
        if self._load is not None and event is not LifeEvent.SPAWNED:
            self._load.end()
        self.life.apply(event, time.monotonic())
        self._care.events.instance_changed(self, phase)

    def _on_boot(self) -> None:
        assert self._child is not None
        try:
            message = self._child.channel.receive()
        except (wire.WireError, OSError) as error:
            self._end_broken(str(error))
            return
        if message is None:
            self._child.stop_listening()
            return
        try:
            self._heard(message)  # an OSError of the supervisor's own work is not the worker's fault
        except wire.WireError as error:
            self._end_broken(str(error))

    def _heard(self, message: Any) -> None:
        """Obey a message, or raise ``WireError``. User code runs in that process, so fields are looked at."""
        match message:
            case wire.Phase(str(name)):
                if self._load is not None:
                    self._load.phase = name
                self._care.events.instance_changed(self, name)
            case wire.Ready(float(load_s), int()) if self.life.state is InstanceState.LOADING:
                logger.info("loaded in %.2f s", load_s, extra=self._fields)
                self._loaded = message
                self.device_failures = 0
                self._move(LifeEvent.LOADED)
                self._care.events.instance_ready(self)
            case wire.Ready() | wire.Unrecoverable() if self.life.state is InstanceState.STOPPING:
                pass  # it crossed our Stop
            case wire.LoadFailed(str(text), str(traceback)):
                self._last_words = text
                self._load_failed = True
                what = "could not be loaded" if traceback else f"could not be loaded: {text}"
                log_with_text(logger, logging.ERROR, what, traceback, self._fields)
            case wire.Unrecoverable(str(text)) if self.life.state is InstanceState.READY:
                self._last_words = f"its callable cannot go on: {text}"
                log_with_text(logger, logging.ERROR, self._last_words, "", self._fields)
                self._care.events.instance_unrecoverable(self, text)
            case wire.Imported(tuple(files)) if all(isinstance(one, str) for one in files):
                self._care.events.instance_imported(self, files)
            case wire.Log(int(level), str(text), str(traceback), tuple(ids)):
                if self._child is not None and self._child.may_log(text + traceback + "".join(map(str, ids))):
                    fields = {**self._fields, REQUEST_IDS: [str(one) for one in ids]}
                    log_with_text(logger, level, text, traceback, fields)
            case _:
                raise wire.WireError(f"{type(message).__name__} in state {self.life.state.name}")

    def _end_broken(self, what: str) -> None:
        """End a worker that broke the protocol; its successor comes by the usual way."""
        logger.error("the worker broke the protocol and is ended: %s", what, extra=self._fields)
        if self._child is not None:
            self._child.stop_listening()
        self.kill()

    def _on_died(self) -> None:
        assert self._child is not None
        # What the worker said just before it died is still in the socket: LoadFailed, most of all.
        try:
            for message in self._child.last_messages():
                # A worker that said Ready and died at once never was.
                if not isinstance(message, wire.Ready):
                    self._heard(message)
        except (wire.WireError, OSError) as error:
            logger.error("the worker broke the protocol: %s", error, extra=self._fields)
        exit_reason = self._child.exit_reason()  # which also reaps it
        if self._child.process.exit_status == EXIT_DEVICE:
            self.device_failures += 1
        verdict = "" if self._load is None else self._load.verdict
        reason = self._last_words or verdict or exit_reason
        self._dead_pid = self._child.process.pid
        self.close()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        stopping = self.life.state is InstanceState.STOPPING
        self._move(LifeEvent.DIED)
        if not stopping and (why_lost := self.why_lost()):
            self._move(LifeEvent.FENCE)
            reason = why_lost
            logger.warning("ended (%s); it starts again when that is over", reason, extra=self._fields)
        elif not stopping:
            delay_s = self.life.restart_in_s(time.monotonic())
            self._care.reactor.call_later(delay_s, self._start_when_due)
        self._care.events.instance_lost(self, reason)
        if self.life.state is InstanceState.WAITING:  # else nobody wants a successor
            self._tell_of_successor(reason, delay_s)

    def _tell_of_successor(self, reason: str, delay_s: float) -> None:
        """Log when it starts again; a load that failed has been told."""
        when = f"starts again in {delay_s:.1f} s" if delay_s >= _NOTICEABLE_S else "starts again at once"
        if not self._load_failed:
            logger.warning("died (%s); %s", reason, when, extra=self._fields)
        elif delay_s >= _NOTICEABLE_S:
            logger.warning("%s", when, extra=self._fields)

    def _start_when_due(self) -> None:
        if self.life.restart_in_s(time.monotonic()) < _NOTICEABLE_S:  # else a timer of an earlier death
            self._start_again(InstanceState.WAITING, LifeEvent.DUE)

    def _start_again(self, waiting: InstanceState, event: LifeEvent) -> None:
        if self.life.state is not waiting:
            return
        self._move(event)
        try:
            self.start()
        except (StartupError, OSError, MemoryError, RuntimeError) as error:
            # Processes, memory or descriptors were lacking: that passes.
            self.kill()
            self.close()
            self._lost(str(error))


def _launch(name: str, instance: InstanceSpec, relay_output: bool) -> tuple[Child, list[socket.socket]]:
    if "object" in instance.source:
        return start_thread(name, instance.source)
    python = instance.source.get("python")
    module = "gpuserve.environments.worker" if python else "gpuserve_worker"
    return spawn(
        module,
        channels=2,
        arguments=(python,) if python else (),
        environment=instance.placement.environment(),
        relay_output=relay_output,
    )


def _init(spec: ModelSpec, instance: InstanceSpec, care: WorkerCare) -> wire.Init:
    """Make the message that tells a worker its model. A worker thread has all GPUs of this process."""
    in_thread, placement = "object" in instance.source, instance.placement
    settings = care.settings.now
    return wire.Init(
        wire.PROTOCOL,
        spec.name,
        spec.version,
        instance.name,
        instance.device if instance.device == CPU or in_thread else OWN_GPU,
        {} if in_thread else instance.source,
        spec.inputs,
        spec.outputs,
        spec.max_batch_size,
        spec.batching.preferred_batch_sizes,
        spec.decoupled,
        spec.concurrency,
        spec.strict,
        spec.exact,
        spec.read_only_inputs,
        spec.warmup,
        spec.array,
        placement.cpus,
        placement.numa_node,
        settings.shared_memory_locked_nbytes,
        spec.all_lines,
        care.follows_imports or settings.model_control == POLL,
    )
