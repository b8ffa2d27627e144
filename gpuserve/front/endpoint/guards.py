"""The guard before a door: an ASGI application that lets through what carries the access token, or needs
none. Only a server with restricted endpoints has one; what is restricted is in ``restrictions.py``.
"""

from __future__ import annotations

import contextlib
from typing import Final

from gpuserve.errors import Unavailable
from gpuserve.front.endpoint import http_bodies, routes
from gpuserve.front.endpoint.asgi import MODEL_STREAM_INFER, Application, Receive, Scope, Send
from gpuserve.front.endpoint.grpc_asgi import refuse
from gpuserve.front.endpoint.http import raw_path
from gpuserve.front.endpoint.restrictions import (
    GRPC_HEADER,
    GRPC_REFUSAL,
    HTTP_HEADER,
    HTTP_REFUSAL,
    Restrictions,
)
from gpuserve.front.endpoint.routes import Route

_HTTP_NAMES: Final = frozenset({HTTP_HEADER.encode()})
#: tritonclient sends what it is given; the short name is taken as well.
_GRPC_NAMES: Final = frozenset({GRPC_HEADER.encode(), HTTP_HEADER.encode()})


class HttpGuard:
    """Before the HTTP door."""

    def __init__(self, door: Application, restrictions: Restrictions) -> None:
        self._door = door
        self._restrictions = restrictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 403."""
        route = routes.match(scope["method"], raw_path(scope))
        if isinstance(route, Route) and self._restrictions.refuses_endpoint(
            route.endpoint, _values(scope, _HTTP_NAMES)
        ):
            await _forbid(send)
        else:
            await self._door(scope, receive, send)


class GrpcGuard:
    """Before the gRPC door."""

    def __init__(self, door: Application, restrictions: Restrictions) -> None:
        self._door = door
        self._restrictions = restrictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or answer UNAVAILABLE."""
        path = scope["path"]
        if not self._restrictions.refuses_method(path, _values(scope, _GRPC_NAMES)):
            await self._door(scope, receive, send)
            return
        # A status before the end of the request may be lost with it; a stream of requests need not end.
        if path == MODEL_STREAM_INFER or await _read_to_end(receive):
            await refuse(send, Unavailable(GRPC_REFUSAL))


def _values(scope: Scope, names: frozenset[bytes]) -> list[bytes]:
    return [value for name, value in scope["headers"] if name in names]


async def _read_to_end(receive: Receive) -> bool:
    """Let the request pass by; false where its client went away."""
    message = await receive()
    while message.get("more_body", False):
        message = await receive()
    return bool(message["type"] != "http.disconnect")


async def _forbid(send: Send) -> None:
    body = http_bodies.error_body(HTTP_REFUSAL)
    headers = http_bodies.json_headers(body)
    with contextlib.suppress(OSError):  # the client is gone
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
