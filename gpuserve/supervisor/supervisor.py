"""The supervisor: one reactor that starts everything, keeps it alive and ends it in order. ``run()`` is the
life of a server, told from top to bottom; ``_Parts`` puts the parts of a server together.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from socket import socket
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.control import messages
from gpuserve.control.operator import AnswerOutcome
from gpuserve.control.reactor import Reactor
from gpuserve.errors import BindError, GpuserveError, ModelUnrecoverable, StartupError
from gpuserve.journal.event_journal import EventJournal
from gpuserve.journal.kinds import SEEN_BY_FRONT, EventKind
from gpuserve.model.spec import RESTART_WORKER, ModelSpec
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.supervisor.attach.attached_models import AttachedModels
from gpuserve.supervisor.core.front_events import EventsForFront
from gpuserve.supervisor.core.front_keeper import FrontKeeper
from gpuserve.supervisor.core.ingress import IngressProcesses
from gpuserve.supervisor.core.listeners import Listeners
from gpuserve.supervisor.core.log_lines import LogLines
from gpuserve.supervisor.core.processes import Child, front_process
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.core.server_life import ServerLife, ServerObserver, ServerState, SettingsInForce
from gpuserve.supervisor.ending import ServerEnding, ended
from gpuserve.supervisor.models.generations import GenerationTable
from gpuserve.supervisor.models.load_requests import LoadRequests
from gpuserve.supervisor.models.model_operations import LoadOperation, UnloadOperation, failed_start
from gpuserve.supervisor.models.repository import (
    ConfigSource,
    DeclaredModels,
    Repository,
    loaded_at_start,
    wanted_at_start,
)
from gpuserve.supervisor.models.served_models import ServedModels
from gpuserve.supervisor.operator.control_socket import ControlSocket
from gpuserve.supervisor.operator.verbs import OperatorVerbs
from gpuserve.supervisor.publication.publication import Publication
from gpuserve.supervisor.reload.background import Background
from gpuserve.supervisor.reload.config_reload import ConfigReload
from gpuserve.supervisor.reload.file_watch import FileWatch
from gpuserve.supervisor.reload.polling import FilePolling
from gpuserve.supervisor.reload.run import ConfigWork
from gpuserve.supervisor.workers.gpu_fences import GpuFences
from gpuserve.supervisor.workers.hang import Hang
from gpuserve.supervisor.workers.load_watch import SlowLoad
from gpuserve.supervisor.workers.worker_events import tell_changed, tell_lost, tell_slow
from gpuserve.supervisor.workers.worker_keeper import WorkerCare, WorkerKeeper
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: With a model that cannot go on, the others finish what is queued within this time, or the drain time
#: where that is shorter: whoever starts the server again should not wait long.
BROKEN_DRAIN_TIMEOUT_S: Final = 5.0


class _Parts:
    def __init__(
        self,
        core: ServerCore,
        care: WorkerCare,
        repository: Repository,
        devices: ServerDevices,
        source: ConfigSource | None,
        watch: FileWatch | None,
    ) -> None:
        relayed = care.relay_output
        self.ingress = IngressProcesses(core.reactor, core.front, core.lines, relay_output=relayed)
        numbers = itertools.count(1)
        table = GenerationTable(repository, care, core.front, numbers)
        self._core = core
        self.front = core.front
        self.events = EventsForFront(core.events.recent, core.front, core.reactor)
        self.gpus = GpuFences(core, care.lost_gpus, table.workers)
        self.models = models = ServedModels(core, table)
        self.attached = attached = AttachedModels(core, table.names, numbers)
        background = Background(core)
        work = ConfigWork(models, attached, devices)
        self.config = ConfigReload(source, core.life, core.events, work, self._adjust, background.run)
        self.polling = FilePolling(source, core, background, self.config.touched, watch)
        self.publication = Publication(core, background.run)
        self.loads = LoadRequests(core.life, models, attached, devices, background.run, self.config.loaded)
        self.operator = OperatorVerbs(core, models, attached, self.loads, self.config, self.publication)
        self.control = ControlSocket(core.reactor, self.operator.ask)
        self.ending = ServerEnding(core, models, attached, self.operator.quiescence, self.ingress)

    def _adjust(self, changes: dict[str, Any]) -> None:
        """Let changed settings hold, from the next look at the files on as well."""
        self._core.front.adjust(changes)
        self.polling.set_timer()

    def obey(self, message: Any) -> None:
        match message:
            case messages.Drained(int(unfinished)):
                self.ending.front_drained(unfinished)
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
                self.operator.quiescence.quiesced(message)
            case messages.Census(int(ticket)):
                self.operator.census.answer(ticket, message)
            case messages.LostGpus(tuple(gpus)):
                self.gpus.gpus_lost(gpus)
            case messages.StartIngress(int(number)):
                self.ingress.start(number)
            case _:
                self._hear(message)

    def _hear(self, message: Any) -> None:
        """Take what the front has seen; ``WireError`` where it is no message of a front's."""
        match message:
            case messages.ExecutionHung(int(generation), str(), int(), float(), float()):
                self._execution_hung(generation, Hang(*message[1:]))
            case messages.IsolatedDeath(int(generation), str(instance), int(pid)):
                self.models.death_isolated(generation, instance, pid)
            case messages.Rates(tuple()):
                self._sample(message)
            case messages.Noticed(str(), str(), int(), str(), dict()):
                self._noticed(message)
            case other:
                raise WireError(f"the front said {type(other).__name__}")

    def _sample(self, rates: messages.Rates) -> None:
        status = self.operator.status.document(messages.Census(*rates.census))
        self.publication.sample(status, rates)

    def _execution_hung(self, generation: int, hang: Hang) -> None:
        """Have who keeps the worker of an instance end it, or tell of it."""
        spec = self.models.execution_hung(generation, hang) or self.attached.execution_hung(generation, hang)
        if spec is not None:
            self._core.events.tell(
                EventKind.EXECUTION_HUNG,
                model=spec.name,
                version=spec.version,
                instance=hang.instance,
                running_s=round(hang.ran_s, 3),
                limit_s=hang.limit_s,
                pid=hang.pid,
            )

    def _noticed(self, message: messages.Noticed) -> None:
        kind, model, version, instance, facts = message
        if kind not in {one.value for one in SEEN_BY_FRONT}:
            raise WireError(f"the front has noticed {kind!r}")
        tell = self._core.events.tell
        tell(EventKind(kind), model=model, version=version, instance=instance, **facts)


