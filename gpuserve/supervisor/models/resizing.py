"""Resizes: served models that get more or fewer instances. New workers start first, and each enters rotation
when it is ready. Instances are retired only when all new workers are ready. If a new worker fails to load,
the other new workers are dropped as well, and the model keeps the instances that it had before.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gpuserve.core.errors import GpuserveError, Internal, InvalidArgument, RequestError, StartupError
from gpuserve.model.placement import joined, with_count
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.models.generations import Generation, GenerationTable
from gpuserve.supervisor.models.model_operations import OperationEnd, ResizeOperation, cancelled_error
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor, stop_timeout_s

logger = logging.getLogger(__name__)


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


class ModelResizes:
    """The running resizes, at most one for each model. ``finish`` is called at the end of each resize that
    does not end at once.
    """

    def __init__(
        self,
        core: ServerCore,
        table: GenerationTable,
        finish: Callable[[ResizeOperation, GpuserveError | None], None],
    ) -> None:
        self._core = core
        self._table = table
        self._finish = finish
        self._running: dict[str, _RunningResize] = {}

    # ---- requests -------------------------------------------------------------------------

    def start(self, resize: ResizeOperation, generations: Sequence[Generation]) -> OperationEnd | None:
        """Resize the generations that serve a model. Return ``OperationEnd`` if the resize ends at once."""
        if not generations:  # the model was unloaded meanwhile
            return OperationEnd(InvalidArgument(f"model '{resize.model}' is not loaded"))
        try:
            running = _RunningResize(resize, generations)
        except RequestError as error:
            return OperationEnd(error)
        self._running[resize.model] = running
        for generation, wanted in running.wanted.items():
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
            self._lost_leaving(generation, worker, reason)
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

    def _lost_leaving(self, generation: Generation, worker: WorkerMonitor, reason: str) -> None:
        worker.stop()
        # Its requests move to other instances if it died by itself, or if the front did not retire it in
        # time.
        self._table.send_down(worker, reason)
        self._forget_stopped(generation, worker)

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
