"""The generations of a server's own models, by number and by model, and what the front is told of them. What
is loaded and unloaded when is decided in ``served_models.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from gpuserve.spec import ModelSpec
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.generation import Generation
from gpuserve.supervisor.life import InstanceState
from gpuserve.supervisor.model_index import ModelIndex
from gpuserve.supervisor.repository import Repository
from gpuserve.supervisor.worker_group import WorkerGroup


class GenerationTable:
    """``new_group`` makes the workers of a generation, given its number and its declaration; ``numbers`` are
    given out once. ``front`` is there from the start of the server on.
    """

    def __init__(
        self,
        repository: Repository,
        new_group: Callable[[int, ModelSpec], WorkerGroup],
        numbers: Iterator[int],
    ) -> None:
        self.index = ModelIndex(repository)
        self.front: FrontKeeper | None = None
        self._new_group = new_group
        self._numbers = numbers
        self._generations: dict[int, Generation] = {}

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._generations.values()))

    def __contains__(self, generation: Generation) -> bool:
        return generation.number in self._generations

    def get(self, number: int) -> Generation | None:
        """The generation of that number, if there is one."""
        return self._generations.get(number)

    def add(self, spec: ModelSpec, *, served: bool) -> Generation:
        """A generation more; its workers are not started yet."""
        number = next(self._numbers)
        generation = Generation(number, spec, self._new_group(number, spec), served=served)
        self._generations[number] = generation
        return generation

    def remove(self, generation: Generation) -> None:
        """It is no more."""
        del self._generations[generation.number]

    def drop(self, generations: Iterable[Generation]) -> None:
        """Those were never served, and never will be."""
        for generation in generations:
            if generation not in self or generation.served:
                continue
            self.remove(generation)
            if self.front is not None:
                self.front.remove_model(generation.number)
            generation.group.discard()

    def of(self, model: str) -> list[Generation]:
        """Those of a model."""
        return [one for one in self if one.spec.name == model]

    def served(self, model: str) -> list[Generation]:
        """Those of a model that requests are for."""
        return [one for one in self.of(model) if one.served]

    def names(self) -> Collection[str]:
        """Every model of this server, loaded or not."""
        return dict.fromkeys([*self.index.known(), *(one.spec.name for one in self)]).keys()

    def tell_states(self, model: str) -> None:
        """The front is told what the repository index says of a model."""
        if self.front is not None:
            self.front.model_states(model, self.index.states(model, self))

    def announce(self, front: FrontKeeper) -> None:
        """All that a new front must know, in the order in which it came about."""
        known = [one for one in self if one.is_known_to_front]
        for generation in known:
            front.add_model(generation.number, generation.spec, attached=False, served=generation.served)
        for worker in [worker for one in known for worker in one.group.workers]:
            if (live := worker.live()) is not None:
                front.instance_up(worker.generation, live)
            elif worker.life.state is not InstanceState.LOADING:
                reason = worker.why_lost() or "it died before this front"
                front.instance_down(worker.generation, worker.instance.name, reason, worker.restart_in_s())
        for name in self.names():
            front.model_states(name, self.index.states(name, self))