class Supervisor:
    """One server. ``started`` resolves with the addresses, or fails with the ``StartupError``. ``repository``
    has the models that clients may load by name; without one these are ``models``, and those that are added
    later. All models are placed; ``devices`` places those that clients load. ``config`` is the config file,
    where there is one that can be read again; with a ``watch`` its files are followed.
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
    ) -> None:
        self.started: Future[dict[str, str]] = Future()
        self._observer = observer
        self._failure: GpuserveError | None = None
        reactor, listeners, in_force = Reactor(self._on_error), Listeners(), SettingsInForce(settings)
        events = EventJournal()
        lines = LogLines(reactor)
        front = FrontKeeper(reactor, listeners, in_force, events, lines, partial(start_front, relay_output))
        self._core = ServerCore(ServerLife(events), in_force, reactor, listeners, front, events, lines)
        self._declared = DeclaredModels(models)
        follows = watch is not None
        care = WorkerCare(reactor, self, in_force, relay_output, {}, lines, follows)
        self._parts = _Parts(
            self._core, care, repository or self._declared, devices or ServerDevices(), config, watch
        )
        broken = {} if config is None else config.start.broken
        for name, reason in broken.items():
            self._parts.models.table.index.undeclared(name, str(reason))
        self._parts.models.missing += wanted_at_start(broken, settings.load_at_start)
        for spec in loaded_at_start(models, settings.load_at_start):
            self._parts.models.table.add(spec, served=True)

    @property
    def state(self) -> ServerState:
        return self._core.life.state

    # ---- from any thread ------------------------------------------------------------------

    def request_stop(self, fast: bool = False, terminated: bool = False) -> None:
        """End the server: finish what is queued first, unless ``fast``; ``terminated``: for a SIGTERM. Safe
        in signal handlers.
        """
        ending = self._parts.ending
        drain = partial(ending.begin_drain, terminated=terminated)
        self._core.reactor.call_soon_threadsafe(ending.now if fast else drain)

    def request_reload(self, anew: bool = False) -> None:
        """Read the config file again and apply what has changed, once the server serves; ``anew``: load all
        models again, changed or not. What comes of it is in the log. Safe in signal handlers.
        """
        config = self._parts.config
        self._core.reactor.call_soon_threadsafe(config.anew if anew else config.signalled)

    def request_status(self, answer: AnswerOutcome) -> None:
        """Answer with the status of the server, in the supervisor's thread."""
        ask = partial(self._parts.operator.ask, "status", {}, lambda _: None, answer)
        self._core.reactor.call_soon_threadsafe(ask)

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model; the future resolves when every instance of it is loaded. It fails with
        ``StartupError`` when an instance cannot load; the model is taken out again. It fails with
        ``BindError`` when an attached program serves a model of that name.
        """
        loaded: Future[None] = Future()
        if not self._core.reactor.call_soon_threadsafe(lambda: self._add_model(spec, loaded)):
            loaded.set_exception(ended())
        return loaded

    def remove_model(self, model: str) -> Future[None]:
        """Unload every version of a model of this program, and forget it; the future resolves when its
        workers have ended.
        """
        gone: Future[None] = Future()
        if not self._core.reactor.call_soon_threadsafe(lambda: self._remove_model(model, gone)):
            gone.set_exception(ended())
        return gone

    # ---- the life of a server -------------------------------------------------------------

    def run(self) -> int:
        """Serve until stopped, in the calling thread. 0 after a clean stop. Raises StartupError: a port is
        taken, or a model could not be loaded; everything is ended; ModelUnrecoverable: a callable said that
        it cannot go on; everything is ended.
        """
        try:
            self._serve()
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            self._tell_waiting(error)
            raise
        self._tell_waiting(StartupError("stopped before it was ready"))
        return 0

    def _serve(self) -> None:
        core, parts = self._core, self._parts
        parts.events.open()
        core.lines.open()
        core.life.move(ServerState.STARTING)
        try:
            core.listeners.open(core.settings.now)
            parts.control.open(core.listeners, required=core.settings.now.require_control)
            core.front.start(self, parts.obey)
            parts.models.start()
            self._check_started()
            core.reactor.run()
        finally:
            self._kill_all()
            core.listeners.close()
            core.life.end()
            parts.publication.close()
            core.lines.close()
            core.reactor.close()

    def _kill_all(self) -> None:
        """Kill and reap whatever still runs; after a clean stop nothing does."""
        self._parts.control.close()
        self._parts.polling.close()
        self._parts.gpus.close()
        self._parts.attached.end()
        self._core.front.kill()
        self._parts.ingress.close()
        self._parts.models.kill()
        self._core.front.close()

    def _tell_waiting(self, error: BaseException) -> None:
        if not self.started.done():
            self.started.set_exception(error)
        self._parts.models.abandon(error if isinstance(error, GpuserveError) else ended())

    def _on_error(self, error: Exception) -> None:
        """Log an unexpected exception of a callback, and go on while the server serves or drains; the
        exception ends a server that starts or stops.
        """
        if self.state not in {ServerState.SERVING, ServerState.DRAINING}:
            raise error
        logger.error("a task of the supervisor failed, and the server goes on: %r", error, exc_info=error)

    # ---- what the workers tell ------------------------------------------------------------

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None:
        tell_changed(self._core.events, worker, phase)
        instance, state = worker.instance, worker.life.state
        self._observer.instance_changed(worker.spec.name, instance.name, instance.device, state.value, phase)

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """Let a loaded worker enter rotation; the start may be complete with it."""
        self._parts.gpus.instance_ready(worker)
        self._parts.models.instance_ready(worker)
        self._check_started()

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """Take a dead worker out of rotation; at the first start its death is a failure."""
        tell_lost(self._core.events, worker, reason)
        if self.state is ServerState.STOPPING:
            self._parts.ending.check_workers_stopped()
            return
        failure = self._parts.models.instance_lost(worker, reason)
        if failure is not None and self.state is ServerState.STARTING:
            if self._core.settings.now.exit_on_error:
                self._fail(failure)
            else:
                self._parts.models.leave_out(worker, reason, failure)
        self._parts.gpus.look()
        self._check_started()  # it does not wait for a model that could not be bound

    def load_slow(self, worker: WorkerKeeper, slow: SlowLoad) -> None:
        tell_slow(self._core.events, worker, slow)

    def instance_unrecoverable(self, worker: WorkerKeeper, text: str) -> None:
        """Start that worker afresh, or end the server, as the model wants it."""
        if worker.spec.on_unrecoverable == RESTART_WORKER:
            worker.kill()
        elif self.state in {ServerState.STARTING, ServerState.SERVING}:
            self._end_broken(worker, text)

    def instance_imported(self, worker: WorkerKeeper, files: Sequence[str]) -> None:
        self._parts.polling.imported(worker.spec.name, worker.spec.version, worker.generation, files)

    # ---- what the front tells -------------------------------------------------------------

    def front_started(self) -> None:
        parts = self._parts  # in the order in which it came about
        parts.gpus.announce()
        parts.models.table.announce()
        parts.attached.announce()
        parts.operator.quiescence.announce()
        if self.state is ServerState.SERVING:
            self._core.front.send(messages.Serving(tuple(parts.models.missing)))

    def front_ready(self) -> None:
        self._parts.ingress.front_ready()
        self._parts.events.front_ready()
        self._parts.publication.front_ready()
        self._check_started()

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """Fail the start where a front cannot even start; later it is just replaced, or was to end."""
        self._parts.ingress.front_lost()
        if self.state is ServerState.STOPPING:
            self._parts.ending.front_ended()
            return
        self._parts.models.front_lost()
        if self.state is ServerState.STARTING and hopeless:
            self._fail(StartupError(f"the front process could not be started: {reason}"))
        else:
            self._parts.ending.begin_stop()  # where it drains: nothing is in flight any more

    # ---- starting -------------------------------------------------------------------------

    def _check_started(self) -> None:
        core, parts = self._core, self._parts
        starting = self.state is ServerState.STARTING
        if not starting or not core.front.ready or not parts.models.table.all_loaded():
            return
        addresses = core.listeners.addresses(core.settings.now)
        try:
            if core.settings.now.attachable:
                parts.attached.open(addresses)
        except StartupError as failure:
            self._fail(failure)
            return
        core.front.send(messages.Serving(tuple(parts.models.missing)))
        self._observer.server_ready(addresses)  # before SERVING: an error here is one of the start
        core.life.move(ServerState.SERVING)
        self.started.set_result(addresses)
        parts.config.started()
        parts.polling.start()
        parts.publication.open_later()

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
        self._parts.models.begin(load)

    def _remove_model(self, model: str, gone: Future[None]) -> None:
        if self.state not in {ServerState.STARTING, ServerState.SERVING}:
            gone.set_exception(ended())
            return

        def answer(error: GpuserveError | None) -> None:
            self._declared.remove(model)
            self._parts.models.table.index.forget_all(model)
            self._parts.models.table.tell_states(model)
            if error is None:
                gone.set_result(None)
            else:
                gone.set_exception(error)

        self._parts.models.begin(UnloadOperation(model, answer))

    # ---- ending ---------------------------------------------------------------------------

    def _fail(self, failure: GpuserveError) -> None:
        self._failure = failure
        self._parts.ending.now()

    def _end_broken(self, broken: WorkerKeeper, text: str) -> None:
        """A model cannot go on: whoever waits for it is refused, the others are finished, then all ends."""
        failure = ModelUnrecoverable(f"model {broken.spec.name!r} cannot go on: {text}")
        if self.state is ServerState.STARTING:
            self._fail(failure)
            return
        self._failure = failure
        generation = self._parts.models.table.get(broken.generation)
        for worker in [] if generation is None else generation.group.all:
            worker.stop()
            worker.kill()  # its death and no successor is what the front refuses the queue by
        self._parts.ending.begin_drain(BROKEN_DRAIN_TIMEOUT_S, lame=False)
