"""Monitors of workers. ``WorkerMonitor`` starts the worker of one instance, follows its load, and restarts it
when it dies. The worker is a process, with ``isolation="thread"`` a thread, or with ``ranks`` a process for
each rank: the front knows rank 0 only, and all ranks end with the first that ends.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.logs import log_with_text
from gpuserve.config.settings.server import POLL
from gpuserve.core.errors import StartupError
from gpuserve.devices.mps import MpsDaemon
from gpuserve.devices.names import CPU, gpu_name
from gpuserve.model.placement import thread_variables
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.control.reactor import Channel, Reactor
from gpuserve.supervisor.processes.child_process import Child, spawn
from gpuserve.supervisor.processes.child_supervision import LogLines, MonitoredChild, OutputRate
from gpuserve.supervisor.processes.lifecycle import (
    InstanceEvent,
    InstanceLifecycle,
    InstanceState,
    LiveInstance,
    LiveSettings,
)
from gpuserve.supervisor.workers.rank_processes import (
    RankProcess,
    ask_all_stacks,
    rank_variables,
    reserved_port,
)
from gpuserve.supervisor.workers.shared_weights import SharedWeights
from gpuserve.supervisor.workers.worker_thread import start_thread
from gpuserve.supervisor.workers.worker_watchdogs import Hang, LoadWatchdog, SlowLoad, report_overdue_call
from gpuserve_worker.execution.lifecycle import EXIT_DEVICE
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import close_all
from gpuserve_worker.protocol.sealed_memory import ExportedMemory, SealedMemory

logger = logging.getLogger(__name__)


class WorkerEvents:
    """The callbacks of worker monitors, in the reactor's thread. Those that a subclass lacks do nothing."""

    def instance_changed(self, worker: WorkerMonitor, phase: str) -> None:
        """Note that an instance is in a new state, or in a new phase of loading."""

    def instance_ready(self, worker: WorkerMonitor) -> None:
        """Note that an instance is loaded, and ``live_instance()`` can be sent to the front."""

    def instance_slept(self, worker: WorkerMonitor) -> None:
        """Note that the callable of an instance sleeps now."""

    def instance_lost(self, worker: WorkerMonitor, reason: str) -> None:
        """Note that a worker died, for ``reason``. Its restart is planned already unless it is stopping."""

    def load_slow(self, worker: WorkerMonitor, slow: SlowLoad) -> None:
        """Note that an instance still loads; the log says so already."""

    def instance_unrecoverable(self, worker: WorkerMonitor, text: str) -> None:
        """Note that a callable raised ``UnrecoverableError``; the model's policy decides what follows."""

    def instance_imported(self, worker: WorkerMonitor, files: Sequence[str]) -> None:
        """Note which of the user's files a worker has imported, if imports are followed."""


@dataclass(frozen=True)
class WorkerContext:
    """The context that all worker monitors share. ``lost_gpus`` has the reasons why workers cannot run on
    GPUs, by UUID. ``lines`` stores the output of workers. With ``follows_imports`` workers report the files
    that they import. ``threads_of`` returns the number of threads of an instance beside all others, and
    ``instances`` all instances that run.
    """

    reactor: Reactor
    events: WorkerEvents
    threads_of: Callable[[InstanceSpec], int]
    settings: LiveSettings
    relay_output: bool
    lost_gpus: dict[str, str]
    lines: LogLines | None = None
    follows_imports: bool = False
    weights: SharedWeights = field(default_factory=SharedWeights)
    mps: MpsDaemon = field(default_factory=MpsDaemon)
    instances: Callable[[], Sequence[InstanceSpec]] = tuple


#: Messages that have no meaning once their worker is dead.
_OF_THE_LIVING: Final = (
    wire.Ready, wire.Slept, wire.WantWeights, wire.Weights, wire.WeightsFailed, wire.ReleaseWeights,
)  # fmt: skip
#: The phases of a worker that was just started, that was asleep, and that is to sleep.
STARTING: Final = "starting"
_WAKING: Final = "waking"
_GOING_TO_SLEEP: Final = "going to sleep"
#: The limit of the callable's ``sleep`` and ``wake``, unless ``load_timeout_s`` is less.
SLEEP_TIMEOUT_S: Final = 120.0
#: Restart back-off, in seconds, if it is long enough to be reported.
_NOTICEABLE_S: Final = 0.05


