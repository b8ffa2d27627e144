"""The front process: dispatch of the supervisor's messages, leaving service, and heartbeats.

A front leaves service in steps that spare its clients. For good, at the end of the server::

    not ready ─► lame duck ─► notice ─► finishing ─► drained
                 served       served    refused

Or on an operator's request, until ``resume()``::

    not ready ─► lame duck ─► notice ─► quiet
                 served       served    served

Not ready: probes and watches report it at once. Lame duck: requests are served as usual until load balancers
have noticed. Notice: connections are told to accept no more requests, and requests sent before clients know
are served. Finishing: accepted requests run, new ones are refused.

At the end, without a lame duck there is no notice either: clients are told during finishing. A lame duck that
already passed, because an operator had taken the server out of service, is not repeated. A notice is sent
once to each connection that exists at that time. Later connections are left alone: their clients know no
other server, and would be sent away again and again. At the end they get their notice with finishing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.config.settings.logs import LOG
from gpuserve.config.settings.server import ServerSettings, with_changed_settings
from gpuserve.front.ipc.heap_memory import trim_periodically
from gpuserve.front.ipc.worker_link import DeviceLinks
from gpuserve.front.live.live_feed import LivePage, live_page
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.net.admission import Limits
from gpuserve.front.net.async_requests import run_periodic_work
from gpuserve.front.observability.gpu_health.gpu_states import LostGpu
from gpuserve.front.observability.metrics.change_detection import AnomalyDetector
from gpuserve.front.observability.metrics.rates import RateMeter
from gpuserve.front.observability.time_slices import iterate_in_slices
from gpuserve.front.process.generations import POLL_S, Generations, ModelParts, wait_until
from gpuserve.front.process.listeners import FrontListeners, Spawn
from gpuserve.front.process_setup import on_callback_error
from gpuserve.front.service.control import NotifySupervisor
from gpuserve.front.service.inference_service import InferenceService, inference_service
from gpuserve.front.service.server_health import ServerHealth
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control import heartbeat
from gpuserve.supervisor.control.operator_protocol import VerbOutcome
from gpuserve_worker.protocol import datagram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontParts:
    """The parts of a front, which exist from the supervisor's first message on."""

    service: InferenceService
    generations: Generations
    front_listeners: FrontListeners
    draining: Draining
    rates: RateReports
    live: LivePage | None


