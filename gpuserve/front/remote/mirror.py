"""What a door knows of the models that are served: the front tells it of each change before it answers
anybody who could know. A door refuses nobody by what it knows before it has looked at all that was said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpuserve.core.errors import NotFound, Unavailable
from gpuserve.front.models.interface import Driver
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.drivers import RemoteDriver, RemoteRequests
from gpuserve.front.service.control import TraceControl
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.service.server_health import ServerHealth
from gpuserve.model.spec import CLIENT, ModelSpec

URGENT: Final = frozenset({messages.Served, messages.FrontStage})


class ModelMirror:
    """The front's side: tells one door what there is, and of every change, from ``open`` to ``close``."""

    def __init__(
        self, passage: Passage, models: ModelTable, health: ServerHealth, trace: TraceControl
    ) -> None:
        self._passage = passage
        self._models = models
        self._health = health
        self._trace = trace
        self._told: dict[str, Sequence[Any]] = {}
        self._stage: messages.FrontStage | None = None
        self._is_due = False
        self._unwatch: list[Callable[[], None]] = []

    def open(self) -> None:
        self._unwatch = [one.watch(self._on_change) for one in (self._health, self._trace)]
        self.tell()

    def close(self) -> None:
        while self._unwatch:
            self._unwatch.pop()()

    def _on_change(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._passage.call_at_end(self.tell)

    def tell(self) -> None:
        """Tell all that the door does not know yet."""
        self._is_due = False
        models = self._models
        for name in models.names() | self._told.keys():
            drivers, states = models.of(name), models.states_of(name)
            known = (*[(one.spec, one.was_ready) for one in drivers], *states)
            if self._told.get(name) != known:
                self._tell_of(name, drivers, states)
                if known:
                    self._told[name] = known
                else:
                    del self._told[name]
        stage = messages.FrontStage(self._health.draining, self._health.ended, self._trace.is_active)
        if stage != self._stage:
            self._stage = stage
            self._passage.post(stage)

    def _tell_of(self, name: str, drivers: Sequence[Driver], states: Sequence[tuple[int, str, str]]) -> None:
        versions = tuple([(one.spec.to_wire(), one.was_ready) for one in drivers])
        self._passage.post(messages.Served(name, versions, tuple(states)))


class MirroredTable(ModelTable):
    """A door's table of models, which looks again before it says that there is none."""

    look_ahead: Callable[[], None]

    def find(self, name: str, version: str = "") -> Driver:
        try:
            return super().find(name, version)
        except (NotFound, Unavailable):
            self.look_ahead()
            return super().find(name, version)

    def has_openai(self) -> bool:
        if not super().has_openai():
            self.look_ahead()
        return super().has_openai()


class Mirrored:
    """The door's side: keeps its table of models and its health as the front says."""

    def __init__(self, models: ModelTable, health: ServerHealth, requests: RemoteRequests) -> None:
        self._models = models
        self._health = health
        self._requests = requests
        self._fair_by: dict[str, set[bytes]] = {}
        #: The models that a new front has told of, until it has told of all.
        self._told: set[str] | None = None
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.Served: self._on_served,
            messages.FrontStage: self._on_stage,
        }

    def begin(self) -> None:
        """Forget what another front does not tell of; it tells of all models before its stage."""
        self._told = set()

    def _on_served(self, message: messages.Served) -> None:
        name, versions, states = message
        if self._told is not None:
            self._told.add(name)
        specs = [(ModelSpec.from_wire(spec), was_ready) for spec, was_ready in versions]
        drivers = [RemoteDriver(spec, was_ready, self._requests) for spec, was_ready in specs]
        fair = {one.queue.fairness_header.encode() for one, _ in specs if one.queue.fairness == CLIENT}
        if fair:
            self._fair_by[name] = fair
        else:  # names come and go
            self._fair_by.pop(name, None)
        self._requests.fair_by = frozenset().union(*self._fair_by.values())
        self._models.set_states(name, states)
        self._models.serve(name, drivers)

    def _on_stage(self, message: messages.FrontStage) -> None:
        if self._told is not None:
            gone, self._told = self._models.names() - self._told, None
            for name in gone:
                self._on_served(messages.Served(name, (), ()))
        draining, ended, self._requests.tracing = message
        self._requests.draining = draining
        if draining and not self._health.draining:
            self._health.drain()
        if ended and not self._health.ended:
            self._health.end()
