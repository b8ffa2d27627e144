"""The HTTP door over ASGI: the v2 endpoints. Converts, calls the service, converts back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gpuserve.errors import RequestError, Unimplemented
from gpuserve.front.endpoint import (
    http_bodies,
    http_codec,
    http_encoding,
    routes,
    statistics_codec,
)
from gpuserve.front.endpoint.asgi import Receive, Scope, Send
from gpuserve.front.endpoint.closing_peers import Peer
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.docs_page import NOSNIFF, page
from gpuserve.front.endpoint.forwarding import HeaderForwarding
from gpuserve.front.endpoint.http_admin import admin_endpoints
from gpuserve.front.endpoint.http_answers import (
    Answer,
    content_length,
    defect,
    failure,
    json_answer,
    live_answer,
    ready_answer,
    started_answer,
    too_large,
)
from gpuserve.front.endpoint.http_encoding import IDENTITY
from gpuserve.front.endpoint.http_generate import GenerateDoor
from gpuserve.front.endpoint.http_header import OutputForm
from gpuserve.front.endpoint.http_json import compact
from gpuserve.front.endpoint.http_regions import region_endpoints
from gpuserve.front.endpoint.http_repository import repository_endpoints
from gpuserve.front.endpoint.http_settings import settings_endpoints
from gpuserve.front.endpoint.model_config import model_config, model_config_body
from gpuserve.front.endpoint.offload import offload
from gpuserve.front.endpoint.openapi import Description
from gpuserve.front.endpoint.response_body import send_body
from gpuserve.front.endpoint.routes import Endpoint, Refusal, Route
from gpuserve.front.endpoint.service import EXTENSIONS, InferenceService
from gpuserve.front.endpoint.v2 import InferRequest
from gpuserve.front.plane.http_ingest import HttpBodyScanner

logger = logging.getLogger(__name__)

_METRICS_TYPE: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_GENERATE: Final = frozenset({Endpoint.MODEL_GENERATE, Endpoint.MODEL_GENERATE_STREAM})
_ON_METRICS_PORT: Final = frozenset(
    {Endpoint.METRICS, Endpoint.SERVER_LIVE, Endpoint.SERVER_READY, Endpoint.SERVER_STARTED}
)
_NO_STREAM: Final = "HTTP end point doesn't support models with decoupled transaction policy"
_HEADER_LENGTH: Final = b"inference-header-content-length"


class HttpDoor:
    """The ASGI application for everything that is not gRPC."""

    def __init__(
        self,
        service: InferenceService,
        watch: DisconnectWatch,
        max_request_nbytes: int,
        forwarding: HeaderForwarding | None = None,
    ) -> None:
        self._service = service
        self._forwarding = forwarding
        self._watch = watch
        self._max_request_nbytes = max_request_nbytes
        self._description = Description(service.name, service.version, admin=service.admin.is_open)
        self._generate = GenerateDoor(service, watch, max_request_nbytes)
        #: By the body of their answer.
        self._controls = {
            **settings_endpoints(service),
            **repository_endpoints(service),
            **region_endpoints(service),
        }
        self._endpoints: dict[Endpoint, Callable[[Route, Receive], Awaitable[Answer]]] = {
            Endpoint.SERVER_METADATA: self._server_metadata,
            Endpoint.SERVER_LIVE: self._server_live,
            Endpoint.SERVER_READY: self._server_ready,
            Endpoint.SERVER_STARTED: self._server_started,
            Endpoint.MODEL_METADATA: self._model_metadata,
            Endpoint.MODEL_READY: self._model_ready,
            Endpoint.MODEL_CONFIG: self._model_config,
            Endpoint.MODEL_STATISTICS: self._model_statistics,
            Endpoint.GPUS: self._gpus,
            Endpoint.METRICS: self._metrics,
            **dict.fromkeys(self._controls, self._control),
            **admin_endpoints(service),
            Endpoint.OPENAPI: self._openapi,
            Endpoint.DOCS: self._docs,
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request."""
        return self.serve(routes.match(scope["method"], raw_path(scope)), scope, receive, send)

    async def serve(self, route: Route | Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request of a route. Whatever goes wrong is its answer; the connection goes on."""
        try:
            if isinstance(route, Refusal):
                await _send(send, _refusal(route))
            elif route.endpoint is Endpoint.MODEL_INFER:
                await self._infer(route, scope, receive, send)
            elif route.endpoint in _GENERATE:
                await self._generate_by(route, scope, receive, send)
            else:
                await _send(send, await self._endpoints[route.endpoint](route, receive))
        except RequestError as error:
            await _send(send, failure(error))
        except Exception:
            logger.exception("defect while serving %s", scope["path"][:256])
            await _send(send, defect())

    async def metrics_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of the metrics port: ``/metrics`` and health, nothing else."""
        route = routes.match(scope["method"], raw_path(scope))
        if isinstance(route, Route) and route.endpoint not in _ON_METRICS_PORT:
            route = routes.NOT_FOUND
        if isinstance(route, Refusal):
            await _send(send, _refusal(route))
        else:
            await _send(send, await self._endpoints[route.endpoint](route, receive))

    # ---- inference ------------------------------------------------------------------------

    async def _infer(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request, form = await self._read_request(route, headers, receive)
        if self._forwarding is not None:
            self._forwarding.add_to(request, scope["headers"])
        pending = self._service.submit(request)
        response = await self._watch.answer(pending, receive, _peer(scope))
        if response is None:
            return
        if request.class_counts:
            self._service.classify(response, pending)
        try:
            answer_headers, pieces = http_codec.encode_infer_response(response, form)
            accepted = headers.get(b"accept-encoding")
            if accepted and (coding := http_encoding.negotiate(accepted.decode("latin-1"))) != IDENTITY:
                nbytes, compress = sum(map(len, pieces)), http_encoding.compress
                answer_headers, pieces = await offload(nbytes, compress, coding, answer_headers, pieces)
            await send({"type": "http.response.start", "status": 200, "headers": answer_headers})
            await send_body(send, pieces)
        except OSError:  # what ASGI's send() raises once the client is gone
            pass
        finally:
            response.close()

    async def _generate_by(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        coding = _headers(scope).get(b"content-encoding", b"").decode("latin-1")
        request = await self._generate.read_request(route, coding, receive)
        if self._forwarding is not None:
            self._forwarding.add_to(request, scope["headers"])
        peer = _peer(scope)
        if route.endpoint is Endpoint.MODEL_GENERATE:
            await _send(send, json_answer(200, await self._generate.generate(request, receive, peer)))
            return
        with contextlib.suppress(OSError):  # the client is gone
            await self._generate.generate_stream(request, receive, peer, send)

    async def _read_request(
        self, route: Route, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[InferRequest, OutputForm]:
        driver = self._service.model(route.model_name, route.model_version)
        if driver.spec.decoupled:
            raise Unimplemented(f"{_NO_STREAM}: model '{driver.spec.name}' gives any number of responses")
        encoding = headers.get(b"content-encoding")
        coding = http_encoding.request_coding(encoding.decode("latin-1")) if encoding else IDENTITY
        header_length = headers.get(_HEADER_LENGTH)
        text = None if header_length is None else header_length.decode("latin-1")
        message = await _next(receive)
        body = message.get("body", b"")
        if message.get("more_body", False):
            return await self._ingest(route, headers, text, coding, body, receive)
        if len(body) > self._max_request_nbytes:
            raise too_large(len(body), self._max_request_nbytes)
        plain: bytes | memoryview = body
        if coding != IDENTITY:
            limit = self._max_request_nbytes
            plain = await offload(len(body), http_encoding.decompress, coding, body, limit)
        return http_codec.parse_infer_request(route.model_name, route.model_version, plain, text, driver.spec)

    async def _ingest(
        self,
        route: Route,
        headers: dict[bytes, bytes],
        header_length: str | None,
        coding: str,
        body: bytes,
        receive: Receive,
    ) -> tuple[InferRequest, OutputForm]:
        driver = self._service.model(route.model_name, route.model_version)
        identity = coding == IDENTITY
        scanner = HttpBodyScanner(
            route.model_name,
            route.model_version,
            header_length,
            content_length(headers) if identity else None,
            lambda _, nbytes: driver.allocate(nbytes),
            self._max_request_nbytes,
            driver.spec,
        )
        inflater = None if identity else http_encoding.Decompressor(coding, self._max_request_nbytes)
        blocks = scanner.blocks
        try:
            more = True
            while True:
                if inflater is not None:
                    body = await offload(len(body), inflater.feed, body)
                scanner.feed(body)
                if not more:
                    break
                message = await _next(receive)
                body, more = message.get("body", b""), message.get("more_body", False)
            if inflater is not None:
                inflater.finish()
            finished = scanner.finish()
        except BaseException:
            driver.free(blocks)
            raise
        return finished

    # ---- everything else ------------------------------------------------------------------

    async def _server_metadata(self, route: Route, receive: Receive) -> Answer:
        service = self._service
        return json_answer(200, http_bodies.server_metadata_body(service.name, service.version, EXTENSIONS))

    async def _server_live(self, route: Route, receive: Receive) -> Answer:
        return live_answer(self._service.live)

    async def _server_ready(self, route: Route, receive: Receive) -> Answer:
        return ready_answer(self._service.ready)

    async def _server_started(self, route: Route, receive: Receive) -> Answer:
        return started_answer(self._service.started)

    async def _model_metadata(self, route: Route, receive: Receive) -> Answer:
        found = self._service.model_metadata(route.model_name, route.model_version)
        batch = (-1,) if found.batches else ()
        body = http_bodies.model_metadata_body(
            found.spec.name,
            found.versions,
            found.platform,
            [one._replace(shape=batch + one.shape) for one in found.spec.inputs],
            [one._replace(shape=batch + one.shape) for one in found.spec.outputs],
        )
        return json_answer(200, body)

    async def _model_ready(self, route: Route, receive: Receive) -> Answer:
        self._service.model(route.model_name, route.model_version)
        ready = self._service.model_ready(route.model_name, route.model_version)
        if ready:
            return json_answer(200, http_bodies.ready_body(True))
        why = self._service.why_not_ready(route.model_name, route.model_version)
        return json_answer(400, http_bodies.error_body(f"Model version not ready{why and f': {why}'}"))

    async def _model_config(self, route: Route, receive: Receive) -> Answer:
        spec = self._service.model(route.model_name, route.model_version).spec
        versions = [one.version for one in self._service.served_versions(spec.name)]
        return json_answer(200, model_config_body(model_config(spec, versions)))

    async def _model_statistics(self, route: Route, receive: Receive) -> Answer:
        entries = self._service.statistics(route.model_name, route.model_version)
        return json_answer(200, statistics_codec.json_body(entries))

    async def _gpus(self, route: Route, receive: Receive) -> Answer:
        return json_answer(200, compact(self._service.gpus.document()).encode())

    async def _metrics(self, route: Route, receive: Receive) -> Answer:
        page = self._service.metrics_page.page()
        return 200, [_METRICS_TYPE, (b"content-length", b"%d" % len(page))], page

    async def _control(self, route: Route, receive: Receive) -> Answer:
        return json_answer(200, await self._controls[route.endpoint](route, receive))

    async def _openapi(self, route: Route, receive: Receive) -> Answer:
        described = self._description.body(driver.spec for driver in self._service.models())
        status, headers, body = json_answer(200, described)
        return status, [*headers, NOSNIFF], body

    async def _docs(self, route: Route, receive: Receive) -> Answer:
        return 200, list(page().headers), page().body


def raw_path(scope: Scope) -> bytes:
    """The path as it was sent. A server need not tell it; then it is made of the decoded one."""
    return scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()


def _peer(scope: Scope) -> Peer | None:
    """The connection, where only the kernel can tell that its client went away."""
    client, server = scope.get("client"), scope.get("server")
    if scope["http_version"] != "1.1" or not client or not server or not server[1]:
        return None
    return client[0], client[1], server[1]


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


async def _next(receive: Receive) -> dict[str, Any]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise asyncio.CancelledError
    return message


def _refusal(refusal: Refusal) -> Answer:
    status, headers, body = json_answer(refusal.status, http_bodies.error_body(refusal.text))
    if refusal.allow:
        headers.append((b"allow", refusal.allow.encode()))
    return status, headers, body


async def _send(send: Send, answer: Answer) -> None:
    status, headers, body = answer
    with contextlib.suppress(OSError):  # the client is gone
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
