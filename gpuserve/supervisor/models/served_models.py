"""The server's own models: what is loaded, what is on its way in or out, and which of it gets requests. Once
all workers of a load are ready the front turns to them, in one message; then the earlier ones finish and are
ended. A load that fails leaves all as it was. Operations on one model wait for one another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from gpuserve.config.settings.rate_limits import check_rates
from gpuserve.control import messages
from gpuserve.errors import AlreadyExists, GpuserveError, InvalidArgument, RequestError, StartupError
from gpuserve.journal.kinds import EventKind
from gpuserve.model.spec import ModelSpec
from gpuserve.placement.instance_counts import with_count
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.core.refusals import refuse_change
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.models.generations import (
    Generation,
    GenerationState,
    GenerationTable,
)
from gpuserve.supervisor.models.model_operations import (
    LoadOperation,
    ModelOperation,
    OperationEnd,
    Operations,
    ResizeOperation,
    UnloadOperation,
    cannot_poll,
    failed_start,
    taken_back,
)
from gpuserve.supervisor.models.resizing import ModelResizes
from gpuserve.supervisor.workers.hang import Hang
from gpuserve.supervisor.workers.worker_group import stop_timeout_s
from gpuserve.supervisor.workers.worker_keeper import WorkerKeeper

logger = logging.getLogger(__name__)


class ServedModels:
    """What is done to the server's own models, and what becomes of their workers. Owner of the workers:
    ``kill()`` leaves none. ``table`` answers all questions.
    """

    def __init__(self, core: ServerCore, table: GenerationTable) -> None:
        self.table = table
        #: The models of the start of which a version could not be loaded.
        self.missing: list[str] = []
        self._core = core
        self._operations = Operations()
        self._loads = _Loads(core, table, self)
        self._resizes = ModelResizes(core, table, self.end)

    # ---- the start, and the front ---------------------------------------------------------

    def start(self) -> None:
        """Start the workers of the models of the start; ``StartupError`` where one cannot be started."""
        for generation in self.table:
            self._loads.start_workers(generation)
            self._loads.check_loaded(generation)

    def front_lost(self) -> None:
        """Let workers go that were to finish what they had: what was in flight is lost with the front."""
        for generation in self.table:
            self.retired(generation.number)
        self._resizes.front_lost()

    # ---- what is asked for ----------------------------------------------------------------

    def begin(self, operation: ModelOperation) -> None:
        """Do it now, or as soon as what was asked before of this model is done or taken back."""
        if self._operations.put(operation):
            self._run(operation)
            return
        first = self._operations.running(operation.model)
        if first is not None and self._operations.is_overtaken(first):
            self.take_back(operation.model)

    def take_back(self, model: str) -> None:
        """End the load or the change of size that is at work on a model: its workers may never be loaded."""
        running = self._operations.running(model)
        if isinstance(running, ResizeOperation):
            self._resizes.take_back(running)
        elif isinstance(running, LoadOperation):
            logger.warning("model %s: its load is taken back", model)
            self.table.drop(running.generations)
            self.table.tell_states(model)
            self.end(running, taken_back(model))

    def check_resize(self, model: str, count: int) -> None:
        """Raise ``InvalidArgument`` unless the model could have ``count`` instances on each device."""
        generations = self.table.served(model) or self.table.of(model)
        if not generations:
            raise InvalidArgument(f"model '{model}' is not loaded")
        for generation in generations:
            with_count(generation.spec, count)

    def abandon(self, error: GpuserveError) -> None:
        for operation in self._operations.take_all():
            if isinstance(operation, LoadOperation):
                self.table.drop(operation.generations)
            elif isinstance(operation, ResizeOperation):
                self._resizes.abandon(operation)
            operation.answer(error)

    # ---- what the workers and the front tell ----------------------------------------------

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """Let a worker enter rotation; a load whose last instance it is is complete."""
        generation = self.table.get(worker.generation)
        live = worker.live()
        if generation is None or live is None or generation.state is GenerationState.STOPPING:
            return
        if self._resizes.has(generation, worker):
            self._resizes.worker_ready(generation, worker)
            return
        self._core.front.instance_up(generation.number, live)
        self._check_complete(generation)

    def _check_complete(self, generation: Generation) -> None:
        """End the load of a generation whose last instance has just become ready."""
        if not self._loads.check_loaded(generation):
            return
        load = self._operations.load_of(generation)
        if load is not None:
            self.go_on(load, lambda: OperationEnd(None) if self._loads.is_complete(load) else None)

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> StartupError | None:
        """Take a dead worker out of rotation; return the error of a model of the start that cannot start."""
        generation = self.table.get(worker.generation)
        if generation is None:
            return None
        if generation.state is GenerationState.STOPPING:
            self._check_stopped(generation)
            return None
        if self._resizes.has(generation, worker):
            self._resizes.worker_lost(generation, worker, reason)
            return None
        self.table.tell_down(worker, reason)
        if worker.life.was_ready or worker.life.state is InstanceState.STOPPED:
            return None
        if worker.life.state is InstanceState.FENCED and not generation.group.is_fenced:
            self._check_complete(generation)  # the model goes on without that GPU
            return None
        load, name = self._operations.load_of(generation), worker.instance.name
        if load is not None:
            self._loads.fail(load, generation.spec, reason)
            self.end(load, load.failure(generation.spec, name, reason))
            return None
        failure = failed_start(generation.spec, name, reason)
        self._tell_failed(generation.spec.name, str(failure), generation.spec.version)
        return failure

    def retired(self, number: int, *, hurried: bool = True) -> None:
        """Stop the workers of a generation that has nothing in flight, or gave it up (``hurried``)."""
        generation = self.table.get(number)
        if generation is None or generation.state is not GenerationState.RETIRING:
            return
        generation.move(GenerationState.STOPPING)
        generation.group.stop()
        self._core.reactor.call_later(stop_timeout_s(hurried=hurried), generation.group.kill)
        self._check_stopped(generation)

    def instance_retired(self, number: int, instance: str, *, hurried: bool) -> None:
        generation = self.table.get(number)
        if generation is not None:
            self._resizes.retired(generation, instance, hurried=hurried)

    def execution_hung(self, number: int, hang: Hang) -> ModelSpec | None:
        """Let an instance's keeper end it, or tell of it; the model, None where it is none of ours."""
        generation = self.table.get(number)
        if generation is None:
            return None
        for worker in generation.group.all:
            if worker.instance.name == hang.instance:
                worker.hung(hang)
        return generation.spec

    def death_isolated(self, number: int, instance: str, pid: int) -> None:
        """Start an instance again without restart back-off: its worker died under an isolated request."""
        generation = self.table.get(number)
        for worker in () if generation is None else generation.group.all:
            if worker.instance.name == instance and worker.excuse(pid):
                self.table.tell_down(worker, "it died under an isolated request")

    def leave_out(self, worker: WorkerKeeper, reason: str, error: GpuserveError) -> None:
        """Serve without a version of the start that cannot be loaded, for that reason."""
        generation = self.table.get(worker.generation)
        assert generation is not None, "it has just been lost"
        logger.error("%s", error)
        self._leave_out(generation, reason)

    def _leave_out(self, generation: Generation, reason: str) -> None:
        """Serve without a version; where it was the last of a model, without the ensembles that need that."""
        spec, generation.served = generation.spec, False
        self.missing.append(spec.name)
        self.table.drop([generation])
        self.table.index.unavailable(spec.name, spec.version, reason)
        self.serve(spec.name, ())
        for other in () if self.table.of(spec.name) else self.table:
            if other in self.table and any(step.model == spec.name for step in other.spec.steps):
                needed = f"model '{spec.name}', which it needs, could not be loaded"
                logger.error("model %s is not served: %s", other.spec.name, needed)
                self._tell_failed(other.spec.name, needed, other.spec.version)
                self._leave_out(other, needed)

    # ---- ending ---------------------------------------------------------------------------

    def stop(self) -> None:
        for generation in self.table:
            generation.group.stop()

    def kill(self) -> None:
        for generation in self.table:
            generation.group.kill()
        for generation in self.table:
            generation.group.close()

    # ---- operations -----------------------------------------------------------------------

    def _run(self, operation: ModelOperation | None) -> None:
        while operation is not None:
            end = self._guarded(operation, partial(self._do, operation))
            if end is None:
                return
            operation = self._finish(operation, end.error)

    def go_on(self, operation: ModelOperation, step: Callable[[], OperationEnd | None]) -> None:
        """Do one more step of an operation, and end the operation if that was the last."""
        if (end := self._guarded(operation, step)) is not None:
            self.end(operation, end.error)

    def _guarded(
        self, operation: ModelOperation, step: Callable[[], OperationEnd | None]
    ) -> OperationEnd | None:
        """Do a step of an operation; an unexpected exception ends the operation, and what serves stays."""
        try:
            return step()
        except Exception as error:
            if isinstance(operation, LoadOperation):
                self.table.drop([one for one in operation.generations if not one.served])
                self.table.tell_states(operation.model)
            elif isinstance(operation, ResizeOperation):
                self._resizes.abandon(operation)
            return OperationEnd(refuse_change(f"the change of model '{operation.model}'", error))

    def _do(self, operation: ModelOperation) -> OperationEnd | None:
        if self._operations.is_overtaken(operation):
            return OperationEnd(taken_back(operation.model))
        if isinstance(operation, LoadOperation):
            return self._loads.begin(operation)
        if isinstance(operation, ResizeOperation):
            return self._resizes.begin(operation, self.table.served(operation.model))
        self.serve(operation.model, self.table.served(operation.model))
        return None if self.table.is_going(operation.model) else OperationEnd(None)

    def is_at_work(self, operation: ModelOperation) -> bool:
        """Whether it is being done: it may have been taken back, or nobody does anything any more."""
        return self._operations.running(operation.model) is operation

    def end(self, operation: ModelOperation, error: GpuserveError | None) -> None:
        self._run(self._finish(operation, error))

    def _finish(self, operation: ModelOperation, error: GpuserveError | None) -> ModelOperation | None:
        if isinstance(operation, LoadOperation) and not isinstance(error, AlreadyExists | None):
            self._tell_failed(operation.model, str(error).strip())
        if isinstance(operation, ResizeOperation) and error is None:
            for one in self.table.served(operation.model):
                self._core.events.tell(
                    EventKind.SCALED,
                    model=operation.model,
                    version=one.spec.version,
                    instances=len(one.spec.instances),
                )
        return self._operations.finish(operation, error)

    def _tell_failed(self, model: str, reason: str, version: int = 0) -> None:
        self._core.events.tell(EventKind.MODEL_LOAD_FAILED, model=model, version=version, reason=reason)

    def serve(self, model: str, old: Sequence[Generation]) -> None:
        """Tell the front which generations serve a model now, and let ``old`` retire, which did."""
        for generation in old:
            generation.served = False
            generation.move(GenerationState.RETIRING)
        serving = tuple(one.number for one in self.table.served(model))
        timeout_s = self._core.settings.now.drain_timeout_s
        self._core.front.send(messages.ServeModel(model, serving, timeout_s))
        self.table.tell_states(model)
        for generation in old:
            late = partial(self.retired, generation.number)
            self._core.reactor.call_later(self._core.front.answer_due_s(timeout_s), late)

    def _check_stopped(self, generation: Generation) -> None:
        if not generation.group.is_stopped:
            return
        generation.move(GenerationState.GONE)
        generation.group.close()
        self.table.remove(generation)
        name, version = generation.spec.name, generation.spec.version
        if all(one.spec.version != version for one in self.table.of(name)):
            self.table.index.unavailable(name, version, messages.UNLOADED)
            logger.info("version %d of model %s is unloaded", version, name)
            self._core.events.tell(EventKind.MODEL_UNLOADED, model=name, version=version)
        self.table.tell_states(name)
        running = self._operations.running(name)
        if isinstance(running, UnloadOperation) and not self.table.is_going(name):
            self.end(running, None)


