"""The models of a front as the supervisor tells of them: the generations that there are, those that get the
requests for a model, and the instances of each that come up, go and die. Which models and instances there are
is the supervisor's to say. Here a driver is made for each generation, and waited until a generation or an
instance that is to go has finished what it has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpuserve.config.settings.rate_limits import resource_limits
from gpuserve.config.settings.server import OFF, ServerSettings
from gpuserve.front.batching.rate_limiter import SharedResources
from gpuserve.front.batching.saturation import saturation
from gpuserve.front.links.worker_link import DeviceLinks, WorkerLink, no_such_message
from gpuserve.front.models.ensembles.driver import EnsembleDriver
from gpuserve.front.models.interface import Driver
from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observe.callable_metrics import CallableMetrics, Owner
from gpuserve.front.observe.metrics import LatencyWindow, ModelMetrics
from gpuserve.front.process.call_watch import ExecutionWatch
from gpuserve.front.process.model_calls import ModelCalls
from gpuserve.front.process.ports import Spawn
from gpuserve.front.service.control import Say
from gpuserve.front.service.service import InferenceService
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control import front_messages as messages
from gpuserve_worker.protocol import datagram, wire

logger = logging.getLogger(__name__)

#: How often it is looked whether a generation or an instance has finished what it has.
_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What all models of a front share. ``epoch`` counts the fronts of a server."""

    service: InferenceService
    settings: ServerSettings
    epoch: int
    links: DeviceLinks
    cache: ResponseCache


