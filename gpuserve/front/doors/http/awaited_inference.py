"""Inference that a coroutine awaits: the whole body of a request is read, and its responses are taken one by
one. Part of the HTTP door; what the bodies mean is for the endpoints.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from typing import Final, TypeVar

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.http.encoding import IDENTITY
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.exchange.exchange import Exchange
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.model_driver import Driver
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.requests.inference import Data, InferRequest, InferResponse
from gpuserve.front.requests.json_arrays import SHORT_NBYTES
from gpuserve.front.service.inference_service import InferenceService

Parsed = TypeVar("Parsed")
Made = TypeVar("Made", bound=InferRequest)
#: Proxies that collect answers are told not to (nginx).
_EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
#: Outputs up to this size are made into JSON on the event loop.
_SHORT_OUTPUTS_NBYTES: Final = 64 << 10
#: So many events leave in one piece at most.
_MAX_JOINED: Final = 64
#: Shorter parts of a body are joined: an object for each would take more memory than the body.
_PART_NBYTES: Final = 4 << 10
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
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback has this frame
        return None

    def close(self) -> None:
        if not self._ended:
            self._pending.cancel()
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
        self._executor = service.json_executor
        self._receptions = service.control.trace.receptions
        self._max_request_nbytes = max_request_nbytes
        self._forwarding = forwarding

    async def read(
        self,
        client: AwaitedRequest,
        parse: Callable[[list[bytes]], Parsed],
        made_of: Callable[[Parsed], Awaitable[Made]],
    ) -> Made:
        """Return the request that ``made_of`` makes of what ``parse`` reads in the parts of a body. A thread
        parses a long body, whose bytes are counted until they are ``placed`` or the client is answered.

        Raises:
            RequestError: the body is too long or coded, or either function raised the error.
            ClientGone: the client has left.
        """
        headers = client.head.headers
        reception = self._receptions.of(headers, grpc=False)
        if dict(headers).get(b"content-encoding", b"") not in _NO_CODING:
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        parts, nbytes = await self._body(client)
        if nbytes > SHORT_NBYTES:
            client.share.hold(nbytes)
            loop = asyncio.get_running_loop()
            # No local variable: the future has the error, whose traceback has this frame, and so the body.
            parsed = await client.unless_gone(loop.run_in_executor(self._executor, parse, parts))
        else:
            parsed = parse(parts)
        request = await made_of(parsed)
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

    async def _body(self, client: AwaitedRequest) -> tuple[list[bytes], int]:
        """Return the parts of the body, and how many bytes they are."""
        self._check_length(client.head.content_length or 0)
        parts: list[bytes] = []
        nbytes = 0
        share = Share(self._intake, client.exchange.ends.source)
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


async def placed(parts: list[bytes], driver: Driver, share: Share) -> Data:
    """Return a tensor in parts as one. A long tensor moves into the model's arena, a part in each turn of the
    loop; ``share`` holds what has not moved. Raises RequestError: there is no memory.
    """
    nbytes = sum(map(len, parts))
    block = driver.claim(nbytes) if nbytes > SHORT_NBYTES else None
    if block is None:
        return b"".join(parts)
    filled = reserved = 0
    parts.reverse()
    try:
        while parts:
            part = parts.pop()
            end = filled + len(part)
            if end > reserved:
                reserved = share.reserve(block, end)
            block.view[filled:end] = part
            filled = end
            share.hold(max(1, nbytes - end))
            await asyncio.sleep(0)
    except BaseException:
        block.free()
        raise
    return block


async def send_events(
    client: AwaitedRequest,
    request: InferRequest,
    responses: ResponseQueue,
    document_of: Callable[[InferResponse], bytes | memoryview],
    executor: Executor | None = None,
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
            unsent.append(event(await document(response, document_of, executor)))
        except RequestError as error:
            failure = error.with_traceback(None)  # which has this frame
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


async def document(
    response: InferResponse,
    document_of: Callable[[InferResponse], bytes | memoryview],
    executor: Executor | None = None,
) -> bytes | memoryview:
    """Return a response as a document, made by a thread of ``executor`` if it is large, and close it."""
    with closing(response):
        if executor is None or sum([len(one.data) for one in response.outputs]) <= _SHORT_OUTPUTS_NBYTES:
            return document_of(response)
        return await asyncio.get_running_loop().run_in_executor(executor, document_of, response)


def event(data: bytes | memoryview) -> bytes:
    """A server-sent event that holds these bytes, which have no line's end."""
    return b"".join((b"data: ", data, b"\n\n"))


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
