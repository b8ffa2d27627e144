"""The front process put together: each message of the supervisor goes to the part that obeys it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.config.settings.logs import LOG
from gpuserve.config.settings.server import ServerSettings, with_changed_settings
from gpuserve.front.exchange.housekeeping import keep_running
from gpuserve.front.exchange.limits import Limits
from gpuserve.front.links.worker_link import DeviceLinks
from gpuserve.front.live.page import LivePage, live_page
from gpuserve.front.memory.trimming import keep_trim
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observe.gpu_health.fleet import LostGpu
from gpuserve.front.process.draining import Draining
from gpuserve.front.process.generations import Generations, ModelParts
from gpuserve.front.process.noticing_loop import keep_noticing
from gpuserve.front.process.ports import Ports
from gpuserve.front.process.pushing import MetricsPushing, metrics_pushing
from gpuserve.front.process.rate_reports import RateReports
from gpuserve.front.process.turning import Turning
from gpuserve.front.service.service import InferenceService, inference_service
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.operator_protocol import VerbOutcome
from gpuserve_worker.protocol import datagram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What a front is made of, from the first message of the supervisor on."""

    service: InferenceService
    generations: Generations
    ports: Ports
    draining: Draining
    rates: RateReports
    live: LivePage | None
    pushing: MetricsPushing | None