class _Loads:
    """Loads at work: from declarations to generations whose workers are all ready, or to why they are not."""

    def __init__(self, core: ServerCore, table: GenerationTable, models: ServedModels) -> None:
        self._core = core
        self._table = table
        self._models = models

    def begin(self, load: LoadOperation) -> OperationEnd | None:
        """Begin a load; its end where not even that can be done."""
        if load.prepare is None:
            return self._read(load)
        load.prepare(partial(self._prepared, load))
        return None

    def _prepared(self, load: LoadOperation, error: GpuserveError | None) -> None:
        if self._models.is_at_work(load):
            self._models.go_on(load, lambda: self._read(load) if error is None else OperationEnd(error))

    def _read(self, load: LoadOperation) -> OperationEnd | None:
        """Start the workers of a load; its end where that cannot be done."""
        try:
            specs = load.read()
        except RequestError as error:
            return OperationEnd(error)
        except GpuserveError as error:
            logger.error("model %s cannot be loaded: %s", load.model, error)
            return OperationEnd(cannot_poll(load.model))
        return self._start(load, specs) if specs else OperationEnd(cannot_poll(load.model))

    def _start(self, load: LoadOperation, specs: Sequence[ModelSpec]) -> OperationEnd | None:
        for spec in specs:
            load.generations.append(self._table.add(spec, served=False))
        for generation in load.generations:
            message = messages.AddModel(generation.number, generation.spec.to_wire(), False, False)
            self._core.front.send(message)
            try:
                self.start_workers(generation)
            except StartupError as error:
                self._table.drop(load.generations)
                self._table.tell_states(load.model)
                name = generation.group.workers[0].instance.name
                return OperationEnd(load.failure(generation.spec, name, str(error)))
        self._table.tell_states(load.model)
        for generation in load.generations:
            self.check_loaded(generation)
        return OperationEnd(None) if self.is_complete(load) else None

    def start_workers(self, generation: Generation) -> None:
        """Start the workers of a generation; ``StartupError`` where something that they need is not there."""
        check_rates(self._table.specs(), self._core.settings.now)
        generation.group.start()

    def check_loaded(self, generation: Generation) -> bool:
        if generation.state is not GenerationState.LOADING or not generation.group.is_loaded:
            return False
        generation.move(GenerationState.READY)
        self._table.index.forget(generation.spec.name, generation.spec.version)
        self._table.tell_states(generation.spec.name)
        if generation.served:  # from the start
            self._tell_loaded(generation)
        return True

    def is_complete(self, load: LoadOperation) -> bool:
        """Say whether all of a load is ready; then requests go to it from now on."""
        if any(one.state is not GenerationState.READY for one in load.generations):
            return False
        versions = {one.spec.version for one in load.generations}
        served = self._table.served(load.model)
        old = [one for one in served if load.replaces or one.spec.version in versions]
        for generation in load.generations:
            generation.served = True
        self._models.serve(load.model, old)
        logger.info("model %s is loaded", load.model)
        for generation in load.generations:
            self._tell_loaded(generation)
        return True

    def _tell_loaded(self, generation: Generation) -> None:
        spec, lives = generation.spec, [one.live() for one in generation.group.workers]
        self._core.events.tell(
            EventKind.MODEL_LOADED,
            model=spec.name,
            version=spec.version,
            instances=len(spec.instances),
            load_s=round(max((one.load_s for one in lives if one is not None), default=0.0), 3),
        )

    def fail(self, load: LoadOperation, spec: ModelSpec, reason: str) -> None:
        """Drop all of a load, because an instance of that declaration could not be started."""
        self._table.drop(load.generations)
        if load.replaces:  # a version that could not be bound does not exist
            self._table.index.unavailable(spec.name, spec.version, reason)
        self._table.tell_states(spec.name)
        # Its worker has said why in the log, and whoever wanted the load says what comes of it.
        logger.debug("model %s could not be loaded: %s", load.model, reason)
