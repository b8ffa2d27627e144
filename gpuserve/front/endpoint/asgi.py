"""The ASGI application: which door a request goes through. Nothing of either protocol is here.

Types of the messages are those of the ASGI specification, 3.0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
#: The one gRPC method that is called all the time.
MODEL_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"

Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Doors:
    """gRPC and HTTP behind one application, so that either port answers both.

    ``metrics_port`` answers with ``metrics`` alone: it is often reachable from further away.
    """

    def __init__(
        self, grpc: Application, http: Application, metrics: Application, metrics_port: int | None
    ) -> None:
        self._grpc = grpc
        self._http = http
        self._metrics = metrics
        self._metrics_port = metrics_port
        self._plain = grpc, http
        #: Whether every request must come through here, because something is around the doors.
        self.wrapped = False

    def wrap(self, around: Callable[[Application], Application] | None) -> None:
        """Put something around both doors, for requests from now on; None takes it away."""
        self.wrapped = around is not None
        self._grpc, self._http = self._plain if around is None else map(around, self._plain)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request: the door's own coroutine, without another one around it."""
        if scope["type"] != "http":
            return refuse_websocket(receive, send)
        if self._metrics_port is not None and scope["server"][1] == self._metrics_port:
            return self._metrics(scope, receive, send)
        # The path of an inference call says it already; any other is looked at more closely.
        if scope["path"] == MODEL_INFER or is_grpc(scope):
            return self._grpc(scope, receive, send)
        return self._http(scope, receive, send)


async def refuse_websocket(receive: Receive, send: Send) -> None:
    """Close a websocket before it is accepted, which a server makes a 403 of."""
    await receive()
    await send({"type": "websocket.close"})


def is_grpc(scope: Scope) -> bool:
    """Told by the content type, as the gRPC specification wants it."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value.startswith(b"application/grpc"))
    return False
