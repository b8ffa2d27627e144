"""Models that get more instances, or fewer, while they are served. New workers come first, and each enters
rotation when it is ready. Only when all are there do instances leave, after they have finished. If a worker
cannot be loaded, those that came with it leave as well, and the model has the instances that it had before.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gpuserve.control import messages
from gpuserve.errors import GpuserveError, Internal, InvalidArgument, RequestError, StartupError
from gpuserve.model.spec import ModelSpec
from gpuserve.placement.instance_counts import joined, with_count
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.core.server_core import ServerCore
from gpuserve.supervisor.models.generations import Generation, GenerationTable
from gpuserve.supervisor.models.model_operations import OperationEnd, ResizeOperation, taken_back
from gpuserve.supervisor.workers.worker_group import stop_timeout_s
from gpuserve.supervisor.workers.worker_keeper import WorkerKeeper

logger = logging.getLogger(__name__)


class _Phase(enum.Enum):
    STARTING = "STARTING"
    GROWING = "GROWING"
    SHRINKING = "SHRINKING"


class _Course:
    """One resize at work: what each generation was, and what it is to be."""

    def __init__(self, resize: ResizeOperation, generations: Iterable[Generation]) -> None:
        self.resize = resize
        self.before = {one: one.spec for one in generations}
        self.wanted = {one: with_count(one.spec, resize.count, one.group.down()) for one in self.before}
        self.phase = _Phase.STARTING
        self.error: GpuserveError | None = None


class ModelResizes:
    """The resizes at work, one a model at most. ``finish`` is told of each that is over, unless it was over
    as soon as it began.
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
        self._courses: dict[str, _Course] = {}

    # ---- what is asked for ----------------------------------------------------------------

    def begin(self, resize: ResizeOperation, generations: Sequence[Generation]) -> OperationEnd | None:
        """Resize the generations that serve a model; ``OperationEnd`` where that is over at once."""
        if not generations:  # any more, since it was asked for
            return OperationEnd(InvalidArgument(f"model '{resize.model}' is not loaded"))
        try:
            course = _Course(resize, generations)
        except RequestError as error:
            return OperationEnd(error)
        self._courses[resize.model] = course
        for generation, wanted in course.wanted.items():
            present = {one.name for one in generation.spec.instances}
            generation.group.add(one for one in wanted.instances if one.name not in present)
        try:
            for worker in [worker for one in course.wanted for worker in list(one.group.coming)]:
                worker.start()
        except StartupError as error:
            self._fail(course, worker, str(error))
        course.phase = _Phase.GROWING
        return self._advance(course)

    def take_back(self, resize: ResizeOperation) -> None:
        """Drop what is still coming, and go back to the instances that there were."""
        course = self._courses.get(resize.model)
        if course is not None and course.phase is _Phase.GROWING:
            self._give_up(course, taken_back(resize.model))
            self._go_on(next(iter(course.wanted)))

    def abandon(self, resize: ResizeOperation) -> None:
        """Drop what was coming, because the server ends. What leaves goes on leaving."""
        course = self._courses.pop(resize.model, None)
        for generation in course.wanted if course is not None else ():
            generation.group.discard_coming()

    # ---- what the workers and the front tell ----------------------------------------------

    def has(self, generation: Generation, worker: WorkerKeeper) -> bool:
        return worker in generation.group.coming or worker in generation.group.leaving

    def worker_ready(self, generation: Generation, worker: WorkerKeeper) -> None:
        """Let a loaded worker of ours enter rotation, if it was coming."""
        live = worker.live()
        if worker not in generation.group.coming or live is None:
            return
        self._join(generation, worker)
        self._core.front.instance_up(generation.number, live)
        self._go_on(generation)

    def worker_lost(self, generation: Generation, worker: WorkerKeeper, reason: str) -> None:
        """Fail the resize with a dead worker that was coming; forget one that was leaving."""
        if worker in generation.group.leaving:
            self._lost_leaving(generation, worker, reason)
        elif worker.life.state is InstanceState.FENCED:  # as the others on that GPU are
            self._join(generation, worker)
            self._table.tell_down(worker, reason)
        else:
            self._fail(self._courses[generation.spec.name], worker, reason)
        self._go_on(generation)

    def retired(self, generation: Generation, instance: str, *, hurried: bool) -> None:
        """Stop the worker of an instance that leaves and has nothing in flight any more, or gave it up."""
        leaving = generation.group.leaving
        worker = next((one for one in leaving if one.instance.name == instance), None)
        if worker is not None:
            self._stop(generation, worker, hurried=hurried)

    def _stop(self, generation: Generation, worker: WorkerKeeper, *, hurried: bool = True) -> None:
        if worker.life.state in {InstanceState.STOPPING, InstanceState.STOPPED}:
            return
        was_ready = worker.life.state is InstanceState.READY
        worker.stop()
        if not was_ready:  # it has nothing to finish
            worker.kill()
        self._core.reactor.call_later(stop_timeout_s(hurried=hurried), worker.kill)
        self._forget_stopped(generation, worker)
        self._go_on(generation)

    def front_lost(self) -> None:
        """Stop all workers that leave: what they had in flight is lost with the front."""
        for generation in self._table:
            for worker in list(generation.group.leaving):
                self._stop(generation, worker)

    # ---- inside ---------------------------------------------------------------------------

    def _join(self, generation: Generation, worker: WorkerKeeper) -> None:
        """Add an instance to its model; the front is told of it before it comes up."""
        generation.group.join(worker)
        wanted = self._courses[generation.spec.name].wanted[generation]
        generation.spec = joined(generation.spec, wanted, worker.instance.name)
        self._tell_instances(generation)

    def _fail(self, course: _Course, worker: WorkerKeeper, reason: str) -> None:
        model, instance = course.resize.model, worker.instance.name
        text = f"instance {instance} could not be started: {reason}"
        logger.error("model %s stays as it was: %s", model, text)
        self._give_up(course, Internal(f"model '{model}' stays as it was: {text}"))

    def _give_up(self, course: _Course, error: GpuserveError) -> None:
        course.error, course.wanted = error, dict(course.before)
        for generation in course.wanted:
            generation.group.discard_coming()

    def _lost_leaving(self, generation: Generation, worker: WorkerKeeper, reason: str) -> None:
        worker.stop()
        # What it had goes elsewhere, if it died by itself or the front was not in time to let it go.
        self._table.tell_down(worker, reason)
        self._forget_stopped(generation, worker)

    def _forget_stopped(self, generation: Generation, worker: WorkerKeeper) -> None:
        if worker.life.state is InstanceState.STOPPED:
            generation.group.forget(worker)

    def _go_on(self, generation: Generation) -> None:
        course = self._courses.get(generation.spec.name)
        if course is None or course.phase is _Phase.STARTING:
            return
        if (done := self._advance(course)) is not None:
            self._finish(course.resize, done.error)

    def _advance(self, course: _Course) -> OperationEnd | None:
        groups = [one.group for one in course.wanted]
        if any(group.coming for group in groups):
            return None
        if course.phase is _Phase.GROWING:
            course.phase = _Phase.SHRINKING
            for generation, wanted in course.wanted.items():
                self._shrink(generation, wanted)
        if any(group.leaving for group in groups):
            return None
        del self._courses[course.resize.model]
        if course.error is None:
            for generation in course.wanted:
                count = len(generation.spec.instances)
                plural = "" if count == 1 else "s"
                logger.info("model %s has %d instance%s", course.resize.model, count, plural)
        return OperationEnd(course.error)

    def _shrink(self, generation: Generation, wanted: ModelSpec) -> None:
        names = {one.name for one in wanted.instances}
        leaving = [one for one in generation.group.workers if one.instance.name not in names]
        if not leaving:
            return
        generation.spec = dataclasses.replace(generation.spec, instances=wanted.instances)
        # First what the model is, so that those that leave are not missed.
        self._tell_instances(generation)
        timeout_s = self._core.settings.now.drain_timeout_s
        for worker in leaving:
            generation.group.leave(worker)
            message = messages.RetireInstance(generation.number, worker.instance.name, timeout_s)
            self._core.front.send(message)
            late = partial(self._stop, generation, worker)
            self._core.reactor.call_later(self._core.front.answer_due_s(timeout_s), late)

    def _tell_instances(self, generation: Generation) -> None:
        self._core.front.send(messages.Resize(generation.number, generation.spec.to_wire()))
