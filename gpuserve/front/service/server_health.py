"""Liveness, start-up and readiness of the server and its models, with change notification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuserve.core.errors import NotFound, Unavailable
from gpuserve.front.models.model_driver import STARVED, Driver
from gpuserve.front.observability.gpu_health.gpu_monitor import GpuWatch
from gpuserve.front.requests.server_status import HealthReport, HealthSubscribers
from gpuserve.front.service.model_table import ModelTable
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control.front_messages import UNLOADED


class ServerHealth:
    """The health of one front, a ``HealthSource``.

    The front is ready from ``serving`` on while its own models have enough instances and GPUs, unless it is
    leaving service.
    """

    def __init__(self, models: ModelTable, gpus: GpuWatch, watchers: HealthSubscribers) -> None:
        self._models = models
        self._gpus = gpus
        self._watchers = watchers
        self._min_healthy_devices = 0
        self._min_ready_instances = 1
        self._leaving = False
        self._is_supervisor_responsive = True
        #: Models that could not be loaded at start-up.
        self._missing: tuple[str, ...] = ()
        #: True once every other model of the start-up was loaded.
        self.started = False
        #: True while new requests are refused because the server stops.
        self.draining = False
        #: True once no more changes follow, so that subscribers should stop.
        self.ended = False

    def require(self, min_healthy_devices: int, min_ready_instances: int) -> None:
        """Set how many GPUs of all models, and instances of each model, must be up for readiness."""
        self._min_healthy_devices = min_healthy_devices
        self._min_ready_instances = min_ready_instances
        self._watchers.changed()

    # ---- state --------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Return whether a new process could use CUDA, and the supervisor could start one."""
        return self._gpus.cuda_works and self._is_supervisor_responsive

    @property
    def ready(self) -> bool:
        """Return whether requests should come here: enough instances and GPUs, and not leaving."""
        own = [driver for driver in self._models.own() if driver.spec.instances]
        placements = [one.placement for driver in own for one in driver.spec.instances]
        gpus = {uuid for one in placements for uuid in one.gpu_uuids}
        usable = self._gpus.are_enough(gpus, self._min_healthy_devices)
        whole = (
            self.started and all(map(self._has_enough, own)) and not any(map(self._is_missing, self._missing))
        )
        return whole and usable and not self._leaving

    @property
    def leaving(self) -> bool:
        """Return whether the front is leaving service, so that new requests should go elsewhere."""
        return self._leaving

    def _is_missing(self, model: str) -> bool:
        """Return whether a version of a model was never loaded since the start, and no client unloaded it."""
        if not self._min_ready_instances:
            return False
        served = {driver.spec.version for driver in self._models.of(model)}
        return any(
            version not in served and (state == "LOADING" or reason not in {"", UNLOADED})
            for version, state, reason in self._models.states_of(model)
        )

    def _has_enough(self, driver: Driver) -> bool:
        """Return whether a model has memory, and as many instances up as readiness requires."""
        if driver.is_starved:
            return not self._min_ready_instances
        if driver.workers is None:
            return True
        instances = driver.workers.instances
        wanted = min(self._min_ready_instances, len(driver.spec.instances) - instances.n_starting)
        return len(instances.in_rotation()) >= wanted

    def model_ready(self, name: str, version: str) -> bool:
        """Return whether a model accepts requests. Raise InvalidArgument for a malformed version."""
        try:
            driver = self._models.find(name, version)
        except (NotFound, Unavailable):
            return False
        return driver.ready and not self._leaving

    def why_not_ready(self, name: str, version: str) -> str:
        """Return why a model is not ready: its memory stays full, or its GPUs are lost; else ""."""
        driver = self._models.find(name, version)
        if driver.is_starved:
            return STARVED
        return "" if driver.ready else self.fault_of(driver.spec)

    def fault_of(self, spec: ModelSpec) -> str:
        """Return why the GPUs of all instances of a model are lost, or "" if they are not."""
        return self._gpus.why_lost([one.placement.gpu_uuids for one in spec.instances])

    def of(self, service: str) -> bool | None:
        return self.report().of(service)

    def report(self) -> HealthReport:
        latest, staying = self._models.latest, not self._leaving
        models = {
            name: staying and (driver := latest.get(name)) is not None and driver.ready
            for name in self._models.names()
        }
        return HealthReport(self.live, self.started, self.ready, models)

    # ---- changes ------------------------------------------------------------------------------

    def serving(self, missing: Sequence[str] = ()) -> None:
        """Record the end of start-up, and the models that it could not load."""
        self.started = True
        self._missing = tuple(missing)
        self._watchers.changed()

    def cuda_state(self, works: bool) -> None:
        self._gpus.cuda_works = works
        self._watchers.changed()

    def set_supervisor_responsive(self, is_responsive: bool) -> None:
        """Record whether the supervisor's event loop responds."""
        if is_responsive is not self._is_supervisor_responsive:
            self._is_supervisor_responsive = is_responsive
            self._watchers.changed()

    def leave_service(self) -> None:
        self._leaving = True
        self._watchers.changed()

    def return_to_service(self) -> None:
        """Return to service unless the server drains."""
        self._leaving = self.draining
        self._watchers.changed()

    def drain(self) -> None:
        """Report not ready from now on, and let models refuse new requests."""
        self._leaving = self.draining = True
        self._models.stop_accepting()
        self._watchers.changed()

    def end(self) -> None:
        """Notify subscribers that the front ends; no other client waits for an answer by then."""
        self.ended = True
        self._watchers.changed()

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._watchers.watch(callback)
