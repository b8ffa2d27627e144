"""``/generate`` and ``/generate_stream``: inference by plain JSON, the second as server-sent events. Both
take any model; a stream is as long as the model makes it. Part of the HTTP door.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from gpuserve.errors import Internal, InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.endpoint import generate_codec, http_bodies
from gpuserve.front.endpoint.asgi import Receive, Send
from gpuserve.front.endpoint.closing_peers import Peer
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.http_encoding import IDENTITY
from gpuserve.front.endpoint.routes import Route
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.endpoint.status import STATUS
from gpuserve.front.endpoint.v2 import InferRequest, InferResponse

_STREAM_HEADERS: Final = [(b"content-type", generate_codec.EVENT_STREAM), (b"cache-control", b"no-cache")]


class Responses:
    """The responses to one request, as they come, until its end or its error.

    Leaving the block takes the request back, if it still runs, and closes what nobody took.
    """

    def __init__(
        self, service: InferenceService, watch: DisconnectWatch, receive: Receive, peer: Peer | None
    ) -> None:
        self._service = service
        self._watch = watch
        self._receive = receive
        self._peer = peer
        self._came: deque[InferResponse] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def submit(self, request: InferRequest) -> None:
        """Queue the request.

        Raises:
            RequestError: it is wrong or refused.
        """
        decoupled = self._service.model(request.model_name, request.model_version).spec.decoupled
        self._pending = self._service.submit(request, self._on_response if decoupled else None)
        self._waiting = self._watch.add(self._pending.answer, self._receive, self._peer)
        self._pending.answer.add_done_callback(self._on_answer)

    async def __aiter__(self) -> AsyncIterator[InferResponse]:
        """Each response, to be closed by the taker.

        Raises:
            RequestError: the request failed; after the responses that came before.
            CancelledError: the client is gone.
        """
        answer = self._pending.answer
        while True:
            while self._came:
                yield self._came.popleft()
            if answer.done():
                await asyncio.sleep(0)  # the callbacks of the answer come first
                if self._came:
                    continue
                break
            self._changed.clear()
            await self._changed.wait()
        if answer.cancelled():
            raise asyncio.CancelledError
        if (error := answer.exception()) is not None:
            raise error

    def close(self) -> None:
        """Nobody takes any more of them."""
        self._closed = True
        self._waiting.finish()
        if not self._pending.answer.done() or self._pending.answer.cancelled():
            self._pending.take_back()
            self._pending.answer.cancel()
        for response in self._came:
            response.close()
        self._came.clear()

    def _on_response(self, response: InferResponse) -> None:
        self._came.append(response)
        self._changed.set()

    def _on_answer(self, answer: asyncio.Future[Any]) -> None:
        response = None if answer.cancelled() or answer.exception() is not None else answer.result()
        if response is not None and self._closed:
            response.close()
        elif response is not None:
            self._came.append(response)
        self._changed.set()


class GenerateDoor:
    """The two endpoints."""

    def __init__(self, service: InferenceService, watch: DisconnectWatch, max_request_nbytes: int) -> None:
        self._service = service
        self._watch = watch
        self._max_request_nbytes = max_request_nbytes

    async def generate(self, request: InferRequest, receive: Receive, peer: Peer | None) -> bytes:
        """The one response, as JSON.

        Raises:
            RequestError: the request failed, or there is not exactly one response.
        """
        responses = Responses(self._service, self._watch, receive, peer)
        responses.submit(request)
        bodies: list[bytes] = []
        try:
            async for response in responses:
                bodies.append(_json_of(response))
                if len(bodies) > 1:
                    break
        finally:
            responses.close()
        if len(bodies) != 1:
            raise Internal(generate_codec.ONE_RESPONSE)
        return bodies[0]

    async def generate_stream(
        self, request: InferRequest, receive: Receive, peer: Peer | None, send: Send
    ) -> None:
        """Send every response as an event. The status is that of the first; a later error is an event.

        Raises:
            RequestError: the request is refused before it runs.
            OSError: the client is gone.
        """
        responses = Responses(self._service, self._watch, receive, peer)
        responses.submit(request)
        started = False
        try:
            async for response in responses:
                event = generate_codec.event(_json_of(response))
                if not started:
                    await _start(send, 200)
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except RequestError as error:
            if not started:
                await _start(send, STATUS[error.code][0])
                started = True
            event = generate_codec.event(http_bodies.error_body(str(error)))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            responses.close()
        if not started:  # a stream without a response is one as well
            await _start(send, 200)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def read_request(self, route: Route, coding: str, receive: Receive) -> InferRequest:
        """The whole request.

        Raises:
            RequestError: the model does not exist, or the body is none for it.
        """
        spec = self._service.model(route.model_name, route.model_version).spec
        if coding not in {"", IDENTITY}:
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        parts: list[bytes] = []
        nbytes = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            parts.append(message.get("body", b""))
            nbytes += len(parts[-1])
            if nbytes > self._max_request_nbytes:
                limit = self._max_request_nbytes
                raise ResourceExhausted(f"the request body is over the limit of {limit} bytes")
            more = message.get("more_body", False)
        return generate_codec.parse_generate_request(b"".join(parts), spec, route.model_version)


def _json_of(response: InferResponse) -> bytes:
    try:
        return generate_codec.response_json(response)
    finally:
        response.close()


async def _start(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _STREAM_HEADERS})
