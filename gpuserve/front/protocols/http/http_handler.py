"""The HTTP request handler: checks access by the head, finds the endpoint in tables, returns the receiver."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Final

from gpuserve.config.settings.values import ADMIN, DASHBOARD
from gpuserve.core.errors import RequestError
from gpuserve.front.live.live_feed import LivePage
from gpuserve.front.net.async_requests import AsyncRequest, AsyncRequests
from gpuserve.front.net.exchange import AnswerHead, BodyReceiver, Exchange, Head
from gpuserve.front.observability.metrics import prometheus
from gpuserve.front.protocols.access.authorization import (
    AccessPolicy,
    AllowedHosts,
    ForeignHost,
    Verdict,
    address_of,
    foreign_host,
    is_local_client,
)
from gpuserve.front.protocols.access.body_decoding import client_error
from gpuserve.front.protocols.access.endpoints import NOT_FOUND, Endpoint, Route, RouteError, match_route
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.protocols.http import http_responses as responses
from gpuserve.front.protocols.http.dashboard_endpoints import METRICS_INDEX, dashboard_endpoints
from gpuserve.front.protocols.http.generate_endpoints import GenerateEndpoints
from gpuserve.front.protocols.http.http_responses import (
    HttpAnswer,
    ImmediateReceiver,
    health_answer,
    json_answer,
)
from gpuserve.front.protocols.http.infer_handler import InferHandler, InferHead, read_infer_head
from gpuserve.front.protocols.http.management_endpoints import ManagementEndpoints, admin_endpoints
from gpuserve.front.protocols.http.static_pages import NOSNIFF, docs_page
from gpuserve.front.protocols.openapi.openapi_document import ADMIN_PART, DASHBOARD_PART, OpenApiDocument
from gpuserve.front.requests import admin_codec
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.model.triton_config import model_config_body

_METRICS: Final = AnswerHead(200, ((b"content-type", prometheus.TEXT_TYPE),))
_OPEN_METRICS: Final = AnswerHead(200, ((b"content-type", prometheus.OPEN_METRICS_TYPE),))
_OPENAPI: Final = AnswerHead(200, (*responses.JSON_OK.headers, NOSNIFF))
#: The parts of the OpenAPI document for optional groups of endpoints.
_PARTS: Final = {ADMIN: ADMIN_PART, DASHBOARD: DASHBOARD_PART}
_ON_METRICS_PORT: Final = frozenset(
    {Endpoint.METRICS, Endpoint.SERVER_LIVE, Endpoint.SERVER_READY, Endpoint.SERVER_STARTED}
)


class HttpHandler:
    """The handler of every request that is not gRPC. Errors become responses.

    Args:
        service: The models and the server's state.
        requests: Runs endpoints that are coroutines.
        max_request_nbytes: The limit of a request body.
        policy: Decides who may use which endpoint.
        forwarding: The headers that become parameters.
        allowed_hosts: Host names that browsers may use.
        family: Endpoints with their own error format.
        live: The dashboard; None: disabled.
    """

    def __init__(
        self,
        service: InferenceService,
        requests: AsyncRequests,
        max_request_nbytes: int,
        policy: AccessPolicy,
        forwarding: HeaderForwarding | None = None,
        allowed_hosts: Iterable[str] = (),
        family: responses.EndpointFamily = responses.NO_FAMILY,
        live: LivePage | None = None,
    ) -> None:
        self._requests = requests
        self._hosts = AllowedHosts(allowed_hosts)
        self._policy = policy
        self._public_endpoints = frozenset(one for one in Endpoint if policy.is_public(one.access))
        self._infer_is_public = Endpoint.MODEL_INFER in self._public_endpoints
        has = {ADMIN: service.control.admin.is_open, DASHBOARD: live is not None}
        #: The optional groups of endpoints that this server has enabled.
        self._enabled = frozenset(group for group, is_there in has.items() if is_there)
        self._infer = InferHandler(service, max_request_nbytes, forwarding).accept
        generate = GenerateEndpoints(service, max_request_nbytes, forwarding)
        control = ManagementEndpoints(service)
        insight = StateEndpoints(service, self._enabled)
        self._family = family
        self._immediate = {**insight.immediate, **control.immediate, **family.immediate}
        self._awaiting: dict[Endpoint, responses.AsyncEndpoint] = {
            Endpoint.MODEL_GENERATE: generate.generate,
            Endpoint.MODEL_GENERATE_STREAM: generate.stream,
            **insight.awaiting,
            **control.awaiting,
            **admin_endpoints(service),
            **dashboard_endpoints(live, policy),
            **family.awaiting,
        }

    def accept(self, exchange: Exchange) -> BodyReceiver:
        head = exchange.head
        kind: InferHead | ForeignHost | bool | None = head.memo
        if kind is None:
            kind = head.memo = foreign_host(head.headers) or read_infer_head(head) or False
        if self._infer_is_public and type(kind) is InferHead:
            return self._infer(exchange, kind)
        if isinstance(kind, ForeignHost):
            if (misdirected := self._hosts.refusal(kind, address_of(exchange.endpoints))) is not None:
                return ImmediateReceiver(exchange, partial(self._error_format(head).refused, misdirected))
            kind = read_infer_head(head)
        route = match_route(head.method, head.raw_path, self._enabled)
        if isinstance(route, RouteError):
            return ImmediateReceiver(exchange, partial(self._error_format(head).refused, route))
        endpoint = route.endpoint
        if endpoint not in self._public_endpoints and (refusal := self._access_refusal(endpoint, exchange)):
            return ImmediateReceiver(exchange, lambda: refusal)
        if isinstance(kind, InferHead):
            return self._infer(exchange, kind)
        return self._call_endpoint(route, exchange)

    def refuse(self, error: RequestError, exchange: Exchange) -> BodyReceiver:
        """Return a body receiver that answers a request with an error, whatever its body says."""
        return ImmediateReceiver(exchange, partial(self._error_format(exchange.head).failure, error))

    def accept_metrics(self, exchange: Exchange) -> BodyReceiver:
        """Return the body receiver of a request to the metrics port: ``/metrics`` and health, for anybody."""
        route: Route | RouteError | None = None
        if (host := foreign_host(exchange.head.headers)) is not None:
            route = self._hosts.refusal(host, address_of(exchange.endpoints))
        route = route or match_route(exchange.head.method, exchange.head.raw_path)
        if isinstance(route, RouteError):
            return ImmediateReceiver(exchange, partial(responses.route_error_answer, route))
        if route.endpoint is Endpoint.ROOT:
            return ImmediateReceiver(exchange, lambda: json_answer(METRICS_INDEX))
        if route.endpoint not in _ON_METRICS_PORT:
            return ImmediateReceiver(exchange, partial(responses.route_error_answer, NOT_FOUND))
        return self._call_endpoint(route, exchange)

    def _call_endpoint(self, route: Route, exchange: Exchange) -> BodyReceiver:
        if (immediate := self._immediate.get(route.endpoint)) is not None:
            return ImmediateReceiver(exchange, partial(immediate, route))
        endpoint, failure = self._awaiting[route.endpoint], self._error_format(exchange.head).failure
        return self._requests.start(exchange, partial(_serve, endpoint, route, failure))

    def _access_refusal(self, endpoint: Endpoint, exchange: Exchange) -> HttpAnswer | None:
        access, headers = endpoint.access, exchange.head.headers
        local = is_local_client(address_of(exchange.endpoints), headers)
        if access.group == DASHBOARD and foreign_host(headers) is not None:
            local = False  # even if allowed_hosts has the name: a foreign page could read all data
        verdict = self._policy.judge(access, headers, is_local=local)
        if verdict is Verdict.ALLOWED:
            return None
        return self._error_format(exchange.head).forbidden(self._policy.refusal(access, verdict))

    def _error_format(self, head: Head) -> responses.ErrorFormat:
        family = self._family
        is_of_family = family.prefix and head.raw_path.startswith(family.prefix)
        return family.errors if is_of_family else responses.V2_ERRORS


async def _serve(
    endpoint: responses.AsyncEndpoint,
    route: Route,
    error_answer: Callable[[RequestError], HttpAnswer],
    request: AsyncRequest,
) -> None:
    try:
        answer = await endpoint(route, request)
    except Exception as error:
        if request.gone and isinstance(error, OSError):
            return
        answer = error_answer(client_error(error, f"serving {request.head.path}"))
    if answer is not None:
        answer.send(request.exchange)


class StateEndpoints:
    """The endpoints that show the state of the server and its models."""

    def __init__(self, service: InferenceService, enabled: Container[str]) -> None:
        self._service, models = service, service.models
        parts = [part for group, part in _PARTS.items() if group in enabled]
        self._openapi_document = OpenApiDocument(service.name, service.version, models.all_specs, parts)
        self.immediate: dict[Endpoint, responses.ImmediateEndpoint] = {
            Endpoint.SERVER_METADATA: lambda _: json_answer(service.metadata()),
            Endpoint.MODELS: lambda _: json_answer({"models": sorted(models.names())}),
            Endpoint.SERVER_LIVE: lambda _: health_answer("live", service.health.live),
            Endpoint.SERVER_READY: lambda _: health_answer("ready", service.health.ready),
            Endpoint.SERVER_STARTED: lambda _: health_answer("started", service.health.started),
            Endpoint.MODEL_METADATA: lambda route: json_answer(models.metadata(*route.version)),
            Endpoint.MODEL_READY: self._model_ready,
            Endpoint.MODEL_CONFIG: lambda route: json_answer(
                model_config_body(models.config(*route.version))
            ),
            Endpoint.GPUS: lambda _: json_answer(service.control.gpus.document()),
            Endpoint.DOCS: lambda _: HttpAnswer(*docs_page()),
        }
        self.awaiting: dict[Endpoint, responses.AsyncEndpoint] = {
            Endpoint.MODEL_STATISTICS: self._statistics,
            Endpoint.METRICS: self._metrics,
            Endpoint.OPENAPI: self._openapi,
        }

    async def _statistics(self, route: Route, _request: AsyncRequest) -> HttpAnswer:
        if not route.model_name:
            return json_answer(await self._service.statistics[0].page())
        return json_answer(admin_codec.statistics_json(self._service.models.statistics(*route.version)))

    async def _metrics(self, _route: Route, request: AsyncRequest) -> HttpAnswer:
        accepted = [value for name, value in request.head.headers if name == b"accept"]
        if any(b"application/openmetrics-text" in one for one in accepted):
            return HttpAnswer(_OPEN_METRICS, await self._service.metrics_page.open_metrics_page())
        return HttpAnswer(_METRICS, await self._service.metrics_page.page())

    def _model_ready(self, route: Route) -> HttpAnswer:
        self._service.models.find(*route.version)
        if self._service.health.model_ready(*route.version):
            return health_answer("ready", True)
        why = self._service.health.why_not_ready(*route.version)
        return json_answer({"error": f"Model version not ready{why and f': {why}'}"}, 400)

    async def _openapi(self, _route: Route, _request: AsyncRequest) -> HttpAnswer:
        return HttpAnswer(_OPENAPI, await self._openapi_document.body())
