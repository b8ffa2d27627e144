"""The inference service behind every protocol handler: handlers convert, call a part of the service, and
convert back. Nothing here knows HTTP or gRPC, and every part is complete before a handler serves.

The supervisor numbers all events and sends them to every front; a front reports its own observations to the
supervisor first.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import RequestError
from gpuserve.core.event_log import KEPT_BY_FRONT, Event, EventKind, RecentEvents, bounded_facts
from gpuserve.core.version import VERSION
from gpuserve.devices.names import OFF
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import Intake
from gpuserve.front.ipc.shared_memory import RegionTable
from gpuserve.front.ipc.worker_link import DeviceLinks
from gpuserve.front.models.pending_request import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observability.access_log import notes_of
from gpuserve.front.observability.gpu_health.gpu_monitor import GpuWatch
from gpuserve.front.observability.metrics.metrics_page import MetricsPage
from gpuserve.front.observability.time_slices import SlicedPage
from gpuserve.front.requests import admin_codec, classification
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.limits import InflationLimits
from gpuserve.front.requests.server_status import HealthSubscribers
from gpuserve.front.service.control import (
    AdminControl,
    LogControl,
    NotifySupervisor,
    RepositoryControl,
    SupervisorRequests,
    TraceControl,
)
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.service.server_health import ServerHealth
from gpuserve.model.spec import ModelSpec, StepSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.front_messages import EventBatch, FrontEvent
from gpuserve_worker.memory.arena import Block

#: The extensions of the v2 protocol that this server supports, by Triton's names.
EXTENSIONS: Final = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServiceControl:
    """The parts that clients and operators change at run time, and the ``requests`` to the supervisor."""

    repository: RepositoryControl
    trace: TraceControl
    log: LogControl
    admin: AdminControl
    regions: RegionTable
    gpus: GpuWatch
    supervisor_requests: SupervisorRequests


@dataclass(frozen=True, slots=True)
class InferenceService:
    """The parts of the service. ``name`` is the server's own name, ``compat_name`` its name in metadata."""

    name: str
    compat_name: str
    inference: Inference
    models: ModelTable
    health: ServerHealth
    control: ServiceControl
    metrics_page: MetricsPage
    intake: Intake
    inflation: InflationLimits
    #: The statistics of all models, as JSON and as a message.
    statistics: tuple[SlicedPage, SlicedPage]
    events: FrontEventLog
    #: A thread that parses and writes long JSON slice by slice, so that the event loop goes on between
    #: slices. There is only one thread: each further one would hold the interpreter lock as long as the event
    #: loop waits for it.
    json_executor: Executor
    version: str = VERSION
    extensions: tuple[str, ...] = EXTENSIONS

    def metadata(self) -> dict[str, Any]:
        return {"name": self.compat_name, "version": self.version, "extensions": self.extensions}


def inference_service(
    settings: ServerSettings,
    notify_supervisor: NotifySupervisor = lambda _: None,
    *,
    epoch: int = 1,
    links: DeviceLinks | None = None,
    cache: ResponseCache | None = None,
    table: type[ModelTable] = ModelTable,
    tracing: type[TraceControl] = TraceControl,
    pins: RegionPins | None = None,
) -> InferenceService:
    """Create a service without models.

    ``send`` sends messages to the supervisor, ``links`` are the links to workers that are up. ``pins`` keeps
    the regions that requests use, if that is not done by the region table.
    """
    watchers = HealthSubscribers()
    gpus = GpuWatch(
        settings.gpu_health_interval_s,
        lambda lost: notify_supervisor(messages.LostGpus(lost)),
        watchers.changed,
    )
    models = table(gpus, watchers)
    regions = RegionTable((links or DeviceLinks()).on, models.devices, settings.shared_memory_owners)
    is_logged = settings.access_log != OFF
    # With ingress processes, these write the access log, and drivers here do not observe requests.
    has_notes = is_logged and settings.ingress_processes == 1
    trace = tracing(models, settings.trace, epoch, notify_supervisor, has_notes)
    watchers.watch(trace.refresh)
    supervisor_requests = SupervisorRequests(notify_supervisor)
    control = ServiceControl(
        RepositoryControl(settings.model_control, supervisor_requests, models),
        trace,
        LogControl(settings.log_settings(), notify_supervisor),
        AdminControl(supervisor_requests, is_open=settings.admin_api),
        regions,
        gpus,
        supervisor_requests,
    )
    health = ServerHealth(models, gpus, watchers)
    health.require(settings.min_healthy_devices, settings.min_ready_instances)
    cache = cache or ResponseCache(0)
    page = MetricsPage(models.metrics, VERSION, lambda: cache.statistics().nbytes, gpus.families)
    intake = Intake(settings.max_intake_nbytes)
    inflation = InflationLimits(settings.max_inflated_nbytes, settings.max_inflation_ratio)
    statistics = (
        SlicedPage(lambda: admin_codec.statistics_json_in_steps(models.statistics())),
        SlicedPage(lambda: admin_codec.statistics_message_in_steps(models.statistics())),
    )
    inference = (LoggedInference if is_logged else Inference)(models, pins or regions)
    name = settings.name
    return InferenceService(
        name,
        settings.compat_name or name,
        inference,
        models,
        health,
        control,
        page,
        intake,
        inflation,
        statistics,
        FrontEventLog(notify_supervisor),
        ThreadPoolExecutor(1, "json"),
    )


