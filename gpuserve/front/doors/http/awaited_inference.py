"""Inference that a coroutine awaits: the whole body of a request is read, and its responses are taken one by
one. Part of the HTTP door; what the bodies mean is for the endpoints.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final, TypeVar

from gpuserve.errors import InvalidArgument, RequestError
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.http.encoding import IDENTITY
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.exchange.exchange import Exchange
from gpuserve.front.memory.intake import Share
from gpuserve.front.memory.scatter import Answer
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2.types import InferRequest, InferResponse

Made = TypeVar("Made", bound=InferRequest)
#: Proxies that collect answers are told not to (nginx).
_EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
#: So many events leave in one piece at most.
_MAX_JOINED: Final = 64
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

    @property
    def is_empty(self) -> bool:
        return not self._came

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


class RequestReader:
    """Reads the requests of endpoints that await, of at most ``max_request_nbytes``."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
    ) -> None:
        self._intake = service.intake
        self._receptions = service.control.trace.receptions
        self._max_request_nbytes = max_request_nbytes
        self._forwarding = forwarding

    async def read(self, client: AwaitedRequest, made_of: Callable[[bytes], Made]) -> Made:
        """The request that ``made_of`` makes of the whole body. Raises RequestError: it is too long or coded,
        or what ``made_of`` raises; ClientGone.
        """
        headers = client.head.headers
        reception = self._receptions.of(headers, grpc=False)
        if dict(headers).get(b"content-encoding", b"") not in _NO_CODING:
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        share = Share(self._intake, client.exchange.ends.source)
        try:
            body = await client.body(self._max_request_nbytes, hold=share.hold)
        finally:
            share.hold(0)
        request = made_of(body)
        if self._forwarding is not None:
            self._forwarding.add_to(request, client.head)
        if reception is not None:
            reception.read()
            request.reception = reception
        request.sender = client.exchange
        return request


async def send_events(
    client: AwaitedRequest,
    request: InferRequest,
    responses: ResponseQueue,
    document_of: Callable[[InferResponse], bytes],
) -> RequestError | None:
    """Send each response as a server-sent event, those that are there together in one piece. The error that
    ended the stream, None for none; nothing may have been sent then. Raises ClientGone.
    """
    exchange = client.exchange
    unsent: list[bytes] = []
    failure = None
    while failure is None:
        try:
            if (response := await responses.next(client)) is None:
                break
            unsent.append(event(_document(response, document_of)))
        except RequestError as error:
            failure = error
        if unsent and (responses.is_empty or failure or len(unsent) == _MAX_JOINED):
            with sending(request):
                start_events(exchange)
                exchange.send(b"".join(unsent))
            unsent.clear()
            await exchange.room()
    return failure


def start_events(exchange: Exchange, status: int = 200) -> None:
    """Begin a response of server-sent events, unless it has begun."""
    if not exchange.started:
        exchange.start(status, _EVENT_HEADERS)


def _document(response: InferResponse, document_of: Callable[[InferResponse], bytes]) -> bytes:
    with closing(response):
        return document_of(response)


def event(data: bytes) -> bytes:
    """A server-sent event that holds these bytes, which have no line's end."""
    return b"data: " + data + b"\n\n"


@contextmanager
def traced(request: InferRequest) -> Iterator[None]:
    """Nothing of a request that is traced is sent after this."""
    try:
        yield
    finally:
        if request.reception is not None:
            request.reception.close()


@contextmanager
def sending(request: InferRequest) -> Iterator[None]:
    """Note when something is sent, where the request is traced."""
    if request.reception is not None:
        request.reception.sending()
    yield
    if request.reception is not None:
        request.reception.sent()
