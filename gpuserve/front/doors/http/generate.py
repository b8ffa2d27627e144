"""``/generate`` and ``/generate_stream``: inference by plain JSON, the second as server-sent events. Both
take any model; a stream is as long as the model makes it. Part of the HTTP door.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

from gpuserve.errors import Internal, InvalidArgument, RequestError
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http import generate_codec
from gpuserve.front.doors.http.answers import error_body, json_answer
from gpuserve.front.doors.http.encoding import IDENTITY
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.memory.intake import Share
from gpuserve.front.memory.scatter import Answer
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2.status import STATUS
from gpuserve.front.v2.types import InferRequest, InferResponse

_STREAM_HEADERS: Final = ((b"content-type", generate_codec.EVENT_STREAM), (b"cache-control", b"no-cache"))
_NO_CODING: Final = frozenset({b"", IDENTITY.encode()})


class ResponseQueue:
    """The responses to one request in their order. Closing it takes the request back, and closes the rest."""

    def __init__(self, service: InferenceService, request: InferRequest) -> None:
        self._came: deque[InferResponse] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._error: RequestError | None = None
        self._ended = False
        decoupled = service.models.find(request.model_name, request.model_version).spec.decoupled
        self._pending = service.inference.submit(
            request, self._on_response if decoupled else None, on_answer=self._on_answer
        )

    async def next(self, client: AwaitedRequest) -> InferResponse | None:
        """The next response, the taker's to close; None after the last; RequestError or ClientGone."""
        while not (self._came or self._ended):
            self._changed = asyncio.get_running_loop().create_future()
            await client.unless_gone(self._changed)
        if self._came:
            return self._came.popleft()
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        if not self._ended:
            self._pending.take_back()
        for response in self._came:
            response.close()
        self._came.clear()

    def _on_response(self, response: InferResponse) -> None:
        self._came.append(response)
        self._wake()

    def _on_answer(self, pending: PendingRequest, answer: Answer) -> None:
        self._ended = True
        if isinstance(answer, InferResponse):
            self._came.append(answer)
        else:
            self._error = answer
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class GenerateEndpoints:
    """``/generate`` and ``/generate_stream``, for requests of at most ``max_request_nbytes``."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
    ) -> None:
        self._service = service
        self._receptions = service.control.trace.receptions
        self._max_request_nbytes = max_request_nbytes
        self._forwarding = forwarding

    async def generate(self, route: Route, client: AwaitedRequest) -> None:
        """Send the one response, as JSON; RequestError: it failed, or there is not exactly one."""
        bodies: list[bytes] = []
        request = await self._read(route, client)
        with _traced(request), closing(ResponseQueue(self._service, request)) as responses:
            while len(bodies) < 2 and (response := await responses.next(client)) is not None:
                bodies.append(_json_of(response))
            if len(bodies) != 1:
                raise Internal(generate_codec.ONE_RESPONSE)
            with _sending(request):
                json_answer(bodies[0]).send(client.exchange)

    async def stream(self, route: Route, client: AwaitedRequest) -> None:
        """Send each response as an event; a first error is a RequestError, later ones are events."""
        exchange = client.exchange
        request = await self._read(route, client)
        with _traced(request), closing(ResponseQueue(self._service, request)) as responses:
            try:
                while (response := await responses.next(client)) is not None:
                    event = generate_codec.event(_json_of(response))
                    with _sending(request):
                        if not exchange.started:
                            exchange.start(200, _STREAM_HEADERS)
                        exchange.send(event)
                    await exchange.room()
            except RequestError as error:
                if error.untried:  # as it is where it is refused here
                    raise
                if not exchange.started:
                    exchange.start(STATUS[error.code][0], _STREAM_HEADERS)
                exchange.send(generate_codec.event(error_body(str(error))))
        if not exchange.started:  # a stream without a response is one as well
            exchange.start(200, _STREAM_HEADERS)
        exchange.finish()

    async def _read(self, route: Route, client: AwaitedRequest) -> InferRequest:
        """The whole request; RequestError: the model does not exist, or the body is none for it."""
        headers = client.head.headers
        reception = self._receptions.of(headers, grpc=False)
        spec = self._service.models.find(route.model_name, route.model_version).spec
        if dict(headers).get(b"content-encoding", b"") not in _NO_CODING:
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        share = Share(self._service.intake, client.exchange.ends.source)
        try:
            body = await client.body(self._max_request_nbytes, hold=share.hold)
        finally:
            share.hold(0)
        request = generate_codec.parse_generate_request(body, spec, route.model_version)
        if self._forwarding is not None:
            self._forwarding.add_to(request, client.head)
        if reception is not None:
            reception.read()
            request.reception = reception
        request.sender = client.exchange
        return request


def _json_of(response: InferResponse) -> bytes:
    with closing(response):
        return generate_codec.response_json(response)


@contextmanager
def _traced(request: InferRequest) -> Iterator[None]:
    """Nothing of a request that is traced is sent after this."""
    try:
        yield
    finally:
        if request.reception is not None:
            request.reception.close()


@contextmanager
def _sending(request: InferRequest) -> Iterator[None]:
    """Note when something is sent, where the request is traced."""
    if request.reception is not None:
        request.reception.sending()
    yield
    if request.reception is not None:
        request.reception.sent()
