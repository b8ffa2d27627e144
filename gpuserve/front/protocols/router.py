"""Routing of requests to protocol handlers, so that every port answers HTTP and gRPC.

``RequestRouter`` serves all requests in the front process. ``IngressRouter`` serves inference in an ingress
process and forwards every other request to the front. While no front runs, it answers readiness itself.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gpuserve.config.settings.server import NO_COMPRESSION, ServerSettings, all_access_rules
from gpuserve.config.settings.values import DASHBOARD
from gpuserve.core.errors import RateLimited, RequestError
from gpuserve.devices.names import ON
from gpuserve.front.live.live_feed import LivePage
from gpuserve.front.net.admission import Admission
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.exchange import BodyReceiver, Exchange, Head, RequestHandler
from gpuserve.front.net.request_rate_limiter import RequestRates
from gpuserve.front.protocols.access.authorization import AccessPolicy, RateLimit, token_headers
from gpuserve.front.protocols.access.endpoints import Endpoint, Route, match_route
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding, header_forwarding
from gpuserve.front.protocols.grpc import grpc_protocol, unary_rpcs
from gpuserve.front.protocols.grpc.grpc_handler import GrpcHandler
from gpuserve.front.protocols.http.http_handler import HttpHandler
from gpuserve.front.protocols.http.http_responses import error_answer
from gpuserve.front.protocols.openai_api import openai_endpoints
from gpuserve.front.service.inference_service import InferenceService


def make_handlers(
    service: InferenceService,
    settings: ServerSettings,
    requests: AsyncRequests,
    admission: Admission,
    live: LivePage | None = None,
) -> tuple[HttpHandler, GrpcHandler]:
    """Return the HTTP and gRPC handlers for the settings of a server."""
    forwarded = _forwarding(settings, settings.http_header_forward_pattern)
    http = HttpHandler(
        service,
        requests,
        settings.max_request_nbytes,
        _policy(settings),
        forwarded,
        settings.allowed_hosts,
        openai_endpoints(service, settings.max_request_nbytes, forwarded),
        live,
    )
    return http, make_grpc_handler(service, settings, requests, admission, settings.grpc_response_compression)


def make_rate_limit(settings: ServerSettings, admission: Admission) -> RateLimit:
    return RateLimit(admission.rates, all_access_rules(settings))


def make_grpc_handler(
    service: InferenceService,
    settings: ServerSettings,
    requests: AsyncRequests,
    admission: Admission,
    compression: str = NO_COMPRESSION,
) -> GrpcHandler:
    forwarded = _forwarding(settings, settings.grpc_header_forward_pattern)
    nbytes, policy = settings.max_request_nbytes, _policy(settings)
    limit = make_rate_limit(settings, admission)
    return GrpcHandler(service, requests, nbytes, policy, forwarded, compression, admission.streams, limit)


def _policy(settings: ServerSettings) -> AccessPolicy:
    page = {DASHBOARD} if settings.dashboard == ON else set()
    return AccessPolicy(all_access_rules(settings), {*settings.remote_control, *page})


def _forwarding(settings: ServerSettings, pattern: str) -> HeaderForwarding | None:
    return header_forwarding(pattern, token_headers(all_access_rules(settings)))


class RequestRouter:
    """Both protocols behind one rate limit; by default without, as an ingress process has counted before."""

    def __init__(self, grpc: GrpcHandler, http: HttpHandler, limit: RateLimit | None = None) -> None:
        self._grpc = grpc.accept
        self._http = http.accept
        limit = limit or RateLimit(RequestRates())
        self._rates = limit.rates
        self._limit = limit.refusal
        self._refuse = partial(refusing_receiver, grpc, http)

    def accept(self, exchange: Exchange) -> BodyReceiver:
        """Return the body receiver of a request. The content type tells gRPC, as its specification says."""
        if self._rates.is_on and (refusal := self._limit(exchange)) is not None:
            return self._refuse(refusal, exchange)
        head = exchange.head
        if not head.is_grpc:
            return self._http(exchange)
        handler: RequestHandler | None = head.memo  # cached in the head: nearly every call
        return self._grpc(exchange) if handler is None else handler(exchange)


def refusing_receiver(
    grpc: GrpcHandler, http: HttpHandler, error: RateLimited, exchange: Exchange
) -> BodyReceiver:
    """Return a body receiver that answers a request with an error, in the form of the request's protocol."""
    return grpc.refuse(error, exchange) if exchange.head.is_grpc else http.refuse(error, exchange)


