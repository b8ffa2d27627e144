"""The server's own models: what is loaded, what is on its way in or out, and which of it gets requests.

A load starts workers beside those that serve. Once all of them are ready the front is told to turn to them,
in one message; then the earlier ones finish what they have and are ended. A load that fails leaves all as
it was. Operations on one model wait for one another; different models do not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpuserve.errors import GpuserveError, Internal, RequestError, StartupError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.generation import Generation, GenerationEvent, GenerationState
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.model_index import ModelIndex
from gpuserve.supervisor.model_operations import Load, Operation, Operations, OperationState, Unload
from gpuserve.supervisor.reactor import Reactor
from gpuserve.supervisor.repository import Repository
from gpuserve.supervisor.worker_group import WorkerGroup
from gpuserve.supervisor.worker_keeper import WorkerKeeper

logger = logging.getLogger(__name__)

#: After its Stop a worker of an unloaded model may take this long to end, then it is killed.
STOP_TIMEOUT_S = 10.0
#: The front has this much more time to say that a generation is finished than it has to finish it.
_ANSWER_TIMEOUT_S = 1.0
_GOING = frozenset({GenerationState.RETIRING, GenerationState.STOPPING})


class ServedModels:
    """The generations of the server's own models. Owner of their workers: ``kill()`` leaves none.

    ``new_group`` makes the workers of a generation, given its number and its declaration; ``numbers`` are the
    numbers of generations, given out once.
    """

    def __init__(
        self,
        reactor: Reactor,
        repository: Repository,
        new_group: Callable[[int, ModelSpec], WorkerGroup],
        numbers: Iterator[int],
        *,
        retire_timeout_s: float,
    ) -> None:
        self._reactor = reactor
        self._new_group = new_group
        self._numbers = numbers
        self._retire_timeout_s = retire_timeout_s
        self._generations: dict[int, Generation] = {}
        self._operations = Operations()
        self._index = ModelIndex(repository)
        self._front: FrontKeeper | None = None

    # ---- the start, and every front -------------------------------------------------------

    def add(self, specs: Iterable[ModelSpec]) -> None:
        """Models of the start: they are served from the beginning, as far as they are loaded."""
        for spec in specs:
            self._new_generation(spec, served=True)

    def start(self, front: FrontKeeper) -> None:
        """Start the workers of all that was added.

        Raises:
            StartupError: there is no process to be had.
        """
        self._front = front
        for generation in self._generations.values():
            generation.group.start()
            self._check_loaded(generation)

    def announce(self, front: FrontKeeper) -> None:
        """All that a new front must know, in the order in which it came about."""
        known = [one for one in self._generations.values() if one.is_known_to_front]
        for generation in known:
            front.add_model(generation.number, generation.spec, attached=False, served=generation.served)
        for worker in [worker for one in known for worker in one.group.workers]:
            if (live := worker.live()) is not None:
                front.instance_up(worker.generation, live)
            elif worker.life.state is not InstanceState.LOADING:
                reason = worker.why_lost() or "it died before this front"
                front.instance_down(worker.generation, worker.instance.name, reason, worker.restart_in_s())
        for name in self.names():
            front.model_states(name, self._index.states(name, self._generations.values()))

    def front_lost(self) -> None:
        """What was in flight is lost with it."""
        for generation in list(self._generations.values()):
            self.retired(generation.number)

    # ---- questions ------------------------------------------------------------------------

    def names(self) -> Collection[str]:
        """Every model of this server, loaded or not."""
        loaded = [one.spec.name for one in self._generations.values()]
        return dict.fromkeys([*self._index.known(), *loaded]).keys()

    def specs(self) -> list[ModelSpec]:
        """The models that are loaded, or are being."""
        return [one.spec for one in self._generations.values()]

    def is_served(self, model: str) -> bool:
        """Whether requests for a model are for any of its versions."""
        return any(one.served for one in self._of(model))

    def all_loaded(self) -> bool:
        """Whether no generation is still loading."""
        return all(one.state is not GenerationState.LOADING for one in self._generations.values())

    def all_stopped(self) -> bool:
        """Whether no worker runs, and none will."""
        return all(one.group.is_stopped for one in self._generations.values())

    def workers(self) -> Iterator[WorkerKeeper]:
        """Every worker of every generation."""
        for generation in self._generations.values():
            yield from generation.group.workers

    def workers_of(self, worker: WorkerKeeper) -> Sequence[WorkerKeeper]:
        """A worker and those of its generation."""
        generation = self._generations.get(worker.generation)
        return [] if generation is None else generation.group.workers

    # ---- what is asked for ----------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """Do it now, or as soon as what was asked before for the same model is done."""
        if self._operations.put(operation):
            self._run(operation)

    def abandon(self, error: GpuserveError) -> None:
        """Nobody gets what he asked for any more, because the server ends."""
        for operation in self._operations.take_all():
            if isinstance(operation, Load):
                self._drop(operation.generations)
            operation.answer(error)

    # ---- what the workers and the front tell ----------------------------------------------

    def instance_ready(self, worker: WorkerKeeper) -> None:
        """It enters rotation; a load whose last instance it is is complete."""
        assert self._front is not None
        generation = self._generations.get(worker.generation)
        live = worker.live()
        if generation is None or live is None or generation.state is GenerationState.STOPPING:
            return
        self._front.instance_up(generation.number, live)
        self._check_complete(generation)

    def _check_complete(self, generation: Generation) -> None:
        """A load whose last instance has just become ready is done."""
        if not self._check_loaded(generation):
            return
        load = self._operations.load_of(generation)
        if load is not None and self._is_complete(load):
            self._run(self._operations.finish(load))

    def instance_lost(self, worker: WorkerKeeper, reason: str) -> StartupError | None:
        """Out of rotation. The error of a model of the start that cannot even be started."""
        generation = self._generations.get(worker.generation)
        if generation is None:
            return None
        if generation.state is GenerationState.STOPPING:
            self._check_stopped(generation)
            return None
        assert self._front is not None
        self._front.instance_down(generation.number, worker.instance.name, reason, worker.restart_in_s())
        if worker.life.was_ready or worker.life.state is InstanceState.STOPPED:
            return None
        if worker.life.state is InstanceState.FENCED and not generation.group.is_fenced:
            self._check_complete(generation)  # the model goes on without that GPU
            return None
        name = worker.instance.name
        load = self._operations.load_of(generation)
        if load is not None:
            self._fail(load, load.failure(generation.spec, name, reason), generation.spec, reason)
            return None
        return StartupError(f"model {generation.spec.name!r}: instance {name} could not be started: {reason}")

    def retired(self, number: int) -> None:
        """A generation has nothing in flight any more: its workers can go."""
        generation = self._generations.get(number)
        if generation is None or generation.state is not GenerationState.RETIRING:
            return
        generation.apply(GenerationEvent.FINISHED)
        generation.group.stop()
        self._reactor.call_later(STOP_TIMEOUT_S, lambda: self._kill_late(generation))
        self._check_stopped(generation)

    # ---- ending ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Let every worker finish its batch and exit."""
        for generation in self._generations.values():
            generation.group.stop()

    def kill(self) -> None:
        """Whatever still runs is killed and reaped."""
        for generation in self._generations.values():
            generation.group.kill()
        for generation in self._generations.values():
            generation.group.close()

    # ---- loading --------------------------------------------------------------------------

    def _run(self, operation: Operation | None) -> None:
        """Begin an operation, and those after it for as long as each is done at once."""
        while operation is not None:
            operation.move(OperationState.RUNNING)
            done = self._load(operation) if isinstance(operation, Load) else self._unload(operation.model)
            if done is None:
                return
            operation = self._operations.finish(operation, done.error)

    def _load(self, load: Load) -> _Done | None:
        """Start the workers of a load. It is done at once where not even that can be done."""
        assert self._front is not None
        try:
            specs = load.read()
        except RequestError as error:
            return _Done(error)
        except GpuserveError as error:
            logger.error("model %s cannot be loaded: %s", load.model, error)
            return _Done(_cannot_poll(load.model))
        if not specs:
            return _Done(_cannot_poll(load.model))
        load.generations = [self._new_generation(spec, served=False) for spec in specs]
        for generation in load.generations:
            self._front.add_model(generation.number, generation.spec, attached=False, served=False)
            try:
                generation.group.start()
            except StartupError as error:
                self._drop(load.generations)
                self._tell_states(load.model)
                name = generation.group.workers[0].instance.name
                return _Done(load.failure(generation.spec, name, str(error)))
        self._tell_states(load.model)
        for generation in load.generations:
            self._check_loaded(generation)
        return _Done(None) if self._is_complete(load) else None

    def _check_loaded(self, generation: Generation) -> bool:
        """Whether a generation is loaded at this moment, which one without workers is from the beginning."""
        if generation.state is not GenerationState.LOADING or not generation.group.is_loaded:
            return False
        generation.apply(GenerationEvent.LOADED)
        self._index.forget(generation.spec.name, generation.spec.version)
        self._tell_states(generation.spec.name)
        return True

    def _is_complete(self, load: Load) -> bool:
        """Whether all of a load is ready; then requests are for it from now on."""
        if any(one.state is not GenerationState.READY for one in load.generations):
            return False
        replaced = {one.spec.version for one in load.generations}
        old = [
            one
            for one in self._of(load.model)
            if one.served and (load.replaces or one.spec.version in replaced)
        ]
        for generation in load.generations:
            generation.served = True
        self._serve(load.model, old)
        logger.info("model %s is loaded", load.model)
        return True

    def _fail(self, load: Load, error: GpuserveError, spec: ModelSpec, reason: str) -> None:
        self._drop(load.generations)
        if load.replaces:  # a version that could not be bound does not exist
            self._index.unavailable(spec.name, spec.version, reason)
        self._tell_states(spec.name)
        logger.error("model %s could not be loaded: %s", load.model, reason)
        self._run(self._operations.finish(load, error))

    def _drop(self, generations: Iterable[Generation]) -> None:
        """Those were never served, and never will be."""
        for generation in generations:
            if generation.number not in self._generations or generation.served:
                continue
            del self._generations[generation.number]
            if self._front is not None:
                self._front.remove_model(generation.number)
            generation.group.discard()

    def _new_generation(self, spec: ModelSpec, *, served: bool) -> Generation:
        number = next(self._numbers)
        generation = Generation(number, spec, self._new_group(number, spec), served=served)
        self._generations[number] = generation
        return generation

    # ---- unloading ------------------------------------------------------------------------

    def _unload(self, model: str) -> _Done | None:
        self._serve(model, [one for one in self._of(model) if one.served])
        return None if self._is_going(model) else _Done(None)

    def _serve(self, model: str, old: Sequence[Generation]) -> None:
        """Tell the front which generations serve a model now; ``old`` do not any more."""
        assert self._front is not None
        for generation in old:
            generation.served = False
            generation.apply(GenerationEvent.RETIRE)
        serving = [one.number for one in self._of(model) if one.served]
        self._front.serve_model(model, serving, self._retire_timeout_s)
        self._tell_states(model)
        is_between_fronts = self._front.process is None
        delay_s = 0.0 if is_between_fronts else self._retire_timeout_s + _ANSWER_TIMEOUT_S
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
        del self._generations[generation.number]
        name, version = generation.spec.name, generation.spec.version
        if all(one.spec.version != version for one in self._of(name)):
            self._index.unavailable(name, version, "unloaded")
            logger.info("version %d of model %s is unloaded", version, name)
        self._tell_states(name)
        running = self._operations.running(name)
        if isinstance(running, Unload) and not self._is_going(name):
            self._run(self._operations.finish(running))

    def _is_going(self, model: str) -> bool:
        """Whether any generation of a model is on its way out."""
        return any(one.state in _GOING for one in self._of(model))

    def _of(self, model: str) -> list[Generation]:
        return [one for one in self._generations.values() if one.spec.name == model]

    def _tell_states(self, model: str) -> None:
        if self._front is not None:
            self._front.model_states(model, self._index.states(model, self._generations.values()))


class _Done(NamedTuple):
    """An operation is over; with what error, if with any."""

    error: GpuserveError | None


def _cannot_poll(model: str) -> Internal:
    return Internal(f"failed to load '{model}', failed to poll from model repository")
