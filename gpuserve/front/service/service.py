"""What every door answers from: the parts of the inference service, each complete before any door opens. A
door converts, calls one of the parts, and converts back. Nothing here knows HTTP or gRPC.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.config.settings.server import OFF, ServerSettings
from gpuserve.front.links.worker_link import DeviceLinks
from gpuserve.front.memory.intake import Intake
from gpuserve.front.memory.regions import RegionTable
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.models.watching import AccessNotes
from gpuserve.front.observe.gpu_health.watch import GpuWatch
from gpuserve.front.observe.metrics_page import MetricsPage
from gpuserve.front.observe.sliced_page import SlicedPage
from gpuserve.front.service.control import AdminControl, LogControl, Questions, RepositoryControl, Say
from gpuserve.front.service.events import EventsInFront
from gpuserve.front.service.health import ServerHealth
from gpuserve.front.service.inference import Inference, NotedInference, Pins
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.service.trace_control import TraceControl
from gpuserve.front.v2 import statistics_codec
from gpuserve.front.v2.health import Watchers
from gpuserve.front.v2.limits import InflationLimits
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.version import VERSION

#: The extensions of the v2 protocol that this server has, by Triton's names.
EXTENSIONS: Final = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


@dataclass(frozen=True, slots=True)
class ServiceControl:
    """What clients and operators change while the server runs, and ``questions`` to the supervisor."""

    repository: RepositoryControl
    trace: TraceControl
    log: LogControl
    admin: AdminControl
    regions: RegionTable
    gpus: GpuWatch
    questions: Questions


@dataclass(frozen=True, slots=True)
class InferenceService:
    """The parts of the service. ``name`` is what the server calls itself, ``compat_name`` in metadata."""

    name: str
    compat_name: str
    inference: Inference
    models: ModelTable
    health: ServerHealth
    control: ServiceControl
    metrics_page: MetricsPage
    intake: Intake
    inflation: InflationLimits
    #: The statistics of all models, by JSON and as a message.
    statistics: tuple[SlicedPage, SlicedPage]
    events: EventsInFront
    #: For JSON that is not short, which it reads and writes slice by slice: the loop goes on between. It has
    #: one thread: each more would hold the interpreter as long as the loop waits for it.
    json_executor: Executor
    version: str = VERSION
    extensions: tuple[str, ...] = EXTENSIONS

    def metadata(self) -> dict[str, Any]:
        return {"name": self.compat_name, "version": self.version, "extensions": self.extensions}


def inference_service(
    settings: ServerSettings,
    say: Say = lambda _: None,
    *,
    epoch: int = 1,
    links: DeviceLinks | None = None,
    cache: ResponseCache | None = None,
    table: type[ModelTable] = ModelTable,
    pins: Pins | None = None,
) -> InferenceService:
    """A service without models yet; ``say`` sends to the supervisor, ``links`` are of workers that are up.
    ``pins`` keeps the regions that requests name, where this is another's task than the region table's.
    """
    watchers = Watchers()
    gpus = GpuWatch(
        settings.gpu_health_interval_s, lambda lost: say(messages.LostGpus(lost)), watchers.changed
    )
    models = table(gpus, watchers)
    regions = RegionTable((links or DeviceLinks()).on, models.devices, settings.shared_memory_owners)
    is_logged = settings.access_log != OFF
    # With doors, what becomes of requests is noted there, and their drivers tell nobody.
    notes = AccessNotes() if is_logged and settings.doors == 1 else None
    trace = TraceControl(models, settings.trace, epoch, say, notes)
    watchers.watch(trace.refresh)
    questions = Questions(say)
    control = ServiceControl(
        RepositoryControl(settings.model_control, questions, models),
        trace,
        LogControl(settings.log_level, say),
        AdminControl(questions, is_open=settings.admin_api),
        regions,
        gpus,
        questions,
    )
    health = ServerHealth(models, gpus, watchers)
    health.require(settings.min_healthy_devices, settings.min_ready_instances)
    cache = cache or ResponseCache(0)
    page = MetricsPage(models.metrics, VERSION, lambda: cache.statistics().nbytes, gpus.families)
    intake = Intake(settings.max_intake_nbytes)
    inflation = InflationLimits(settings.max_inflated_nbytes, settings.max_inflation_ratio)
    statistics = (
        SlicedPage(lambda: statistics_codec.json_in_steps(models.statistics())),
        SlicedPage(lambda: statistics_codec.message_in_steps(models.statistics())),
    )
    inference = (NotedInference if is_logged else Inference)(models, pins or regions)
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
        EventsInFront(say),
        ThreadPoolExecutor(1, "json"),
    )