def grpc_only(grpc: GrpcHandler, limit: RateLimit) -> RequestHandler:
    """Return a request handler for gRPC calls behind a rate limit, without HTTP."""
    rates = limit.rates

    def accept(exchange: Exchange) -> BodyReceiver:
        if rates.is_on and (refusal := limit.refusal(exchange)) is not None:
            return grpc.refuse(refusal, exchange)
        return grpc.accept(exchange)

    return accept


#: The ``Head.memo`` of a request that is forwarded.
FORWARDED: Final = object()
_INFERENCE_METHODS: Final = frozenset({unary_rpcs.MODEL_INFER, unary_rpcs.MODEL_STREAM_INFER})
_INFERENCE_ENDPOINTS: Final = frozenset(one for one in Endpoint if one.access.group == "inference")
#: The requests for readiness, by gRPC path and by HTTP endpoint.
_READY_METHODS: Final = frozenset({unary_rpcs.SERVER_READY, unary_rpcs.MODEL_READY, unary_rpcs.HEALTH_CHECK})
_READY_ENDPOINTS: Final = frozenset({Endpoint.SERVER_READY, Endpoint.MODEL_READY})


class IngressRouter:
    """Both protocols behind one rate limit, for inference. ``forward`` handles other requests."""

    def __init__(
        self, grpc: GrpcHandler, http: HttpHandler, forward: RequestHandler, limit: RateLimit
    ) -> None:
        self._grpc = grpc.accept
        self._http = http.accept
        self._forward_to_front = self._forward = forward
        self._rates = limit.rates
        self._limit = limit.refusal
        self._refuse = partial(refusing_receiver, grpc, http)
        self.n_requests = 0

    def front_lost(self) -> None:
        self._forward = self._answer_without_front

    def front_found(self) -> None:
        self._forward = self._forward_to_front

    def accept(self, exchange: Exchange) -> BodyReceiver:
        """Return the body receiver of a request. The destination is cached for all equal heads."""
        self.n_requests += 1
        if self._rates.is_on and (refusal := self._limit(exchange)) is not None:
            return self._refuse(refusal, exchange)
        head = exchange.head
        if head.memo is FORWARDED:
            return self._forward(exchange)
        if head.is_grpc:
            if head.memo is not None or head.path in _INFERENCE_METHODS:
                return self._grpc(exchange)
        elif head.memo is not None or _is_for(head, _INFERENCE_ENDPOINTS):
            return self._http(exchange)
        head.memo = FORWARDED
        return self._forward(exchange)

    def _answer_without_front(self, exchange: Exchange) -> BodyReceiver:
        """Answer that nothing is ready while no front runs. Other requests wait for the next front."""
        head = exchange.head
        if not is_readiness_request(head):
            return self._forward_to_front(exchange)
        head.memo = None  # the handlers use the memo for their own cache
        try:
            return (self._grpc if head.is_grpc else self._http)(exchange)
        finally:
            head.memo = FORWARDED


def is_readiness_request(head: Head) -> bool:
    return head.path in _READY_METHODS if head.is_grpc else _is_for(head, _READY_ENDPOINTS)


def refuse(exchange: Exchange, error: RequestError) -> None:
    """End a request with an error, in its own protocol. Over HTTP the response must not have begun."""
    if exchange.head.is_grpc:
        grpc_protocol.refuse_call(exchange, error)
    else:
        error_answer(error).send(exchange)


def _is_for(head: Head, endpoints: frozenset[Endpoint]) -> bool:
    route = match_route(head.method, head.raw_path)
    return isinstance(route, Route) and route.endpoint in endpoints
