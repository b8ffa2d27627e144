"""Operations on models (load, unload, resize), queued for each model in order of arrival. Pure."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from gpuserve.core.errors import (
    Cancelled,
    GpuserveError,
    Internal,
    InvalidArgument,
    ModelLoadError,
    RequestError,
    StartupError,
    Unavailable,
)
from gpuserve.model.placement import joined, with_count
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.models.generations import Generation, GenerationTable, Residence
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_group import stop_timeout_s
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor

#: Receives the result of an operation: an error, or None for success.
OnDone: TypeAlias = Callable[[GpuserveError | None], None]
#: Makes the error of a version that failed to load, from its declaration, the instance and the reason.
Failure: TypeAlias = Callable[[ModelSpec, str, str], GpuserveError]


class OperationEnd(NamedTuple):
    """The end of an operation, with its error, if any."""

    error: GpuserveError | None


@dataclass(eq=False)
class ModelOperation:
    """One operation on a model."""

    model: str
    answer: OnDone


@dataclass(eq=False)
class LoadOperation(ModelOperation):
    """The load of versions of a model. ``prepare``, if given, is called first and reports its result. Then
    ``read`` returns the declarations. With ``replaces`` the loaded versions replace all served versions,
    otherwise they join them. With ``is_last_word`` the load overtakes earlier operations. Models with
    ``on_demand`` are loaded as well if they are resident, or with ``wakes``.
    """

    read: Callable[[], Sequence[ModelSpec]]
    failure: Failure
    replaces: bool
    is_last_word: bool = False
    wakes: bool = False
    prepare: Callable[[OnDone], None] | None = None
    generations: list[Generation] = field(default_factory=list)


@dataclass(eq=False)
class UnloadOperation(ModelOperation):
    """The unload of every version of a model."""


@dataclass(eq=False)
class ResizeOperation(ModelOperation):
    """The resize of a served model to ``count`` instances on each device of each version."""

    count: int


class OperationQueues:
    """The queues of operations, one for each model. The first operation of a queue is running."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[ModelOperation]] = {}

    def put(self, operation: ModelOperation) -> bool:
        """Queue an operation. Return whether it is the first of its queue, so that it can run now."""
        queue = self._queues.setdefault(operation.model, deque())
        queue.append(operation)
        return len(queue) == 1

    def running(self, model: str) -> ModelOperation | None:
        queue = self._queues.get(model)
        return queue[0] if queue else None

    def is_overtaken(self, operation: ModelOperation) -> bool:
        """Return whether this running load or resize is to be cancelled in favour of a later operation."""
        queue = self._queues.get(operation.model, deque())
        is_first = bool(queue) and queue[0] is operation and not isinstance(operation, UnloadOperation)
        return is_first and any(
            later.is_last_word if isinstance(later, LoadOperation) else isinstance(later, UnloadOperation)
            for later in islice(queue, 1, None)
        )

    def load_of(self, generation: Generation) -> LoadOperation | None:
        """Return the running load that a generation belongs to, or None."""
        running = self.running(generation.spec.name)
        return running if isinstance(running, LoadOperation) and generation in running.generations else None

    def finish(self, operation: ModelOperation, error: GpuserveError | None = None) -> ModelOperation | None:
        """Report the result of the running operation. Return the operation that runs next, if any."""
        assert operation is self.running(operation.model), "an operation is answered once"
        queue = self._queues[operation.model]
        queue.popleft()
        if not queue:
            del self._queues[operation.model]
        following = self.running(operation.model)
        operation.answer(error)  # the callback may queue more operations, or cancel all
        return following if following is self.running(operation.model) else None

    def pop_all(self) -> Iterator[ModelOperation]:
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            yield from queue


def cancelled_error(model: str) -> RequestError:
    """Return the error for an operation that was still running when a later one overtook it."""
    return Cancelled(f"model '{model}': the load was cancelled by a later operation")


def cannot_poll(model: str) -> RequestError:
    """Return the error for a client if the model's declaration cannot be read. The text is Triton's."""
    return Internal(f"failed to load '{model}', failed to poll from model repository")


def refused_load(spec: ModelSpec, instance: str, reason: str) -> RequestError:
    state = f"version {spec.version} is at UNAVAILABLE state: {reason};\n"
    return InvalidArgument(f"load failed for model '{spec.name}': {state}")


