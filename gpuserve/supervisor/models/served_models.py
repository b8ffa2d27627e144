"""The server's own models: loads, unloads and resizes, one operation at a time for each model. When all
workers of a load are ready, one message switches the front to them. A load that fails changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpuserve.config.settings.checks import check_memory, check_rates
from gpuserve.core.errors import AlreadyExists, GpuserveError, RequestError, StartupError
from gpuserve.core.event_log import EventKind
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.models.generations import (
    Generation,
    GenerationState,
    GenerationTable,
    Residence,
)
from gpuserve.supervisor.models.model_operations import (
    LoadOperation,
    ModelOperation,
    ModelResizes,
    OperationEnd,
    OperationQueues,
    ResizeOperation,
    UnloadOperation,
    cancelled_error,
    cannot_poll,
    failed_start,
)
from gpuserve.supervisor.models.on_demand import OnDemandModels
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.processes.server_core import ServerCore, refuse_change
from gpuserve.supervisor.workers.worker_group import stop_timeout_s
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor
from gpuserve.supervisor.workers.worker_watchdogs import Hang

logger = logging.getLogger(__name__)


class ServedModels:
    """The operations on the server's own models, and the events of their workers. Owner of the workers: after
    ``kill()`` none is left. ``table`` answers queries.
    """

    def __init__(self, core: ServerCore, table: GenerationTable) -> None:
        self.table = table
        #: The models of the start that lack a version because it failed to load.
        self.missing: list[str] = []
        self._core = core
        self._operations = OperationQueues()
        self._loads = _Loads(core, table, self)
        self._resizes = ModelResizes(core, table, self.end)
        self.on_demand = OnDemandModels(
            core, table, lambda model: self._operations.running(model) is not None
        )

    # ---- start, and restart of the front --------------------------------------------------

    def start(self) -> None:
        """Start the workers of the models of the start, or raise ``StartupError``."""
        for generation in self.table:
            self._loads.start_workers(generation)
            self._loads.mark_loaded(generation)

    def front_lost(self) -> None:
        """Stop the workers that were finishing requests: requests in flight are lost with the front."""
        for generation in self.table:
            self.retired(generation.number)
        self._resizes.front_lost()
        self.on_demand.front_lost()

    # ---- requests -------------------------------------------------------------------------

    def submit(self, operation: ModelOperation) -> None:
        """Run an operation now, or when the earlier operations on the model are done or cancelled."""
        if self._operations.put(operation):
            self._run(operation)
            return
        first = self._operations.running(operation.model)
        if first is not None and self._operations.is_overtaken(first):
            self.cancel(operation.model)

    def cancel(self, model: str) -> None:
        """Cancel the running load or resize of a model, whose workers may never finish loading."""
        running = self._operations.running(model)
        if isinstance(running, ResizeOperation):
            self._resizes.cancel(running)
        elif isinstance(running, LoadOperation):
            logger.warning("model %s: cancelled its load", model)
            self.table.drop(running.generations)
            self.table.send_states(model)
            self.end(running, cancelled_error(model))

    def abandon(self, error: GpuserveError) -> None:
        for operation in self._operations.pop_all():
            if isinstance(operation, LoadOperation):
                self.table.drop(operation.generations)
            elif isinstance(operation, ResizeOperation):
                self._resizes.abandon(operation)
            operation.answer(error)

    # ---- events of workers and of the front -----------------------------------------------

    def instance_ready(self, worker: WorkerMonitor) -> None:
        """Put a ready worker into rotation, and complete the load if the worker is the last of it."""
        generation = self.table.get(worker.generation)
        live = worker.live_instance()
        if generation is None or live is None or generation.state is GenerationState.STOPPING:
            return
        if self._resizes.has(generation, worker):
            self._resizes.worker_ready(generation, worker)
            return
        self._core.front.instance_up(generation.number, live)
        self.on_demand.worker_ready(generation)
        self._check_complete(generation)

    def _check_complete(self, generation: Generation) -> None:
        if not self._loads.mark_loaded(generation):
            return
        if (load := self._operations.load_of(generation)) is not None:
            self.continue_operation(load, partial(self._loads.complete_if_ready, load))

    def instance_lost(self, worker: WorkerMonitor, reason: str) -> StartupError | None:
        """Take a dead worker out of rotation. Return the error if a model of the start cannot start."""
        generation = self.table.get(worker.generation)
        if generation is None:
            return None
        if generation.state is GenerationState.STOPPING:
            self._check_stopped(generation)
            return None
        if self._resizes.has(generation, worker):
            self._resizes.worker_lost(generation, worker, reason)
            return None
        if self.on_demand.worker_lost(generation):
            return None
        self.table.send_down(worker, reason)
        if worker.lifecycle.was_ready or worker.lifecycle.state is InstanceState.STOPPED:
            return None
        if worker.lifecycle.state is InstanceState.FENCED and not generation.group.is_fenced:
            self._check_complete(generation)  # the model is served without that GPU
            return None
        load, name = self._operations.load_of(generation), worker.instance.name
        if load is not None:
            self._loads.fail(load, generation.spec, reason)
            self.end(load, load.failure(generation.spec, name, reason))
            return None
        failure = failed_start(generation.spec, name, reason)
        self._record_failed(generation.spec.name, str(failure), generation.spec.version)
        return None if generation.spec.on_demand else failure

    def retired(self, number: int, *, hurried: bool = True) -> None:
        """Stop the workers of a generation that has no requests in flight, or aborted them (``hurried``)."""
        generation = self.table.get(number)
        if generation is None or generation.state is not GenerationState.RETIRING:
            return
        generation.move(GenerationState.STOPPING)
        generation.group.stop()
        self._core.reactor.call_later(stop_timeout_s(hurried=hurried), generation.group.kill)
        self._check_stopped(generation)

    def instance_retired(self, number: int, instance: str, *, hurried: bool) -> None:
        if (generation := self.table.get(number)) is not None:
            self._resizes.retired(generation, instance, hurried=hurried)

    def execution_hung(self, number: int, hang: Hang) -> ModelSpec | None:
        """Report an overdue call to the worker's monitor. Return the model; None for models of programs."""
        generation = self.table.get(number)
        if generation is None:
            return None
        for worker in generation.group.all:
            if worker.instance.name == hang.instance:
                worker.report_hang(hang)
        return generation.spec

    def excuse_isolated_death(self, number: int, instance: str, pid: int) -> None:
        """Restart an instance without restart back-off, because its worker died under an isolated request."""
        generation = self.table.get(number)
        for worker in () if generation is None else generation.group.all:
            if worker.instance.name == instance and worker.excuse(pid):
                self.table.send_down(worker, "it died under an isolated request")

    def exclude_version(self, worker: WorkerMonitor, reason: str, error: GpuserveError) -> None:
        """Serve without a version of the start that failed to load."""
        generation = self.table.get(worker.generation)
        assert generation is not None, "it has just been lost"
        logger.error("%s", error)
        self._exclude_version(generation, reason)

    def _exclude_version(self, generation: Generation, reason: str) -> None:
        """Serve without a version. Without the last one, exclude the ensembles that need the model."""
        spec, generation.served = generation.spec, False
        self.missing.append(spec.name)
        self.table.drop([generation])
        self.table.index.unavailable(spec.name, spec.version, reason)
        self.serve(spec.name, ())
        for other in () if self.table.of(spec.name) else self.table:
            if other in self.table and any(step.model == spec.name for step in other.spec.steps):
                needed = f"model '{spec.name}', which it needs, could not be loaded"
                logger.error("model %s is not served: %s", other.spec.name, needed)
                self._record_failed(other.spec.name, needed, other.spec.version)
                self._exclude_version(other, needed)

    # ---- shutdown -------------------------------------------------------------------------

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
            end = self._run_step(operation, partial(self._start, operation))
            if end is None:
                return
            operation = self._finish(operation, end.error)

    def continue_operation(self, operation: ModelOperation, step: Callable[[], OperationEnd | None]) -> None:
        """Run one more step of an operation, and end the operation if the step was its last."""
        if (end := self._run_step(operation, step)) is not None:
            self.end(operation, end.error)

    def _run_step(
        self, operation: ModelOperation, step: Callable[[], OperationEnd | None]
    ) -> OperationEnd | None:
        """Run a step of an operation. An unexpected exception ends the operation; served models stay."""
        try:
            return step()
        except Exception as error:
            if isinstance(operation, LoadOperation):
                self.table.drop([one for one in operation.generations if not one.served])
                self.table.send_states(operation.model)
            elif isinstance(operation, ResizeOperation):
                self._resizes.abandon(operation)
            return OperationEnd(refuse_change(f"the change of model '{operation.model}'", error))

    def _start(self, operation: ModelOperation) -> OperationEnd | None:
        if self._operations.is_overtaken(operation):
            return OperationEnd(cancelled_error(operation.model))
        if isinstance(operation, LoadOperation):
            return self._loads.start(operation)
        if isinstance(operation, ResizeOperation):
            served = self.table.served(operation.model)
            for one in served:
                if one.residence is Residence.ASLEEP:
                    self.on_demand.want(one)
            return self._resizes.start(operation, served)
        self.serve(operation.model, self.table.served(operation.model))
        return None if self.table.is_retiring(operation.model) else OperationEnd(None)

    def is_running(self, operation: ModelOperation) -> bool:
        """Return whether an operation is running: it may have been cancelled meanwhile."""
        return self._operations.running(operation.model) is operation

    def end(self, operation: ModelOperation, error: GpuserveError | None) -> None:
        self._run(self._finish(operation, error))

    def _finish(self, operation: ModelOperation, error: GpuserveError | None) -> ModelOperation | None:
        if isinstance(operation, LoadOperation) and not isinstance(error, AlreadyExists | None):
            self._record_failed(operation.model, str(error).strip())
        if isinstance(operation, ResizeOperation) and error is None:
            for one in self.table.served(operation.model):
                version, count = one.spec.version, len(one.spec.instances)
                self._core.events.record(
                    EventKind.SCALED, model=operation.model, version=version, instances=count
                )
        return self._operations.finish(operation, error)

    def _record_failed(self, model: str, reason: str, version: int = 0) -> None:
        self._core.events.record(EventKind.MODEL_LOAD_FAILED, model=model, version=version, reason=reason)

    def serve(self, model: str, old: Sequence[Generation]) -> None:
        """Tell the front which generations serve a model now, and retire ``old``, which served it before."""
        for generation in old:
            generation.served = False
            generation.move(GenerationState.RETIRING)
        serving = tuple(one.number for one in self.table.served(model))
        timeout_s = self._core.settings.current.drain_timeout_s
        self._core.front.send(messages.ServeModel(model, serving, timeout_s))
        self.table.send_states(model)
        for generation in old:
            late = partial(self.retired, generation.number)
            self._core.reactor.call_later(self._core.front.answer_due_s(timeout_s), late)

    def _check_stopped(self, generation: Generation) -> None:
        if not generation.group.is_stopped:
            return
        generation.move(GenerationState.GONE)
        generation.group.close()
        self.table.remove(generation)
        self.on_demand.advance()
        name, version = generation.spec.name, generation.spec.version
        if all(one.spec.version != version for one in self.table.of(name)):
            self.table.index.unavailable(name, version, messages.UNLOADED)
            logger.info("unloaded version %d of model %s", version, name)
            self._core.events.record(EventKind.MODEL_UNLOADED, model=name, version=version)
        self.table.send_states(name)
        running = self._operations.running(name)
        if isinstance(running, UnloadOperation) and not self.table.is_retiring(name):
            self.end(running, None)


