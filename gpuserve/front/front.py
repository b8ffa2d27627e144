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
from typing import Any

from gpuserve.errors import NotFound
from gpuserve.front.endpoint.asgi import Application, Doors
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.forwarding import forwarding
from gpuserve.front.endpoint.grpc_asgi import GrpcDoor
from gpuserve.front.endpoint.guards import GrpcGuard, HttpGuard
from gpuserve.front.endpoint.http import HttpDoor
from gpuserve.front.endpoint.restrictions import Restrictions, restrictions
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.links import WorkerLink
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.scheduler.driver import ModelDriver
from gpuserve.front.scheduler.response_cache import ResponseCache
from gpuserve.front.transport import H2cornTransport, Transport
from gpuserve.settings import ServerSettings
from gpuserve.spec import ModelSpec
from gpuserve.supervisor import messages
from gpuserve_worker import datagram

logger = logging.getLogger(__name__)

#: How often a drain looks whether everything is finished.
_DRAIN_POLL_S = 0.005


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
        self.application: Application | None = None
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._control = control
        self._buffer = memoryview(bytearray(datagram.MAX_DATAGRAM_NBYTES))
        self._epoch = 0
        self._settings = ServerSettings()
        self._cache = ResponseCache(0)
        self._service = InferenceService("", lambda: self._cache.statistics().nbytes)
        self._transports: list[Transport] = []
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
        for driver in list(self._service.models()):
            driver.close()
        self._service.end()
        for transport in self._transports:
            await transport.stop()

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
            case messages.Setup(epoch, settings, roles):
                self._epoch = epoch
                self._settings = ServerSettings(**settings)
                self._service.name = self._settings.name
                self._cache = ResponseCache(self._settings.response_cache_nbytes)
                self._on_setup(self._settings)
                self._spawn(self._listen(dict(zip(roles, fds, strict=True))))
            case messages.AddModel(spec, attached):
                self._add_model(ModelSpec.from_wire(spec), attached)
            case messages.RemoveModel(model):
                driver = self._service.remove_model(model)
                if driver is not None:
                    driver.close()
            case messages.InstanceUp(model, instance, _, slots):
                self._instance_up(model, instance, slots, fds)
            case messages.InstanceDown(model, instance, reason, restart_in_s):
                driver = self._driver(model)
                if driver is not None:
                    driver.instance_down(instance, reason, restart_in_s)
                    self._service.changed()
            case messages.Serving():
                self._service.serving()
            case messages.Drain(timeout_s):
                self._spawn(self._drain(timeout_s))
            case messages.Quit():
                self.quit()

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
        metrics_fd = listeners.get("metrics")
        doors = self._doors(None if metrics_fd is None else _port(metrics_fd))
        self.application = doors
        if self._settings.transport == "grpcio" and "grpc" in listeners:
            self._transports.append(self._grpc_aio(listeners.pop("grpc")))
        if listeners:
            fds = list(listeners.values())
            self._transports.append(H2cornTransport(doors, fds, self._settings.log_format))
        for transport in self._transports:
            await transport.start()
        self._say(messages.FrontReady())

    def _doors(self, metrics_port: int | None) -> Doors:
        """Both doors, each behind a guard where endpoints are restricted."""
        settings, watch = self._settings, DisconnectWatch()
        most, restricted = settings.max_request_nbytes, _restrictions(settings)
        http = HttpDoor(self._service, watch, most, forwarding(settings.http_header_forward_pattern))
        grpc = GrpcDoor(self._service, watch, most, forwarding(settings.grpc_header_forward_pattern))
        if restricted is None:
            return Doors(grpc, http, http.metrics_only, metrics_port)
        guards = GrpcGuard(grpc, restricted), HttpGuard(http, restricted)
        return Doors(*guards, http.metrics_only, metrics_port)

    def _grpc_aio(self, reserved_fd: int) -> Transport:
        from gpuserve.front.endpoint.grpc_aio import GrpcAioTransport

        host = self._settings.host
        address = f"[{host}]" if ":" in host else host
        address = f"{address}:{_port(reserved_fd)}"
        return GrpcAioTransport(
            self._service,
            address,
            self._settings.max_request_nbytes,
            forwarding(self._settings.grpc_header_forward_pattern),
            _restrictions(self._settings),
        )

    # ---- models and instances -------------------------------------------------------------

    def _add_model(self, spec: ModelSpec, attached: bool) -> None:
        metrics = ModelMetrics(spec.name, str(spec.version), lambda: _gauges(driver))
        self._cache.drop_model(spec.name)  # another model may have had the name
        cache = self._cache if self._settings.response_cache_nbytes else None
        if spec.response_cache and cache is None:
            logger.warning(
                "model %s: its response_cache has no memory, because response_cache_nbytes is 0", spec.name
            )
        driver = ModelDriver(spec, self._settings.max_arena_nbytes, metrics, cache)
        self._service.add_model(driver, attached)

    def _driver(self, model: str) -> ModelDriver | None:
        try:
            return self._service.model(model)
        except NotFound:  # removed while its workers were still starting or dying
            return None

    def _instance_up(self, model: str, instance: str, slots: int, fds: list[int]) -> None:
        driver = self._driver(model)
        if driver is None:
            datagram.close_all(fds)
            return
        sock, pidfd = socket.socket(fileno=fds[0]), fds[1]

        def on_down(link: WorkerLink, reason: str) -> None:
            driver.instance_down(link.instance, reason)
            self._service.changed()

        link = WorkerLink(instance, slots, sock, pidfd, self._epoch, driver.on_message, on_down)
        driver.instance_up(link)
        self._service.changed()

    async def _drain(self, timeout_s: float) -> None:
        self._service.drain()
        deadline = time.monotonic() + timeout_s
        while (unfinished := self._unfinished()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)
        # A turn more for the answers that were just given to be written.
        await asyncio.sleep(_DRAIN_POLL_S)
        self._say(messages.Drained(unfinished))

    def _unfinished(self) -> int:
        return sum(driver.unfinished for driver in self._service.models())


def _gauges(driver: ModelDriver) -> dict[str, float]:
    counts = driver.scheduler.statistics()
    arena = driver.arena.statistics()
    return {
        "gpuserve_queue_requests": counts.queued,
        "gpuserve_running_requests": counts.running_requests,
        "gpuserve_arena_bytes": arena.nbytes,
        "gpuserve_arena_blocks": arena.blocks,
    }


def _restrictions(settings: ServerSettings) -> Restrictions | None:
    return restrictions(settings.restricted_endpoints, settings.access_token)


def _port(listener_fd: int) -> int:
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        return int(listener.getsockname()[1])
