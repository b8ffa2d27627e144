"""The application of the health port: ``grpc.health.v1`` and the three health paths of HTTP, nothing else."""

from __future__ import annotations

import contextlib
from typing import Final

from gpuserve.errors import InvalidArgument, RequestError
from gpuserve.front.endpoint import grpc_health, http_bodies, routes
from gpuserve.front.endpoint.asgi import Receive, Scope, Send, is_grpc, refuse_websocket
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.grpc_calls import Call, call_of, read_rest, refuse, respond
from gpuserve.front.endpoint.grpc_framing import unary_message
from gpuserve.front.endpoint.grpc_rpcs import unimplemented
from gpuserve.front.endpoint.health_view import HealthView
from gpuserve.front.endpoint.http_answers import (
    Answer,
    json_answer,
    live_answer,
    ready_answer,
    started_answer,
)
from gpuserve.front.endpoint.routes import Endpoint, Refusal, Route

_MAX_NBYTES: Final = grpc_health.MAX_REQUEST_NBYTES


class HealthDoor:
    """The ASGI application. Made in the loop that serves it."""

    def __init__(self, view: HealthView) -> None:
        self._view = view
        self._watch = DisconnectWatch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await refuse_websocket(receive, send)
        elif is_grpc(scope):
            await self._call(scope, receive, send)
        else:
            await self._get(scope, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(call_of(scope, receive, send), "http.response.trailers" in scope["extensions"])
        except RequestError as error:
            await refuse(send, error)

    async def _answer(self, call: Call, trailers: bool) -> None:
        if trailers and call.path == grpc_health.WATCH:
            await grpc_health.serve_watch(self._view, self._watch, call)
            return
        body = await read_rest(call.receive, b"", _MAX_NBYTES)
        if not trailers:
            raise InvalidArgument("a gRPC call needs the header 'te: trailers', which is missing")
        if call.path != grpc_health.CHECK:
            raise unimplemented(call.path)
        message = bytes(unary_message(body, _MAX_NBYTES, call.encoding))
        await respond(call.send, grpc_health.check(self._view, message))

    async def _get(self, scope: Scope, send: Send) -> None:
        status, headers, body = self._of(routes.match(scope["method"], scope["raw_path"]))
        with contextlib.suppress(OSError):  # the client is gone
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    def _of(self, route: Route | Refusal) -> Answer:
        match route:
            case Route(Endpoint.SERVER_LIVE):
                return live_answer(self._view.live)
            case Route(Endpoint.SERVER_READY):
                return ready_answer(self._view.report.ready)
            case Route(Endpoint.SERVER_STARTED):
                return started_answer(self._view.report.started)
            case _:
                return json_answer(404, http_bodies.error_body("Not Found"))
