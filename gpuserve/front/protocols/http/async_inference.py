"""Inference in coroutines: reads whole request bodies, waits for responses, and sends server-sent events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from typing import Final, TypeVar

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import ArrivingTensor, Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.net.exchange import Exchange, wake
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.protocols.http.http_responses import IDENTITY
from gpuserve.front.requests.inference import Data, InferRequest, InferResponse
from gpuserve.front.requests.json_arrays import SHORT_JSON_NBYTES, SHORT_NBYTES
from gpuserve.front.service.inference_service import InferenceService

Parsed = TypeVar("Parsed")
Made = TypeVar("Made", bound=InferRequest)
#: Headers of an event stream; the last one makes nginx pass events on unbuffered.
_EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
#: Outputs up to this size are rendered on the event loop.
_SHORT_OUTPUTS_NBYTES: Final = 64 << 10
#: The maximum number of events in one write.
_MAX_JOINED: Final = 64
#: Shorter parts of a body are joined: an object for each would take more memory than the body.
_PART_NBYTES: Final = 4 << 10
_NO_CODING: Final = frozenset({b"", IDENTITY.encode()})


class PendingResponses:
    """The responses to one request in order. ``close`` cancels the request and closes the rest."""

    def __init__(self, service: InferenceService, request: InferRequest) -> None:
        self._responses: deque[InferResponse] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._error: RequestError | None = None
        self._ended = False
        decoupled = service.models.find(request.model_name, request.model_version).spec.decoupled
        self._pending = service.inference.submit(
            request, self._on_response if decoupled else None, on_answer=self._on_answer
        )

    @property
    def is_empty(self) -> bool:
        return not self._responses

    async def next(self, client: AsyncRequest) -> InferResponse | None:
        """Return the next response, to be closed, or None at the end. Raise RequestError or ClientGone."""
        while not (self._responses or self._ended):
            self._changed = asyncio.get_running_loop().create_future()
            await client.wait_unless_gone(self._changed)
        if self._responses:
            return self._responses.popleft()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame
        return None

    def close(self) -> None:
        if not self._ended:
            self._pending.cancel()
        for response in self._responses:
            response.close()
        self._responses.clear()

    def _on_response(self, response: InferResponse) -> None:
        self._responses.append(response)
        wake(self._changed)

    def _on_answer(self, pending: PendingRequest, answer: Answer) -> None:
        self._ended = True
        if isinstance(answer, InferResponse):
            self._responses.append(answer)
        else:
            self._error = answer
        wake(self._changed)


def trace_unread(service: InferenceService, model_name: str, error: RequestError, exchange: Exchange) -> None:
    """Trace a request that no model receives, if requests are traced and this one is sampled."""
    trace = service.control.trace
    if (reception := trace.receptions.of(exchange.head.headers, grpc=False)) is not None:
        trace.on_unread(model_name, error, exchange, reception)
        reception.close()


class RequestReader:
    """A reader of requests of at most ``max_request_nbytes``, for endpoints that are coroutines."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
    ) -> None:
        self._intake = service.intake
        self._executor = service.json_executor
        self._receptions = service.control.trace.receptions
        self._max_request_nbytes = max_request_nbytes
        self._forwarding = forwarding

    async def read(
        self,
        client: AsyncRequest,
        parse: Callable[[list[bytes]], Parsed],
        make_request: Callable[[Parsed], Awaitable[Made]],
    ) -> Made:
        """Return the request that ``make_request`` makes of the result of ``parse``, which parses the parts
        of the body, in a thread if it is long. Its bytes are counted until they are in the arena or answered.

        Raises:
            RequestError: The body is too long or has a content coding, or either function raised the error.
            ClientGone: The client has left.
        """
        headers = client.head.headers
        reception = self._receptions.of(headers, grpc=False)
        if dict(headers).get(b"content-encoding", b"") not in _NO_CODING:
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        parts, nbytes = await self._body(client)
        if nbytes > SHORT_JSON_NBYTES:
            client.share.hold(nbytes)
            loop = asyncio.get_running_loop()
            # No local variable: the future has the error, whose traceback refers to this frame.
            parsed = await client.wait_unless_gone(loop.run_in_executor(self._executor, parse, parts))
        else:
            parsed = parse(parts)
        request = await make_request(parsed)
        try:
            if self._forwarding is not None:
                self._forwarding.add_to(request, client.head)
        except RequestError:
            free_body(request)
            raise
        if reception is not None:
            reception.read()
            request.reception = reception
        request.sender = client.exchange
        return request

    async def _body(self, client: AsyncRequest) -> tuple[list[bytes], int]:
        self._check_length(client.head.content_length or 0)
        parts: list[bytes] = []
        nbytes = 0
        share = Share(self._intake, client.exchange.endpoints.source)
        try:
            while (part := await client.part()) is not None:
                if parts and len(parts[-1]) < _PART_NBYTES:
                    parts[-1] += part
                else:
                    parts.append(part)
                nbytes += len(part)
                self._check_length(nbytes)
                share.hold(nbytes)
        finally:
            share.hold(0)
        return parts, nbytes

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self._max_request_nbytes:
            raise ResourceExhausted(f"the request body is over the limit of {self._max_request_nbytes} bytes")


