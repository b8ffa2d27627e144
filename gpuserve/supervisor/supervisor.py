"""The supervisor: one reactor that starts, monitors, restarts and stops all processes of a server."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import BindError, GpuserveError, ModelUnrecoverable, StartupError
from gpuserve.core.event_log import OBSERVED_BY_FRONT, EventKind, EventLog
from gpuserve.devices.mps import MpsDaemon
from gpuserve.devices.placement import n_processors
from gpuserve.model.placement import ServerDevices, cores_of_instances, n_threads, overloads
from gpuserve.model.spec import RESTART_WORKER, InstanceSpec, ModelSpec
from gpuserve.supervisor.attach.attached_programs import AttachedModels
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.operator_protocol import OnOutcome
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.models.declared_models import (
    ConfigSource,
    DeclaredModels,
    Repository,
    loaded_at_start,
    wanted_at_start,
)
from gpuserve.supervisor.models.generations import GenerationState, GenerationTable
from gpuserve.supervisor.models.load_requests import LoadRequests
from gpuserve.supervisor.models.model_operations import (
    LoadOperation,
    UnloadOperation,
    failed_start,
)
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.operator.event_publication import DELAY_S, EventPublication
from gpuserve.supervisor.operator.operator_verbs import ControlSocket, OperatorVerbs
from gpuserve.supervisor.operator.quiescence import Quiescence, QuiescenceState
from gpuserve.supervisor.processes.child_process import Child, front_process
from gpuserve.supervisor.processes.child_supervision import LogLines
from gpuserve.supervisor.processes.front_monitor import FrontEventFeed, FrontMonitor, IngressProcesses
from gpuserve.supervisor.processes.lifecycle import LiveSettings, ServerLifecycle, ServerObserver, ServerState
from gpuserve.supervisor.processes.listeners import Listeners
from gpuserve.supervisor.processes.server_core import BackgroundThreads, ServerCore
from gpuserve.supervisor.processes.service_manager import ServiceManager
from gpuserve.supervisor.reload.config_reload import ConfigReload, ConfigWork
from gpuserve.supervisor.reload.file_polling import FilePolling, FileWatch
from gpuserve.supervisor.workers.gpu_fences import GpuFences
from gpuserve.supervisor.workers.worker_group import (
    record_instance_death,
    record_instance_state,
    record_slow_load,
    stop_timeout_s,
)
from gpuserve.supervisor.workers.worker_monitor import WorkerContext, WorkerEvents, WorkerMonitor
from gpuserve.supervisor.workers.worker_watchdogs import Hang, SlowLoad
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: Drain time after a model has raised ``UnrecoverableError``: a restarted server should be up again soon.
BROKEN_DRAIN_TIMEOUT_S: Final = 5.0


#: Time for a front to close its connections after ``Quit``; then it is killed. Longer than the front's own
#: timeout for its connections.
FRONT_QUIT_TIMEOUT_S: Final = 6.0


@dataclass(eq=False)
class ServerShutdown:
    """The shutdown of one server. The reactor stops at its end."""

    _core: ServerCore
    _models: ServedModels
    _attached: AttachedModels
    _quiescence: Quiescence
    _ingress: IngressProcesses
    #: Requests that the front aborted at the end of the drain.
    _unfinished: int = 0

    def start_drain(
        self, timeout_s: float = math.inf, *, lame: bool = True, terminated: bool = False
    ) -> None:
        """Finish queued requests within ``timeout_s``. Without ``lame`` no new request is accepted; otherwise
        the lame duck period comes first. ``terminated``: a SIGTERM ends the server.
        """
        core = self._core
        if core.lifecycle.state is ServerState.STARTING:
            self.now()
        elif core.lifecycle.state is ServerState.SERVING:
            core.lifecycle.move(ServerState.DRAINING)
            self._attached.stop_accepting()
            self._models.abandon(ended())
            whole_s = self._quiescence.lame_duck_s(terminated=terminated) if lame else 0.0
            lame_duck_s = self._quiescence.lame_duck_left_s(whole_s)
            if lame_duck_s:
                text = "stopping: requests are served for %.3g s more, then queued requests are finished"
                logger.info(text, lame_duck_s)
            else:
                logger.info("stopping: finishing queued requests")
            if core.front.process is None:  # no request is in flight between two fronts
                self.start_stop()
                return
            timeout_s = min(timeout_s, core.settings.current.drain_timeout_s)
            keeps_ports = core.listeners.are_inherited
            core.front.send(messages.Drain(timeout_s, lame_duck_s, whole_s > 0 or keeps_ports, keeps_ports))
            core.reactor.call_later(lame_duck_s + timeout_s + 1.0, self.start_stop)

    def front_drained(self, unfinished: int) -> None:
        """Continue the shutdown, because no request is in flight any more."""
        self._unfinished = unfinished
        out = QuiescenceState.OUT_OF_SERVICE.value
        self._core.events.record(EventKind.DRAINED, service=out, unfinished=unfinished)
        if unfinished:
            logger.warning("%d requests were not finished within the drain time", unfinished)
        self.start_stop()

    def start_stop(self) -> None:
        if self._core.lifecycle.state is not ServerState.DRAINING:
            return
        self._core.lifecycle.move(ServerState.STOPPING)
        front = self._core.front
        # The front then has the last descriptors. It accepts who has connected, and closes them.
        self._core.listeners.close()
        front.quit()
        if front.process is None:
            self.front_ended()
            return
        self._core.reactor.call_later(FRONT_QUIT_TIMEOUT_S, front.kill)

    def front_ended(self) -> None:
        """Stop the workers, because the front has ended."""
        self._ingress.close()  # a killed front leaves its ingress processes behind
        self._attached.end()
        self._models.stop()
        # Nobody waits for the answers of calls that are still running after the drain.
        self._core.reactor.call_later(stop_timeout_s(hurried=self._unfinished > 0), self.now)
        self.check_workers_stopped()

    def check_workers_stopped(self) -> None:
        if all(generation.group.is_stopped for generation in self._models.table):
            self.now()

    def now(self) -> None:
        self._core.reactor.stop()


def ended() -> StartupError:
    return StartupError("the server has been stopped")


class _Parts:
    """The parts of one server, and the dispatch of the front's messages to them."""

    def __init__(
        self,
        core: ServerCore,
        context: WorkerContext,
        repository: Repository,
        devices: ServerDevices,
        source: ConfigSource | None,
        watch: FileWatch | None,
    ) -> None:
        relayed = context.relay_output
        self.ingress = IngressProcesses(core.reactor, core.front, core.lines, relay_output=relayed)
        numbers = itertools.count(1)
        table = GenerationTable(repository, context, core.front, numbers)
        self._core = core
        self.front = core.front
        self.events = FrontEventFeed(core.events.recent, core.front, core.reactor)
        self.gpus = GpuFences(core, context.lost_gpus, table.workers)
        self.models = models = ServedModels(core, table)
        self.attached = attached = AttachedModels(core, table.names, numbers)
        background = BackgroundThreads(core)
        work = ConfigWork(models, attached, devices)
        self.config = ConfigReload(source, core.lifecycle, core.events, work, self._adjust, background.run)
        self.polling = FilePolling(source, core, background, self.config.request_by_files, watch)
        self.publication = EventPublication(core, background.run)
        lifecycle, on_loaded = core.lifecycle, self.config.model_loaded
        self.loads = LoadRequests(lifecycle, models, attached, devices, background.run, on_loaded)
        self.operator = OperatorVerbs(core, models, attached, self.loads, self.config, self.publication)
        self.control = ControlSocket(core.reactor, self.operator.ask)
        self.shutdown = ServerShutdown(core, models, attached, self.operator.quiescence, self.ingress)

    def _adjust(self, changes: dict[str, Any]) -> None:
        self._core.front.adjust(changes)
        self.polling.set_timer()

    def on_front_message(self, message: Any) -> None:
        """Handle a message of the front: requests, answers, and reports."""
        match message:
            case messages.Drained(int(unfinished)):
                self.shutdown.front_drained(unfinished)
            case messages.Retired(int(generation), int(unfinished)):
                self.models.retired(generation, hurried=unfinished > 0)
            case messages.InstanceRetired(int(generation), str(instance), bool(idle)):
                self.models.instance_retired(generation, instance, hurried=not idle)
            case messages.LoadModel(int(ticket), str(model), dict(changes)):
                self.loads.load(model, changes, self.front.answer_to(ticket))
            case messages.UnloadModel(int(ticket), str(model)):
                self.loads.unload(model, self.front.answer_to(ticket))
            case messages.Operate(int(ticket), str(verb), dict(arguments)):
                self.operator.ask(verb, arguments, lambda _: None, self.front.outcome_to(ticket))
            case messages.Quiesced(int(), int(), bool()):
                self.operator.quiescence.on_quiesced(message)
            case messages.Census(int(ticket)):
                self.operator.census.answer(ticket, message)
            case messages.LostGpus(tuple(gpus)):
                self.gpus.gpus_lost(gpus)
            case messages.StartIngress(int(number)):
                self.ingress.start(number)
            case _:
                self._on_front_report(message)

    def _on_front_report(self, message: Any) -> None:
        """Handle a report of what the front has observed. Raise ``WireError`` if the message is unknown."""
        match message:
            case messages.ExecutionHung(int(generation), str(), int(), float(), float()):
                self._execution_hung(generation, Hang(*message[1:]))
            case messages.IsolatedWorkerDeath(int(generation), str(instance), int(pid)):
                self.models.excuse_isolated_death(generation, instance, pid)
            case messages.Rates(tuple()):
                status = self.operator.status.document(messages.Census(*message.census))
                self.publication.publish_sample(status, message)
            case messages.Usage(tuple(), tuple()):
                self.models.on_demand.on_usage(message)
            case messages.Asleep(int(generation), bool(is_asleep)):
                self.models.on_demand.on_asleep(generation, is_asleep=is_asleep)
            case messages.FrontEvent(str(kind), str(model), int(version), str(instance), dict(facts)):
                if kind not in {kind.value for kind in OBSERVED_BY_FRONT}:
                    raise WireError(f"the front sent an event of kind {kind!r}")
                about: dict[str, Any] = {"model": model, "version": version, "instance": instance}
                self._core.events.record(EventKind(kind), **about, **facts)
            case other:
                raise WireError(f"the front said {type(other).__name__}")

    def _execution_hung(self, generation: int, hang: Hang) -> None:
        """Ask the worker's monitor to kill the worker, or to report that the call is overdue."""
        spec = self.models.execution_hung(generation, hang) or self.attached.execution_hung(generation, hang)
        if spec is not None:
            about: dict[str, Any] = {"model": spec.name, "version": spec.version, "instance": hang.instance}
            ran_s, limit_s, pid = round(hang.ran_s, 3), hang.limit_s, hang.pid
            kind = EventKind.EXECUTION_HUNG
            self._core.events.record(kind, **about, running_s=ran_s, limit_s=limit_s, pid=pid)


