"""The health port: a thread with its own event loop, so that probes are answered while the front is busy. The
front publishes its health and a heartbeat to it. The port never uses TLS: a kubelet has no certificate.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.net.admission import SPARE_DESCRIPTORS, Admission, Limits
from gpuserve.front.net.async_requests import AsyncRequest, AsyncRequests
from gpuserve.front.net.exchange import BodyReceiver, Exchange
from gpuserve.front.net.request_rate_limiter import BoundedLog
from gpuserve.front.net.server import Connections, NativeServer, ProtocolServer
from gpuserve.front.protocols.access.endpoints import NOT_FOUND, Endpoint, Route, RouteError, match_route
from gpuserve.front.protocols.grpc import grpc_protocol as protocol
from gpuserve.front.protocols.grpc import unary_rpcs
from gpuserve.front.protocols.http import http_responses as responses
from gpuserve.front.protocols.http.dashboard_endpoints import HEALTH_INDEX
from gpuserve.front.protocols.http.http_responses import health_answer
from gpuserve.front.requests.server_status import HealthReport, HealthSubscribers
from gpuserve.front.service.inference_service import InferenceService
from gpuserve_worker.protocol import datagram

logger = logging.getLogger(__name__)

#: Seconds without a heartbeat after which the front counts as hung. No request keeps the event loop as long.
STUCK_S: Final = 30.0
#: The report before the front has published one.
_INITIAL_REPORT: Final = HealthReport(live=True, started=False, ready=False, models={})


class HealthView:
    """The front's last report, and whether heartbeats arrive on the clock ``now``. Pure."""

    def __init__(self, now: float) -> None:
        self.report = _INITIAL_REPORT
        self.ended = False
        self._heartbeat_at = now
        self._stuck = False
        self._subscribers = HealthSubscribers()

    @property
    def live(self) -> bool:
        """True if the front reports that it is live, and its heartbeats arrive."""
        return self.report.live and not self._stuck

    def of(self, service: str) -> bool | None:
        """Return the answer of ``grpc.health.v1`` for a service name, or None if there is no such service."""
        return self.report._replace(live=self.live).of(service)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback for possible changes. Return a function that removes the callback."""
        return self._subscribers.watch(callback)

    def update(self, report: HealthReport, ended: bool) -> None:
        """Replace the report; ``ended``: no further report follows."""
        self.report, self.ended = report, ended
        self._subscribers.changed()

    def heartbeat(self, now: float) -> None:
        """Note a heartbeat of the front's event loop at this time, in seconds."""
        self._heartbeat_at = now

    def check_heartbeat(self, now: float) -> None:
        """Check at this time, in seconds, whether heartbeats of the front still arrive."""
        stuck = now - self._heartbeat_at > STUCK_S
        if stuck is not self._stuck:
            self._stuck = stuck
            self._subscribers.changed()


_HEALTH_METHODS: Final = frozenset({unary_rpcs.HEALTH_CHECK, unary_rpcs.HEALTH_WATCH})

#: Seconds between heartbeats of the front, and between checks.
_HEARTBEAT_S: Final = 1.0
#: Connections of probes and watches.
_MAX_CONNECTIONS: Final = 1024


class HealthPort(ProtocolServer):
    """The server of the health port, controlled from the front's event loop, for probes until it stops."""

    def __init__(self, service: InferenceService, listener_fd: int) -> None:
        self._service = service
        self._listener_fd = listener_fd
        self._view = HealthView(time.monotonic())
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_error)
        self._starved = BoundedLog(time.monotonic)
        self._quit = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gpuserve-health", daemon=True)
        self._front = asyncio.get_running_loop()
        self._listening = self._front.create_future()
        self._ended = self._front.create_future()
        self._published: tuple[HealthReport, bool] | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._unwatch = self._service.health.watch(self._publish)
        self._publish()
        self._send_heartbeat()
        self._thread.start()
        await asyncio.wait({self._listening, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()

    async def stop(self) -> None:
        self._unwatch()
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._quit.set)
            await self._ended

    # ---- in the front's thread ----------------------------------------------------------------

    def _publish(self) -> None:
        state = self._service.health.report(), self._service.health.ended
        if state != self._published:
            self._published = state
            self._loop.call_soon_threadsafe(self._view.update, *state)

    def _send_heartbeat(self) -> None:
        self._heartbeat_timer = self._front.call_later(_HEARTBEAT_S, self._send_heartbeat)
        self._loop.call_soon_threadsafe(self._view.heartbeat, time.monotonic())

    # ---- in the port's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # a defect of the server
            logger.exception("the health port stopped because of a defect")
            self._front.call_soon_threadsafe(self._ended.set_exception, error)
        else:
            self._front.call_soon_threadsafe(self._ended.set_result, None)

    async def _serve(self) -> None:
        requests = AsyncRequests()
        handler = HealthHandler(self._view, requests)
        # Other ports keep more descriptors spare, so a flood there leaves some for this port.
        admission = Admission(Limits(_MAX_CONNECTIONS), n_spare=SPARE_DESCRIPTORS // 2)
        listeners = {self._listener_fd: handler.accept}
        transport = NativeServer(listeners, requests, Connections(admission), admission)
        await transport.start()
        self._front.call_soon_threadsafe(self._listening.set_result, None)
        check_heartbeat = self._loop.create_task(self._check_heartbeats())
        await self._quit.wait()
        check_heartbeat.cancel()
        await transport.stop()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop; asyncio reports each connection for which no descriptor is left."""
        if datagram.is_starved(context.get("exception")):
            self._starved("the health port has no descriptor left for a connection and retries")
        else:
            loop.default_exception_handler(context)

    async def _check_heartbeats(self) -> None:
        while True:
            self._view.check_heartbeat(time.monotonic())
            await asyncio.sleep(_HEARTBEAT_S)


class HealthHandler:
    """The request handler for health, open to anybody. ``requests`` runs the coroutines of watches."""

    def __init__(self, view: HealthView, requests: AsyncRequests) -> None:
        self._view = view
        self._requests = requests

    def accept(self, exchange: Exchange) -> BodyReceiver:
        head = exchange.head
        if not head.is_grpc:
            answer = partial(self._answer, match_route(head.method, head.raw_path))
            return responses.ImmediateReceiver(exchange, answer)
        if not head.trailers:
            return protocol.Refused(InvalidArgument(protocol.NO_TRAILERS), exchange)
        if head.path not in _HEALTH_METHODS:
            return protocol.Refused(unary_rpcs.unimplemented(head.path), exchange)
        call = protocol.parse_call_head(head)
        return self._requests.start(exchange, partial(protocol.serve, self._serve, call))

    async def _serve(self, call: protocol.CallHead, request: AsyncRequest) -> None:
        if request.head.path == unary_rpcs.HEALTH_WATCH:
            await unary_rpcs.serve_health_watch(self._view, call, request)
        else:
            message = await protocol.small_message(call, request)
            protocol.send_message(request.exchange, unary_rpcs.check_health(self._view, message))

    def _answer(self, route: Route | RouteError) -> responses.HttpAnswer:
        match route:
            case Route(Endpoint.SERVER_LIVE):
                return health_answer("live", self._view.live)
            case Route(Endpoint.SERVER_READY):
                return health_answer("ready", self._view.report.ready)
            case Route(Endpoint.SERVER_STARTED):
                return health_answer("started", self._view.report.started)
            case Route(Endpoint.ROOT):
                return responses.json_answer(HEALTH_INDEX)
            case _:
                return responses.route_error_answer(NOT_FOUND)
