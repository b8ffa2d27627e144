"""Generations of the server's own models: loads of one version each, with their workers and states."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from gpuserve.core.states import StepTable
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.models.declared_models import Repository
from gpuserve.supervisor.processes.front_monitor import FrontMonitor
from gpuserve.supervisor.processes.lifecycle import InstanceState
from gpuserve.supervisor.workers.shared_weights import DeviceWeights
from gpuserve.supervisor.workers.worker_group import WorkerGroup
from gpuserve.supervisor.workers.worker_monitor import WorkerContext, WorkerMonitor


class GenerationState(enum.Enum):
    """The states of a generation, which follow one another. RETIRING: the generation gets no new requests,
    and its workers finish those in flight. STOPPING: nothing is in flight, and the workers are stopped.
    """

    LOADING = "LOADING"
    READY = "READY"
    RETIRING = "RETIRING"
    STOPPING = "STOPPING"
    GONE = "GONE"


GENERATION_STEPS: Final = StepTable(
    "generation", {before: {after} for before, after in itertools.pairwise(GenerationState)}
)

#: The state in the repository index of a version by its generation's state. With several generations the last
#: in this order counts.
_INDEX_STATE: Final[dict[GenerationState, str]] = {
    GenerationState.STOPPING: "UNLOADING",
    GenerationState.RETIRING: "UNLOADING",
    GenerationState.LOADING: "LOADING",
    GenerationState.READY: "READY",
}
#: The entry in the repository index of a model that was never loaded.
_NO_VERSION: Final = 0
_NEVER_LOADED: Final = ((_NO_VERSION, "", ""),)


class Residence(enum.Enum):
    """The states of the instances of a generation with ``on_demand``. DRAINING: the front takes them out of
    rotation. RESIDENT: they are loaded, or restart after a failed load. SUSPENDING: their callables go to
    sleep.
    """

    COLD = "COLD"
    STARTING = "STARTING"
    RESIDENT = "RESIDENT"
    DRAINING = "DRAINING"
    SUSPENDING = "SUSPENDING"
    ASLEEP = "ASLEEP"
    WAKING = "WAKING"
    STOPPING = "STOPPING"


#: The states of an instance about whose next start a new front is told nothing.
_TO_COME: Final = {InstanceState.LOADING, InstanceState.DOWN, InstanceState.ASLEEP}

RESIDENCE_STEPS: Final = StepTable(
    "residence",
    {
        Residence.COLD: {Residence.STARTING},
        Residence.STARTING: {Residence.RESIDENT},
        Residence.RESIDENT: {Residence.DRAINING},
        Residence.DRAINING: {Residence.RESIDENT, Residence.SUSPENDING, Residence.STOPPING},
        Residence.SUSPENDING: {Residence.ASLEEP, Residence.STOPPING},
        Residence.ASLEEP: {Residence.WAKING, Residence.STOPPING},
        Residence.WAKING: {Residence.RESIDENT},
        Residence.STOPPING: {Residence.COLD},
    },
)


class Generation:
    """One load of one version of a model. ``served``: requests for the model are routed to it."""

    def __init__(self, number: int, spec: ModelSpec, workers: WorkerGroup, *, served: bool) -> None:
        self.number = number
        self.spec = spec
        self.group = workers
        self.served = served
        self.state = GenerationState.LOADING
        #: False for a model with ``on_demand`` whose instances need not be up for the load to be complete.
        self.starts = not spec.on_demand
        self.residence = Residence.COLD
        #: With ``on_demand``: whether requests wait or run, when the latest came, since when the instances
        #: are resident or start, how long they took to start or wake, why they were evicted, and whether they
        #: keep their processes then.
        self.is_used, self.used_at, self.resident_at, self.load_s = False, 0.0, 0.0, 0.0
        self.evicted_for, self.keeps_processes = "", False
        #: The time of the latest change of residence.
        self.moved_at = 0.0

    def move(self, state: GenerationState) -> None:
        self.state = GENERATION_STEPS.step(self.state, state, f"{self.number} of model {self.spec.name}")

    def move_to(self, residence: Residence) -> None:
        name = f"{self.number} of model {self.spec.name}"
        self.residence, self.moved_at = (
            RESIDENCE_STEPS.step(self.residence, residence, name),
            time.monotonic(),
        )

    @property
    def is_cold(self) -> bool:
        return self.spec.on_demand and self.residence is Residence.COLD

    @property
    def is_loading(self) -> bool:
        return self.state is GenerationState.LOADING

    @property
    def is_known_to_front(self) -> bool:
        """True if a new front has to know the generation: a retiring one has no work for a new front."""
        return self.state in {GenerationState.LOADING, GenerationState.READY}

    @property
    def is_retiring(self) -> bool:
        return self.state in {GenerationState.RETIRING, GenerationState.STOPPING}


class RepositoryIndex:
    """The repository index. It stores why versions are not loaded, and queries everything else."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._reasons: dict[str, dict[int, str]] = {}

    def unavailable(self, model: str, version: int, reason: str) -> None:
        """Store why a version is not loaded, unless the model cannot be loaded again."""
        if model in self._repository.names():
            self._reasons.setdefault(model, {})[version] = reason

    def undeclared(self, model: str, reason: str) -> None:
        """Store that the declaration of a model is broken, so that its versions are unknown."""
        self._reasons[model] = {_NO_VERSION: reason}

    def forget(self, model: str, version: int) -> None:
        for key in (version, _NO_VERSION):
            self._reasons.get(model, {}).pop(key, None)

    def forget_all(self, model: str) -> None:
        """Forget every version of a model that is not declared any more."""
        self._reasons.pop(model, None)

    def states(self, model: str, generations: Iterable[Generation]) -> Sequence[tuple[int, str, str]]:
        """Return (version, state, reason) of each version of a model, for ``messages.ModelStates``."""
        is_known = model in self._repository.names()
        reasons = self._reasons.get(model, {}) if is_known else {}
        found = {version: (version, "UNAVAILABLE", reason) for version, reason in reasons.items()}
        present = {(each.spec.version, each.state) for each in generations if each.spec.name == model}
        for version, state in sorted(present, key=lambda pair: list(_INDEX_STATE).index(pair[1])):
            found[version] = (version, _INDEX_STATE[state], "")
        if found:
            return [found[version] for version in sorted(found)]
        return _NEVER_LOADED if is_known else ()