class Front:
    """One front. ``on_lost`` is called when the supervisor is gone or the front cannot go on."""

    def __init__(
        self,
        control: socket.socket,
        on_setup: Callable[[ServerSettings], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._control = control
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._buffer = datagram.receive_buffer()
        self._settings = ServerSettings()
        self._parts: FrontParts | None = None
        self._obeyed_by: Mapping[type, Callable[[Any], None]] = {}
        self._quit = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_defect)
        loop.add_reader(self._control.fileno(), self._hear)
        await self._quit.wait()
        loop.remove_reader(self._control.fileno())
        if self._parts is None:
            return
        # Whoever was not finished in time is told so while there still is a connection.
        service = self._parts.service
        self._parts.generations.close()
        service.control.regions.close()
        service.control.gpus.stop()
        service.health.end()
        await self._parts.ports.close()
        pushing = self._parts.pushing
        await asyncio.gather(service.control.trace.close(), *([] if pushing is None else [pushing.close()]))

    # ---- the supervisor's word ------------------------------------------------------------

    def _hear(self) -> None:
        while True:
            try:
                data, fds = datagram.receive(self._control, self._buffer)
            except BlockingIOError:
                return
            if not data:
                # The supervisor is gone: so are the listeners, the workers and the server.
                asyncio.get_running_loop().remove_reader(self._control.fileno())
                self._on_lost()
                return
            self._obey(messages.CONTROL.decode(data), fds)

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed. A message lost for want of a descriptor can only be told to a successor."""
        loop.default_exception_handler(context)
        if datagram.is_starved(context.get("exception")):
            logger.critical("the front has no descriptor left for what it is told, and is replaced")
            self._on_lost()

    def _obey(self, message: Any, fds: list[int]) -> None:
        if self._parts is None:
            self._set_up(message, fds)
        elif isinstance(message, messages.InstanceUp):
            self._parts.generations.instance_up(message, fds)
        elif isinstance(message, messages.IngressUp):
            self._parts.ports.door_up(message, fds)
        else:
            self._obeyed_by[type(message)](message)

    def _set_up(self, setup: messages.Setup, fds: list[int]) -> None:
        self._settings = settings = ServerSettings.from_wire(setup.settings)
        self._on_setup(settings)
        links, cache = DeviceLinks(), ResponseCache(settings.response_cache_nbytes)
        service = inference_service(settings, self._say, epoch=setup.epoch, links=links, cache=cache)
        shared = ModelParts(service, settings, setup.epoch, links, cache)
        generations = Generations(shared, self._say, self._spawn)
        live = live_page(service, settings, setup.epoch)
        ports = Ports(service, settings, self._spawn, live, self._say)
        draining = Draining(service.health, ports, generations, self._say, self._spawn)
        rates = RateReports(service, generations, ports, self._say)
        pushing = metrics_pushing(service.metrics_page, settings)
        self._parts = FrontParts(service, generations, ports, draining, rates, live, pushing)
        self._obeyed_by = self._dispatch_table(self._parts)
        self._spawn(keep_running(partial(keep_trim, generations.shrink)))
        self._spawn(generations.watch.run())
        self._spawn(keep_running(partial(keep_noticing, service)))
        if live is not None:
            live.feed.open()
            self._spawn(keep_running(live.feed.run))
        if pushing is not None:
            self._spawn(keep_running(pushing.run))
        if settings.gpu_health_interval_s:
            service.control.gpus.start()
        *listeners, own_pulse, supervisors_pulse = fds
        turning = Turning(own_pulse, supervisors_pulse, settings.hang_timeout_s, service.health)
        self._spawn(turning.run())
        self._spawn(self._listen(ports, dict(zip(setup.listeners, listeners, strict=True))))

    def _dispatch_table(self, parts: FrontParts) -> Mapping[type, Callable[[Any], None]]:
        """Who obeys which message; ``Setup`` and ``InstanceUp`` come with descriptors, and are not in it."""
        models, control, health = parts.service.models, parts.service.control, parts.service.health
        return {
            messages.AddModel: parts.generations.add,
            messages.RemoveModel: parts.generations.remove,
            messages.ServeModel: parts.generations.serve,
            messages.Resize: parts.generations.resize,
            messages.RetireInstance: parts.generations.retire_instance,
            messages.InstanceDown: parts.generations.instance_down,
            messages.IngressDown: parts.ports.door_down,
            messages.ModelStates: lambda message: models.set_states(*message),
            messages.Outcome: lambda message: control.questions.answered(
                message.ticket, VerbOutcome(*message[1:])
            ),
            messages.Changed: lambda message: (control.log if message.kind == LOG else control.trace).restore(
                message.settings
            ),
            messages.LostGpus: lambda message: control.gpus.restore(LostGpu(*one) for one in message.gpus),
            messages.CudaState: lambda message: health.cuda_state(message.works),
            messages.Adjust: self._adjust,
            messages.Quiesce: parts.draining.quiesce,
            messages.Resume: parts.draining.resume,
            messages.RequestCensus: lambda message: self._say(
                parts.generations.census(message)._replace(doors=parts.ports.door_rows())
            ),
            messages.WatchRates: parts.rates.watch,
            messages.EventBatch: parts.service.events.happened,
            messages.Serving: lambda message: health.serving(message.missing),
            messages.Drain: parts.draining.drain,
            messages.Quit: lambda _: self._quit.set(),
        }

    def _adjust(self, message: messages.Adjust) -> None:
        assert self._parts is not None
        self._settings = with_changed_settings(self._settings, message.settings)
        if self._parts.live is not None:
            self._parts.live.settings.now = self._settings
        for name in message.settings:
            if name in ADJUSTED_HERE:
                ADJUSTED_HERE[name](self._parts, self._settings)

    async def _listen(self, ports: Ports, listeners: dict[str, int]) -> None:
        await ports.open(listeners)
        self._say(messages.FrontReady())

    def _say(self, message: tuple[Any, ...]) -> None:
        datagram.send(self._control, messages.CONTROL.encode(message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the front cannot go on", exc_info=task.exception())
            self._on_lost()


# ---- settings that change while a front serves --------------------------------------------

_Adjust: TypeAlias = Callable[[FrontParts, ServerSettings], None]


def _adjust_readiness(parts: FrontParts, settings: ServerSettings) -> None:
    parts.service.health.require(settings.min_healthy_devices, settings.min_ready_instances)


def _adjust_model_control(parts: FrontParts, settings: ServerSettings) -> None:
    parts.service.control.repository.mode = settings.model_control


#: Who is told of each. Which settings may change is in ``gpuserve/config/settings/checks.py``; those that are not here
#: are the supervisor's alone.
ADJUSTED_HERE: Final[dict[str, _Adjust]] = {
    **{one.name: lambda parts, now: parts.ports.adjust(now) for one in fields(Limits)},
    "max_connection_age_s": lambda parts, now: parts.ports.limit_age(now.max_connection_age_s),
    "metrics_summaries": lambda parts, now: parts.generations.keep_latencies(now.metrics_summaries),
    "min_healthy_devices": _adjust_readiness,
    "min_ready_instances": _adjust_readiness,
    "model_control": _adjust_model_control,
    "shared_memory_owners": lambda parts, now: parts.service.control.regions.allow(now.shared_memory_owners),
    "trace": lambda parts, now: parts.service.control.trace.restart(now.trace),
}