class Front:
    """One front. ``on_lost`` is called when the supervisor is gone or the front cannot go on."""

    def __init__(
        self, control: socket.socket, on_setup: Callable[[ServerSettings], None], on_lost: Callable[[], None]
    ) -> None:
        self._control = control
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._buffer = datagram.receive_buffer()
        self._settings = ServerSettings()
        self._parts: FrontParts | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._quit = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_callback_error("front", self._on_lost))
        loop.add_reader(self._control.fileno(), self._receive)
        await self._quit.wait()
        if self._parts is None:
            return
        # Clients with unfinished requests get an error while their connections still exist.
        service = self._parts.service
        self._parts.generations.close()
        service.control.regions.close()
        service.control.gpus.stop()
        service.health.end()
        await self._parts.front_listeners.close()
        loop.remove_reader(self._control.fileno())
        await service.control.trace.close()

    # ---- messages of the supervisor --------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                data, fds = datagram.receive(self._control, self._buffer)
            except BlockingIOError:
                return
            if not data:
                # The supervisor is gone, and with it the listeners, the workers and the server.
                asyncio.get_running_loop().remove_reader(self._control.fileno())
                self._on_lost()
                return
            message = messages.CONTROL.decode(data)
            if self._parts is None:
                self._set_up(message, fds)
            elif isinstance(message, messages.IngressUp):
                self._parts.front_listeners.ingress_up(message, fds)
            elif isinstance(message, messages.IngressDown):
                self._parts.front_listeners.ingress_down(message)
            elif self._quit.is_set():
                continue  # the models are closed; the listeners still wait for the end of ingress processes
            elif isinstance(message, messages.InstanceUp):
                self._parts.generations.instance_up(message, fds)
            else:
                self._handlers[type(message)](message)

    def _set_up(self, setup: messages.Setup, fds: list[int]) -> None:
        self._settings = settings = ServerSettings.from_wire(setup.settings)
        self._on_setup(settings)
        notify, links = self._notify_supervisor, DeviceLinks()
        cache = ResponseCache(settings.response_cache_nbytes)
        service = inference_service(settings, notify, epoch=setup.epoch, links=links, cache=cache)
        shared = ModelParts(service, settings, setup.epoch, links, cache)
        generations = Generations(shared, notify, self._spawn)
        live = live_page(service, settings, setup.epoch)
        front_listeners = FrontListeners(service, settings, self._spawn, live, notify)
        draining = Draining(service.health, front_listeners, generations, notify, self._spawn)
        rates = RateReports(service, generations, front_listeners, notify)
        self._parts = FrontParts(service, generations, front_listeners, draining, rates, live)
        self._handlers = self._dispatch_table(self._parts)
        self._spawn(run_periodic_work(partial(trim_periodically, generations.shrink)))
        self._spawn(generations.watch.run())
        self._spawn(run_periodic_work(partial(detect_changes, service)))
        if live is not None:
            live.feed.open()
            self._spawn(run_periodic_work(live.feed.run))
        if settings.gpu_health_interval_s:
            service.control.gpus.start()
        *listeners, own, supervisors = fds
        watchdog = SupervisorWatchdog(own, supervisors, settings.hang_timeout_s, service.health)
        self._spawn(watchdog.run())
        fds_by_role = dict(zip(setup.listeners, listeners, strict=True))
        self._handlers[messages.Listen] = lambda _: self._spawn(self._listen(front_listeners, fds_by_role))

    def _dispatch_table(self, parts: FrontParts) -> dict[type, Callable[[Any], None]]:
        models, control, health = parts.service.models, parts.service.control, parts.service.health
        return {
            messages.AddModel: parts.generations.add,
            messages.RemoveModel: parts.generations.remove,
            messages.ServeModel: parts.generations.serve,
            messages.Resize: parts.generations.resize,
            messages.RetireInstance: parts.generations.retire_instance,
            messages.Sleep: parts.generations.sleep,
            messages.ResidentMemory: parts.generations.on_demand.show_memory,
            messages.InstanceDown: parts.generations.instance_down,
            messages.ModelStates: lambda message: models.set_states(*message),
            messages.Outcome: lambda found: control.supervisor_requests.complete(
                found.ticket, VerbOutcome(*found[1:])
            ),
            messages.Changed: lambda changed: (control.log if changed.kind == LOG else control.trace).restore(
                changed.settings
            ),
            messages.LostGpus: lambda message: control.gpus.restore(LostGpu(*one) for one in message.gpus),
            messages.CudaState: lambda message: health.cuda_state(message.works),
            messages.Adjust: self._adjust,
            messages.HeldWeights: lambda held: parts.service.metrics_page.show_weights(held.weights),
            messages.Quiesce: parts.draining.quiesce,
            messages.Resume: parts.draining.resume,
            messages.RequestCensus: lambda message: self._notify_supervisor(
                parts.generations.census(message)._replace(ingress=parts.front_listeners.census_rows())
            ),
            messages.WatchRates: parts.rates.watch,
            messages.EventBatch: parts.service.events.on_events,
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

    async def _listen(self, front_listeners: FrontListeners, listeners: dict[str, int]) -> None:
        await front_listeners.open(listeners)
        self._notify_supervisor(messages.FrontReady())

    def _notify_supervisor(self, message: tuple[Any, ...]) -> None:
        datagram.send(self._control, messages.CONTROL.encode(message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.critical("front task failed: replacing the front", exc_info=task.exception())
            self._on_lost()


# ---- settings that change while a front serves --------------------------------------------

_Adjust: TypeAlias = Callable[[FrontParts, ServerSettings], None]


def _adjust_readiness(parts: FrontParts, settings: ServerSettings) -> None:
    parts.service.health.require(settings.min_healthy_devices, settings.min_ready_instances)


#: Actions that apply a changed setting. ``gpuserve/config/settings/checks.py`` lists the settings that may
#: change; those missing here concern only the supervisor.
ADJUSTED_HERE: Final[dict[str, _Adjust]] = {
    **{one.name: lambda parts, now: parts.front_listeners.adjust(now) for one in fields(Limits)},
    "max_connection_age_s": lambda parts, now: parts.front_listeners.limit_age(now.max_connection_age_s),
    "metrics_summaries": lambda parts, now: parts.generations.keep_latencies(now.metrics_summaries),
    "min_healthy_devices": _adjust_readiness,
    "min_ready_instances": _adjust_readiness,
    "model_control": lambda parts, now: setattr(parts.service.control.repository, "mode", now.model_control),
    "shared_memory_owners": lambda parts, now: parts.service.control.regions.allow(now.shared_memory_owners),
    "trace": lambda parts, now: parts.service.control.trace.restart(now.trace),
}

# ---- leaving service -----------------------------------------------------------------------------

#: Time for clients to learn that their connections accept no more requests. HTTP/1 clients learn it with
#: their next answer, HTTP/2 clients at once.
NOTICE_S: Final = 1.0
#: Poll period while requests finish on an operator's request.
_QUIESCING_POLL_S: Final = 0.02
#: No request may arrive for this long: between two requests there is a moment without any.
QUIET_S: Final = 0.5


class Draining:
    """Takes one front out of service on the supervisor's request, and reports the completion."""

    def __init__(
        self,
        health: ServerHealth,
        front_listeners: FrontListeners,
        generations: Generations,
        notify_supervisor: NotifySupervisor,
        spawn: Spawn,
    ) -> None:
        self._health = health
        self._front_listeners = front_listeners
        self._generations = generations
        self._notify_supervisor = notify_supervisor
        self._spawn = spawn
        #: A new object each time that an operator takes the front out of service; None while in service.
        self._quiesce_id: object | None = None

    # ---- for good -----------------------------------------------------------------------------

    def drain(self, message: messages.Drain) -> None:
        """Start to drain; ``Drained`` follows when everything is finished, or at the timeout."""
        self._health.leave_service()  # at once, so that later probes see it
        self._spawn(self._drain(message))

    async def _drain(self, message: messages.Drain) -> None:
        if message.lame_duck_s:
            await asyncio.sleep(message.lame_duck_s)
        deadline = time.monotonic() + message.timeout_s
        if message.keeps_ports:
            await self._front_listeners.stop_accepting()
        if message.notice:
            notice_end = min(deadline, time.monotonic() + NOTICE_S)
            self._front_listeners.announce()
            await wait_until(lambda: not self._front_listeners.n_unaware, notice_end)
        self._health.drain()
        self._front_listeners.announce()
        await wait_until(lambda: not self._generations.unfinished(), deadline)
        unfinished = self._generations.unfinished()
        # One more loop turn, so that the last answers are written.
        await asyncio.sleep(POLL_S)
        self._notify_supervisor(messages.Drained(unfinished))

    # ---- on an operator's request -------------------------------------------------------------

    def quiesce(self, message: messages.Quiesce) -> None:
        """Start to leave service; ``Quiesced`` follows when idle, or ``timeout_s`` after the lame duck."""
        if self._quiesce_id is None:
            self._quiesce_id = object()
            # Before the next message is handled, so that the front is never ready in between.
            self._health.leave_service()
        self._spawn(self._quiesce(message, self._quiesce_id))

    def resume(self, _: messages.Resume) -> None:
        self._quiesce_id = None
        self._health.return_to_service()

    async def _quiesce(self, message: messages.Quiesce, quiesce_id: object) -> None:
        await asyncio.sleep(message.lame_duck_s)
        started = quiet_since = time.monotonic()
        self._front_listeners.announce()
        accepted, has_new_requests = self._generations.accepted(), False
        while self._quiesce_id is quiesce_id:
            now = time.monotonic()
            is_aware = now - started >= NOTICE_S or not self._front_listeners.n_unaware
            left = max(self._generations.unfinished(), self._front_listeners.n_held)
            if self._generations.accepted() != accepted:
                accepted, quiet_since, has_new_requests = self._generations.accepted(), now, True
            is_quiet = now - quiet_since >= QUIET_S
            if (is_aware and is_quiet and not left) or now >= started + message.timeout_s:
                is_idle = is_quiet or not has_new_requests
                self._notify_supervisor(messages.Quiesced(message.ticket, left, is_idle))
                return
            await asyncio.sleep(_QUIESCING_POLL_S)


# ---- heartbeats ----------------------------------------------------------------------------------

#: The server is not live after this many times ``hang_timeout_s`` without a heartbeat of the supervisor.
LIVE_TIMEOUTS: Final = 2
#: A blocked supervisor is logged after this fraction of ``hang_timeout_s``.
_WARN_FRACTION: Final = 3


class SupervisorWatchdog:
    """The heartbeats of this front and of its supervisor, whose descriptors come with ``Setup``."""

    def __init__(self, own_fd: int, supervisors_fd: int, timeout_s: float, health: ServerHealth) -> None:
        self._own = heartbeat.Heartbeat(own_fd)
        self._supervisors = heartbeat.Heartbeat(supervisors_fd)
        self._timeout_s = timeout_s
        self._health = health
        self._silence = heartbeat.LoopWatchdog()
        self._is_reported = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        period_s = heartbeat.heartbeat_period_s(self._timeout_s)
        while True:
            self._own.beat()
            has_heartbeat = self._supervisors.has_beaten()
            cpu_ticks = None if has_heartbeat else heartbeat.cpu_times(os.getppid())
            self._report(self._silence.poll(has_heartbeat, loop.time(), period_s, cpu_ticks))
            await asyncio.sleep(period_s)

    def _report(self, silent_s: float) -> None:
        if not self._timeout_s:
            return
        if self._is_reported and not silent_s:
            logger.warning("supervisor event loop recovered")
        if not self._is_reported and silent_s >= self._timeout_s / _WARN_FRACTION:
            pid = os.getppid()
            text = "supervisor event loop of process %d blocked for %.3g s: %s"
            logger.warning(text, pid, silent_s, heartbeat.describe_process_state(pid))
        self._is_reported = silent_s >= self._timeout_s / _WARN_FRACTION
        self._health.set_supervisor_responsive(silent_s < LIVE_TIMEOUTS * self._timeout_s)


PERIOD_S: Final = 1.0
#: The first fields of ``ModelRates``, which are those of ``messages.Rates.models``.
_SAMPLED: Final = 6
_READINGS: Final = ("utilization", "memory_used_bytes", "memory_total_bytes")


class RateReports:
    """The rate reports of one front, sent while ``watch`` asks for them."""

    def __init__(
        self,
        service: InferenceService,
        generations: Generations,
        front_listeners: FrontListeners,
        notify_supervisor: NotifySupervisor,
    ) -> None:
        self._service = service
        self._generations = generations
        self._front_listeners = front_listeners
        self._notify_supervisor = notify_supervisor
        self._meter = RateMeter()
        self._task: asyncio.Task[None] | None = None

    def watch(self, message: messages.WatchRates) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if message.wanted:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._meter = RateMeter()
        due_at = loop.time()
        await self._rates()  # rates are counted from here
        while True:
            due_at = max(due_at + PERIOD_S, loop.time())
            await asyncio.sleep(due_at - loop.time())
            report = await self._rates()
            with contextlib.suppress(BlockingIOError):  # the supervisor's socket is full: the next will do
                self._notify_supervisor(report)

    async def _rates(self) -> messages.Rates:
        metrics = self._service.models.metrics()
        found: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = []
        async for one in iterate_in_slices(metrics):
            rates = self._meter.read(one, time.monotonic())
            of = one.model, int(one.version)
            rows = [(*of, name, *map(_rounded, its)) for name, its in rates.instances.items() if name]
            found.append(((*of, *map(_rounded, rates[:_SAMPLED])), rows))
        self._meter.retain((one.model, one.version) for one in metrics)
        census = self._generations.census(messages.RequestCensus(0))
        return messages.Rates(
            census._replace(ingress=self._front_listeners.census_rows()),
            round(sum(one[2] for one, _ in found), 3),
            self._front_listeners.n_connections,
            tuple(one for one, _ in found),
            tuple(each for _, instances in found for each in instances),
            tuple(self._gpus()),
        )

    def _gpus(self) -> Iterator[tuple[Any, ...]]:
        for one in self._service.control.gpus.document()["gpus"]:
            reading = one["reading"] or {}
            yield (one["device"], one["uuid"], *(reading.get(name) for name in _READINGS))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


# ---- events --------------------------------------------------------------------------------------


async def detect_changes(service: InferenceService) -> None:
    """Publish an event for every notable change of a model's counts, once a second until the front ends."""
    detector = AnomalyDetector()
    while True:
        await asyncio.sleep(PERIOD_S)
        models = service.models.metrics()
        detector.retain(models)
        async for one in iterate_in_slices(models):
            for kind, model, version, instance, facts in detector.poll(one, time.monotonic()):
                service.events.publish(kind, model=model, version=version, instance=instance, **facts)
