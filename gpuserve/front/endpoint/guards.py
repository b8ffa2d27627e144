"""The guards before the doors: ASGI applications that let through what the policy allows.

What is open to anybody they hand on without a coroutine of their own. What is allowed is in
``restrictions.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import Final, Protocol

from gpuserve.errors import RequestError
from gpuserve.front.endpoint import grpc_reflection, grpc_rpcs, http_bodies, routes
from gpuserve.front.endpoint.asgi import MODEL_STREAM_INFER, Application, Receive, Scope, Send
from gpuserve.front.endpoint.grpc_calls import read_rest, refuse
from gpuserve.front.endpoint.grpc_framing import unary_message
from gpuserve.front.endpoint.grpc_headers import encoding_of
from gpuserve.front.endpoint.http import raw_path
from gpuserve.front.endpoint.peers import asgi_address, is_local
from gpuserve.front.endpoint.restrictions import ENDPOINTS, GRPC_PREFIX, METHODS, Policy, Verdict
from gpuserve.front.endpoint.routes import Refusal, Route

_STREAMS: Final = frozenset({MODEL_STREAM_INFER, *grpc_reflection.METHODS})


class RoutedDoor(Protocol):
    """The HTTP door, asked for a route that is known."""

    def serve(self, route: Route | Refusal, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""


class HttpGuard:
    """Before the HTTP door. ``admin``: whether the paths of the admin API exist."""

    def __init__(self, door: RoutedDoor, policy: Policy, *, admin: bool = False) -> None:
        self._door = door
        self._policy = policy
        self._admin = admin
        self._open = frozenset(one for one, access in ENDPOINTS.items() if policy.is_open(access))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request, or answer 403, or 404 for what the policy does not list."""
        route = routes.match(scope["method"], raw_path(scope), admin=self._admin)
        if isinstance(route, Refusal) or route.endpoint in self._open:
            return self._door.serve(route, scope, receive, send)
        return self._judged(route, scope, receive, send)

    async def _judged(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        access, headers = ENDPOINTS.get(route.endpoint), scope["headers"]
        local = is_local(asgi_address(scope), headers)
        verdict = self._policy.judge(access, headers, is_local=local)
        if access is None:
            await self._door.serve(routes.NOT_FOUND, scope, receive, send)
        elif verdict is Verdict.ALLOWED:
            await self._door.serve(route, scope, receive, send)
        else:
            await _forbid(send, self._policy.refusal(access, verdict))


class GrpcGuard:
    """Before the gRPC door."""

    def __init__(self, door: Application, policy: Policy) -> None:
        self._door = door
        self._policy = policy
        self._open = frozenset(path for path, access in METHODS.items() if policy.is_open(access))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one call, or answer UNAVAILABLE or PERMISSION_DENIED; what is not listed is UNIMPLEMENTED."""
        if scope["path"] in self._open:
            return self._door(scope, receive, send)
        return self._judged(scope, receive, send)

    async def _judged(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], scope["headers"]
        access, local = METHODS.get(path), is_local(asgi_address(scope), headers)
        verdict = self._policy.judge(access, headers, is_local=local, prefix=GRPC_PREFIX)
        if verdict is Verdict.ALLOWED:
            await self._door(scope, receive, send)
        elif access is None:
            await _refuse(path, grpc_rpcs.unimplemented(path), receive, send)
        elif verdict is Verdict.READ_ONLY:
            await self._read_only(scope, receive, send)
        else:
            await _refuse(path, self._policy.refusal(access, verdict, GRPC_PREFIX), receive, send)

    async def _read_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A call of a method that changes the server or not, as its message says, which is small."""
        path = scope["path"]
        try:
            body = await read_rest(receive, b"", grpc_rpcs.MAX_REQUEST_NBYTES)
            message = unary_message(body, grpc_rpcs.MAX_REQUEST_NBYTES, encoding_of(dict(scope["headers"])))
            if grpc_rpcs.CHANGES[path](bytes(message)):
                raise self._policy.refusal(METHODS[path], Verdict.REMOTE, GRPC_PREFIX)
        except RequestError as error:
            await refuse(send, error)
            return
        await self._door(scope, _replay(body, receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` once more from the beginning, of a body that has been read whole."""
    whole = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> dict[str, object]:
        return whole.pop() if whole else await receive()

    return again


async def _refuse(path: str, error: RequestError, receive: Receive, send: Send) -> None:
    # A status before the end of the request may be lost with it; a stream of requests need not end.
    if path in _STREAMS or await _read_to_end(receive):
        await refuse(send, error)


async def _read_to_end(receive: Receive) -> bool:
    """Let the request pass by; false where its client went away."""
    message = await receive()
    while message.get("more_body", False):
        message = await receive()
    return bool(message["type"] != "http.disconnect")


async def _forbid(send: Send, error: RequestError) -> None:
    body = http_bodies.error_body(str(error))
    headers = http_bodies.json_headers(body)
    with contextlib.suppress(OSError):  # the client is gone
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
