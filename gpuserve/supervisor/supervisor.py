"""The supervisor: one reactor that starts everything, keeps it alive and ends it in order.

``run()`` is the life of a server, told from top to bottom: open the listeners, start the front and
the workers, say ready when every model is loaded, then wait; at the end drain the front, stop the
workers, close the listeners.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from gpuserve.devices.server_devices import ServerDevices
from gpuserve.errors import BindError, GpuserveError, ModelUnrecoverable, StartupError
from gpuserve.rates import check_rates
from gpuserve.settings import ServerSettings
from gpuserve.spec import RESTART_WORKER, ModelSpec
from gpuserve.supervisor import messages
from gpuserve.supervisor.attached_models import AttachedModels
from gpuserve.supervisor.ending import Ending, ended
from gpuserve.supervisor.front_keeper import Answer, FrontKeeper, StartFront
from gpuserve.supervisor.front_process import front_process
from gpuserve.supervisor.gpu_fences import GpuFences
from gpuserve.supervisor.listeners import Listeners
from gpuserve.supervisor.load_requests import LoadRequests
from gpuserve.supervisor.model_operations import Load, failed_start
from gpuserve.supervisor.observer import Observer
from gpuserve.supervisor.operator.access import OperatorAccess
from gpuserve.supervisor.operator.outcome import AnswerOutcome
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.reload.config_reload import ConfigReload
from gpuserve.supervisor.reload.work import ConfigWork
from gpuserve.supervisor.repository import ConfigSource, DeclaredModels, Repository, loaded_at_start
from gpuserve.supervisor.served_models import ServedModels
from gpuserve.supervisor.server_state import ServerLife, ServerState
from gpuserve.supervisor.worker_group import WorkerGroup
from gpuserve.supervisor.worker_keeper import WorkerKeeper

#: With a model that cannot go on, the others finish what is queued within this time, or the drain time
#: where that is shorter: whoever starts the server again should not wait long.
BROKEN_DRAIN_TIMEOUT_S: Final = 5.0


class Supervisor:
    """One server. ``started`` resolves with the addresses, or fails with the ``StartupError``.

    ``repository`` has the models that clients may load by name; without one these are ``models``, and those
    that are added later. All models are placed; ``devices`` places those that clients load. ``config`` is the
    config file, where there is one that can be read again.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[ModelSpec],
        observer: Observer,
        *,
        relay_output: bool,
        start_front: StartFront = front_process,
        repository: Repository | None = None,
        devices: ServerDevices | None = None,
        config: ConfigSource | None = None,
    ) -> None:
        self.started: Future[dict[str, str]] = Future()
        self._life = ServerLife()
        self._settings = settings
        self._observer = observer
        self._relay_output = relay_output
        self._reactor = Reactor()
        self._listeners = Listeners()
        self._front = FrontKeeper(
            settings,
            self._listeners,
            self._reactor,
            self,
            self._announce,
            start_front=start_front,
            relay_output=relay_output,
        )
        self._declared = DeclaredModels(models)
        repository = repository or self._declared
        numbers = itertools.count(1)
        self._models = ServedModels(
            self._reactor,
            repository,
            self._new_group,
            numbers,
            retire_timeout_s=lambda: self._settings.drain_timeout_s,
        )
        self._gpus = GpuFences(self._reactor, self._models.workers)
        self._models.add(loaded_at_start(models, settings.load_at_start))
        self._attached = AttachedModels(self._reactor, self._models.names, numbers)
        devices = devices or ServerDevices()
        work = ConfigWork(self._models, self._attached.has, devices)
        self._config = ConfigReload(config, self._life, work, self._adjust)
        self._loads = LoadRequests(
            self._life, self._models, self._attached.has, repository, devices, self._config.loaded
        )
        self._operator = self._operator_access(repository)
        self._ending = self._new_ending()
        self._failure: GpuserveError | None = None

    def _operator_access(self, repository: Repository) -> OperatorAccess:
        return OperatorAccess(
            self._life,
            self._reactor,
            lambda: self._settings,
            self._listeners,
            self._front,
            self._models,
            self._attached,
            self._loads,
            repository,
            self._config,
        )

    def _new_ending(self) -> Ending:
        return Ending(
            self._life,
            self._reactor,
            lambda: self._settings,
            self._listeners,
            self._front,
            self._attached,
            self._models,
            self._operator.lame_duck_left_s,
        )

    @property
    def state(self) -> ServerState:
        """Where the server stands."""
        return self._life.state

    # ---- from any thread ------------------------------------------------------------------

    def request_stop(self, fast: bool = False) -> None:
        """End the server: finish what is queued first, unless ``fast``. Safe in signal handlers."""
        self._reactor.call_soon_threadsafe(self._ending.now if fast else self._ending.begin_drain)

    def request_reload(self) -> None:
        """Read the config file again and apply what has changed, once the server serves. What comes of it is
        in the log. Safe in signal handlers.
        """
        self._reactor.call_soon_threadsafe(self._config.signalled)

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model; the future resolves when every instance of it is loaded.

        It fails with ``StartupError`` when an instance cannot load; the model is taken out again. It
        fails with ``BindError`` when an attached program serves a model of that name.
        """
        loaded: Future[None] = Future()
        if not self._reactor.call_soon_threadsafe(lambda: self._add_model(spec, loaded)):
            loaded.set_exception(ended())
        return loaded

    # ---- the life of a server -------------------------------------------------------------

    def run(self) -> int:
        """Serve until stopped, in the calling thread. 0 after a clean stop.

        Raises:
            StartupError: a port is taken, or a model could not be loaded; everything is ended.
            ModelUnrecoverable: a callable said that it cannot go on; everything is ended.
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
        self._life.begin()
        try:
            self._listeners.open(self._settings)
            self._operator.open()
            self._front.start()
            self._models.start(self._front)
            self._check_started()
            self._reactor.run()
        finally:
            self._kill_all()
            self._listeners.close()
            self._life.end()
            self._reactor.close()

    def _tell_waiting(self, error: BaseException) -> None:
        """Nobody waits for what will not come."""
        if not self.started.done():
            self.started.set_exception(error)
        self._models.abandon(error if isinstance(error, GpuserveError) else ended())

    def _new_group(self, generation: int, spec: ModelSpec) -> WorkerGroup:
        return WorkerGroup(
            spec,
            self._reactor,
            self,
            relay_output=self._relay_output,
            load_timeout_s=lambda: self._settings.load_timeout_s,
            generation=generation,
            check_start=self._check_start,
            why_lost=self._gpus.why_lost,
        )

    def _adjust(self, changes: dict[str, Any]) -> None:
        """Settings are others from now on, by name."""
        self._settings = dataclasses.replace(self._settings, **changes)
        self._front.adjust(changes)

    def _check_start(self, spec: ModelSpec) -> None:
        check_rates([*self._models.specs(), spec], self._settings)

    def _announce(self, front: FrontKeeper) -> None:
        """All that a new front must know, in the order in which it came about."""
        self._gpus.announce(front)
        self._models.announce(front)
        self._attached.announce(front)
        self._operator.announce(front)
        if self.state is ServerState.SERVING:
            front.serving()

    # ---- what the workers and the front tell ----------------------------------------------

    def instance_changed(self, worker: WorkerKeeper, phase: str) -> None:
        """Shown to whoever watches."""
        self._observer.instance_changed(
            worker.spec.name, worker.instance.name, worker.instance.device, worker.life.state.value, phase
        )

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """It enters rotation."""
        self._gpus.instance_ready(worker)
        self._models.instance_ready(worker)
        self._check_started()

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> None:
        """Out of rotation; at the first start that is a failure."""
        if self.state is ServerState.STOPPING:
            self._ending.check_workers_stopped()
            return
        failure = self._models.instance_lost(worker, reason)
        if failure is not None and self.state is ServerState.STARTING:
            self._fail(failure)
        self._gpus.instance_lost()
        self._check_started()  # it does not wait for a model that could not be bound

    def instance_unrecoverable(self, worker: WorkerKeeper, text: str) -> None:
        """That worker starts afresh, or the server ends, as the model wants it."""
        if worker.spec.on_unrecoverable == RESTART_WORKER:
            worker.kill()
        elif self.state in {ServerState.STARTING, ServerState.SERVING}:
            self._end_broken(worker, text)

    def gpus_lost(self, gpus: Sequence[tuple[str, str, str]]) -> None:
        """No worker is to run on these, and no others."""
        self._gpus.gpus_lost(gpus)

    def front_ready(self) -> None:
        """It accepts; the start may be complete with it."""
        self._check_started()

    def front_drained(self, unfinished: int) -> None:
        """Nothing is in flight: the processes can go."""
        self._ending.front_drained(unfinished)

    def front_lost(self, reason: str, hopeless: bool) -> None:
        """A front that cannot even start is a failure of the start; later it is just replaced."""
        self._models.front_lost()
        if self.state is ServerState.STARTING and hopeless:
            self._fail(StartupError(f"the front process could not be started: {reason}"))
        else:
            self._ending.begin_stop()  # where it drains: nothing is in flight any more

    def front_ended(self) -> None:
        """It closed its connections; the workers are next."""
        self._ending.stop_workers()

    def generation_retired(self, generation: int) -> None:
        """Its workers can go."""
        self._models.retired(generation)

    def instance_retired(self, generation: int, instance: str) -> None:
        """Its worker can go."""
        self._models.instance_retired(generation, instance)

    def load_asked(self, model: str, changes: dict[str, Any], answer: Answer) -> None:
        """A client wants a model loaded."""
        self._loads.load(model, changes, answer)

    def unload_asked(self, model: str, answer: Answer) -> None:
        """A client wants a model unloaded."""
        self._loads.unload(model, answer)

    def operator_asked(self, verb: str, arguments: dict[str, Any], answer: AnswerOutcome) -> None:
        """An operator asks by the admin API."""
        self._operator.verbs.ask(verb, arguments, lambda _: None, answer)

    def operator_told(self, message: messages.Quiesced | messages.Census) -> None:
        """What the front answers to an operator's question."""
        self._operator.told(message)

    # ---- starting -------------------------------------------------------------------------

    def _check_started(self) -> None:
        starting = self.state is ServerState.STARTING
        if not starting or not self._front.ready or not self._models.all_loaded():
            return
        self._life.move(ServerState.SERVING)
        self._front.serving()
        addresses = self._listeners.addresses(self._settings)
        if self._settings.attachable:
            self._attached.open(self._front, self._settings.name, addresses, self._listeners)
        self._observer.server_ready(addresses)
        self.started.set_result(addresses)
        self._config.started()

    def _add_model(self, spec: ModelSpec, loaded: Future[None]) -> None:
        if self.state not in {ServerState.STARTING, ServerState.SERVING}:
            loaded.set_exception(ended())
            return
        if self._attached.has(spec.name):
            loaded.set_exception(BindError(f"model {spec.name!r} is served by an attached program"))
            return

        def answer(error: GpuserveError | None) -> None:
            if error is None:
                self._declared.add(spec)
                loaded.set_result(None)
            else:
                loaded.set_exception(error)

        self._models.begin(Load(spec.name, answer, lambda: [spec], failed_start, replaces=False))

    # ---- ending ---------------------------------------------------------------------------

    def _fail(self, failure: GpuserveError) -> None:
        self._failure = failure
        self._ending.now()

    def _end_broken(self, broken: WorkerKeeper, text: str) -> None:
        """A model cannot go on: whoever waits for it is refused, the others are finished, then all ends."""
        failure = ModelUnrecoverable(f"model {broken.spec.name!r} cannot go on: {text}")
        if self.state is ServerState.STARTING:
            self._fail(failure)
            return
        self._failure = failure
        for worker in self._models.workers_of(broken):
            worker.stop()
            worker.kill()  # its death and no successor is what the front refuses the queue by
        self._ending.begin_drain(BROKEN_DRAIN_TIMEOUT_S, lame=False)

    def _kill_all(self) -> None:
        """Whatever still runs is killed and reaped; after a clean stop nothing does."""
        self._operator.close()
        self._gpus.close()
        self._attached.end()
        self._front.kill()
        self._models.kill()
        self._front.close()