class GenerationTable:
    """The generations of generation server, by number. ``numbers`` yields each number once."""

    def __init__(
        self, repository: Repository, context: WorkerContext, front: FrontMonitor, numbers: Iterator[int]
    ) -> None:
        self.repository = repository
        self.index = RepositoryIndex(repository)
        self.front = front
        self._context = context
        self._numbers = numbers
        self._generations: dict[int, Generation] = {}

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._generations.values()))

    def __contains__(self, generation: Generation) -> bool:
        return generation.number in self._generations

    def shared_weights(self) -> list[dict[str, Any]]:
        """Return a row for each memory that workers share."""
        return self._context.weights.document()

    def weights_on(self, worker: WorkerMonitor, device: str) -> list[DeviceWeights]:
        """Return the shared weights on a device that an instance uses."""
        uuids = dict(zip(worker.instance.devices, worker.instance.placement.gpu_uuids, strict=False))
        return [
            one
            for one in self._context.weights.on_devices()
            if uuids.get(device, "").endswith(one.uuid) and not one.users.isdisjoint(worker.ranks)
        ]

    def get(self, number: int) -> Generation | None:
        return self._generations.get(number)

    def add(self, spec: ModelSpec, *, served: bool) -> Generation:
        number = next(self._numbers)
        generation = Generation(number, spec, WorkerGroup(spec, self._context, number), served=served)
        self._generations[number] = generation
        return generation

    def remove(self, generation: Generation) -> None:
        del self._generations[generation.number]

    def drop(self, generations: Iterable[Generation]) -> None:
        """Kill and forget those of the generations that never served."""
        for generation in generations:
            if generation in self and not generation.served:
                self.remove(generation)
                self.front.send(messages.RemoveModel(generation.number))
                generation.group.discard()

    def of(self, model: str) -> list[Generation]:
        return [generation for generation in self if generation.spec.name == model]

    def served(self, model: str) -> list[Generation]:
        return [generation for generation in self.of(model) if generation.served]

    def is_served(self, model: str) -> bool:
        return any(generation.served for generation in self.of(model))

    def is_retiring(self, model: str) -> bool:
        return any(generation.is_retiring for generation in self.of(model))

    def on_demand(self) -> list[Generation]:
        """Return the generations whose instances come and go."""
        return [one for one in self if one.spec.on_demand]

    def names(self) -> Collection[str]:
        loaded = (generation.spec.name for generation in self)
        return dict.fromkeys([*self.repository.names(), *loaded]).keys()

    def specs(self) -> list[ModelSpec]:
        return [generation.spec for generation in self]

    def instances(self) -> list[InstanceSpec]:
        """Return the instances that run or start, without those that a newer load of their model replaces."""
        newest = {(one.spec.name, one.spec.version): one.group for one in self if not one.is_cold}
        groups = newest.values()
        return [worker.instance for one in groups for worker in (*one.workers, *one.coming)]

    def workers(self) -> Iterator[WorkerMonitor]:
        for generation in self:
            yield from generation.group.all

    def leaving(self) -> set[WorkerMonitor]:
        """Return the workers that get no new requests: their instance, or their generation, is retiring."""
        groups = [one.group.all if one.is_retiring else one.group.leaving for one in self]
        return {worker for group in groups for worker in group}

    def send_states(self, *models: str) -> None:
        for model in models:
            self.front.send(messages.ModelStates(model, tuple(self.index.states(model, self))))

    def announce(self) -> None:
        """Send a new front everything it must know, in the order in which it happened."""
        known = [generation for generation in self if generation.is_known_to_front]
        for one in known:
            self.front.send(messages.AddModel(one.number, one.spec.to_wire(), False, one.served))
        for worker in [worker for one in known for worker in one.group.workers]:
            if (live := worker.live_instance()) is not None:
                self.front.instance_up(worker.generation, live)
            elif worker.lifecycle.state not in _TO_COME:
                self.send_down(worker, worker.lost_gpu_reason() or "it died before this front")
        self.send_states(*self.names())

    def send_down(self, worker: WorkerMonitor, reason: str) -> None:
        """Send that a worker is gone, and in how many seconds its successor starts."""
        restart_in_s = worker.lifecycle.restart_in_s(time.monotonic())
        down = messages.InstanceDown(worker.generation, worker.instance.name, reason, restart_in_s)
        self.front.send(down)
