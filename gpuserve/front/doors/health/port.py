"""The health port: a thread with its own event loop, so that probes are answered while the front works. The
front tells it what changes. It speaks no TLS anywhere: a kubelet has no certificate.
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
from gpuserve.front.doors.access import routes
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.routes import Refusal, Route
from gpuserve.front.doors.health.view import HealthView
from gpuserve.front.doors.http.answers import HttpAnswer, Reply, health_answer, json_answer, refused
from gpuserve.front.doors.http.dashboard import HEALTH_INDEX
from gpuserve.front.exchange.awaited import AwaitedRequest, AwaitedRequests
from gpuserve.front.exchange.bounded_log import BoundedLog
from gpuserve.front.exchange.exchange import Exchange, Sink
from gpuserve.front.exchange.limits import SPARE_DESCRIPTORS, Admission, Limits
from gpuserve.front.exchange.transport import Transport
from gpuserve.front.protocols.grpc import unary_rpcs
from gpuserve.front.protocols.grpc.grpc_protocol import (
    NO_TRAILERS,
    CallHead,
    Refused,
    parse_call_head,
    send_message,
    serve,
    small_message,
)
from gpuserve.front.protocols.grpc.unary_rpcs import unimplemented
from gpuserve.front.requests.server_status import HealthReport
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.transport import NativeTransport
from gpuserve.front.service.inference_service import InferenceService
from gpuserve_worker.protocol import datagram

_METHODS: Final = frozenset({unary_rpcs.HEALTH_CHECK, unary_rpcs.HEALTH_WATCH})

logger = logging.getLogger(__name__)

#: How often the front shows that it turns, and is judged by that.
_TURN_S: Final = 1.0
#: Of probes and watches.
_MAX_CONNECTIONS: Final = 1024


class HealthPort(Transport):
    """The transport of the health port, run in the front's loop; probes go on until the end."""

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
        self._said: tuple[HealthReport, bool] | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._turn: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._unwatch = self._service.health.watch(self._say)
        self._say()
        self._on_turn()
        self._thread.start()
        await asyncio.wait({self._listening, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()

    async def stop(self) -> None:
        self._unwatch()
        if self._turn is not None:
            self._turn.cancel()
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._quit.set)
            await self._ended

    # ---- in the front's thread ------------------------------------------------------------

    def _say(self) -> None:
        """Tell the thread the health of the front, where it has changed."""
        said = self._service.health.report(), self._service.health.ended
        if said != self._said:
            self._said = said
            self._loop.call_soon_threadsafe(self._view.say, *said)

    def _on_turn(self) -> None:
        self._turn = self._front.call_later(_TURN_S, self._on_turn)
        self._loop.call_soon_threadsafe(self._view.turned, time.monotonic())

    # ---- in its own -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # a fault of ours
            logger.exception("the health port ended")
            self._front.call_soon_threadsafe(self._ended.set_exception, error)
        else:
            self._front.call_soon_threadsafe(self._ended.set_result, None)

    async def _serve(self) -> None:
        requests = AwaitedRequests()
        door = HealthDoor(self._view, requests)
        # A flood on the other ports leaves descriptors for this one.
        admission = Admission(Limits(_MAX_CONNECTIONS), n_spare=SPARE_DESCRIPTORS // 2)
        listeners = {self._listener_fd: door.accept}
        transport = NativeTransport(listeners, requests, Connections(admission), admission)
        await transport.start()
        self._front.call_soon_threadsafe(self._listening.set_result, None)
        look = self._loop.create_task(self._look())
        await self._quit.wait()
        look.cancel()
        await transport.stop()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop. asyncio reports each connection in the backlog that has no descriptor."""
        if datagram.is_starved(context.get("exception")):
            self._starved("the health port has no descriptor left for a connection, and tries again")
        else:
            loop.default_exception_handler(context)

    async def _look(self) -> None:
        while True:
            self._view.look(time.monotonic())
            await asyncio.sleep(_TURN_S)


class HealthDoor:
    """Accepts what asks for health, for anybody; ``requests`` runs what awaits."""

    def __init__(self, view: HealthView, requests: AwaitedRequests) -> None:
        self._view = view
        self._requests = requests

    def accept(self, exchange: Exchange) -> Sink:
        head = exchange.head
        if not head.is_grpc:
            return Reply(exchange, lambda: self._of(routes.match(head.method, head.raw_path)))
        if not head.trailers:
            return Refused(InvalidArgument(NO_TRAILERS), exchange)
        if head.path not in _METHODS:
            return Refused(unimplemented(head.path), exchange)
        return self._requests.begin(exchange, partial(serve, self._serve, parse_call_head(head)))

    async def _serve(self, call: CallHead, request: AwaitedRequest) -> None:
        if request.head.path == unary_rpcs.HEALTH_WATCH:
            await unary_rpcs.serve_health_watch(self._view, call, request)
        else:
            message = await small_message(call, request)
            send_message(request.exchange, unary_rpcs.check_health(self._view, message))

    def _of(self, route: Route | Refusal) -> HttpAnswer:
        match route:
            case Route(Endpoint.SERVER_LIVE):
                return health_answer("live", self._view.live)
            case Route(Endpoint.SERVER_READY):
                return health_answer("ready", self._view.report.ready)
            case Route(Endpoint.SERVER_STARTED):
                return health_answer("started", self._view.report.started)
            case Route(Endpoint.ROOT):
                return json_answer(HEALTH_INDEX)
            case _:
                return refused(routes.NOT_FOUND)