def failed_version(spec: ModelSpec, instance: str, reason: str) -> InvalidArgument:
    where = f"instance {instance} could not be started: " if instance else ""
    return InvalidArgument(f"version {spec.version}: {where}{reason}")


def failed_start(spec: ModelSpec, instance: str, reason: str) -> StartupError:
    return ModelLoadError(f"model {spec.name!r}: instance {instance} could not be started: {reason}")


# ---- resizes --------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


#: States in which the number of instances cannot change.
_BETWEEN: Final = {Residence.DRAINING, Residence.SUSPENDING, Residence.ASLEEP, Residence.STOPPING}


class _Phase(enum.Enum):
    STARTING = "STARTING"
    GROWING = "GROWING"
    SHRINKING = "SHRINKING"


class _RunningResize:
    """One running resize: the specs of each generation before and after."""

    def __init__(self, resize: ResizeOperation, generations: Iterable[Generation]) -> None:
        self.resize = resize
        self.before = {one: one.spec for one in generations}
        self.wanted = {one: with_count(one.spec, resize.count, one.group.down()) for one in self.before}
        self.phase = _Phase.STARTING
        self.error: GpuserveError | None = None


@dataclasses.dataclass(eq=False)
class ModelResizes:
    """The running resizes, one for each model. ``finish`` is called at the end of those that take time."""

    _core: ServerCore
    _table: GenerationTable
    _finish: Callable[[ResizeOperation, GpuserveError | None], None]
    _running: dict[str, _RunningResize] = dataclasses.field(default_factory=dict)

    def start(self, resize: ResizeOperation, generations: Sequence[Generation]) -> OperationEnd | None:
        """Resize the generations that serve a model. Return ``OperationEnd`` if the resize ends at once."""
        if not generations:  # the model was unloaded meanwhile
            return OperationEnd(InvalidArgument(f"model '{resize.model}' is not loaded"))
        if any(one.residence in _BETWEEN for one in generations):
            text = f"the instances of model '{resize.model}' are ending or asleep; try again"
            return OperationEnd(Unavailable(text))
        try:
            running = _RunningResize(resize, generations)
        except RequestError as error:
            return OperationEnd(error)
        self._running[resize.model] = running
        for generation, wanted in running.wanted.items():
            if generation.is_cold:
                generation.spec = wanted
                generation.group.renew(wanted)
                self._send_instances(generation)
            present = {one.name for one in generation.spec.instances}
            generation.group.add(one for one in wanted.instances if one.name not in present)
        try:
            for worker in [worker for one in running.wanted for worker in list(one.group.coming)]:
                worker.start()
        except StartupError as error:
            self._fail(running, worker, str(error))
        running.phase = _Phase.GROWING
        return self._advance(running)

    def cancel(self, resize: ResizeOperation) -> None:
        """Drop the workers that are still loading, and go back to the earlier instances."""
        running = self._running.get(resize.model)
        if running is not None and running.phase is _Phase.GROWING:
            self._abort(running, cancelled_error(resize.model))
            self._continue(next(iter(running.wanted)))

    def abandon(self, resize: ResizeOperation) -> None:
        """Drop the workers that are still loading, because the server ends. Retiring instances go on."""
        running = self._running.pop(resize.model, None)
        for generation in running.wanted if running is not None else ():
            generation.group.discard_coming()

    # ---- events of workers and of the front -----------------------------------------------

    def has(self, generation: Generation, worker: WorkerMonitor) -> bool:
        return worker in generation.group.coming or worker in generation.group.leaving

    def worker_ready(self, generation: Generation, worker: WorkerMonitor) -> None:
        """Put a worker that has just loaded into rotation."""
        live = worker.live_instance()
        if worker not in generation.group.coming or live is None:
            return
        self._join(generation, worker)
        self._core.front.instance_up(generation.number, live)
        self._continue(generation)

    def worker_lost(self, generation: Generation, worker: WorkerMonitor, reason: str) -> None:
        """Fail the resize if the dead worker was a new one; forget a worker that was retiring."""
        if worker in generation.group.leaving:
            worker.stop()
            # Its requests move to other instances, in case the front did not retire it in time.
            self._table.send_down(worker, reason)
            self._forget_stopped(generation, worker)
        elif worker.lifecycle.state is InstanceState.FENCED:  # like the other instances on that GPU
            self._join(generation, worker)
            self._table.send_down(worker, reason)
        else:
            self._fail(self._running[generation.spec.name], worker, reason)
        self._continue(generation)

    def retired(self, generation: Generation, instance: str, *, hurried: bool) -> None:
        """Stop the worker of a retired instance whose requests are finished, or aborted (``hurried``)."""
        leaving = generation.group.leaving
        worker = next((one for one in leaving if one.instance.name == instance), None)
        if worker is not None:
            self._stop(generation, worker, hurried=hurried)

    def _stop(self, generation: Generation, worker: WorkerMonitor, *, hurried: bool = True) -> None:
        if worker.lifecycle.state in {InstanceState.STOPPING, InstanceState.STOPPED}:
            return
        was_ready = worker.lifecycle.state is InstanceState.READY
        worker.stop()
        if not was_ready:  # it has no request to finish
            worker.kill()
        self._core.reactor.call_later(stop_timeout_s(hurried=hurried), worker.kill)
        self._forget_stopped(generation, worker)
        self._continue(generation)

    def front_lost(self) -> None:
        """Stop all retiring workers: their requests in flight are lost with the front."""
        for generation in self._table:
            for worker in list(generation.group.leaving):
                self._stop(generation, worker)

    # ---- steps ----------------------------------------------------------------------------

    def _join(self, generation: Generation, worker: WorkerMonitor) -> None:
        """Add an instance to its model. The front learns of the instance before ``InstanceUp``."""
        generation.group.join(worker)
        wanted = self._running[generation.spec.name].wanted[generation]
        generation.spec = joined(generation.spec, wanted, worker.instance.name)
        self._send_instances(generation)

    def _fail(self, running: _RunningResize, worker: WorkerMonitor, reason: str) -> None:
        model, instance = running.resize.model, worker.instance.name
        text = f"instance {instance} could not be started: {reason}"
        logger.error("model %s was not resized: %s", model, text)
        self._abort(running, Internal(f"model '{model}' stays as it was: {text}"))

    def _abort(self, running: _RunningResize, error: GpuserveError) -> None:
        running.error, running.wanted = error, dict(running.before)
        for generation in running.wanted:
            generation.group.discard_coming()

    def _forget_stopped(self, generation: Generation, worker: WorkerMonitor) -> None:
        if worker.lifecycle.state is InstanceState.STOPPED:
            generation.group.forget(worker)

    def _continue(self, generation: Generation) -> None:
        running = self._running.get(generation.spec.name)
        if running is None or running.phase is _Phase.STARTING:
            return
        if (done := self._advance(running)) is not None:
            self._finish(running.resize, done.error)

    def _advance(self, running: _RunningResize) -> OperationEnd | None:
        groups = [one.group for one in running.wanted]
        if any(group.coming for group in groups):
            return None
        if running.phase is _Phase.GROWING:
            running.phase = _Phase.SHRINKING
            for generation, wanted in running.wanted.items():
                self._shrink(generation, wanted)
        if any(group.leaving for group in groups):
            return None
        del self._running[running.resize.model]
        if running.error is None:
            for generation in running.wanted:
                count = len(generation.spec.instances)
                plural = "" if count == 1 else "s"
                logger.info("resized model %s to %d instance%s", running.resize.model, count, plural)
        return OperationEnd(running.error)

    def _shrink(self, generation: Generation, wanted: ModelSpec) -> None:
        names = {one.name for one in wanted.instances}
        leaving = [one for one in generation.group.workers if one.instance.name not in names]
        if not leaving:
            return
        generation.spec = dataclasses.replace(generation.spec, instances=wanted.instances)
        # First the new size, so that readiness does not count the instances that leave as missing.
        self._send_instances(generation)
        timeout_s = self._core.settings.current.drain_timeout_s
        for worker in leaving:
            generation.group.leave(worker)
            message = messages.RetireInstance(generation.number, worker.instance.name, timeout_s)
            self._core.front.send(message)
            late = partial(self._stop, generation, worker)
            self._core.reactor.call_later(self._core.front.answer_due_s(timeout_s), late)

    def _send_instances(self, generation: Generation) -> None:
        self._core.front.send(messages.Resize(generation.number, generation.spec.to_wire()))
