"""The doors of HTTP and gRPC as the settings of a server want them."""

from __future__ import annotations

from gpuserve.config.settings.server import NO_COMPRESSION, ON, ServerSettings, all_access_rules
from gpuserve.config.settings.values import DASHBOARD
from gpuserve.front.doors.access.forwarding import HeaderForwarding, forwarding
from gpuserve.front.doors.access.rate_limit import RateLimit
from gpuserve.front.doors.access.restrictions import Policy, token_headers
from gpuserve.front.doors.http.door import HttpDoor
from gpuserve.front.doors.openai.endpoints import openai_endpoints
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.observability.live.live_feed import LivePage
from gpuserve.front.protocols.grpc.grpc_handler import GrpcHandler
from gpuserve.front.service.inference_service import InferenceService


def both_doors(
    service: InferenceService,
    settings: ServerSettings,
    requests: AwaitedRequests,
    admission: Admission,
    live: LivePage | None = None,
) -> tuple[HttpDoor, GrpcHandler]:
    forwarded = _forwarding(settings, settings.http_header_forward_pattern)
    http = HttpDoor(
        service,
        requests,
        settings.max_request_nbytes,
        _policy(settings),
        forwarded,
        settings.allowed_hosts,
        openai_endpoints(service, settings.max_request_nbytes, forwarded),
        live,
    )
    return http, grpc_door(service, settings, requests, admission, settings.grpc_response_compression)


def rate_limit(settings: ServerSettings, admission: Admission) -> RateLimit:
    return RateLimit(admission.rates, all_access_rules(settings))


def grpc_door(
    service: InferenceService,
    settings: ServerSettings,
    requests: AwaitedRequests,
    admission: Admission,
    compression: str = NO_COMPRESSION,
) -> GrpcHandler:
    forwarded = _forwarding(settings, settings.grpc_header_forward_pattern)
    nbytes, policy = settings.max_request_nbytes, _policy(settings)
    limit = rate_limit(settings, admission)
    return GrpcHandler(service, requests, nbytes, policy, forwarded, compression, admission.streams, limit)


def _policy(settings: ServerSettings) -> Policy:
    page = {DASHBOARD} if settings.dashboard == ON else set()
    return Policy(all_access_rules(settings), {*settings.remote_control, *page})


def _forwarding(settings: ServerSettings, pattern: str) -> HeaderForwarding | None:
    return forwarding(pattern, token_headers(all_access_rules(settings)))
