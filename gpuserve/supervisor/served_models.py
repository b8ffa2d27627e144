"""The server's own models: what is loaded, what is on its way in or out, and which of it gets requests.

A load starts workers beside those that serve. Once all of them are ready the front is told to turn to them,
in one message; then the earlier ones finish what they have and are ended. A load that fails leaves all as
it was. Operations on one model wait for one another; different models do not. How a load goes is in
``loading.py``, and how instances join and leave a model that is served in ``resizing.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from gpuserve.errors import GpuserveError, InvalidArgument, StartupError
from gpuserve.instance_counts import with_count
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.generation import Generation, GenerationEvent, GenerationState
from gpuserve.supervisor.generation_table import GenerationTable
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.loading import Loading
from gpuserve.supervisor.model_operations import (
    Answer,
    Done,
    Load,
    Operation,
    Operations,
    OperationState,
    Resize,
    Unload,
)
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.repository import Repository
from gpuserve.supervisor.resizing import Resizing
from gpuserve.supervisor.worker_group import STOP_TIMEOUT_S, WorkerGroup
from gpuserve.supervisor.worker_keeper import WorkerKeeper

logger = logging.getLogger(__name__)

#: The front has this much more time to say that a generation is finished than it has to finish it.
_ANSWER_TIMEOUT_S = 1.0
_GOING = frozenset({GenerationState.RETIRING, GenerationState.STOPPING})


class ServedModels:
    """The generations of the server's own models. Owner of their workers: ``kill()`` leaves none.

    ``new_group`` and ``numbers`` are as ``GenerationTable`` has them.
    """

    def __init__(
        self,
        reactor: Reactor,
        repository: Repository,
        new_group: Callable[[int, ModelSpec], WorkerGroup],
        numbers: Iterator[int],
        *,
        retire_timeout_s: Callable[[], float],
    ) -> None:
        self._reactor = reactor
        self._retire_timeout_s = retire_timeout_s
        self._table = GenerationTable(repository, new_group, numbers)
        self._operations = Operations()
        self._loading = Loading(self._table, self._serve)
        self._resizing = Resizing(reactor, self._table, self._end, retire_timeout_s)

    # ---- the start, and every front -------------------------------------------------------

    def add(self, specs: Iterable[ModelSpec]) -> None:
        """Models of the start: they are served from the beginning, as far as they are loaded."""
        for spec in specs:
            self._table.add(spec, served=True)

    def start(self, front: FrontKeeper) -> None:
        """Start the workers of all that was added.

        Raises:
            StartupError: there is no process to be had.
        """
        self._table.front = front
        for generation in self._table:
            generation.group.start()
            self._loading.check_loaded(generation)

    def announce(self, front: FrontKeeper) -> None:
        """All that a new front must know, in the order in which it came about."""
        self._table.announce(front)

    def front_lost(self) -> None:
        """What was in flight is lost with it."""
        for generation in self._table:
            self.retired(generation.number)
        self._resizing.front_lost()

    # ---- questions ------------------------------------------------------------------------

    def names(self) -> Collection[str]:
        """Every model of this server, loaded or not."""
        return self._table.names()

    def specs(self) -> list[ModelSpec]:
        """The models that are loaded, or are being."""
        return [one.spec for one in self._table]

    def served(self, model: str) -> list[ModelSpec]:
        """The versions of a model that requests for it are for."""
        return [one.spec for one in self._table.served(model)]

    def is_served(self, model: str) -> bool:
        """Whether requests for a model are for any of its versions."""
        return bool(self._table.served(model))

    def all_loaded(self) -> bool:
        """Whether no generation is still loading."""
        return all(one.state is not GenerationState.LOADING for one in self._table)

    def all_stopped(self) -> bool:
        """Whether no worker runs, and none will."""
        return all(one.group.is_stopped for one in self._table)

    def workers(self) -> Iterator[WorkerKeeper]:
        """Every worker of every generation."""
        for generation in self._table:
            yield from generation.group.all

    def leaving(self) -> set[WorkerKeeper]:
        """The workers that get nothing new, because the model has fewer of them or is not served any more."""
        going = [one.group.all if one.state in _GOING else one.group.leaving for one in self._table]
        return {worker for group in going for worker in group}

    def workers_of(self, worker: WorkerKeeper) -> Sequence[WorkerKeeper]:
        """A worker and those of its generation."""
        generation = self._table.get(worker.generation)
        return [] if generation is None else generation.group.all

    # ---- what is asked for ----------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Do it now, or as soon as what was asked before for the same model is done."""
        if self._operations.put(operation):
            self._run(operation)

    def check_resize(self, model: str, count: int) -> None:
        """Do nothing if a model that is served, or is being loaded, could have ``count`` instances on each
        device.

        Raises:
            InvalidArgument: it could not, or is not loaded.
        """
        generations = self._table.served(model) or self._table.of(model)
        if not generations:
            raise InvalidArgument(f"model '{model}' is not loaded")
        for generation in generations:
            with_count(generation.spec, count)

    def resize(self, model: str, count: int, answer: Answer) -> None:
        """Let every version of a model that is served have ``count`` instances on each device that it has."""
        self.begin(Resize(model, answer, count))

    def tell_known(self, models: Iterable[str]) -> None:
        """The repository knows these models now, or does not any more."""
        for model in models:
            self._table.tell_states(model)

    def abandon(self, error: GpuserveError) -> None:
        """Nobody gets what he asked for any more, because the server ends."""
        for operation in self._operations.take_all():
            if isinstance(operation, Load):
                self._table.drop(operation.generations)
            elif isinstance(operation, Resize):
                self._resizing.abandon(operation)
            operation.answer(error)

    # ---- what the workers and the front tell ----------------------------------------------

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """It enters rotation; a load whose last instance it is is complete."""
        assert self._table.front is not None
        generation = self._table.get(worker.generation)
        live = worker.live()
        if generation is None or live is None or generation.state is GenerationState.STOPPING:
            return
        if self._resizing.has(generation, worker):
            self._resizing.worker_ready(generation, worker)
            return
        self._table.front.instance_up(generation.number, live)
        self._check_complete(generation)

    def _check_complete(self, generation: Generation) -> None:
        """A load whose last instance has just become ready is done."""
        if not self._loading.check_loaded(generation):
            return
        load = self._operations.load_of(generation)
        if load is not None and self._loading.is_complete(load):
            self._end(load, None)

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> StartupError | None:
        """Out of rotation. The error of a model of the start that cannot even be started."""
        generation = self._table.get(worker.generation)
        if generation is None:
            return None
        if generation.state is GenerationState.STOPPING:
            self._check_stopped(generation)
            return None
        if self._resizing.has(generation, worker):
            self._resizing.worker_lost(generation, worker, reason)
            return None
        front, name = self._table.front, worker.instance.name
        assert front is not None
        front.instance_down(generation.number, name, reason, worker.restart_in_s())
        if worker.life.was_ready or worker.life.state is InstanceState.STOPPED:
            return None
        if worker.life.state is InstanceState.FENCED and not generation.group.is_fenced:
            self._check_complete(generation)  # the model goes on without that GPU
            return None
        load = self._operations.load_of(generation)
        if load is not None:
            self._loading.fail(load, generation.spec, reason)
            self._end(load, load.failure(generation.spec, name, reason))
            return None
        return StartupError(f"model {generation.spec.name!r}: instance {name} could not be started: {reason}")

    def retired(self, number: int) -> None:
        """A generation has nothing in flight any more: its workers can go."""
        generation = self._table.get(number)
        if generation is None or generation.state is not GenerationState.RETIRING:
            return
        generation.apply(GenerationEvent.FINISHED)
        generation.group.stop()
        self._reactor.call_later(STOP_TIMEOUT_S, lambda: self._kill_late(generation))
        self._check_stopped(generation)

    def instance_retired(self, number: int, instance: str) -> None:
        """An instance that leaves its model has nothing in flight any more: its worker can go."""
        generation = self._table.get(number)
        if generation is not None:
            self._resizing.retired(generation, instance)

    # ---- ending ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Let every worker finish its batch and exit."""
        for generation in self._table:
            generation.group.stop()

    def kill(self) -> None:
        """Whatever still runs is killed and reaped."""
        for generation in self._table:
            generation.group.kill()
        for generation in self._table:
            generation.group.close()

    # ---- operations -----------------------------------------------------------------------

    def _run(self, operation: Operation | None) -> None:
        """Begin an operation, and those after it for as long as each is done at once."""
        while operation is not None:
            operation.move(OperationState.RUNNING)
            done = self._do(operation)
            if done is None:
                return
            operation = self._operations.finish(operation, done.error)

    def _do(self, operation: Operation) -> Done | None:
        """Begin one; ``Done`` where it is over at once."""
        if isinstance(operation, Load):
            return self._loading.begin(operation)
        if isinstance(operation, Resize):
            return self._resize(operation)
        return self._unload(operation.model)

    def _end(self, operation: Operation, error: GpuserveError | None) -> None:
        """The one at work is over: the next."""
        self._run(self._operations.finish(operation, error))

    def _resize(self, resize: Resize) -> Done | None:
        try:
            self.check_resize(resize.model, resize.count)  # it may be another since it was asked for
        except InvalidArgument as error:
            return Done(error)
        return self._resizing.begin(resize, self._table.served(resize.model))

    # ---- unloading ------------------------------------------------------------------------

    def _unload(self, model: str) -> Done | None:
        self._serve(model, self._table.served(model))
        return None if self._is_going(model) else Done(None)

    def _serve(self, model: str, old: Sequence[Generation]) -> None:
        """Tell the front which generations serve a model now; ``old`` do not any more."""
        front = self._table.front
        assert front is not None
        for generation in old:
            generation.served = False
            generation.apply(GenerationEvent.RETIRE)
        serving = [one.number for one in self._table.served(model)]
        timeout_s = self._retire_timeout_s()
        front.serve_model(model, serving, timeout_s)
        self._table.tell_states(model)
        is_between_fronts = front.process is None
        delay_s = 0.0 if is_between_fronts else timeout_s + _ANSWER_TIMEOUT_S
        for generation in old:
            self._retire_later(generation.number, delay_s)

    def _retire_later(self, number: int, delay_s: float) -> None:
        self._reactor.call_later(delay_s, lambda: self.retired(number))

    def _kill_late(self, generation: Generation) -> None:
        if generation.state is GenerationState.STOPPING:
            generation.group.kill()

    def _check_stopped(self, generation: Generation) -> None:
        if not generation.group.is_stopped:
            return
        generation.apply(GenerationEvent.STOPPED)
        generation.group.close()
        self._table.remove(generation)
        name, version = generation.spec.name, generation.spec.version
        if all(one.spec.version != version for one in self._table.of(name)):
            self._table.index.unavailable(name, version, "unloaded")
            logger.info("version %d of model %s is unloaded", version, name)
        self._table.tell_states(name)
        running = self._operations.running(name)
        if isinstance(running, Unload) and not self._is_going(name):
            self._end(running, None)

    def _is_going(self, model: str) -> bool:
        """Whether any generation of a model is on its way out."""
        return any(one.state in _GOING for one in self._table.of(model))
