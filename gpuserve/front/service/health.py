"""Whether the server and its models are live, started and ready, and who is told when that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuserve.core.errors import NotFound, Unavailable
from gpuserve.front.models.interface import STARVED, Driver
from gpuserve.front.observe.gpu_health.watch import GpuWatch
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.v2.health import HealthReport, Watchers
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control.front_messages import UNLOADED


class ServerHealth:
    """The health of one front; a ``HealthSource``. It is ready from ``serving`` on, while its own models have
    enough instances and GPUs, and not while it is to leave service.
    """

    def __init__(self, models: ModelTable, gpus: GpuWatch, watchers: Watchers) -> None:
        self._models = models
        self._gpus = gpus
        self._watchers = watchers
        self._min_healthy_devices = 0
        self._min_ready_instances = 1
        self._leaving = False
        self._supervisor_turns = True
        #: Models that the start could not load.
        self._missing: tuple[str, ...] = ()
        #: Every other model of the start was loaded once.
        self.started = False
        #: Nothing new is taken, because the server stops.
        self.draining = False
        #: Nothing changes any more: who watches is to stop.
        self.ended = False

    def require(self, min_healthy_devices: int, min_ready_instances: int) -> None:
        """Set how many of models' GPUs, and of each one's instances, must be up for readiness."""
        self._min_healthy_devices = min_healthy_devices
        self._min_ready_instances = min_ready_instances
        self._watchers.changed()

    # ---- what it is -----------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether a new process could use CUDA, on a GPU machine, and the supervisor would start one."""
        return self._gpus.cuda_works and self._supervisor_turns

    @property
    def ready(self) -> bool:
        """Whether requests should come here: own models have enough instances and GPUs; it is not leaving."""
        own = [driver for driver in self._models.own() if driver.spec.instances]
        gpus = {one.placement.gpu_uuid for driver in own for one in driver.spec.instances} - {""}
        usable = self._gpus.are_enough(gpus, self._min_healthy_devices)
        whole = (
            self.started and all(map(self._has_enough, own)) and not any(map(self._is_missing, self._missing))
        )
        return whole and usable and not self._leaving

    @property
    def leaving(self) -> bool:
        """Whether it is to leave service, so that nothing new should come here."""
        return self._leaving

    def _is_missing(self, model: str) -> bool:
        """Whether a version of a model has not been loaded since the start, and nobody has taken it out."""
        if not self._min_ready_instances:
            return False
        served = {driver.spec.version for driver in self._models.of(model)}
        return any(
            version not in served and (state == "LOADING" or reason not in {"", UNLOADED})
            for version, state, reason in self._models.states_of(model)
        )

    def _has_enough(self, driver: Driver) -> bool:
        """Whether a model has memory, and as many instances up as the server needs to be ready."""
        if driver.is_starved:
            return not self._min_ready_instances
        if driver.workers is None:
            return True
        instances = driver.workers.instances
        wanted = min(self._min_ready_instances, len(driver.spec.instances) - instances.n_coming)
        return len(instances.in_rotation()) >= wanted

    def model_ready(self, name: str, version: str) -> bool:
        """Whether a model takes requests; false for an unknown one. InvalidArgument: a malformed version."""
        try:
            driver = self._models.find(name, version)
        except (NotFound, Unavailable):
            return False
        return driver.ready and not self._leaving

    def why_not_ready(self, name: str, version: str) -> str:
        """The reason why a model is not ready: its memory stays full, or its GPUs are lost; "" for others."""
        driver = self._models.find(name, version)
        if driver.is_starved:
            return STARVED
        return "" if driver.ready else self.fault_of(driver.spec)

    def fault_of(self, spec: ModelSpec) -> str:
        """That the GPUs of every instance of a model are lost, and why; "" where they are not."""
        return self._gpus.why_lost([one.placement.gpu_uuid for one in spec.instances])

    def of(self, service: str) -> bool | None:
        return self.report().of(service)

    def report(self) -> HealthReport:
        latest, staying = self._models.latest, not self._leaving
        models = {
            name: staying and (driver := latest.get(name)) is not None and driver.ready
            for name in self._models.names()
        }
        return HealthReport(self.live, self.started, self.ready, models)

    # ---- what changes it ------------------------------------------------------------------

    def serving(self, missing: Sequence[str] = ()) -> None:
        """Note that the start is over; these models it could not load."""
        self.started = True
        self._missing = tuple(missing)
        self._watchers.changed()

    def cuda_state(self, works: bool) -> None:
        self._gpus.cuda_works = works
        self._watchers.changed()

    def supervisor_turns(self, turns: bool) -> None:
        """Note whether the supervisor does anything."""
        if turns is not self._supervisor_turns:
            self._supervisor_turns = turns
            self._watchers.changed()

    def leave(self) -> None:
        self._leaving = True
        self._watchers.changed()

    def stay(self) -> None:
        """Be ready again, if all else is; unless the server drains."""
        self._leaving = self.draining
        self._watchers.changed()

    def drain(self) -> None:
        """Be not ready from now on, and have models take nothing new."""
        self._leaving = self.draining = True
        self._models.stop_accepting()
        self._watchers.changed()

    def end(self) -> None:
        """Tell whoever watches that the front ends; nobody else waits for an answer by then."""
        self.ended = True
        self._watchers.changed()

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._watchers.watch(callback)
