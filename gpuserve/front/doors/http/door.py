"""The HTTP door: judges who may ask once a request's head is there, and gives it the sink that answers. A
table says which function answers which endpoint of v2; those that only tell something are here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Final

from gpuserve.config.settings.values import ADMIN, DASHBOARD
from gpuserve.core.errors import RequestError
from gpuserve.front.doors.access import routes
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.failures import error_to_tell
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.hosts import AllowedHosts, ForeignHost, foreign_host
from gpuserve.front.doors.access.peers import address_of, is_local
from gpuserve.front.doors.access.restrictions import Policy, Verdict
from gpuserve.front.doors.access.routes import Refusal, Route
from gpuserve.front.doors.http.admin import admin_endpoints
from gpuserve.front.doors.http.answers import (
    JSON_OK,
    HttpAnswer,
    Reply,
    health_answer,
    json_answer,
    refused,
)
from gpuserve.front.doors.http.control import Awaiting, ControlEndpoints, Immediate
from gpuserve.front.doors.http.dashboard import METRICS_INDEX, dashboard_endpoints
from gpuserve.front.doors.http.docs_page import NOSNIFF, page
from gpuserve.front.doors.http.family import NO_FAMILY, V2_ERRORS, ErrorForm, Family
from gpuserve.front.doors.http.generate import GenerateEndpoints
from gpuserve.front.doors.http.inference import HttpInference, InferHead, read_head
from gpuserve.front.doors.openapi.description import ADMIN_PART, PAGE_PART, Description
from gpuserve.front.exchange.awaited import AwaitedRequest, AwaitedRequests
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Head, Sink
from gpuserve.front.observability.live.live_feed import LivePage
from gpuserve.front.requests import admin_codec
from gpuserve.front.requests.model_config import model_config_body
from gpuserve.front.service.inference_service import InferenceService

_METRICS: Final = AnswerHead(200, ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),))
_DESCRIPTION: Final = AnswerHead(200, (*JSON_OK.headers, NOSNIFF))
#: What is described of groups of endpoints that not every server has.
_PARTS: Final = {ADMIN: ADMIN_PART, DASHBOARD: PAGE_PART}
_ON_METRICS_PORT: Final = frozenset(
    {Endpoint.METRICS, Endpoint.SERVER_LIVE, Endpoint.SERVER_READY, Endpoint.SERVER_STARTED}
)


class HttpDoor:
    """Accepts every request that is not gRPC; ``requests`` runs what awaits. What goes wrong is an answer.
    Without ``live`` there is no live page.
    """

    def __init__(
        self,
        service: InferenceService,
        requests: AwaitedRequests,
        max_request_nbytes: int,
        policy: Policy,
        forwarding: HeaderForwarding | None = None,
        allowed_hosts: Iterable[str] = (),
        family: Family = NO_FAMILY,
        live: LivePage | None = None,
    ) -> None:
        self._requests = requests
        self._hosts = AllowedHosts(allowed_hosts)
        self._policy = policy
        self._open = frozenset(one for one in Endpoint if policy.is_open(one.access))
        self._infers_openly = Endpoint.MODEL_INFER in self._open
        self._opened = _opened(service, live)
        self._infer = HttpInference(service, max_request_nbytes, forwarding).accept
        generate = GenerateEndpoints(service, max_request_nbytes, forwarding)
        control = ControlEndpoints(service)
        insight = InsightEndpoints(service, self._opened)
        self._family = family
        self._immediate: dict[Endpoint, Immediate] = {
            **insight.immediate,
            **control.immediate,
            **family.immediate,
        }
        self._awaiting: dict[Endpoint, Awaiting] = {
            Endpoint.MODEL_GENERATE: generate.generate,
            Endpoint.MODEL_GENERATE_STREAM: generate.stream,
            **insight.awaiting,
            **control.awaiting,
            **admin_endpoints(service),
            **dashboard_endpoints(live, policy),
            **family.awaiting,
        }

    def accept(self, exchange: Exchange) -> Sink:
        head = exchange.head
        asked: InferHead | ForeignHost | bool | None = head.memo
        if asked is None:
            asked = head.memo = foreign_host(head.headers) or read_head(head) or False
        if self._infers_openly and type(asked) is InferHead:
            return self._infer(exchange, asked)
        if isinstance(asked, ForeignHost):
            if (misdirected := self._hosts.refusal(asked, address_of(exchange.ends))) is not None:
                return Reply(exchange, partial(self._errors(head).refused, misdirected))
            asked = read_head(head)
        route = routes.match(head.method, head.raw_path, self._opened)
        if isinstance(route, Refusal):
            return Reply(exchange, partial(self._errors(head).refused, route))
        if (
            route.endpoint not in self._open
            and (refusal := self._judged(route.endpoint, exchange)) is not None
        ):
            return Reply(exchange, lambda: refusal)
        if isinstance(asked, InferHead):
            return self._infer(exchange, asked)
        return self._answered(route, exchange)

    def refuse(self, error: RequestError, exchange: Exchange) -> Sink:
        """Return the sink that answers a request with an error, whatever its body says."""
        return Reply(exchange, partial(self._errors(exchange.head).failure, error))

    def accept_metrics(self, exchange: Exchange) -> Sink:
        """The sink of a request to the metrics port, which has ``/metrics`` and health for anybody."""
        route: Route | Refusal | None = None
        if (host := foreign_host(exchange.head.headers)) is not None:
            route = self._hosts.refusal(host, address_of(exchange.ends))
        route = route or routes.match(exchange.head.method, exchange.head.raw_path)
        if isinstance(route, Refusal):
            return Reply(exchange, partial(refused, route))
        if route.endpoint is Endpoint.ROOT:
            return Reply(exchange, lambda: json_answer(METRICS_INDEX))
        if route.endpoint not in _ON_METRICS_PORT:
            return Reply(exchange, partial(refused, routes.NOT_FOUND))
        return self._answered(route, exchange)

    def _answered(self, route: Route, exchange: Exchange) -> Sink:
        if (immediate := self._immediate.get(route.endpoint)) is not None:
            return Reply(exchange, partial(immediate, route))
        return self._requests.begin(
            exchange,
            partial(_serve, self._awaiting[route.endpoint], route, self._errors(exchange.head).failure),
        )

    def _judged(self, endpoint: Endpoint, exchange: Exchange) -> HttpAnswer | None:
        """The refusal of who may not ask for an endpoint."""
        access, headers = endpoint.access, exchange.head.headers
        local = is_local(address_of(exchange.ends), headers)
        if access.group == DASHBOARD and foreign_host(headers) is not None:
            local = False  # whatever allowed_hosts says: the page of a stranger could read all that it tells
        verdict = self._policy.judge(access, headers, is_local=local)
        return (
            None
            if verdict is Verdict.ALLOWED
            else self._errors(exchange.head).forbidden(self._policy.refusal(access, verdict))
        )

    def _errors(self, head: Head) -> ErrorForm:
        family = self._family
        return family.errors if family.prefix and head.raw_path.startswith(family.prefix) else V2_ERRORS


def _opened(service: InferenceService, live: LivePage | None) -> frozenset[str]:
    """The groups of endpoints that this server has of those that not every one has."""
    has = {ADMIN: service.control.admin.is_open, DASHBOARD: live is not None}
    return frozenset(group for group, is_there in has.items() if is_there)


async def _serve(
    endpoint: Awaiting,
    route: Route,
    told: Callable[[RequestError], HttpAnswer],
    request: AwaitedRequest,
) -> None:
    """Have an endpoint that awaits answer a request."""
    try:
        answer = await endpoint(route, request)
    except Exception as error:
        if request.gone and isinstance(error, OSError):
            return
        answer = told(error_to_tell(error, f"serving {request.head.path}"))
    if answer is not None:
        answer.send(request.exchange)


class InsightEndpoints:
    """The endpoints that tell of the server and its models."""

    def __init__(self, service: InferenceService, opened: Container[str]) -> None:
        self._service, models = service, service.models
        parts = [part for group, part in _PARTS.items() if group in opened]
        self._description = Description(service.name, service.version, models.all_specs, parts)
        self.immediate: dict[Endpoint, Immediate] = {
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
            Endpoint.DOCS: lambda _: HttpAnswer(page().head, page().body),
        }
        self.awaiting: dict[Endpoint, Awaiting] = {
            Endpoint.MODEL_STATISTICS: self._statistics,
            Endpoint.METRICS: self._metrics,
            Endpoint.OPENAPI: self._openapi,
        }

    async def _statistics(self, route: Route, _request: AwaitedRequest) -> HttpAnswer:
        if not route.model_name:
            return json_answer(await self._service.statistics[0].page())
        return json_answer(admin_codec.statistics_json(self._service.models.statistics(*route.version)))

    async def _metrics(self, _route: Route, _request: AwaitedRequest) -> HttpAnswer:
        return HttpAnswer(_METRICS, await self._service.metrics_page.page())

    def _model_ready(self, route: Route) -> HttpAnswer:
        self._service.models.find(*route.version)
        if self._service.health.model_ready(*route.version):
            return health_answer("ready", True)
        why = self._service.health.why_not_ready(*route.version)
        return json_answer({"error": f"Model version not ready{why and f': {why}'}"}, 400)

    async def _openapi(self, _route: Route, _request: AwaitedRequest) -> HttpAnswer:
        return HttpAnswer(_DESCRIPTION, await self._description.body())