class Generations:
    """Drivers by the number of their generation; ``close()`` leaves none open. ``say`` tells what went."""

    def __init__(self, parts: ModelParts, say: Say, spawn: Spawn) -> None:
        limits = resource_limits(parts.settings)
        self._limiter = None if limits is None else SharedResources(limits)
        #: About when the front before this one died; its clients do not know of it.
        self._front_lost_at = time.monotonic() if parts.epoch > 1 else -math.inf
        self._parts = parts
        self._service = parts.service
        self._say = say
        self._spawn = spawn
        self._calls = ModelCalls(parts.service, spawn)
        self._callable_metrics = CallableMetrics()
        parts.service.metrics_page.add(self._callable_metrics.families)
        self._keeps_latencies = parts.settings.metrics_summaries
        self._drivers: dict[int, Driver] = {}
        #: Those of them that have workers, as all but ensembles do.
        self._of_workers: dict[int, ModelDriver] = {}
        #: The generations that get the requests for a model.
        self._served: dict[str, set[int]] = {}
        #: Ends calls that are not back in time, while it runs.
        self.watch = ExecutionWatch(self._of_workers, say, parts.service.models.refresh)

    # ---- generations ----------------------------------------------------------------------

    def add(self, message: messages.AddModel) -> None:
        spec = ModelSpec.from_wire(message.spec)
        driver = self._drivers[message.generation] = self._new_driver(message.generation, spec)
        placed = {one.placement.gpu_uuid: one.device for one in spec.instances}
        self._service.control.gpus.call({uuid: device for uuid, device in placed.items() if uuid})
        if message.served:
            self._parts.cache.drop_model(spec.name)  # another program may have had the name
            self._served.setdefault(spec.name, set()).add(message.generation)
            _show(driver)
            self._service.models.add(driver, attached=message.attached)

    def serve(self, message: messages.ServeModel) -> None:
        """Let these generations, and no others, get a model's requests; those that did until now retire."""
        model, numbers, timeout_s = message
        self._parts.cache.drop_model(model)
        before = self._served.pop(model, set())
        now = {number for number in numbers if number in self._drivers}
        if now:
            self._served[model] = now
        drivers = [self._drivers[number] for number in now]
        for driver in drivers:
            _show(driver)
        retired = sorted(before - now)
        for number in retired:
            self._drivers[number].retire()
        self._service.models.serve(model, drivers)
        for number in retired:
            self._spawn(self._retire(number, self._drivers[number], timeout_s))

    async def _retire(self, generation: int, driver: Driver, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        await self._hand_over(driver)
        await _wait(lambda: not driver.unfinished, deadline)
        unfinished = driver.unfinished
        if unfinished and driver.workers is not None:
            driver.workers.give_back()
            await self._hand_over(driver)
        self.remove(messages.RemoveModel(generation))
        self._say(messages.Retired(generation, unfinished))

    async def _hand_over(self, retired: Driver) -> None:
        """Give what waits for a generation to that which serves its version now: its instances may hang."""
        for one in self._service.models.of(retired.spec.name):
            if isinstance(one, ModelDriver) and isinstance(retired, ModelDriver):
                while one.spec.version == retired.spec.version and retired.hand_over(one):  # noqa: ASYNC110
                    await asyncio.sleep(0)

    def remove(self, message: messages.RemoveModel) -> None:
        driver = self._drivers.pop(message.generation, None)
        if driver is None:  # it was removed already, and the message crossed ours
            return
        self._of_workers.pop(message.generation, None)
        self._served.get(driver.spec.name, set()).discard(message.generation)
        self._service.models.remove(driver)
        driver.close()
        owner = _owner(driver.spec)
        if all(_owner(one.spec) != owner for one in self._drivers.values()):
            self._callable_metrics.forget(owner)

    def close(self) -> None:
        for driver in list(self._drivers.values()):
            driver.close()

    def _new_driver(self, generation: int, spec: ModelSpec) -> Driver:
        metrics = self._metrics(spec)
        regions, most = self._service.control.regions, self._parts.settings.max_arena_nbytes
        if spec.is_ensemble:
            return EnsembleDriver(spec, most, metrics, self._service.models.find, regions)
        cache = self._parts.cache if self._parts.settings.response_cache_nbytes else None
        if spec.response_cache and cache is None:
            logger.warning(
                "model %s: its response_cache has no memory, because response_cache_nbytes is 0", spec.name
            )
        on_other = partial(self._on_other, _owner(spec))
        driver = ModelDriver(
            spec, most, metrics, cache, regions, self._limiter, on_other, self._front_lost_at
        )
        if self._parts.settings.access_log != OFF:
            driver.name_requests()
        self._of_workers[generation] = driver
        driver.workers.on_isolated_death = lambda link: self._say(
            messages.IsolatedWorkerDeath(generation, link.instance, link.pid)
        )
        return driver

    def _metrics(self, spec: ModelSpec) -> ModelMetrics:
        """The account of a version: that of the generation that is about to be replaced, if there is one."""
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
        instance, sock, pidfd = message.instance, socket.socket(fileno=fds[0]), fds[1]

        def on_down(link: WorkerLink, reason: str) -> None:
            if not driver.overdue.bury(link):
                driver.workers.instance_down(link.instance, reason)
            self._service.models.refresh(driver.spec.name)

        driver.metrics.instance(instance).load_s = message.load_s
        epoch, gpus = self._parts.epoch, self._service.control.gpus
        link = WorkerLink(
            instance,
            message.slots,
            sock,
            pidfd,
            epoch,
            driver.workers.runner.on_messages,
            on_down,
            message.pid,
        )
        device = next((one.device for one in driver.spec.instances if one.name == instance), "")
        self._parts.links.add(device, link)
        self._calls.add(link, driver)
        gpus.worker_up(message.pid, driver.spec.name, driver.metrics.version)
        link.on_close.append(lambda _: gpus.worker_down(message.pid))
        driver.workers.instance_up(link)
        self._service.models.refresh(driver.spec.name)

    def instance_down(self, message: messages.InstanceDown) -> None:
        driver = self._of_workers.get(message.generation)
        if driver is not None:
            driver.workers.fault = self._service.health.fault_of(driver.spec)
            driver.workers.instance_down(message.instance, message.reason, message.restart_in_s)
            self._service.models.refresh(driver.spec.name)

    def resize(self, message: messages.Resize) -> None:
        """Give a generation other instances; those that are new come up later."""
        driver = self._of_workers.get(message.generation)
        if driver is not None:
            driver.resize(ModelSpec.from_wire(message.spec))
            self._service.models.refresh(driver.spec.name)

    def retire_instance(self, message: messages.RetireInstance) -> None:
        driver = self._of_workers.get(message.generation)
        # Which link is meant is known now: what comes under that name later is another instance.
        link = None if driver is None else driver.workers.instances.up.get(message.instance)
        self._spawn(self._retire_instance(message, driver, link))

    async def _retire_instance(
        self, message: messages.RetireInstance, driver: ModelDriver | None, link: WorkerLink | None
    ) -> None:
        generation, instance, timeout_s = message
        idle = True
        if driver is not None and instance in driver.workers.instances:
            idle = await self._let_go(driver, instance, link, time.monotonic() + timeout_s)
        self._say(messages.InstanceRetired(generation, instance, idle))

    async def _let_go(
        self, driver: ModelDriver, instance: str, link: WorkerLink | None, deadline: float
    ) -> bool:
        """Give an instance nothing new, and let it go when it has finished, which is told, or at the time."""

        def is_up() -> bool:
            return link is not None and driver.workers.instances.up.get(instance) is link

        # While all others wait for the model itself, or start again, it is needed.
        await _wait(lambda: not is_up() or self._calls.can_spare(driver, instance), deadline)
        if _is_another(driver, instance, link):
            return True
        driver.workers.retire_instance(instance)
        self._service.models.refresh(driver.spec.name)
        await _wait(lambda: not is_up() or driver.workers.is_idle(instance), deadline)
        if _is_another(driver, instance, link):
            return True
        idle = not is_up() or driver.workers.is_idle(instance)
        driver.workers.let_go(instance)
        self._calls.refuse_stuck(driver)
        return idle

    def _on_other(self, owner: Owner, link: WorkerLink, message: wire.Message) -> None:
        match message:
            case wire.RegionOpened(region, problem):
                self._service.control.regions.opened(link, region, problem)
            case wire.ExportSegment() | wire.ExportOpened():
                link.exports.take(message)
            case wire.Call() | wire.CallOff() | wire.Return() | wire.Command():
                self._calls.take(link, message)
            case wire.Metrics(changes):
                self._callable_metrics.take(owner, changes)
            case _:
                no_such_message(link, message)

    # ---- all of them ----------------------------------------------------------------------

    def unfinished(self) -> int:
        return sum(driver.unfinished for driver in self._drivers.values())

    def accepted(self) -> int:
        """How many requests the present drivers have taken so far."""
        return sum(driver.statistics().accepted for driver in self._drivers.values())

    def shrink(self) -> None:
        for driver in self._drivers.values():
            was_starved = driver.is_starved
            driver.shrink()
            if driver.is_starved is not was_starved:
                self._service.models.refresh(driver.spec.name)

    def keep_latencies(self, keep: bool) -> None:
        """Begin to keep the latest latencies of every model for their quantiles, or end to."""
        self._keeps_latencies = keep
        for driver in self._drivers.values():
            driver.metrics.window = LatencyWindow() if keep else None

    def census(self, message: messages.RequestCensus) -> messages.Census:
        """What waits and runs at this moment, and which models are ready, for the status of the server."""
        service, counts = self._service, []
        served = set(service.models.all())
        for driver in self._drivers.values():
            now, spec = driver.statistics(), driver.spec
            slots, part = (now.slots, saturation(spec, now)) if driver in served else (0, None)
            counts.append((spec.name, spec.version, now.queued, now.running_requests, slots, part))
        states = tuple((one.name, one.version, one.state, one.reason) for one in service.models.index())
        memory = service.control.gpus.process_memory()
        return messages.Census(message.ticket, service.health.ready, tuple(counts), states, memory)


def _show(driver: Driver) -> None:
    """Let the metrics tell of this generation; those of a version are one account."""
    driver.metrics.gauges = partial(_gauges, driver)
    driver.metrics.declared = lambda: driver.spec.instances


def _gauges(driver: Driver) -> dict[str, float]:
    """What a driver's scheduler and arena know at this moment; what they do not know is left out."""
    counts = driver.statistics()
    arena = driver.arena.statistics()
    part = saturation(driver.spec, counts)
    return {
        **({} if part is None else {"gpuserve_saturation": part}),
        "gpuserve_queue_requests": counts.queued,
        "gpuserve_running_requests": counts.running_requests,
        "gpuserve_arena_bytes": arena.nbytes,
        "gpuserve_arena_blocks": arena.blocks,
    }


def _owner(spec: ModelSpec) -> Owner:
    return spec.name, spec.version


def _is_another(driver: ModelDriver, instance: str, link: WorkerLink | None) -> bool:
    """Whether the one that was meant has died, and another is up in its place."""
    return driver.workers.instances.up.get(instance) not in (link, None)


async def _wait(condition: Callable[[], bool], deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
