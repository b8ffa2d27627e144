"""The front door of a process that is a door: inference is answered here, all else is passed on."""

from __future__ import annotations

from typing import Final

from gpuserve.front.doors.access import routes
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.grpc import rpcs
from gpuserve.front.doors.grpc.door import GrpcDoor
from gpuserve.front.doors.http.door import HttpDoor
from gpuserve.front.exchange.exchange import Accept, Exchange, Head, Sink

#: What is noted on the head of a request that is passed on.
PASSED_ON: Final = object()
_METHODS: Final = frozenset({rpcs.MODEL_INFER, rpcs.MODEL_STREAM_INFER})
_ENDPOINTS: Final = frozenset(
    {
        Endpoint.MODEL_INFER,
        Endpoint.MODEL_GENERATE,
        Endpoint.MODEL_GENERATE_STREAM,
        Endpoint.OPENAI_CHAT,
        Endpoint.OPENAI_COMPLETIONS,
        Endpoint.OPENAI_EMBEDDINGS,
    }
)


class PassingDoor:
    """Both doors, as far as inference goes. ``pass_on`` takes every other request; ``n_requests`` counts
    all of them.
    """

    def __init__(self, grpc: GrpcDoor, http: HttpDoor, pass_on: Accept) -> None:
        self._grpc = grpc.accept
        self._http = http.accept
        self._pass_on = pass_on
        self.n_requests = 0

    def accept(self, exchange: Exchange) -> Sink:
        """The sink of a request. Where it goes is worked out once for all heads that are equal."""
        self.n_requests += 1
        head = exchange.head
        if head.memo is PASSED_ON:
            return self._pass_on(exchange)
        if head.is_grpc:
            if head.memo is not None or head.path in _METHODS:
                return self._grpc(exchange)
        elif head.memo is not None or _is_inference(head):
            return self._http(exchange)
        head.memo = PASSED_ON
        return self._pass_on(exchange)


def _is_inference(head: Head) -> bool:
    route = routes.match(head.method, head.raw_path)
    return isinstance(route, Route) and route.endpoint in _ENDPOINTS