async def copy_to_arena(parts: list[bytes], driver: Driver, share: Share) -> Data:
    """Return a tensor in parts as one buffer. A long tensor is copied to the model's arena, one part in each
    iteration of the loop, while ``share`` counts the rest. Raise RequestError if there is no memory.
    """
    nbytes = sum(map(len, parts))
    block = driver.claim(nbytes) if nbytes > SHORT_NBYTES else None
    if block is None:
        return b"".join(parts)
    tensor = ArrivingTensor(nbytes, block, share)
    parts.reverse()
    try:
        while parts:
            tensor.fill(parts.pop())
            share.hold(max(1, tensor.missing_nbytes))
            await asyncio.sleep(0)
    except BaseException:
        block.free()
        raise
    return block


async def send_events(
    client: AsyncRequest,
    request: InferRequest,
    responses: PendingResponses,
    document_of: Callable[[InferResponse], bytes | memoryview],
    executor: Executor | None = None,
) -> RequestError | None:
    """Send responses as events, available ones in one write. Return the stream's error. Raise ClientGone."""
    exchange = client.exchange
    unsent: list[bytes] = []
    failure = None
    while failure is None:
        try:
            if (response := await responses.next(client)) is None:
                break
            unsent.append(sse_event(await rendered(response, document_of, executor)))
        except RequestError as error:
            failure = error.with_traceback(None)  # the traceback refers to this frame
        if unsent and (responses.is_empty or failure or len(unsent) == _MAX_JOINED):
            with timing_send(request):
                start_events(exchange)
                exchange.send(b"".join(unsent))
            unsent.clear()
            await exchange.room()
    return failure


def start_events(exchange: Exchange, status: int = 200) -> None:
    """Begin a response of server-sent events, unless begun."""
    if not exchange.started:
        exchange.start(status, _EVENT_HEADERS)


async def rendered(
    response: InferResponse,
    document_of: Callable[[InferResponse], bytes | memoryview],
    executor: Executor | None = None,
) -> bytes | memoryview:
    """Return a response as a document, rendered by a thread if it is large, and close the response."""
    with closing(response):
        if executor is None or sum([len(one.data) for one in response.outputs]) <= _SHORT_OUTPUTS_NBYTES:
            return document_of(response)
        return await asyncio.get_running_loop().run_in_executor(executor, document_of, response)


def sse_event(data: bytes | memoryview) -> bytes:
    """Return a server-sent event with these bytes, which contain no line break."""
    return b"".join((b"data: ", data, b"\n\n"))


@contextmanager
def closing_trace(request: InferRequest) -> Iterator[None]:
    """Close the trace of a request when the block ends; nothing is sent afterwards."""
    try:
        yield
    finally:
        if request.reception is not None:
            request.reception.close()


@contextmanager
def timing_send(request: InferRequest) -> Iterator[None]:
    """Trace when the block sends something."""
    reception: Reception | None = request.reception
    if reception is not None:
        reception.sending()
    yield
    if reception is not None:
        reception.sent()
