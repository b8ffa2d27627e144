"""The generations of the server's own models: the life of each, what front and repository index say of them.
A generation is one load of one version, and its workers; one whose load fails is dropped.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from gpuserve.control import messages
from gpuserve.model.spec import ModelSpec
from gpuserve.states import StepTable
from gpuserve.supervisor.core.front_keeper import FrontKeeper
from gpuserve.supervisor.core.life import InstanceState
from gpuserve.supervisor.models.repository import Repository
from gpuserve.supervisor.workers.worker_group import WorkerGroup
from gpuserve.supervisor.workers.worker_keeper import WorkerCare, WorkerKeeper


class GenerationState(enum.Enum):
    """Where a generation stands, one after the other. RETIRING: it gets no new requests, and its workers
    finish those that it has. STOPPING: nothing is left to do, and the workers are ended.
    """

    LOADING = "LOADING"
    READY = "READY"
    RETIRING = "RETIRING"
    STOPPING = "STOPPING"
    GONE = "GONE"


STEPS: Final = StepTable(
    "generation", {before: {after} for before, after in itertools.pairwise(GenerationState)}
)

#: What the repository index calls a version whose generation is in a state; of several generations it is told
#: what is last here.
_INDEX_STATE: Final[dict[GenerationState, str]] = {
    GenerationState.STOPPING: "UNLOADING",
    GenerationState.RETIRING: "UNLOADING",
    GenerationState.LOADING: "LOADING",
    GenerationState.READY: "READY",
}
#: What the index says of a model that was never loaded.
_NO_VERSION: Final = 0
_NEVER_LOADED: Final = ((_NO_VERSION, "", ""),)


class Generation:
    """One load of one version of a model. ``served``: requests for the model go to it."""

    def __init__(self, number: int, spec: ModelSpec, workers: WorkerGroup, *, served: bool) -> None:
        self.number = number
        self.spec = spec
        self.group = workers
        self.served = served
        self.state = GenerationState.LOADING

    def move(self, state: GenerationState) -> None:
        self.state = STEPS.step(self.state, state, f"{self.number} of model {self.spec.name}")

    @property
    def is_known_to_front(self) -> bool:
        """Whether a new front is to be told of it: one that retires has nothing to do for that front."""
        return self.state in {GenerationState.LOADING, GenerationState.READY}

    @property
    def is_going(self) -> bool:
        return self.state in {GenerationState.RETIRING, GenerationState.STOPPING}


class ModelIndex:
    """What the repository index says of models. It remembers why versions are not loaded; all else it asks
    or is told.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._reasons: dict[str, dict[int, str]] = {}

    def unavailable(self, model: str, version: int, reason: str) -> None:
        """Note why a version is not loaded; one that cannot be loaded again is not kept."""
        if model in self._repository.names():
            self._reasons.setdefault(model, {})[version] = reason

    def undeclared(self, model: str, reason: str) -> None:
        """Note that a model has a declaration by which it cannot be served, so its versions are not known."""
        self._reasons[model] = {_NO_VERSION: reason}

    def forget(self, model: str, version: int) -> None:
        for one in (version, _NO_VERSION):
            self._reasons.get(model, {}).pop(one, None)

    def forget_all(self, model: str) -> None:
        """Forget every version of a model, which is not declared any more."""
        self._reasons.pop(model, None)

    def states(self, model: str, generations: Iterable[Generation]) -> Sequence[tuple[int, str, str]]:
        """Return (version, state, reason) of each version of a model, for ``messages.ModelStates``."""
        is_known = model in self._repository.names()
        reasons = self._reasons.get(model, {}) if is_known else {}
        found = {version: (version, "UNAVAILABLE", reason) for version, reason in reasons.items()}
        there = {(one.spec.version, one.state) for one in generations if one.spec.name == model}
        for version, state in sorted(there, key=lambda one: list(_INDEX_STATE).index(one[1])):
            found[version] = (version, _INDEX_STATE[state], "")
        if found:
            return [found[version] for version in sorted(found)]
        return _NEVER_LOADED if is_known else ()


class GenerationTable:
    """The generations of one server, by number; ``numbers`` are given out once."""

    def __init__(
        self, repository: Repository, care: WorkerCare, front: FrontKeeper, numbers: Iterator[int]
    ) -> None:
        self.repository = repository
        self.index = ModelIndex(repository)
        self.front = front
        self._care = care
        self._numbers = numbers
        self._generations: dict[int, Generation] = {}

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._generations.values()))

    def __contains__(self, generation: Generation) -> bool:
        return generation.number in self._generations

    def get(self, number: int) -> Generation | None:
        return self._generations.get(number)

    def add(self, spec: ModelSpec, *, served: bool) -> Generation:
        number = next(self._numbers)
        generation = Generation(number, spec, WorkerGroup(spec, self._care, number), served=served)
        self._generations[number] = generation
        return generation

    def remove(self, generation: Generation) -> None:
        del self._generations[generation.number]

    def drop(self, generations: Iterable[Generation]) -> None:
        """End and forget generations that never served."""
        for generation in generations:
            if generation in self and not generation.served:
                self.remove(generation)
                self.front.send(messages.RemoveModel(generation.number))
                generation.group.discard()

    # ---- questions ------------------------------------------------------------------------

    def of(self, model: str) -> list[Generation]:
        return [one for one in self if one.spec.name == model]

    def served(self, model: str) -> list[Generation]:
        return [one for one in self.of(model) if one.served]

    def is_served(self, model: str) -> bool:
        return bool(self.served(model))

    def is_going(self, model: str) -> bool:
        return any(one.is_going for one in self.of(model))

    def names(self) -> Collection[str]:
        return dict.fromkeys([*self.repository.names(), *(one.spec.name for one in self)]).keys()

    def specs(self) -> list[ModelSpec]:
        return [one.spec for one in self]

    def all_loaded(self) -> bool:
        return all(one.state is not GenerationState.LOADING for one in self)

    def all_stopped(self) -> bool:
        return all(one.group.is_stopped for one in self)

    def workers(self) -> Iterator[WorkerKeeper]:
        for generation in self:
            yield from generation.group.all

    def leaving(self) -> set[WorkerKeeper]:
        """Return the workers that get nothing new, because they leave their model or it is not served."""
        groups = [one.group.all if one.is_going else one.group.leaving for one in self]
        return {worker for group in groups for worker in group}

    # ---- telling the front ----------------------------------------------------------------

    def tell_states(self, *models: str) -> None:
        for model in models:
            self.front.send(messages.ModelStates(model, tuple(self.index.states(model, self))))

    def announce(self) -> None:
        """Tell a new front all that it must know, in the order in which it came about."""
        known = [one for one in self if one.is_known_to_front]
        for one in known:
            self.front.send(messages.AddModel(one.number, one.spec.to_wire(), False, one.served))
        for worker in [worker for one in known for worker in one.group.workers]:
            if (live := worker.live()) is not None:
                self.front.instance_up(worker.generation, live)
            elif worker.life.state is not InstanceState.LOADING:
                self.tell_down(worker, worker.why_lost() or "it died before this front")
        self.tell_states(*self.names())

    def tell_down(self, worker: WorkerKeeper, reason: str) -> None:
        """Tell the front that a worker is gone, and in how many seconds its successor starts."""
        restart_in_s = worker.life.restart_in_s(time.monotonic())
        name = worker.instance.name
        self.front.send(messages.InstanceDown(worker.generation, name, reason, restart_in_s))
