"""Model generations of a front: one driver for each generation that the supervisor adds, and the instances
that come up, retire and die. The supervisor decides which exist; a retiring one finishes its requests first.

A watchdog polls the calls of all models and ends overdue ones: the front answers their requests, and the
supervisor kills the worker after logging its stacks. The worker of an attached program is killed by that
program. If nobody kills the worker, this front does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpuserve.config.settings.checks import resource_limits
from gpuserve.config.settings.server import ServerSettings
from gpuserve.devices.names import OFF, devices_of
from gpuserve.front.ipc.worker_link import DeviceLinks, WorkerLink, reject_message
from gpuserve.front.models.batch_runner import AnswerTurns
from gpuserve.front.models.ensemble_driver import EnsembleDriver
from gpuserve.front.models.model_driver import Driver, ModelDriver
from gpuserve.front.models.model_workers import OverdueCall
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observability.metrics.callable_metrics import CallableMetrics, Owner
from gpuserve.front.observability.metrics.model_metrics import LatencyWindow, ModelMetrics
from gpuserve.front.process.callable_requests import CallableRequests
from gpuserve.front.process.listeners import Spawn
from gpuserve.front.process.on_demand import OnDemandDriver, OnDemandDrivers
from gpuserve.front.scheduling.rate_limiter import SharedResources
from gpuserve.front.scheduling.scheduler import saturation
from gpuserve.front.service.control import NotifySupervisor
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.front_messages import ExecutionHung
from gpuserve_worker.protocol import datagram, wire

logger = logging.getLogger(__name__)

#: Poll period of retiring generations and instances, and of requests that finish.
POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts that all models of a front share. ``epoch`` counts the fronts of a server."""

    service: InferenceService
    settings: ServerSettings
    epoch: int
    links: DeviceLinks
    cache: ResponseCache


