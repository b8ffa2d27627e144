"""The front door of a process that is a door: inference is answered here, all else is passed on. While there
is no front, whether the server is ready is answered here, too.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gpuserve.core.errors import RequestError
from gpuserve.front.doors import front_door
from gpuserve.front.doors.access import routes
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.rate_limit import RateLimit
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http import answers
from gpuserve.front.doors.http.door import HttpDoor
from gpuserve.front.exchange.exchange import Accept, Exchange, Head, Sink
from gpuserve.front.protocols.grpc import grpc_protocol, unary_rpcs
from gpuserve.front.protocols.grpc.grpc_handler import GrpcHandler

#: What is noted on the head of a request that is passed on.
PASSED_ON: Final = object()
_METHODS: Final = frozenset({unary_rpcs.MODEL_INFER, unary_rpcs.MODEL_STREAM_INFER})
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
#: What asks for readiness, by the paths of gRPC and by the endpoints of HTTP.
_READY_METHODS: Final = frozenset({unary_rpcs.SERVER_READY, unary_rpcs.MODEL_READY, unary_rpcs.HEALTH_CHECK})
_READY_ENDPOINTS: Final = frozenset({Endpoint.SERVER_READY, Endpoint.MODEL_READY})


class PassingDoor:
    """Both protocols behind one rate limiter, for inference. ``pass_on`` takes every other request;
    ``n_requests`` counts all of them.
    """

    def __init__(self, grpc: GrpcHandler, http: HttpDoor, pass_on: Accept, limit: RateLimit) -> None:
        self._grpc = grpc.accept
        self._http = http.accept
        self._to_front = self._pass_on = pass_on
        self._rates = limit.rates
        self._limit = limit.refusal
        self._refuse = partial(front_door.refuse, grpc, http)
        self.n_requests = 0

    def lose_front(self) -> None:
        self._pass_on = self._pass_on_later

    def find_front(self) -> None:
        self._pass_on = self._to_front

    def accept(self, exchange: Exchange) -> Sink:
        """The sink of a request. Where it goes is worked out once for all heads that are equal."""
        self.n_requests += 1
        if self._rates.is_on and (refusal := self._limit(exchange)) is not None:
            return self._refuse(refusal, exchange)
        head = exchange.head
        if head.memo is PASSED_ON:
            return self._pass_on(exchange)
        if head.is_grpc:
            if head.memo is not None or head.path in _METHODS:
                return self._grpc(exchange)
        elif head.memo is not None or _asks(head, _ENDPOINTS):
            return self._http(exchange)
        head.memo = PASSED_ON
        return self._pass_on(exchange)

    def _pass_on_later(self, exchange: Exchange) -> Sink:
        """Answer that nothing is ready, without a front; what else is asked waits."""
        head = exchange.head
        if not asks_readiness(head):
            return self._to_front(exchange)
        head.memo = None  # the note is ours, and would be taken for one of the door's
        try:
            return (self._grpc if head.is_grpc else self._http)(exchange)
        finally:
            head.memo = PASSED_ON


def asks_readiness(head: Head) -> bool:
    return head.path in _READY_METHODS if head.is_grpc else _asks(head, _READY_ENDPOINTS)


def refuse(exchange: Exchange, error: RequestError) -> None:
    """End a request with an error, in its own protocol; over HTTP its response must not have begun."""
    if exchange.head.is_grpc:
        grpc_protocol.refuse_call(exchange, error)
    else:
        answers.failure(error).send(exchange)


def _asks(head: Head, endpoints: frozenset[Endpoint]) -> bool:
    route = routes.match(head.method, head.raw_path)
    return isinstance(route, Route) and route.endpoint in endpoints
