"""Inference over HTTP/1 on the server of our own, without ASGI: no task, no coroutine, calls all the way.

What is rare about a request (compression, a decoupled model, a model that is not there) is left to ``http``,
by saying None. Answers are the same, to the byte.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from gpuserve.errors import RequestError
from gpuserve.front.driver import Driver
from gpuserve.front.endpoint import http_codec, http_encoding, routes
from gpuserve.front.endpoint.forwarding import HeaderForwarding
from gpuserve.front.endpoint.http_answers import Answer, defect, failure, too_large
from gpuserve.front.endpoint.http_encoding import IDENTITY
from gpuserve.front.endpoint.http_header import OutputForm
from gpuserve.front.endpoint.routes import Endpoint, Route
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.endpoint.v2 import InferRequest, InferResponse
from gpuserve.front.plane.http_ingest import HttpBodyScanner
from gpuserve.front.plane.scatter import Answer as InferAnswer
from gpuserve.front.scheduler.pending import PendingRequest
from gpuserve.front.server.exchange import Exchange, Head, Piece
from gpuserve.front.server.http1_exchange import Http1Exchange
from gpuserve.front.server.http1_response import whole_head

logger = logging.getLogger(__name__)

_TYPE: Final = b"content-type"
_GRPC: Final = b"application/grpc"
_HEADER_LENGTH: Final = b"inference-header-content-length"


class _Reading(NamedTuple):
    """What a head says; no ``route``: the request is not for this door."""

    route: Route | None
    header_length: str | None = None


class HttpDirectDoor:
    """Answers the inference requests that need nothing special."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None = None
    ) -> None:
        self.service = service
        self.max_request_nbytes = max_request_nbytes
        self.forwarding = forwarding

    def __call__(self, exchange: Exchange) -> InferPost | None:
        """The sink of a request, or None for what is to be answered otherwise."""
        head = exchange.head
        reading: _Reading | None = head.memo
        if reading is None:
            reading = head.memo = _read(head)
        route = reading.route
        if route is None or type(exchange) is not Http1Exchange:
            return None
        try:
            driver = self.service.model(route.model_name, route.model_version)
        except RequestError:
            return None
        if driver.spec.decoupled:
            return None
        return InferPost(self, exchange, driver, route, reading.header_length)


class InferPost:
    """One request: reads the body, submits what it says, and sends the answer when it is called back."""

    __slots__ = (
        "_door",
        "_driver",
        "_exchange",
        "_form",
        "_header_length",
        "_pending",
        "_route",
        "_scanner",
        "_through",
    )

    _form: OutputForm

    def __init__(
        self,
        door: HttpDirectDoor,
        exchange: Http1Exchange,
        driver: Driver,
        route: Route,
        header_length: str | None,
    ) -> None:
        self._door = door
        self._exchange = exchange
        self._driver = driver
        self._route = route
        self._header_length = header_length
        self._scanner: HttpBodyScanner | None = None
        self._pending: PendingRequest | None = None
        #: Answered, or given up.
        self._through = False

    # ---- the request ----------------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        """The next part of the body."""
        if self._through:
            return
        try:
            if end and self._scanner is None:
                self._take_whole(data)
            else:
                self._scan(data, end=end)
        except RequestError as error:
            self._fail(failure(error))
        except Exception:
            logger.exception("defect while serving %s", self._exchange.head.path[:256])
            self._fail(defect())

    def abandon(self) -> None:
        """The client is gone."""
        self._through = True
        self._drop_blocks()
        if self._pending is not None:
            self._pending.take_back()

    def _take_whole(self, body: Piece) -> None:
        most = self._door.max_request_nbytes
        if len(body) > most:
            raise too_large(len(body), most)
        if len(body) >= http_codec.LARGE_NBYTES:
            self._scan(body, end=True)
            return
        name, version = self._route.model_name, self._route.model_version
        spec, length = self._driver.spec, self._header_length
        self._submit(*http_codec.parse_infer_request(name, version, bytes(body), length, spec))

    def _scan(self, data: Piece, *, end: bool) -> None:
        """Place a large body, or one that comes in parts."""
        scanner = self._scanner
        if scanner is None:
            scanner = self._scanner = self._made_scanner()
        scanner.feed(data)
        self._exchange.consumed(len(data))
        if end:
            found = scanner.finish()
            self._scanner = None
            self._submit(*found)

    def _made_scanner(self) -> HttpBodyScanner:
        driver, route = self._driver, self._route
        return HttpBodyScanner(
            route.model_name,
            route.model_version,
            self._header_length,
            self._exchange.head.content_length,
            lambda _, nbytes: driver.allocate(nbytes),
            self._door.max_request_nbytes,
            driver.spec,
        )

    def _submit(self, request: InferRequest, form: OutputForm) -> None:
        door = self._door
        self._form = form
        if door.forwarding is not None:
            door.forwarding.add_to(request, self._exchange.head.headers)
        pending = door.service.submit(request, on_answer=self._answer)
        if not self._through:
            self._pending = pending

    # ---- the answer -----------------------------------------------------------------------

    def _answer(self, pending: PendingRequest, answer: InferAnswer) -> None:
        """Called once the answer is there."""
        if not isinstance(answer, InferResponse):
            assert answer is not None, "only a decoupled model ends without an answer"
            self._fail(failure(answer))
            return
        try:
            if pending.request.class_counts:
                self._door.service.classify(answer, pending)
            headers, pieces = http_codec.encode_infer_response(answer, self._form)
        except RequestError as error:
            answer.close()
            self._fail(failure(error))
        except Exception:
            answer.close()
            logger.exception("defect while serving %s", self._exchange.head.path[:256])
            self._fail(defect())
        else:
            self._through = True
            self._pending = None
            self._exchange.answer(whole_head(200, headers), pieces, answer.close)

    def _fail(self, answer: Answer) -> None:
        """Answer with an error."""
        if not self._through:
            self._through = True
            self._pending = None
            self._drop_blocks()
            status, headers, body = answer
            self._exchange.answer(whole_head(status, headers), (body,))

    def _drop_blocks(self) -> None:
        """Free what a body that did not become a request was placed in."""
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            self._driver.free(scanner.blocks)


def _read(head: Head) -> _Reading:
    route = routes.match(head.method, head.raw_path)
    if not isinstance(route, Route) or route.endpoint is not Endpoint.MODEL_INFER:
        return _Reading(None)
    headers: dict[bytes, bytes] = dict(head.headers)
    # Where there are several types, the doors have a rule for which of them counts.
    if _is_coded(headers) or any(one[0] == _TYPE and one[1].startswith(_GRPC) for one in head.headers):
        return _Reading(None)
    length = headers.get(_HEADER_LENGTH)
    return _Reading(route, None if length is None else length.decode("latin-1"))


def _is_coded(headers: dict[bytes, bytes]) -> bool:
    """Whether the body is compressed, or the response's is to be."""
    if headers.get(b"content-encoding", IDENTITY.encode()) != IDENTITY.encode():
        return True
    return http_encoding.negotiate(headers.get(b"accept-encoding", b"").decode("latin-1")) != IDENTITY