class WorkerMonitor:
    """The monitor of one instance and its successive workers. ``generation`` is the number of its load. The
    front's end of the link to the present worker stays open here, so that a front can be replaced without the
    worker noticing.
    """

    def __init__(
        self, spec: ModelSpec, instance: InstanceSpec, context: WorkerContext, generation: int = 0
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.instance = instance
        self.lifecycle = InstanceLifecycle(f"{spec.name}/{instance.name}")
        #: Number of workers in a row that ended because they could not use their device.
        self.device_failures = 0
        self._context = context
        #: Number of threads of numerical libraries in the present worker.
        self.threads = 0
        self.ranks = [self._rank(number) for number in range(instance.ranks)]
        self._link: socket.socket | None = None
        #: The loopback port of ``MASTER_PORT``, if there are several ranks.
        self._port: socket.socket | None = None
        #: Whether the callable takes memory of the host while it sleeps for what it frees on GPUs.
        self.moves_to_host = True
        #: Whether the callable of the present worker has returned from ``sleep``, in all ranks.
        self.has_slept = False
        self._last_words = ""
        self._load_failed = False
        #: The reason for the death of the first rank that died.
        self._death = ""
        #: The process id of the last worker whose death was counted.
        self._dead_pid = 0
        self._fields = self.ranks[0].fields

    def _rank(self, number: int) -> RankProcess:
        which = f" rank {number}" if number else ""
        fields = {"model": self.spec.name, "instance": f"{self.instance.name}{which}"}
        fields["device"] = self.instance.device
        return RankProcess(number, f"{self.name}{which}", fields, self._kill_broken)

    @property
    def name(self) -> str:
        return self.lifecycle.name

    @property
    def child(self) -> MonitoredChild | None:
        """The process that the front knows: rank 0."""
        return self.ranks[0].child

    @property
    def process(self) -> Child | None:
        return None if self.child is None else self.child.process

    @property
    def children(self) -> list[MonitoredChild]:
        """The processes of the instance, which are as many as its ranks unless it is starting or ending."""
        return [one.child for one in self.ranks if one.child is not None]

    def start(self) -> None:
        """Start a worker, or raise ``StartupError``. If its GPU is lost, wait until the GPU is back."""
        if reason := self.lost_gpu_reason():
            self._move(InstanceEvent.FENCE)
            self._context.events.instance_lost(self, reason)
            return
        self.threads = self._context.threads_of(self.instance)
        self._launch()
        self._last_words, self._load_failed, self._death, self.has_slept = "", False, "", False
        self._move(InstanceEvent.SPAWNED, STARTING)
        memory: SealedMemory | None = self.instance.source.get("memory")
        timeout_s = self._context.settings.current.load_timeout_s
        for rank in self.ranks:
            assert rank.child is not None
            if memory is not None:
                self._context.weights.hold(rank, self.spec.name, memory)
            init = _init(self.spec, self.instance, rank.number, self._context)
            rank.send(init, () if memory is None else (memory.fd,))
            self._watch_load(rank, timeout_s, STARTING, "not loaded")

    def _watch_load(self, rank: RankProcess, timeout_s: float, phase: str, unreached: str) -> None:
        assert rank.child is not None
        more = rank.fields, partial(self._on_slow_load, rank), phase, unreached
        rank.load = LoadWatchdog(rank.child, self._context.reactor, timeout_s, *more)
        rank.load.start()

    @property
    def can_sleep(self) -> bool:
        """Return whether the callable can sleep now, in all ranks."""
        is_ready = self.lifecycle.state is InstanceState.READY
        return is_ready and all(one.ready is not None and one.ready.can_sleep for one in self.ranks)

    def sleep(self) -> None:
        """Let the callable sleep, which ``can_sleep``. The front has taken the instance out of rotation. Rank
        0 goes first, when the others have returned from the last batch.
        """
        self.has_slept = False
        self._move(InstanceEvent.SLEEP, _GOING_TO_SLEEP)
        self._rest(self.ranks[:1], wire.Sleep(), _GOING_TO_SLEEP, "not asleep")

    def wake(self) -> None:
        """Wake the callable. ``Ready`` follows as after a load."""
        self._move(InstanceEvent.WAKE, _WAKING)
        self._rest(self.ranks, wire.Wake(), _WAKING, "not awake")

    def _rest(self, ranks: Sequence[RankProcess], message: wire.Message, phase: str, unreached: str) -> None:
        timeout_s = min(self._context.settings.current.load_timeout_s or SLEEP_TIMEOUT_S, SLEEP_TIMEOUT_S)
        for rank in ranks:
            rank.send(message)
            if rank.child is not None:
                self._watch_load(rank, timeout_s, phase, unreached)

    def _on_slept(self, rank: RankProcess) -> None:
        rank.end_load()
        rank.ready = None
        if not rank.number:
            self._rest(self.ranks[1:], wire.Sleep(), _GOING_TO_SLEEP, "not asleep")
        if all(one.ready is None for one in self.ranks):
            self.has_slept = True
            self._context.events.instance_slept(self)

    def _launch(self) -> None:
        """Start all ranks, rank 0 last, because it inherits its links to the others."""
        context, links = self._context, list[socket.socket]()
        settings = context.settings.current
        on_gpu = self.instance.device != CPU
        mps = context.mps.variables(self.instance.gpu_share) if on_gpu else {}
        self._port = reserved_port() if len(self.ranks) > 1 else None
        try:
            for rank in reversed(self.ranks):
                variables = rank_variables(rank.number, len(self.ranks), self._port)
                process, (boot, link) = _launch(self, mps | variables, links, context.relay_output)
                links.insert(0, link)
                rate = OutputRate(settings.max_output_lines_per_s, settings.max_output_nbytes_per_s)
                channel = Channel(boot, wire.WORKER)
                rank.ready = None
                rank.child = MonitoredChild(
                    process, channel, rank.fields, context.reactor, rate, context.lines
                )
                rank.child.open(partial(self._on_boot, rank), partial(self._on_died, rank))
            self._link = links.pop(0)
        finally:
            for link in links:
                link.close()

    def _on_slow_load(self, rank: RankProcess, slow: SlowLoad) -> None:
        if not rank.number:
            self._context.events.load_slow(self, slow)

    def live_instance(self) -> LiveInstance | None:
        """Return the loaded worker for a front; None if there is none."""
        if self.lifecycle.state is not InstanceState.READY or self._link is None or self.child is None:
            return None
        process, loaded = self.child.process, self.ranks[0].ready
        assert loaded is not None, "the instance is ready"
        fds = (self._link.fileno(), process.pidfd)
        pid, *followers = [one.process.pid for one in self.children]
        return LiveInstance(self.instance.name, pid, loaded.slots, loaded.load_s, *fds, tuple(followers))

    def report_hang(self, hang: Hang) -> None:
        """Report an overdue call with the stacks of the worker. With a limit, replace the worker."""
        process = self.process
        if process is None or process.pid != hang.pid or self.lifecycle.state is not InstanceState.READY:
            return  # the call has just returned, or the worker died
        report = partial(report_overdue_call, process, hang, self._fields)
        ask_all_stacks(self.children, report, is_ending=bool(hang.limit_s))
        if hang.limit_s:
            self._last_words = f"its callable was not back within execution_timeout_s, {hang.limit_s:g} s"
            self._move(InstanceEvent.HANG)

    def excuse(self, pid: int) -> bool:
        """Exclude the worker's death from the restart back-off. Return whether its restart was due later."""
        process, waits = self.process, self.lifecycle.state is InstanceState.WAITING
        if pid != (self._dead_pid if process is None else process.pid):
            return False  # another worker runs already
        waits = waits and self.lifecycle.restart_in_s(time.monotonic()) > 0
        self.lifecycle.excuse(time.monotonic())
        if waits:
            self._log_restart("under an isolated request", 0.0)
            self._context.reactor.call_later(0.0, self._start_when_due)
        return waits

    def lost_gpu_reason(self) -> str:
        lost = self._context.lost_gpus
        return next((lost[uuid] for uuid in self.instance.placement.gpu_uuids if uuid in lost), "")

    def fence(self) -> None:
        """Kill the worker because its GPU is lost. It is not restarted until ``release()``."""
        for uuid in self._context.lost_gpus:
            self._context.weights.gpu_lost(uuid)
        if self.lifecycle.state is InstanceState.WAITING:
            self._move(InstanceEvent.FENCE)
            self._context.events.instance_lost(self, self.lost_gpu_reason())
        elif self.lifecycle.state in {InstanceState.LOADING, InstanceState.READY, InstanceState.ASLEEP}:
            self.kill()

    def release(self) -> None:
        """Restart the worker if it was fenced, because its GPU is back."""
        self._start_again(InstanceState.FENCED, InstanceEvent.RELEASE)

    def stop(self) -> None:
        """Ask the worker to finish its batch and exit. It is not restarted."""
        if self.lifecycle.state is InstanceState.STOPPED:
            return
        is_loaded = self.lifecycle.state is InstanceState.READY
        self._move(InstanceEvent.STOP)
        if not self.children:
            self._end_weights()
        for rank in self.ranks[: 1 if is_loaded else None]:  # later, rank 0 stops the others after its batch
            rank.send(wire.Stop())

    def kill(self) -> None:
        for child in self.children:
            child.process.kill()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for sock in (self._link, self._port):
            if sock is not None:
                sock.close()
        self._link = self._port = None

    def discard(self) -> None:
        """Kill and reap the worker at once. It is not restarted."""
        self.stop()
        self.kill()
        self.close()
        self._end_weights()

    def _end_weights(self) -> None:
        for rank in self.ranks:
            self._context.weights.instance_ended(rank)

    def _move(self, event: InstanceEvent, phase: str = "") -> None:
        if event is not InstanceEvent.SPAWNED:
            for rank in self.ranks:
                rank.end_load()
        self.lifecycle.apply(event, time.monotonic())
        self._context.events.instance_changed(self, phase)

    def _on_boot(self, rank: RankProcess) -> None:
        assert rank.child is not None
        try:
            received = rank.child.channel.receive_with_fds()
        except (wire.WireError, OSError) as error:
            self._kill_broken(rank, str(error))
            return
        if received is None:
            rank.child.stop_listening()
            return
        message, fds = received
        try:
            if isinstance(message, wire.Weights) and fds:
                self._publish_weights(rank, message, fds)
                return
            self._handle(rank, message)  # an OSError of the supervisor's own work is not the worker's fault
        except wire.WireError as error:
            self._kill_broken(rank, str(error))
        finally:
            close_all(fds)

    def _publish_weights(self, rank: RankProcess, message: wire.Weights, fds: list[int]) -> None:
        """Store the weights that this worker has loaded. Raise ``WireError`` if they are not sealed, or have
        another number of descriptors than the message says.
        """
        match message:
            case wire.Weights(str(key), tuple(ranges), str(uuid), int(nbytes)) if len(fds) == 1 + bool(uuid):
                device = ExportedMemory(fds.pop(), nbytes, uuid) if uuid else None
            case _:
                raise wire.WireError(f"Weights with {len(fds)} descriptors")
        try:
            memory = SealedMemory(fds.pop())
        except ValueError as error:
            raise wire.WireError(str(error)) from None
        self._context.weights.publish(rank, key, memory, ranges, device)

    def _handle(self, rank: RankProcess, message: Any) -> None:
        """Handle a message, or raise ``WireError``. Fields are checked, because the worker runs user code."""
        match message:
            case wire.Phase(str(name)):
                rank.enter_phase(name)
                if not rank.number:
                    self._context.events.instance_changed(self, name)
            case wire.Ready(float(load_s), int(), bool(), bool()) if (
                self.lifecycle.state is InstanceState.LOADING
            ):
                did = "woke" if self.has_slept else "loaded"
                logger.info("%s in %.2f s", did, load_s, extra=rank.fields)
                self._on_ready(rank, message)
            case wire.Slept() if self.lifecycle.state is InstanceState.ASLEEP and rank.ready is not None:
                self._on_slept(rank)
            case wire.Ready() | wire.Slept() | wire.Unrecoverable() if (
                self.lifecycle.state is InstanceState.STOPPING
            ):
                pass  # sent before our Stop arrived
            case wire.LoadFailed(str(text), str(traceback)):
                self._last_words = self._last_words or text
                self._load_failed = True
                what = "could not be loaded" if traceback else f"could not be loaded: {text}"
                log_with_text(logger, logging.ERROR, what, traceback, rank.fields)
            case wire.Ending(str(text)):
                self._last_words = self._last_words or text
            case wire.Unrecoverable(str(text)) if self.lifecycle.state is InstanceState.READY:
                self._last_words = f"its callable cannot go on: {text}"
                log_with_text(logger, logging.ERROR, self._last_words, "", rank.fields)
                self._context.events.instance_unrecoverable(self, text)
            case wire.Imported(tuple(files)) if all(isinstance(one, str) for one in files):
                self._context.events.instance_imported(self, files)
            case wire.WantWeights(str(key)) | wire.WeightsFailed(str(key)) | wire.ReleaseWeights(str(key)):
                weights = self._context.weights
                {
                    wire.WantWeights: weights.request,
                    wire.WeightsFailed: weights.failed,
                    wire.ReleaseWeights: weights.slept,
                }[type(message)](rank, key)
            case wire.Log(int(), str(), str(), tuple()):
                rank.log(message)
            case _:
                raise wire.WireError(f"{type(message).__name__} in state {self.lifecycle.state.name}")

    def _on_ready(self, rank: RankProcess, message: wire.Ready) -> None:
        rank.ready, self.moves_to_host = message, message.moves_to_host
        rank.end_load()
        self._context.weights.worker_ready(rank)
        if all(one.ready is not None for one in self.ranks):
            self.device_failures, self.has_slept = 0, False
            self._move(InstanceEvent.LOADED)
            self._context.events.instance_ready(self)

    def _kill_broken(self, rank: RankProcess, what: str) -> None:
        """Kill a worker that broke the protocol; it is restarted like any other."""
        logger.error("killed the worker: it broke the protocol: %s", what, extra=rank.fields)
        if rank.child is not None:
            rank.child.stop_listening()
        self.kill()

    def _on_died(self, rank: RankProcess) -> None:
        child = rank.child
        assert child is not None
        try:
            # The last messages of the worker are still in the socket, above all LoadFailed. A worker that
            # died right after Ready was never used.
            for message in child.last_messages():
                if not isinstance(message, _OF_THE_LIVING):
                    self._handle(rank, message)
        except (wire.WireError, OSError) as error:
            logger.error("the worker broke the protocol: %s", error, extra=rank.fields)
        exit_reason, exit_status = child.exit_reason(), child.process.exit_status
        if not rank.number:
            self._dead_pid = child.process.pid
        if not self._death:
            self.device_failures += exit_status == EXIT_DEVICE
            verdict = rank.load.verdict if rank.load is not None else ""
            which = f"rank {rank.number}: " if len(self.ranks) > 1 else ""
            self._death = self._last_words or verdict or f"{which}{exit_reason}"
        rank.close()
        if not self.children:
            self._context.mps.ask_again()
            self.close()
            self._lost(self._last_words or self._death)
        elif exit_status or self.lifecycle.state is not InstanceState.STOPPING:
            self.kill()  # the other ranks; otherwise they end by themselves after rank 0

    def _lost(self, reason: str) -> None:
        stopping = self.lifecycle.state is InstanceState.STOPPING
        self._move(InstanceEvent.DIED)
        if stopping:
            self._end_weights()
        for rank in self.ranks:
            self._context.weights.worker_ended(rank)
        if not stopping and (lost_gpu_reason := self.lost_gpu_reason()):
            self._move(InstanceEvent.FENCE)
            reason = lost_gpu_reason
            logger.warning("ended (%s); it restarts when the GPU is back", reason, extra=self._fields)
        elif not stopping:
            delay_s = self.lifecycle.restart_in_s(time.monotonic())
            self._context.reactor.call_later(delay_s, self._start_when_due)
        self._context.events.instance_lost(self, reason)
        if self.lifecycle.state is InstanceState.WAITING:  # otherwise it is not restarted
            self._log_restart(reason, delay_s)

    def _log_restart(self, reason: str, delay_s: float) -> None:
        """Log when the worker restarts. A failed load has been logged already."""
        when = f"starts again in {delay_s:.1f} s" if delay_s >= _NOTICEABLE_S else "starts again at once"
        if not self._load_failed:
            logger.warning("died (%s); %s", reason, when, extra=self._fields)
        elif delay_s >= _NOTICEABLE_S:
            logger.warning("%s", when, extra=self._fields)

    def _start_when_due(self) -> None:
        # Otherwise the timer belongs to an earlier death.
        if self.lifecycle.restart_in_s(time.monotonic()) < _NOTICEABLE_S:
            self._start_again(InstanceState.WAITING, InstanceEvent.DUE)

    def _start_again(self, waiting: InstanceState, event: InstanceEvent) -> None:
        if self.lifecycle.state is waiting:
            self._move(event)
            self.start_or_retry()

    def start_or_retry(self) -> None:
        """Start a worker. If that fails, another try follows, as after a death."""
        try:
            self.start()
        except (StartupError, OSError, MemoryError, RuntimeError) as error:
            # Processes, memory or descriptors were lacking, which may pass.
            self.kill()
            self.close()
            self._lost(str(error))


def _launch(
    worker: WorkerMonitor, variables: dict[str, str], links: Sequence[socket.socket], relay_output: bool
) -> tuple[Child, list[socket.socket]]:
    instance = worker.instance
    if "object" in instance.source:
        return start_thread(worker.lifecycle.name, instance.source)
    python = instance.source.get("python")
    module = "gpuserve.backends.environments" if python else "gpuserve_worker"
    arguments = (python,) if python else ()
    environment = instance.placement.environment() | thread_variables(instance, worker.threads) | variables
    fds = [one.fileno() for one in links]
    return spawn(
        module, 2, arguments=arguments, more_fds=fds, environment=environment, relay_output=relay_output
    )


def _init(spec: ModelSpec, instance: InstanceSpec, rank: int, context: WorkerContext) -> wire.Init:
    """Return the message that tells a worker its model. A worker thread can use all GPUs of this process."""
    in_thread, placement = "object" in instance.source, instance.placement
    settings = context.settings.current
    sharing = sum(not set(instance.devices).isdisjoint(one.devices) for one in context.instances())
    return wire.Init(
        wire.PROTOCOL,
        spec.name,
        spec.version,
        instance.name,
        instance.device if instance.device == CPU or in_thread else gpu_name(rank),
        {} if in_thread else {key: one for key, one in instance.source.items() if key != "memory"},
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
        instance.cpus or placement.cpus,
        placement.numa_node,
        settings.shared_memory_locked_nbytes,
        spec.all_lines,
        context.follows_imports or settings.model_control == POLL,
        spec.owned_outputs,
        spec.static_inputs,
        spec.max_active,
        0 if in_thread else spec.gpu_memory_nbytes // len(instance.devices),
        rank,
        instance.ranks,
        settings.gpu_locked_nbytes // max(1, sharing),
        spec.on_demand,
    )
