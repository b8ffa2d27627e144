"""The one plane under every door: what the server answers, knowing neither HTTP nor gRPC.

A door (``http``, ``grpc_asgi``, ``grpc_aio``) converts, calls this, and converts back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from gpuserve import __version__
from gpuserve.ensemble_spec import StepSpec
from gpuserve.errors import InvalidArgument, NotFound, RequestError, Unavailable
from gpuserve.front.admin_control import AdminControl
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint import classification
from gpuserve.front.endpoint.health import HealthReport
from gpuserve.front.endpoint.limits import shown
from gpuserve.front.endpoint.model_table import ModelTable, version_number
from gpuserve.front.endpoint.v2 import IndexEntry, InferRequest, InferResponse
from gpuserve.front.gpu_health.watch import GpuWatch
from gpuserve.front.log_control import LogControl
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.metrics_page import MetricsPage
from gpuserve.front.plane.blocks import free_body
from gpuserve.front.plane.regions import RegionTable
from gpuserve.front.repository_control import RepositoryControl
from gpuserve.front.scheduler.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.statistics import StatisticsEntry
from gpuserve.front.tracing.control import TraceControl
from gpuserve.front.triton_metrics import Family
from gpuserve.spec import ModelSpec
from gpuserve_worker.memory import Block

#: What this server does of the extensions; the words are Triton's.
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
PLATFORM: Final = "python"
ENSEMBLE_PLATFORM: Final = "ensemble"


class ModelMetadata(NamedTuple):
    """What ``ModelMetadata`` answers; ``batches``: every shape has -1 in front."""

    spec: ModelSpec
    versions: tuple[str, ...]
    platform: str

    @property
    def batches(self) -> bool:
        """Whether the shapes get a batch dimension."""
        return self.spec.max_batch_size > 0


class InferenceService:
    """The models of a front, and the questions that clients ask about them.

    ``name`` is what the server calls itself. ``ready`` turns true once every model of the start is
    loaded, and false for good when the server is told to end.
    """

    def __init__(self, name: str, cache_nbytes: Callable[[], int] = lambda: 0) -> None:
        self.name = name
        self.version = __version__
        self.metrics_page = MetricsPage(self._metrics, __version__, cache_nbytes, self._gpu_families)
        #: What clients can read and change of tracing and of the log. The front puts its own here.
        self.trace = TraceControl(self.models)
        self.log = LogControl()
        self.repository = RepositoryControl()
        self.admin = AdminControl()
        #: The shared memory that clients have registered; the front puts its own here.
        self.regions = RegionTable()
        #: The GPUs, and how many of those that models name must be usable; the front puts its own here.
        self.gpus = GpuWatch()
        self.min_healthy_devices = 0
        #: How many instances of each model make the server ready, where the model has so many.
        self.min_ready_instances = 1
        self._table = ModelTable()
        #: The table's own; that a request without a version needs one look-up is worth a second name.
        self._latest = self._table.latest
        self._attached: set[str] = set()
        self._serving = False
        self._leaving = False
        self._draining = False
        #: Nothing changes any more: who watches is to stop.
        self.ended = False
        self._watchers: list[Callable[[], None]] = []

    # ---- health and metadata --------------------------------------------------------------

    @property
    def live(self) -> bool:
        """The process runs, and on a GPU machine a new one could use CUDA; nothing else counts."""
        return self.gpus.cuda_works

    @property
    def ready(self) -> bool:
        """Whether requests should come here: the server is not to end, every model of its own has enough
        live instances, and enough of their GPUs can be used.

        A model of an attached program does not count: no other program can take the server out of service.
        Nor does an ensemble, which is ready when the models of its steps are.
        """
        own = [
            driver
            for driver in self._table.all()
            if driver.spec.instances and driver.spec.name not in self._attached
        ]
        gpus = {uuid for driver in own for uuid in _gpus(driver.spec)}
        usable = self.gpus.are_enough(gpus, self.min_healthy_devices)
        return self.started and not self._leaving and usable and all(map(self._has_enough, own))

    def _has_enough(self, driver: Driver) -> bool:
        """Whether so many instances of a model are up that the server may be ready."""
        wanted = min(self.min_ready_instances, len(driver.spec.instances) - driver.instances.n_coming)
        return len(driver.instances.in_rotation()) >= wanted

    @property
    def started(self) -> bool:
        """Whether every model of the start was loaded; stays true."""
        return self._serving

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken, because the server stops."""
        return self._draining

    def model_ready(self, name: str, version: str) -> bool:
        """Whether a model takes requests; false, not an error, for one that does not exist or is not loaded.

        Raises:
            InvalidArgument: the version is no number.
        """
        try:
            driver = self.model(name, version)
        except (NotFound, Unavailable):
            return False
        return driver.ready and not self._leaving

    def why_not_ready(self, name: str, version: str) -> str:
        """The reason why a model is not ready, where it is one of the machine: its GPUs are lost."""
        driver = self.model(name, version)
        return "" if driver.ready else self.fault_of(driver.spec)

    def fault_of(self, spec: ModelSpec) -> str:
        """That the GPUs of every instance of a model are lost, and why; "" where they are not."""
        return self.gpus.why_lost([one.placement.gpu_uuid for one in spec.instances])

    def health(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1`` for a service name; None where there is no such service."""
        return self.health_report().of(service)

    def health_report(self) -> HealthReport:
        """The health of everything."""
        latest, staying = self._latest, not self._leaving
        models = {
            name: staying and (driver := latest.get(name)) is not None and driver.ready
            for name in self._table.names()
        }
        return HealthReport(self.live, self.started, self.ready, models)

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """The declaration of a version, the latest where none is named, and the versions that are ready.

        Raises:
            NotFound, InvalidArgument, Unavailable: no such model or version, or it is not loaded.
        """
        driver = self.model(name, version)
        versions = () if version else self._table.ready_versions(name)
        platform = ENSEMBLE_PLATFORM if driver.spec.is_ensemble else PLATFORM
        return ModelMetadata(driver.spec, versions or (str(driver.spec.version),), platform)

    def repository_index(self, ready_only: bool) -> list[IndexEntry]:
        """Every version of every model with its state."""
        return [one for one in self._table.index() if one.state == "READY" or not ready_only]

    def statistics(self, name: str, version: str) -> list[StatisticsEntry]:
        """What became of the requests of a model, or of a version of it; of all models where ``name`` is "".

        Raises:
            InvalidArgument: no such model or version, or the version is not a positive integer.
        """
        number = version and str(version_number(name, version))
        found = [one for one in self.models() if name in ("", one.spec.name)]
        if name and not found:
            raise InvalidArgument(f"requested model '{shown(name)}' is not available")
        if name and number:
            found = [one for one in found if str(one.spec.version) == number]
            if not found:
                raise InvalidArgument(f"requested model version is not available for model '{shown(name)}'")
        found.sort(key=lambda driver: (driver.spec.name, driver.spec.version))
        return [
            one.metrics.statistics_entry(self.gpus.memory_of(one.spec.name, one.metrics.version))
            for one in found
        ]

    # ---- inference ------------------------------------------------------------------------

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request.

        Raises:
            RequestError: see ``submit``; or the request was late, or the callable failed.
        """
        pending = self.submit(request)
        try:
            response: InferResponse = await pending.answer
        except asyncio.CancelledError:
            pending.take_back()
            raise
        if request.class_counts:
            self.classify(response, pending)
        return response

    def classify(self, response: InferResponse, pending: PendingRequest) -> None:
        """Put the classes that the request asks for in the place of its outputs.

        Raises:
            InvalidArgument: an output has none; the response is closed.
        """
        counts = pending.request.class_counts
        classification.classify(response, counts, pending.spec, self._member)

    def _member(self, step: StepSpec) -> ModelSpec | None:
        """The model of a step of an ensemble."""
        try:
            return self.model(step.model, str(step.version) if step.version else "").spec
        except RequestError:
            return None

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        """Queue one request, answered to ``on_answer`` or else by its ``answer``; see ``Driver.submit``.

        The regions it names stay until it is through.

        Raises:
            RequestError: it is wrong or refused; its body is freed.
        """
        try:
            driver = self.model(request.model_name, request.model_version)
            if request.regions:
                self.regions.pin(request)
        except RequestError:
            free_body(request)
            raise
        if not request.regions:
            return driver.submit(request, on_response, on_answer)
        try:
            return driver.submit(request, on_response, on_answer)
        except BaseException:
            self.regions.unpin(request)
            raise

    def allocate(self, model_name: str, nbytes: int, model_version: str = "") -> Block | None:
        """Memory in the model's arena for a large input whose bytes arrive; None: keep it on the heap."""
        try:
            return self.model(model_name, model_version).allocate(nbytes)
        except RequestError:  # said once the request is complete
            return None

    def model(self, name: str, version: str = "") -> Driver:
        """The version of a model; an empty one means the highest that is ready.

        Raises:
            NotFound, Unavailable, InvalidArgument: see ``ModelTable.find``.
        """
        driver = None if version else self._latest.get(name)
        return self._table.find(name, version) if driver is None else driver

    # ---- what the supervisor says ---------------------------------------------------------

    def add_model(self, driver: Driver, attached: bool = False) -> None:
        """A version exists from now on, of a model of this server or of an attached program."""
        name = driver.spec.name
        if attached:
            self._attached.add(name)
        self.serve_model(name, [*self._table.of(name), driver])

    def remove_model(self, driver: Driver) -> None:
        """A version is no more; its driver is the caller's to close."""
        name = driver.spec.name
        self.serve_model(name, [one for one in self._table.of(name) if one is not driver])
        if not self._table.of(name):
            self._attached.discard(name)

    def served_versions(self, name: str) -> list[ModelSpec]:
        """The declarations of the versions of a model that are served, the highest last."""
        return [driver.spec for driver in self._table.of(name)]

    def serve_model(self, name: str, drivers: Iterable[Driver]) -> None:
        """These, and no others, are the versions of a model from now on."""
        self._table.serve(name, drivers)
        if self._draining:
            for driver in self._table.of(name):
                driver.stop_accepting()
        self.changed()

    def model_states(self, name: str, states: Sequence[tuple[int, str, str]]) -> None:
        """What the index says of the versions of a model; see ``messages.ModelStates``."""
        self._table.set_states(name, states)
        self.changed()

    def instance_changed(self, driver: Driver) -> None:
        """An instance of a version came up, or went down."""
        self._table.refresh(driver.spec.name)
        self.changed()

    def models(self) -> Iterable[Driver]:
        """Every version of every model that gets requests."""
        return self._table.all()

    def serving(self) -> None:
        """Every model of the start is loaded."""
        self._serving = True
        self.changed()

    def cuda_state(self, works: bool) -> None:
        """Whether a new process can use CUDA."""
        self.gpus.cuda_works = works
        self.changed()

    def leave(self) -> None:
        """Not ready from now on. What comes is still taken."""
        self._leaving = True
        self.changed()

    def stay(self) -> None:
        """Ready again, if all else is; unless the server drains."""
        self._leaving = self._draining
        self.changed()

    def drain(self) -> None:
        """Not ready from now on; nothing new is taken."""
        self._leaving = self._draining = True
        for driver in self._table.all():
            driver.stop_accepting()
        self.changed()

    def end(self) -> None:
        """The front ends: whoever watches is told so, as nobody else waits for an answer now."""
        self.ended = True
        self.changed()

    # ---- changes of health ----------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after anything changed that health may depend on. Call the result to end it."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def changed(self) -> None:
        """Something did."""
        for callback in list(self._watchers):
            callback()

    def _metrics(self) -> Iterable[ModelMetrics]:
        return [driver.metrics for driver in self._table.all()]

    def _gpu_families(self) -> Iterable[Family]:
        return self.gpus.families()


def _gpus(spec: ModelSpec) -> list[str]:
    """The UUIDs of the GPUs that instances of a model are on."""
    return list(dict.fromkeys(one.placement.gpu_uuid for one in spec.instances if one.placement.gpu_uuid))