class _Loads:
    """The running loads: from declarations to generations whose workers are all ready, or to an error."""

    def __init__(self, core: ServerCore, table: GenerationTable, models: ServedModels) -> None:
        self._core = core
        self._table = table
        self._models = models

    def start(self, load: LoadOperation) -> OperationEnd | None:
        """Start a load. Return its end if it ends at once."""
        if load.prepare is None:
            return self._read(load)

        def prepared(error: GpuserveError | None) -> None:
            if self._models.is_running(load):
                step = partial(self._read, load)
                self._models.continue_operation(load, lambda: OperationEnd(error) if error else step())

        load.prepare(prepared)
        return None

    def _read(self, load: LoadOperation) -> OperationEnd | None:
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
                generation.starts |= load.wakes or any(
                    not one.is_cold for one in self._table.served(load.model)
                )
                self.start_workers(generation)
            except StartupError as error:
                self._table.drop(load.generations)
                self._table.send_states(load.model)
                name = generation.group.workers[0].instance.name
                return OperationEnd(load.failure(generation.spec, name, str(error)))
        self._table.send_states(load.model)
        for generation in load.generations:
            self.mark_loaded(generation)
        return self.complete_if_ready(load)

    def start_workers(self, generation: Generation) -> None:
        """Start the workers of a generation. Raise ``StartupError`` if a worker cannot be started."""
        check_rates(self._table.specs(), self._core.settings.current)
        check_memory(generation.spec, self._core.settings.current)
        if not generation.spec.on_demand:
            generation.group.start()
        elif generation.starts:
            self._models.on_demand.want(generation)

    def mark_loaded(self, generation: Generation) -> bool:
        is_complete = generation.group.is_loaded or not generation.starts
        if generation.state is not GenerationState.LOADING or not is_complete:
            return False
        generation.move(GenerationState.READY)
        self._table.index.forget(generation.spec.name, generation.spec.version)
        self._table.send_states(generation.spec.name)
        if generation.served:  # a model of the start
            self._record_loaded(generation)
        return True

    def complete_if_ready(self, load: LoadOperation) -> OperationEnd | None:
        """Route requests to a load if all its generations are ready. Return its end if they are."""
        if any(one.state is not GenerationState.READY for one in load.generations):
            return None
        versions = {one.spec.version for one in load.generations}
        served = self._table.served(load.model)
        old = [one for one in served if load.replaces or one.spec.version in versions]
        for generation in load.generations:
            generation.served = True
        self._models.serve(load.model, old)
        logger.info("loaded model %s", load.model)
        for generation in load.generations:
            self._record_loaded(generation)
        return OperationEnd(None)

    def _record_loaded(self, generation: Generation) -> None:
        if not generation.starts:
            return
        spec, lives = generation.spec, [one.live_instance() for one in generation.group.workers]
        load_s = round(max((one.load_s for one in lives if one is not None), default=0.0), 3)
        about: dict[str, Any] = {"model": spec.name, "version": spec.version}
        count = len(spec.instances)
        self._core.events.record(EventKind.MODEL_LOADED, **about, instances=count, load_s=load_s)

    def fail(self, load: LoadOperation, spec: ModelSpec, reason: str) -> None:
        """Drop all generations of a load, because an instance of ``spec`` could not be started."""
        self._table.drop(load.generations)
        if load.replaces:  # a version that ``bind()`` failed to add does not exist
            self._table.index.unavailable(spec.name, spec.version, reason)
        self._table.send_states(spec.name)
        # The worker's failure is in the log already, and the requester of the load reports the rest.
        logger.debug("model %s could not be loaded: %s", load.model, reason)