class Supervisor(WorkerEvents):
    """One server. ``started`` resolves with the addresses, or fails with the ``StartupError``.

    Args:
        settings: the settings of the server.
        models: the models to be loaded at the start, placed on devices.
        observer: called with the progress of the start.
        relay_output: whether the output of child processes goes into the log, line by line.
        start_front: starts a front process.
        repository: the models that clients may load by name; by default ``models`` and those added later.
        devices: places the models that clients load.
        config: the config file, if it can be read again.
        watch: if given, the files of the config and of its models are watched for changes.
        manager: the service manager that started this process.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ModelSpec],
        observer: ServerObserver,
        *,
        relay_output: bool,
        start_front: Callable[[bool], tuple[Child, socket]] = front_process,
        repository: Repository | None = None,
        devices: ServerDevices | None = None,
        config: ConfigSource | None = None,
        watch: FileWatch | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        self._manager = manager
        self.started: Future[dict[str, str]] = Future()
        self._observer = observer
        self._failure: GpuserveError | None = None
        reactor, listeners, live_settings = Reactor(self._on_error), Listeners(), LiveSettings(settings)
        events, lines = EventLog(), LogLines(reactor)
        start = partial(start_front, relay_output)
        front = FrontMonitor(reactor, listeners, live_settings, events, lines, start)
        lifecycle, mps = ServerLifecycle(events), MpsDaemon(settings.mps)
        self._core = ServerCore(lifecycle, live_settings, reactor, listeners, front, events, lines, mps)
        self._declared = DeclaredModels(models)
        processors, ingress_processes = n_processors(), settings.ingress_processes
        cores = cores_of_instances(processors, ingress_processes)

        def instances() -> list[InstanceSpec]:
            return self._parts.models.table.instances()

        def threads_of(instance: InstanceSpec) -> int:
            return n_threads(instance, instances(), cores)

        follows_imports = watch is not None
        context = WorkerContext(
            reactor, self, threads_of, live_settings, relay_output, {}, lines, follows_imports,
            mps=mps, instances=instances,
        )  # fmt: skip
        self._weights = context.weights
        self._weights.on_changed = self._send_weights
        places = devices or ServerDevices()
        self._parts = _Parts(self._core, context, repository or self._declared, places, config, watch)
        broken = {} if config is None else config.start.broken
        for name, reason in broken.items():
            self._parts.models.table.index.undeclared(name, str(reason))
        self._parts.models.missing += wanted_at_start(broken, settings.load_at_start)
        for spec in loaded_at_start(models, settings.load_at_start):
            self._parts.models.table.add(spec, served=True)
        for text in overloads(self._parts.models.table.instances(), processors, ingress_processes):
            logger.warning("%s", text)

    @property
    def state(self) -> ServerState:
        return self._core.lifecycle.state

    # ---- for any thread -------------------------------------------------------------------

    def request_stop(self, fast: bool = False, terminated: bool = False) -> None:
        """Stop the server after queued requests are finished, or at once with ``fast``. Safe in signal
        handlers. ``terminated``: a SIGTERM is the reason.
        """
        shutdown = self._parts.shutdown
        drain = partial(shutdown.start_drain, terminated=terminated)
        self._core.reactor.call_soon_threadsafe(shutdown.now if fast else drain)

    def request_reload(self, reload_all: bool = False) -> None:
        """Reload the config file, or with ``reload_all`` all models, changed or not, once the server serves.
        The result is logged. Safe in signal handlers.
        """
        config = self._parts.config

        def request() -> None:
            if self._manager is not None and config.path and self.state is ServerState.SERVING:
                self._manager.reload_started()
            (config.request_all if reload_all else config.request_by_signal)()

        self._core.reactor.call_soon_threadsafe(request)

    def request_status(self, answer: OnOutcome) -> None:
        """Answer with the status of the server, in the supervisor's thread."""
        ask = partial(self._parts.operator.ask, "status", {}, lambda _: None, answer)
        self._core.reactor.call_soon_threadsafe(ask)

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model. The future resolves when every instance is loaded. It fails with
        ``StartupError`` if an instance fails to load (the model is then removed again), and with
        ``BindError`` if an attached program serves a model of that name.
        """
        loaded: Future[None] = Future()
        if not self._core.reactor.call_soon_threadsafe(lambda: self._add_model(spec, loaded)):
            loaded.set_exception(ended())
        return loaded

    def remove_model(self, model: str) -> Future[None]:
        """Unload and forget a model of this program. The future resolves when its workers have ended."""
        removed: Future[None] = Future()
        if not self._core.reactor.call_soon_threadsafe(lambda: self._remove_model(model, removed)):
            removed.set_exception(ended())
        return removed

    # ---- the run of a server --------------------------------------------------------------

    def run(self) -> int:
        """Serve until stopped; return 0 after a clean stop, raise StartupError or ModelUnrecoverable."""
        try:
            self._serve()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            self._fail_waiting(error)
            raise
        self._fail_waiting(StartupError("stopped before it was ready"))
        return 0

    def _serve(self) -> None:
        core, parts = self._core, self._parts
        parts.events.open()
        core.lines.open()
        if self._manager is not None:
            core.events.recent.subscribe(self._manager.on_event)
            self._beat(self._manager)
        core.lifecycle.move(ServerState.STARTING)
        try:
            core.listeners.open(core.settings.current, self._manager.listeners if self._manager else ())
            parts.control.open(core.listeners, required=core.settings.current.require_control)
            core.front.start(self, parts.on_front_message)
            parts.models.start()
            self._check_started()
            core.reactor.run()
        finally:
            self._kill_all()
            core.listeners.close()
            core.lifecycle.end()
            parts.publication.close()
            core.lines.close()
            core.reactor.close()

    def _beat(self, manager: ServiceManager) -> None:
        """Reset the service manager's watchdog three times within its time, as long as the reactor runs."""
        if manager.watchdog_s:
            manager.heartbeat()
            self._core.reactor.call_later(manager.watchdog_s / 3, partial(self._beat, manager))

    def _kill_all(self) -> None:
        self._parts.control.close()
        self._parts.polling.close()
        self._parts.gpus.close()
        self._parts.attached.end()
        self._core.front.kill()
        self._parts.ingress.close()
        self._parts.models.kill()
        self._core.mps.close()
        self._core.front.close()

    def _fail_waiting(self, error: BaseException) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        self._parts.models.abandon(error if isinstance(error, GpuserveError) else ended())

    def _on_error(self, error: Exception) -> None:
        """Log a callback's exception while the server serves or drains; otherwise end the server by it."""
        if self.state not in {ServerState.SERVING, ServerState.DRAINING}:
            raise error
        logger.error("a task of the supervisor failed, and the server goes on: %r", error, exc_info=error)

    # ---- events of workers ----------------------------------------------------------------

    def instance_changed(self, worker: WorkerMonitor, phase: str) -> None:
        record_instance_state(self._core.events, worker, phase)
        instance, state = worker.instance, worker.lifecycle.state
        self._observer.instance_changed(worker.spec.name, instance.name, instance.device, state.value, phase)

    def instance_ready(self, worker: WorkerMonitor) -> None:
        """Put a loaded worker into rotation, and complete the start if the worker is the last of it."""
        self._parts.gpus.instance_ready(worker)
        self._parts.models.instance_ready(worker)
        self._check_started()

    def instance_slept(self, worker: WorkerMonitor) -> None:
        self._parts.models.on_demand.worker_slept(worker)

    def instance_lost(self, worker: WorkerMonitor, reason: str) -> None:
        """Take a dead worker out of rotation. During the start a death is a failure."""
        record_instance_death(self._core.events, worker, reason)
        if self.state is ServerState.STOPPING:
            self._parts.shutdown.check_workers_stopped()
            return
        failure = self._parts.models.instance_lost(worker, reason)
        if failure is not None and self.state is ServerState.STARTING:
            if self._core.settings.current.exit_on_error:
                self._fail(failure)
            else:
                self._parts.models.exclude_version(worker, reason, failure)
        self._parts.gpus.check()
        self._check_started()  # a model that was excluded above does not delay the start

    def load_slow(self, worker: WorkerMonitor, slow: SlowLoad) -> None:
        record_slow_load(self._core.events, worker, slow)

    def instance_unrecoverable(self, worker: WorkerMonitor, text: str) -> None:
        """Restart the worker, or end the server, by the policy of the model."""
        if worker.spec.on_unrecoverable == RESTART_WORKER:
            worker.kill()
        elif self.state in {ServerState.STARTING, ServerState.SERVING}:
            self._end_broken(worker, text)

    def instance_imported(self, worker: WorkerMonitor, files: Sequence[str]) -> None:
        self._parts.polling.add_imports(worker.spec.name, worker.spec.version, worker.generation, files)

    # ---- events of the front --------------------------------------------------------------

    def front_started(self) -> None:
        parts = self._parts  # the order below is the order in which a first front would learn these facts
        parts.gpus.announce()
        parts.models.table.announce()
        parts.attached.announce()
        parts.operator.quiescence.announce()
        self._send_weights()
        if self.state is ServerState.SERVING:
            self._core.front.send(messages.Serving(tuple(parts.models.missing)))

    def _send_weights(self) -> None:
        keys = ("name", "device", "nbytes")
        rows = [(*map(one.__getitem__, keys), len(one["instances"])) for one in self._weights.document()]
        self._core.front.send(messages.HeldWeights(tuple(rows)))

    def front_ready(self) -> None:
        self._parts.ingress.front_ready()
        self._parts.events.front_ready()
        self._parts.publication.front_ready()
        self._check_started()

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """Fail the start if the front cannot start at all. Later the front is replaced, or was to end."""
        self._parts.ingress.front_lost()
        if self.state is ServerState.STOPPING:
            self._parts.shutdown.front_ended()
            return
        self._parts.models.front_lost()
        if self.state is ServerState.STARTING and hopeless:
            self._fail(StartupError(f"the front process could not be started: {reason}"))
        else:
            self._parts.shutdown.start_stop()  # during a drain: no request is in flight any more

    # ---- start ----------------------------------------------------------------------------

    def _check_started(self) -> None:
        core, parts = self._core, self._parts
        is_loading = any(one.state is GenerationState.LOADING for one in parts.models.table)
        if self.state is not ServerState.STARTING or not core.front.ready or is_loading:
            return
        addresses = core.listeners.addresses(core.settings.current)
        try:
            if core.settings.current.attachable:
                parts.attached.open(addresses)
        except StartupError as failure:
            self._fail(failure)
            return
        core.front.send(messages.Serving(tuple(parts.models.missing)))
        self._observer.server_ready(addresses)  # before SERVING, so that an exception fails the start
        core.lifecycle.move(ServerState.SERVING)
        self.started.set_result(addresses)
        parts.config.server_started()
        parts.polling.start()
        # Later, so that the start does not wait for the import of ZeroMQ.
        core.reactor.call_later(DELAY_S, lambda: parts.publication.open(lambda: None))

    def _add_model(self, spec: ModelSpec, loaded: Future[None]) -> None:
        if self.state not in {ServerState.STARTING, ServerState.SERVING}:
            loaded.set_exception(ended())
            return
        if self._parts.attached.has(spec.name):
            loaded.set_exception(BindError(f"model {spec.name!r} is served by an attached program"))
            return

        def answer(error: GpuserveError | None) -> None:
            if error is None:
                self._declared.add(spec)
                loaded.set_result(None)
            else:
                loaded.set_exception(error)

        load = LoadOperation(spec.name, answer, lambda: [spec], failed_start, replaces=False)
        self._parts.models.submit(load)

    def _remove_model(self, model: str, removed: Future[None]) -> None:
        if self.state not in {ServerState.STARTING, ServerState.SERVING}:
            removed.set_exception(ended())
            return

        def answer(error: GpuserveError | None) -> None:
            self._declared.remove(model)
            self._parts.models.table.index.forget_all(model)
            self._parts.models.table.send_states(model)
            if error is None:
                removed.set_result(None)
            else:
                removed.set_exception(error)

        self._parts.models.submit(UnloadOperation(model, answer))

    # ---- end ------------------------------------------------------------------------------

    def _fail(self, failure: GpuserveError) -> None:
        self._failure = failure
        self._parts.shutdown.now()

    def _end_broken(self, broken: WorkerMonitor, text: str) -> None:
        """End the server because a model is broken: refuse its requests, and finish those of others."""
        failure = ModelUnrecoverable(f"model {broken.spec.name!r} cannot go on: {text}")
        if self.state is ServerState.STARTING:
            self._fail(failure)
            return
        self._failure = failure
        generation = self._parts.models.table.get(broken.generation)
        for worker in [] if generation is None else generation.group.all:
            worker.stop()
            worker.kill()  # the front refuses the queue when the worker dies without a successor
        self._parts.shutdown.start_drain(BROKEN_DRAIN_TIMEOUT_S, lame=False)
