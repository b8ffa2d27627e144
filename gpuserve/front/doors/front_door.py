"""The front door: which door a request goes to, so that either port answers both protocols."""

from __future__ import annotations

from functools import partial

from gpuserve.core.errors import RateLimited
from gpuserve.front.doors.access.rate_limit import RateLimit
from gpuserve.front.doors.http.door import HttpDoor
from gpuserve.front.exchange.exchange import Accept, Exchange, Sink
from gpuserve.front.exchange.request_rates import RequestRates
from gpuserve.front.protocols.grpc.grpc_handler import GrpcHandler


class FrontDoor:
    """Both protocols behind one rate limiter; none if an ingress process has counted the requests before."""

    def __init__(self, grpc: GrpcHandler, http: HttpDoor, limit: RateLimit | None = None) -> None:
        self._grpc = grpc.accept
        self._http = http.accept
        limit = limit or RateLimit(RequestRates())
        self._rates = limit.rates
        self._limit = limit.refusal
        self._refuse = partial(refuse, grpc, http)

    def accept(self, exchange: Exchange) -> Sink:
        """The sink of a request; gRPC is told by the content type, as its specification wants it."""
        if self._rates.is_on and (refusal := self._limit(exchange)) is not None:
            return self._refuse(refusal, exchange)
        head = exchange.head
        if not head.is_grpc:
            return self._http(exchange)
        way: Accept | None = head.memo  # known from an equal head: nearly every call
        return self._grpc(exchange) if way is None else way(exchange)


def refuse(grpc: GrpcHandler, http: HttpDoor, error: RateLimited, exchange: Exchange) -> Sink:
    """Return the sink that answers a request with an error, in the form of the request's protocol."""
    return grpc.refuse(error, exchange) if exchange.head.is_grpc else http.refuse(error, exchange)


def grpc_alone(grpc: GrpcHandler, limit: RateLimit) -> Accept:
    """Return what accepts calls of gRPC behind a rate limiter, without HTTP."""
    rates = limit.rates

    def accept(exchange: Exchange) -> Sink:
        if rates.is_on and (refusal := limit.refusal(exchange)) is not None:
            return grpc.refuse(refusal, exchange)
        return grpc.accept(exchange)

    return accept