# ---- inference -----------------------------------------------------------------------------------


class RegionPins(Protocol):
    """Keeps shared-memory regions alive while requests use them; see ``RegionTable``."""

    def pin(self, request: InferRequest) -> None: ...

    def unpin(self, request: InferRequest) -> None: ...


class Inference:
    """Submission of requests to ``models``, with their shared-memory regions pinned."""

    def __init__(self, models: ModelTable, regions: RegionPins) -> None:
        self._find = models.find
        #: The model table's own dictionary: a request without a version needs one look-up.
        self._latest = models.latest
        self._regions = regions

    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        """Queue one request as ``Driver.submit`` does. Raise RequestError, with its body freed."""
        try:
            driver = None if request.model_version else self._latest.get(request.model_name)
            if driver is None:
                driver = self._find(request.model_name, request.model_version)
            if request.regions:
                self._regions.pin(request)
        except RequestError:
            free_body(request)
            raise
        if not request.regions:
            return driver.submit(request, on_response, on_answer)
        try:
            return driver.submit(request, on_response, on_answer)
        except BaseException:
            self._regions.unpin(request)
            raise

    def classify(self, response: InferResponse, pending: PendingRequest) -> None:
        """Replace outputs by the classes asked for. Raise InvalidArgument if an output has none."""
        classification.classify(response, pending.request.class_counts, pending.spec, self._member)

    def _member(self, step: StepSpec) -> ModelSpec | None:
        """Return the model of an ensemble's step, or None if it is not served."""
        try:
            return self._find(step.model, str(step.version) if step.version else "").spec
        except RequestError:
            return None

    def claim(self, model_name: str, nbytes: int, model_version: str = "") -> Block | None:
        """Return arena memory for a large input, or None for the heap. Raise RequestError if refused."""
        try:
            driver = self._find(model_name, model_version)
        except RequestError:  # reported once the request is complete
            return None
        return driver.claim(nbytes)


class LoggedInference(Inference):
    """Inference with an access log: each request is recorded with the call that contained it."""

    def submit(
        self, request: InferRequest, on_response: OnResponse | None = None, on_answer: OnAnswer | None = None
    ) -> PendingRequest:
        notes = notes_of(request)
        if notes is not None:
            notes.submitted(request)
        return super().submit(request, on_response, on_answer)


# ---- events --------------------------------------------------------------------------------------


class FrontEventLog:
    """The latest events, including those before this front. Subscribe to ``recent`` for new events."""

    def __init__(self, notify_supervisor: NotifySupervisor) -> None:
        self.recent = RecentEvents(KEPT_BY_FRONT)
        self._notify_supervisor = notify_supervisor

    def on_events(self, message: EventBatch) -> None:
        for one in message.events:
            self.recent.add(Event.from_wire(one))

    def publish(
        self, kind: EventKind, *, model: str = "", version: int = 0, instance: str = "", **facts: Any
    ) -> None:
        """Report an observation to the supervisor; it is lost if the supervisor's socket is full."""
        with contextlib.suppress(BlockingIOError):
            self._notify_supervisor(FrontEvent(kind.value, model, version, instance, bounded_facts(facts)))
