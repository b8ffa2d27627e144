"""The one plane under every door: what the server answers, knowing neither HTTP nor gRPC.

A door (``http``, ``grpc_asgi``, ``grpc_aio``) converts, calls this, and converts back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from gpuserve import __version__
from gpuserve.errors import InvalidArgument, NotFound
from gpuserve.front.endpoint.limits import shown
from gpuserve.front.endpoint.v2 import IndexEntry, InferRequest, InferResponse
from gpuserve.front.metrics import MetricsPage, ModelMetrics
from gpuserve.front.scheduler.driver import ModelDriver
from gpuserve.front.scheduler.flights import OnResponse, PendingRequest
from gpuserve.spec import ModelSpec
from gpuserve_worker.memory import Block

#: What this server does of the extensions; the words are Triton's.
EXTENSIONS: Final = (
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
)
PLATFORM: Final = "python"


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
    loaded, and false for good when the server drains.
    """

    def __init__(self, name: str, cache_nbytes: Callable[[], int] = lambda: 0) -> None:
        self.name = name
        self.version = __version__
        self.metrics_page = MetricsPage(self._metrics, __version__, cache_nbytes)
        self._models: dict[str, ModelDriver] = {}
        self._attached: set[str] = set()
        self._serving = False
        self._draining = False
        #: Nothing changes any more: who watches is to stop.
        self.ended = False
        self._watchers: list[Callable[[], None]] = []

    # ---- health and metadata --------------------------------------------------------------

    @property
    def live(self) -> bool:
        """The process runs; nothing else counts."""
        return True

    @property
    def ready(self) -> bool:
        """Whether the server as a whole takes requests: every model of its own has a live instance.

        A model of an attached program does not count: no other program can take the server out of service.
        """
        own = [driver for name, driver in self._models.items() if name not in self._attached]
        return self._serving and not self._draining and all(driver.ready for driver in own)

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken, because the server stops."""
        return self._draining

    def model_ready(self, name: str, version: str) -> bool:
        """Whether a model takes requests; false, not an error, for one that does not exist.

        Raises:
            InvalidArgument: the version is no number.
        """
        try:
            driver = self.model(name, version)
        except NotFound:
            return False
        return driver.ready and not self._draining

    def health(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1`` for a service name; None where there is no such service."""
        match service:
            case "" | "readiness" | "inference.GRPCInferenceService":
                return self.ready
            case "liveness":
                return self.live
            case "startup":
                return self._serving
        prefix, _, model = service.partition("/")
        if prefix == "model" and model in self._models:
            return self._models[model].ready and not self._draining
        return None

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """The declaration of a model.

        Raises:
            NotFound, InvalidArgument: no such model or version.
        """
        driver = self.model(name, version)
        return ModelMetadata(driver.spec, (str(driver.spec.version),), PLATFORM)

    def repository_index(self, ready_only: bool) -> list[IndexEntry]:
        """Every model with its state."""
        entries = [
            IndexEntry(
                name,
                str(driver.spec.version),
                "READY" if driver.ready else "UNAVAILABLE",
                "" if driver.ready else "no live instance",
            )
            for name, driver in sorted(self._models.items())
        ]
        return [one for one in entries if one.state == "READY" or not ready_only]

    # ---- inference ------------------------------------------------------------------------

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request.

        Raises:
            RequestError: see ``ModelDriver.infer``; NotFound where the model does not exist.
        """
        return await self.model(request.model_name, request.model_version).infer(request)

    def submit(self, request: InferRequest, on_response: OnResponse | None = None) -> PendingRequest:
        """Queue one request, to be awaited by its ``answer``; see ``ModelDriver.submit``."""
        return self.model(request.model_name, request.model_version).submit(request, on_response)

    def allocate(self, model_name: str, nbytes: int) -> Block | None:
        """Memory in the model's arena for a large input whose bytes arrive; None: keep it on the heap."""
        driver = self._models.get(model_name)
        return None if driver is None else driver.allocate(nbytes)

    def free(self, model_name: str, blocks: list[Block]) -> None:
        """Take back what ``allocate`` gave for a request that came to nothing."""
        driver = self._models.get(model_name)
        if driver is not None:
            driver.free(blocks)

    def model(self, name: str, version: str = "") -> ModelDriver:
        """The model of that name; an empty version means the newest.

        Raises:
            NotFound: no such model, or no such version of it.
            InvalidArgument: the version is not a positive integer.
        """
        driver = self._models.get(name)
        if driver is None:
            raise NotFound(f"Request for unknown model: '{shown(name)}' is not found")
        if version and _version_number(name, version) != driver.spec.version:
            raise NotFound(
                f"Request for unknown model: '{shown(name)}' version {shown(version)} is not found, "
                f"only version {driver.spec.version} is"
            )
        return driver

    # ---- what the supervisor says ---------------------------------------------------------

    def add_model(self, driver: ModelDriver, attached: bool = False) -> None:
        """A model exists from now on, of this server or of an attached program."""
        self._models[driver.spec.name] = driver
        if attached:
            self._attached.add(driver.spec.name)
        self.changed()

    def remove_model(self, name: str) -> ModelDriver | None:
        """A model is no more; its driver is the caller's to close."""
        driver = self._models.pop(name, None)
        self._attached.discard(name)
        self.changed()
        return driver

    def models(self) -> Iterable[ModelDriver]:
        """Every model."""
        return self._models.values()

    def serving(self) -> None:
        """Every model of the start is loaded."""
        self._serving = True
        self.changed()

    def drain(self) -> None:
        """Not ready from now on; nothing new is taken."""
        self._draining = True
        for driver in self._models.values():
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
        return [driver.metrics for driver in self._models.values()]


def _version_number(name: str, version: str) -> int:
    """A version of the model ``name`` as sent on the wire.

    Raises:
        InvalidArgument: not a positive integer.
    """
    try:
        number = int(version)
    except ValueError:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{shown(version)}' "
            f"(details: stol), version should be an integral value > 0 for model '{name}'"
        ) from None
    if number <= 0:
        raise InvalidArgument(
            f"invalid model version specified '{shown(version)}' , version should be an integral value > 0 "
            f"for model '{name}'"
        )
    return number