class Generations:
    """Drivers by generation number; ``close()`` leaves none open. Removals are reported to the supervisor."""

    def __init__(self, parts: ModelParts, notify_supervisor: NotifySupervisor, spawn: Spawn) -> None:
        limits = resource_limits(parts.settings)
        self._limiter = None if limits is None else SharedResources(limits)
        self._turns = AnswerTurns()
        #: The approximate time when the previous front died; clients do not know of the death.
        self._front_lost_at = time.monotonic() if parts.epoch > 1 else -math.inf
        self._parts = parts
        self._service = parts.service
        self._notify_supervisor = notify_supervisor
        self._spawn = spawn
        self._calls = CallableRequests(parts.service, spawn)
        self._callable_metrics = CallableMetrics()
        parts.service.metrics_page.add(self._callable_metrics.families)
        self._keeps_latencies = parts.settings.metrics_summaries
        self._drivers: dict[int, Driver] = {}
        #: The drivers with workers, which all but ensembles have.
        self._of_workers: dict[int, ModelDriver] = {}
        #: The generations that serve each model.
        self._served: dict[str, set[int]] = {}
        gpus = parts.service.control.gpus
        self.on_demand = OnDemandDrivers(notify_supervisor, gpus.process_memory)
        #: Ends overdue calls while it runs.
        self.watch = CallWatchdog(self._of_workers, notify_supervisor, parts.service.models.refresh)

    # ---- generations ----------------------------------------------------------------------

    def add(self, message: messages.AddModel) -> None:
        spec = ModelSpec.from_wire(message.spec)
        driver = self._drivers[message.generation] = self._create_driver(message.generation, spec)
        placed = [(one.placement.gpu_uuids, devices_of(one.device)) for one in spec.instances]
        names = {uuid: name for each in placed for uuid, name in zip(*each, strict=False)}
        self._service.control.gpus.set_device_names(names)
        if message.served:
            self._parts.cache.drop_model(spec.name)  # another program may have had the name
            self._served.setdefault(spec.name, set()).add(message.generation)
            _export_metrics(driver)
            self._service.models.add(driver, attached=message.attached)

    def serve(self, message: messages.ServeModel) -> None:
        """Let exactly these generations serve a model; the others retire."""
        model, numbers, timeout_s = message
        self._parts.cache.drop_model(model)
        before = self._served.pop(model, set())
        now = {number for number in numbers if number in self._drivers}
        if now:
            self._served[model] = now
        drivers = [self._drivers[number] for number in now]
        for driver in drivers:
            _export_metrics(driver)
        retired = sorted(before - now)
        for number in retired:
            self._drivers[number].retire()
        self._service.models.serve(model, drivers)
        for number in retired:
            self._spawn(self._retire(number, self._drivers[number], timeout_s))

    async def _retire(self, generation: int, driver: Driver, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        await self._transfer_queue(driver)
        await wait_until(lambda: not driver.unfinished, deadline)
        unfinished = driver.unfinished
        if unfinished and driver.workers is not None:
            driver.workers.release_all()
            await self._transfer_queue(driver)
        self.remove(messages.RemoveModel(generation))
        self._notify_supervisor(messages.Retired(generation, unfinished))

    async def _transfer_queue(self, retired: Driver) -> None:
        """Move the queue of a retired generation, whose instances may hang, to the one that now serves."""
        for one in self._service.models.of(retired.spec.name):
            if isinstance(one, ModelDriver) and isinstance(retired, ModelDriver):
                while one.spec.version == retired.spec.version and retired.transfer_queue(one):  # noqa: ASYNC110
                    await asyncio.sleep(0)

    def remove(self, message: messages.RemoveModel) -> None:
        driver = self._drivers.pop(message.generation, None)
        if driver is None:  # already removed: the message crossed ours
            return
        self._of_workers.pop(message.generation, None)
        self.on_demand.remove(message.generation)
        self._served.get(driver.spec.name, set()).discard(message.generation)
        self._service.models.remove(driver)
        driver.close()
        owner = _owner(driver.spec)
        if all(_owner(one.spec) != owner for one in self._drivers.values()):
            self._callable_metrics.forget(owner)

    def close(self) -> None:
        for driver in list(self._drivers.values()):
            driver.close()

    def _create_driver(self, generation: int, spec: ModelSpec) -> Driver:
        metrics = self._metrics(spec)
        regions, most = self._service.control.regions, self._parts.settings.max_arena_nbytes
        if spec.is_ensemble:
            return EnsembleDriver(spec, most, metrics, self._service.models.find, regions)
        cache = self._parts.cache if self._parts.settings.response_cache_nbytes else None
        if spec.response_cache and cache is None:
            logger.warning("model %s: response_cache has no effect: response_cache_nbytes is 0", spec.name)
        on_other = partial(self._on_other_message, _owner(spec))
        link_between = self._service.control.gpus.link_between
        more = regions, self._limiter, on_other, self._front_lost_at, link_between, self._turns
        kind = OnDemandDriver if spec.on_demand else ModelDriver
        driver = kind(spec, most, metrics, cache, *more)
        if self._parts.settings.access_log != OFF:
            driver.name_requests()
        self._of_workers[generation] = driver
        if isinstance(driver, OnDemandDriver):
            self.on_demand.add(generation, driver)
        driver.workers.on_isolated_death = lambda link: self._notify_supervisor(
            messages.IsolatedWorkerDeath(generation, link.instance, link.pid)
        )
        return driver

    def _metrics(self, spec: ModelSpec) -> ModelMetrics:
        for driver in reversed(self._drivers.values()):
            if (driver.spec.name, driver.spec.version) == (spec.name, spec.version):
                return driver.metrics
        window = LatencyWindow() if self._keeps_latencies else None
        metrics = ModelMetrics(spec.name, str(spec.version), dict, window)
        if spec.response_cache:
            metrics.outcomes.cache_misses = 0
        return metrics

    # ---- instances ------------------------------------------------------------------------

    def instance_up(self, message: messages.InstanceUp, fds: list[int]) -> None:
        """Take over the link to a worker; ``fds`` are its socket and its pidfd."""
        driver = self._of_workers.get(message.generation)
        if driver is None:
            datagram.close_all(fds)
            return
        if (parked := driver.workers.parked(message.instance, message.pid)) is not None:
            datagram.close_all(fds)
            self._join(message, driver, parked)
            return
        instance, sock, pidfd = message.instance, socket.socket(fileno=fds[0]), fds[1]

        def on_down(link: WorkerLink, reason: str) -> None:
            if not driver.overdue.reap(link):
                driver.workers.instance_down(link.instance, reason)
            self._service.models.refresh(driver.spec.name)

        epoch, gpus = self._parts.epoch, self._service.control.gpus
        on_messages, pid = driver.workers.runner.on_messages, message.pid
        device = next((one.first_device for one in driver.spec.instances if one.name == instance), "")
        link = WorkerLink(instance, message.slots, sock, pidfd, epoch, on_messages, on_down, pid, device)
        self._parts.links.add(device, link)
        self._calls.add(link, driver)
        limit_nbytes = driver.spec.gpu_memory_nbytes // (1 + len(message.follower_pids))
        gpus.worker_up(link, pid, driver.spec.name, driver.metrics.version, limit_nbytes)
        link.on_close.append(gpus.worker_down)
        for one in message.follower_pids:
            key = link, one
            gpus.worker_up(key, one, driver.spec.name, driver.metrics.version, limit_nbytes)
            link.on_close.append(lambda _, key=key: gpus.worker_down(key))  # type: ignore[misc]
        self._join(message, driver, link)

    def _join(self, message: messages.InstanceUp, driver: ModelDriver, link: WorkerLink) -> None:
        driver.metrics.instance(message.instance).load_s = message.load_s
        self.on_demand.instance_up(message.generation)
        driver.workers.instance_up(link)
        self._service.models.refresh(driver.spec.name)

    def instance_down(self, message: messages.InstanceDown) -> None:
        driver = self._of_workers.get(message.generation)
        if driver is not None:
            driver.workers.fault = self._service.health.fault_of(driver.spec)
            driver.workers.instance_down(message.instance, message.reason, message.restart_in_s)
            self._service.models.refresh(driver.spec.name)

    def resize(self, message: messages.Resize) -> None:
        """Change the instances of a generation; new instances come up later."""
        driver = self._of_workers.get(message.generation)
        if driver is not None:
            driver.resize(ModelSpec.from_wire(message.spec))
            self._service.models.refresh(driver.spec.name)

    def sleep(self, message: messages.Sleep) -> None:
        self._spawn(self._sleep(message))

    async def _sleep(self, message: messages.Sleep) -> None:
        await self.on_demand.sleep(message)
        if (driver := self._of_workers.get(message.generation)) is not None:
            self._service.models.refresh(driver.spec.name)

    def retire_instance(self, message: messages.RetireInstance) -> None:
        driver = self._of_workers.get(message.generation)
        # Find the link now: a later instance of the same name is another instance.
        link = None if driver is None else driver.workers.instances.up.get(message.instance)
        self._spawn(self._retire_instance(message, driver, link))

    async def _retire_instance(
        self, message: messages.RetireInstance, driver: ModelDriver | None, link: WorkerLink | None
    ) -> None:
        generation, instance, timeout_s = message
        idle = True
        if driver is not None and instance in driver.workers.instances:
            idle = await self._drain_instance(driver, instance, link, time.monotonic() + timeout_s)
        self._notify_supervisor(messages.InstanceRetired(generation, instance, idle))

    async def _drain_instance(
        self, driver: ModelDriver, instance: str, link: WorkerLink | None, deadline: float
    ) -> bool:
        """Give an instance no more requests, and remove it when it is idle, or at the deadline. Return
        whether it was idle.
        """

        def is_up() -> bool:
            return link is not None and driver.workers.instances.up.get(instance) is link

        # While all other instances wait for the model itself, or restart, this one is needed.
        await wait_until(lambda: not is_up() or self._calls.can_spare(driver, instance), deadline)
        if _was_replaced(driver, instance, link):
            return True
        driver.workers.retire_instance(instance)
        self._service.models.refresh(driver.spec.name)
        await wait_until(lambda: not is_up() or driver.workers.is_idle(instance), deadline)
        if _was_replaced(driver, instance, link):
            return True
        idle = not is_up() or driver.workers.is_idle(instance)
        driver.workers.release_instance(instance)
        self._calls.refuse_stuck(driver)
        return idle

    def _on_other_message(self, owner: Owner, link: WorkerLink, message: wire.Message) -> None:
        match message:
            case wire.RegionOpened(region, problem):
                self._service.control.regions.opened(link, region, problem)
            case wire.ExportSegment() | wire.ExportOpened():
                link.exports.receive(message)
            case wire.Call() | wire.CancelCall() | wire.Return() | wire.Command():
                self._calls.handle(link, message)
            case wire.DeviceMemory(int(nbytes), int(locked_nbytes)):
                self._service.control.gpus.worker_reported(link, link.device, nbytes, locked_nbytes)
            case wire.Metrics(changes):
                self._callable_metrics.apply(owner, changes)
            case _:
                reject_message(link, message)

    # ---- all generations ------------------------------------------------------------------

    def unfinished(self) -> int:
        return sum(driver.unfinished for driver in self._drivers.values())

    def accepted(self) -> int:
        """Return how many requests the present drivers have accepted so far."""
        return sum(driver.statistics().accepted for driver in self._drivers.values())

    def shrink(self) -> None:
        for driver in self._drivers.values():
            was_starved = driver.is_starved
            driver.shrink()
            if driver.is_starved is not was_starved:
                self._service.models.refresh(driver.spec.name)

    def keep_latencies(self, keep: bool) -> None:
        """Start or stop recording the latest latencies of every model for quantiles."""
        self._keeps_latencies = keep
        for driver in self._drivers.values():
            driver.metrics.window = LatencyWindow() if keep else None

    def census(self, message: messages.RequestCensus) -> messages.Census:
        """Return queued and running requests and model states of this moment, for the server status."""
        service, counts = self._service, []
        served = set(service.models.all())
        for driver in self._drivers.values():
            now, spec = driver.statistics(), driver.spec
            slots, part = (now.slots, saturation(spec, now)) if driver in served else (0, None)
            counts.append((spec.name, spec.version, now.queued, now.running_requests, slots, part))
        states = tuple((one.name, one.version, one.state, one.reason) for one in service.models.index())
        memory = service.control.gpus.process_memory()
        return messages.Census(message.ticket, service.health.ready, tuple(counts), states, memory)


def _export_metrics(driver: Driver) -> None:
    driver.metrics.gauges = partial(_gauges, driver)
    driver.metrics.declared = lambda: driver.spec.instances


def _gauges(driver: Driver) -> dict[str, float]:
    counts = driver.statistics()
    arena = driver.arena.statistics()
    part = saturation(driver.spec, counts)
    return {
        **({} if part is None else {"gpuserve_saturation": part}),
        "gpuserve_queue_requests": counts.queued,
        "gpuserve_queue_shape_groups": counts.shape_groups,
        "gpuserve_running_requests": counts.running_requests,
        "gpuserve_arena_bytes": arena.nbytes,
        "gpuserve_arena_blocks": arena.blocks,
    }


def _owner(spec: ModelSpec) -> Owner:
    return spec.name, spec.version


def _was_replaced(driver: ModelDriver, instance: str, link: WorkerLink | None) -> bool:
    """Return whether the instance has died, and another is up under its name."""
    return driver.workers.instances.up.get(instance) not in (link, None)


async def wait_until(condition: Callable[[], bool], deadline: float) -> None:
    """Wait until the condition is true, or the deadline has passed."""
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


# ---- overdue calls -------------------------------------------------------------------------------

#: After this time nobody else has killed a worker.
_GRACE_S: Final = 2.0
#: Calls are polled four times within the shortest execution timeout, bounded by the first two periods;
#: without any timeout the third period holds.
_SHORTEST_S: Final = 0.05
_LONGEST_S: Final = 0.4
_IDLE_S: Final = 1.0


def poll_period_s(limits_s: Iterable[float]) -> float:
    """Return the time until the next poll for these execution timeouts; 0 is no timeout."""
    shortest_s = min((limit_s for limit_s in limits_s if limit_s), default=math.inf)
    return _IDLE_S if shortest_s == math.inf else min(_LONGEST_S, max(_SHORTEST_S, shortest_s / 4))


class CallWatchdog:
    """The watchdog of all models' calls, ``drivers`` by number. ``on_down(model)``: an instance is lost."""

    def __init__(
        self,
        drivers: Mapping[int, ModelDriver],
        notify_supervisor: NotifySupervisor,
        on_down: Callable[[str], None],
    ) -> None:
        self._drivers = drivers
        self._notify_supervisor = notify_supervisor
        self._on_down = on_down

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            period_s = poll_period_s(one.spec.execution_timeout_s for one in self._drivers.values())
            now = loop.time()
            for number, driver in tuple(self._drivers.items()):
                for overdue in driver.overdue.poll(now, now + period_s):
                    self._report_overdue(number, driver, overdue)
            await asyncio.sleep(period_s)

    def _report_overdue(self, number: int, driver: ModelDriver, overdue: OverdueCall) -> None:
        call, ran_s, limit_s = overdue
        link = driver.workers.instances.up.get(call.instance)
        if link is None or (limit_s and not driver.overdue.terminate(overdue, _GRACE_S)):
            return
        self._on_down(driver.spec.name)
        self._notify_supervisor(ExecutionHung(number, call.instance, link.pid, ran_s, limit_s))
