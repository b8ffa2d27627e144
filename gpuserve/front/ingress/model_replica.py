"""The replica of the front's models in an ingress process, and the inference service over it.

The front publishes each change before it answers any client that could know of it. An ingress process refuses
no request by its replica before it has processed all received changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import NotFound, RequestError, Unavailable
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.ipc_channel import FrontOutage, IpcChannel
from gpuserve.front.ingress.proxy_driver import NoRegionPins, ProxyDriver, ProxyRequests
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.net.exchange import Exchange
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.service.control import TraceControl
from gpuserve.front.service.inference_service import InferenceService, inference_service
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.service.server_health import ServerHealth
from gpuserve.model.spec import CLIENT, ModelSpec
from gpuserve_worker.memory.arena import ArenaStatistics
from gpuserve_worker.protocol import wire

URGENT: Final = frozenset({messages.PublishedModel, messages.FrontState})


class ModelPublisher:
    """The front's side: publishes all models and changes to one ingress process while it is open."""

    def __init__(
        self, channel: IpcChannel, models: ModelTable, health: ServerHealth, trace: TraceControl
    ) -> None:
        self._channel = channel
        self._models = models
        self._health = health
        self._trace = trace
        self._published: dict[str, Sequence[Any]] = {}
        self._stage: messages.FrontState | None = None
        self._is_due = False
        self._unwatch: list[Callable[[], None]] = []

    def open(self) -> None:
        self._unwatch = [one.watch(self._on_change) for one in (self._health, self._trace)]
        self.publish()

    def close(self) -> None:
        while self._unwatch:
            self._unwatch.pop()()

    def _on_change(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._channel.call_at_end(self.publish)

    def publish(self) -> None:
        """Send everything that the ingress process does not know yet."""
        self._is_due = False
        models = self._models
        for name in models.names() | self._published.keys():
            drivers, states = models.of(name), models.states_of(name)
            known = (*[(one.spec, one.was_ready) for one in drivers], *states)
            if self._published.get(name) != known:
                versions = tuple([(one.spec.to_wire(), one.was_ready) for one in drivers])
                self._channel.post(messages.PublishedModel(name, versions, tuple(states)))
                if known:
                    self._published[name] = known
                else:
                    del self._published[name]
        stage = messages.FrontState(self._health.draining, self._health.ended, self._trace.is_active)
        if stage != self._stage:
            self._stage = stage
            self._channel.post(stage)


class ReplicaModelTable(ModelTable):
    """The model table of an ingress process. It processes pending changes before a model is missing."""

    catch_up: Callable[[], None]

    def find(self, name: str, version: str = "") -> Driver:
        try:
            return super().find(name, version)
        except (NotFound, Unavailable):
            self.catch_up()
            return super().find(name, version)

    def has_openai(self) -> bool:
        if not super().has_openai():
            self.catch_up()
        return super().has_openai()


class RelayedTraceControl(TraceControl):
    """The tracing of an ingress process: the front records all traces."""

    #: Has the front trace a call that no model receives.
    relay: Callable[[str, RequestError, Exchange, Reception], None]

    def follow(self, is_active: bool) -> None:
        """Time calls while the front traces any, for those that no model receives."""
        self.receptions.deliver = (lambda _: None) if is_active else None

    def refresh(self) -> None:
        """Do nothing: models have their tracers in the front."""

    def on_unread(
        self, name: str, error: RequestError, exchange: Exchange | None, reception: Reception
    ) -> None:
        assert exchange is not None
        self.relay(name, error, exchange, reception)


class ModelReplica:
    """The side of the ingress process: applies published changes to its model table and health."""

    def __init__(
        self, models: ModelTable, health: ServerHealth, trace: RelayedTraceControl, requests: ProxyRequests
    ) -> None:
        self._models = models
        self._health = health
        self._trace = trace
        self._requests = requests
        self._fairness_headers: dict[str, set[bytes]] = {}
        #: The models published by a new front, until it has published all.
        self._published: set[str] | None = None
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            messages.PublishedModel: self._on_served,
            messages.FrontState: self._on_stage,
        }

    def start_resync(self) -> None:
        """Forget models that a new front does not publish. It publishes all models before its state."""
        self._published = set()

    def _on_served(self, message: messages.PublishedModel) -> None:
        name, versions, states = message
        if self._published is not None:
            self._published.add(name)
        specs = [(ModelSpec.from_wire(spec), was_ready) for spec, was_ready in versions]
        drivers = [ProxyDriver(spec, was_ready, self._requests) for spec, was_ready in specs]
        fair = {one.queue.fairness_header.encode() for one, _ in specs if one.queue.fairness == CLIENT}
        if fair:
            self._fairness_headers[name] = fair
        else:  # so that the dict does not grow with changing names
            self._fairness_headers.pop(name, None)
        self._requests.fairness_headers = frozenset().union(*self._fairness_headers.values())
        self._models.set_states(name, states)
        self._models.serve(name, drivers)

    def _on_stage(self, message: messages.FrontState) -> None:
        if self._published is not None:
            gone, self._published = self._models.names() - self._published, None
            for name in gone:
                self._on_served(messages.PublishedModel(name, (), ()))
        draining, ended, tracing = message
        self._requests.tracing = tracing
        self._trace.follow(tracing)
        self._requests.draining = draining
        if draining and not self._health.draining:
            self._health.drain()
        if ended and not self._health.ended:
            self._health.end()


class IngressService:
    """Inference in an ingress process, until ``close``: the front's parts over proxy drivers."""

    def __init__(self, settings: ServerSettings, channel: IpcChannel) -> None:
        self.service: InferenceService = inference_service(
            settings, table=ReplicaModelTable, tracing=RelayedTraceControl, pins=NoRegionPins()
        )
        models, catch_up = self.service.models, partial(channel.process_urgent, URGENT)
        assert isinstance(models, ReplicaModelTable)
        models.catch_up = catch_up
        self.outage = FrontOutage()
        self._requests = ProxyRequests(channel, settings.max_arena_nbytes, self.outage)
        trace = self.service.control.trace
        assert isinstance(trace, RelayedTraceControl)
        trace.relay = self._requests.relay_unread
        self._replica = ModelReplica(models, self.service.health, trace, self._requests)
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            **self._requests.handlers,
            **self._replica.handlers,
        }

    def attach(self, message: wire.Lend, fds: list[int]) -> None:
        """Map a segment that the front lends. The caller keeps its descriptor."""
        self._requests.memory.attach(message, fds)

    def shrink(self) -> None:
        """Release unused arena memory. Called periodically."""
        self._requests.memory.arena.shrink()

    def arena_statistics(self) -> ArenaStatistics:
        return self._requests.memory.arena.statistics()

    def on_front_died(self) -> None:
        """Report not ready, fail the requests of the dead front, and hold new ones."""
        self.service.health.leave_service()
        self.outage.start()
        self._requests.on_front_died()

    def resume(self) -> None:
        """Continue with another front."""
        self._replica.start_resync()
        self._requests.memory.announce_arena()
        self.service.health.return_to_service()
        self.outage.end()

    def close(self) -> None:
        self._requests.close()
