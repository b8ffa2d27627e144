"""The front process put together: what the supervisor says becomes models, links and a server.

It keeps nothing that the supervisor would not tell a successor again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuserve.front import assembly, live_settings
from gpuserve.front.admin_control import AdminControl
from gpuserve.front.certificates import CertificateWatch
from gpuserve.front.device_links import DeviceLinks
from gpuserve.front.draining import Drain
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint.asgi import Doors
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.ensemble.driver import EnsembleDriver
from gpuserve.front.generations import Generations
from gpuserve.front.gpu_health.fleet import LostGpu
from gpuserve.front.gpu_health.watch import GpuWatch
from gpuserve.front.links import WorkerLink, no_such_message
from gpuserve.front.log_control import LogControl
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.model_calls import ModelCalls
from gpuserve.front.operator_control import OperatorControl
from gpuserve.front.plane.regions import RegionTable
from gpuserve.front.quantiles import LatencyWindow
from gpuserve.front.repository_control import RepositoryControl
from gpuserve.front.resizing import Resizing
from gpuserve.front.scheduler.driver import ModelDriver
from gpuserve.front.scheduler.rate_limiter import RateLimiter
from gpuserve.front.scheduler.response_cache import ResponseCache
from gpuserve.front.tracing.control import TraceControl
from gpuserve.front.tracing.reception import Deliver, TracedApplication
from gpuserve.front.transport import Transport
from gpuserve.log_settings import LOG
from gpuserve.rates import resource_limits
from gpuserve.settings import GRPCIO, TRACE, ServerSettings
from gpuserve.spec import ModelSpec
from gpuserve.supervisor import messages
from gpuserve.supervisor.operator.outcome import Outcome
from gpuserve.tls import tls_files
from gpuserve_worker import datagram, wire

if TYPE_CHECKING:
    from gpuserve.front.endpoint.grpc_aio import GrpcAioTransport

logger = logging.getLogger(__name__)

#: How often it is looked whether a generation has finished what it has.
_RETIRE_POLL_S = 0.005


class Front:
    """One front. ``run()`` lives until the supervisor says ``Quit``.

    ``on_setup`` is told the settings; ``on_lost`` is what to do when the supervisor is gone or the
    front cannot go on. ``application`` is the endpoint, for a server that is not started here: without
    listeners none is.
    """

    def __init__(
        self,
        control: socket.socket,
        on_setup: Callable[[ServerSettings], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.application: Doors | None = None
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._control = control
        self._buffer = datagram.receive_buffer()
        self._epoch = 0
        self._settings = ServerSettings()
        self._cache = ResponseCache(0)
        self._limiter: RateLimiter | None = None
        self._service = InferenceService("", lambda: self._cache.statistics().nbytes)
        self._generations = Generations(self._service)
        self._calls = ModelCalls(self._service)
        self._resizing = Resizing(self._generations, self._calls, self._service, self._say, self._spawn)
        self._devices = DeviceLinks()
        self._transports: list[Transport] = []
        self._operator = OperatorControl(
            self._service, self._generations, self._transports, self._say, self._spawn
        )
        self._grpc_server: GrpcAioTransport | None = None
        #: Takes finished traces, while any request may be traced.
        self._deliver: Deliver | None = None
        self._quit = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until told to quit."""
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._hear)
        await self._quit.wait()
        loop.remove_reader(self._control.fileno())
        # Whoever was not finished in time is told so while there still is a connection.
        self._generations.close()
        self._service.regions.close()
        self._service.gpus.stop()
        self._service.end()
        for transport in self._transports:
            await transport.stop()
        await self._service.trace.close()

    def quit(self) -> None:
        """Let ``run()`` end."""
        self._quit.set()

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

    def _obey(self, message: Any, fds: list[int]) -> None:
        match message:
            case messages.Setup():
                self._set_up(message)
                self._spawn(self._listen(dict(zip(message.listeners, fds, strict=True))))
            case messages.AddModel():
                self._add_model(message)
            case messages.RemoveModel(generation):
                self._generations.remove(generation)
            case messages.ServeModel(model, generations, timeout_s):
                self._serve_model(model, generations, timeout_s)
            case messages.Resize() | messages.RetireInstance():
                self._resizing.obey(message)
            case messages.ModelStates(model, states):
                self._service.model_states(model, states)
            case messages.LoadResult() | messages.OperateResult():
                self._answered(message)
            case messages.InstanceUp() | messages.InstanceDown():
                self._instance_changed(message, fds)
            case messages.Changed() | messages.LostGpus() | messages.CudaState():
                self._restore(message)
            case messages.Adjust(changes):
                self._adjust(changes)
            case messages.Quiesce() | messages.Resume() | messages.TakeCensus():
                self._operator.obey(message)
            case messages.Serving() | messages.Drain() | messages.Quit():
                self._move_on(message)

    def _set_up(self, setup: messages.Setup) -> None:
        self._epoch = setup.epoch
        self._settings = ServerSettings.from_wire(setup.settings)
        self._service.log = LogControl(self._settings.log_level, self._keeper_of(LOG))
        self._service.trace = self._trace_control()
        self._service.watch(self._service.trace.refresh)
        self._service.repository = self._repository_control()
        self._service.admin = self._admin_control()
        owners = self._settings.shared_memory_owners
        self._service.regions = RegionTable(self._devices.on, self._generations.devices, owners)
        self._service.name = self._settings.name
        self._cache = ResponseCache(self._settings.response_cache_nbytes)
        limits = resource_limits(self._settings)
        self._limiter = None if limits is None else RateLimiter(limits)
        self._on_setup(self._settings)
        self._watch_gpus()

    def _move_on(self, message: messages.Serving | messages.Drain | messages.Quit) -> None:
        """The stages of a server's life."""
        match message:
            case messages.Serving():
                self._service.serving()
            case messages.Drain():
                self._service.leave()  # at once: who asks after this is told so
                self._spawn(self._drain(message))
            case messages.Quit():
                self.quit()

    def _answered(self, message: messages.LoadResult | messages.OperateResult) -> None:
        """What a client has asked of the supervisor."""
        match message:
            case messages.LoadResult(ticket, code, text):
                self._service.repository.answered(ticket, code, text)
            case messages.OperateResult(ticket, code, text, result):
                self._service.admin.answered(ticket, Outcome(code, text, result))

    def _restore(self, message: messages.Changed | messages.LostGpus | messages.CudaState) -> None:
        """What is so whichever front there is."""
        match message:
            case messages.Changed(kind, changed):
                (self._service.log if kind == LOG else self._service.trace).restore(changed)
            case messages.LostGpus(gpus):
                self._service.gpus.restore(LostGpu(*one) for one in gpus)
            case messages.CudaState(works):
                self._service.cuda_state(works)

    def _adjust(self, changes: dict[str, Any]) -> None:
        """Settings are others from now on, by name."""
        self._settings = live_settings.adjusted(self._settings, changes)
        parts = live_settings.Parts(self._service, self._generations, self._transports)
        live_settings.apply(self._settings, changes, parts)

    def _watch_gpus(self) -> None:
        interval_s, service = self._settings.gpu_health_interval_s, self._service
        service.min_healthy_devices = self._settings.min_healthy_devices
        service.min_ready_instances = self._settings.min_ready_instances
        service.gpus = GpuWatch(interval_s, lambda lost: self._say(messages.LostGpus(lost)), service.changed)
        if interval_s:
            service.gpus.start()

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the front cannot go on", exc_info=task.exception())
            self._on_lost()

    def _say(self, message: Any) -> None:
        datagram.send(self._control, messages.CONTROL.encode(message))

    async def _listen(self, listeners: dict[str, int]) -> None:
        settings, metrics_fd = self._settings, listeners.get("metrics")
        doors = assembly.doors(self._service, settings, None if metrics_fd is None else _port(metrics_fd))
        self.application = doors
        if settings.transport == GRPCIO and "grpc" in listeners:
            port = _port(listeners.pop("grpc"))
            self._grpc_server = assembly.grpc_aio_transport(self._service, settings, port)
            self._transports.append(self._grpc_server)
        self._trace_calls(self._deliver)
        health_fd = listeners.pop("health", None)
        self._transports += assembly.transports(self._service, doors, settings, listeners)
        if health_fd is not None:
            self._transports.append(assembly.health_port(self._service, health_fd))
        for transport in self._transports:
            await transport.start()
        files = tls_files(settings)
        if files is not None and self._transports:
            certificates = CertificateWatch(files, self._renew_certificates)
            self._service.metrics_page.add(certificates.families)
            self._spawn(certificates.run())
        self._say(messages.FrontReady())

    async def _renew_certificates(self) -> None:
        for transport in self._transports:
            await transport.renew()

    def _repository_control(self) -> RepositoryControl:
        return RepositoryControl(
            self._settings.model_control,
            lambda *request: self._say(messages.LoadModel(*request)),
            lambda *request: self._say(messages.UnloadModel(*request)),
            self._service.served_versions,
        )

    def _admin_control(self) -> AdminControl:
        if not self._settings.admin_api:
            return AdminControl()
        return AdminControl(lambda *question: self._say(messages.Operate(*question)))

    def _keeper_of(self, kind: str) -> Callable[[dict[str, Any]], None]:
        """Has the supervisor remember changed settings for the next front."""
        return lambda settings: self._say(messages.Changed(kind, settings))

    def _trace_control(self) -> TraceControl:
        settings, keep = self._settings.trace, self._keeper_of(TRACE)
        return TraceControl(self._service.models, settings, self._epoch, self._trace_calls, keep)

    def _trace_calls(self, deliver: Deliver | None) -> None:
        """Note when calls are received and sent from now on; None: no more."""
        self._deliver = deliver
        if self.application is not None:
            self.application.wrap(None if deliver is None else partial(TracedApplication, deliver=deliver))
        if self._grpc_server is not None:
            self._grpc_server.trace(deliver)

    # ---- models and instances -------------------------------------------------------------

    def _new_driver(self, spec: ModelSpec) -> Driver:
        metrics = self._generations.metrics(spec.name, spec.version)
        if metrics is None:
            window = LatencyWindow() if self._settings.metrics_summaries else None
            metrics = ModelMetrics(spec.name, str(spec.version), dict, window)
        regions, most = self._service.regions, self._settings.max_arena_nbytes
        if spec.is_ensemble:
            return EnsembleDriver(spec, most, metrics, self._service.model, regions)
        cache = self._cache if self._settings.response_cache_nbytes else None
        if spec.response_cache and cache is None:
            logger.warning(
                "model %s: its response_cache has no memory, because response_cache_nbytes is 0", spec.name
            )
        return ModelDriver(spec, most, metrics, cache, regions, self._limiter, self._on_other)

    def _on_other(self, link: WorkerLink, message: wire.Message) -> None:
        """What a worker says that is not about its batches."""
        match message:
            case wire.RegionOpened(region, problem):
                self._service.regions.opened(link, region, problem)
            case wire.ExportSegment() | wire.ExportOpened():
                link.exports.take(message)
            case wire.Call() | wire.CallOff() | wire.Return():
                self._calls.take(link, message)
            case _:
                no_such_message(link, message)

    async def _retire(self, generation: int, timeout_s: float) -> None:
        """Let a generation finish what it has."""
        driver = self._generations.get(generation)
        deadline = time.monotonic() + timeout_s
        while driver is not None and driver.unfinished and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_RETIRE_POLL_S)
        self._generations.remove(generation)
        self._say(messages.Retired(generation))

    def _instance_changed(self, message: messages.InstanceUp | messages.InstanceDown, fds: list[int]) -> None:
        driver = self._generations.of_workers(message.generation)
        if driver is None:
            datagram.close_all(fds)
        elif isinstance(message, messages.InstanceUp):
            self._instance_up(driver, message, fds)
        else:
            driver.fault = self._service.fault_of(driver.spec)
            driver.instance_down(message.instance, message.reason, message.restart_in_s)
            self._service.instance_changed(driver)

    def _instance_up(self, driver: ModelDriver, message: messages.InstanceUp, fds: list[int]) -> None:
        instance, sock, pidfd = message.instance, socket.socket(fileno=fds[0]), fds[1]

        def on_down(link: WorkerLink, reason: str) -> None:
            driver.instance_down(link.instance, reason)
            self._service.instance_changed(driver)

        driver.metrics.instance(instance).load_s = message.load_s
        link = WorkerLink(instance, message.slots, sock, pidfd, self._epoch, driver.on_message, on_down)
        device = next((one.device for one in driver.spec.instances if one.name == instance), "")
        self._devices.add(device, link)
        self._calls.add(link, driver)
        self._service.gpus.worker_up(message.pid, driver.spec.name, driver.metrics.version)
        link.on_close.append(lambda _: self._service.gpus.worker_down(message.pid))
        driver.instance_up(link)
        self._service.instance_changed(driver)

    def _add_model(self, message: messages.AddModel) -> None:
        driver = self._new_driver(ModelSpec.from_wire(message.spec))
        placed = {one.placement.gpu_uuid: one.device for one in driver.spec.instances}
        self._service.gpus.call({uuid: device for uuid, device in placed.items() if uuid})
        if message.served:
            self._cache.drop_model(driver.spec.name)  # another program may have had the name
        attached, served = message.attached, message.served
        self._generations.add(message.generation, driver, attached=attached, served=served)

    def _serve_model(self, model: str, generations: tuple[int, ...], timeout_s: float) -> None:
        self._cache.drop_model(model)
        for generation in self._generations.serve(model, generations):
            self._spawn(self._retire(generation, timeout_s))

    async def _drain(self, message: messages.Drain) -> None:
        drain = Drain(self._service, self._transports, self._generations.unfinished)
        unfinished = await drain.run(message.lame_duck_s, message.timeout_s, notice=message.notice)
        self._say(messages.Drained(unfinished))


def _port(listener_fd: int) -> int:
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        return int(listener.getsockname()[1])
