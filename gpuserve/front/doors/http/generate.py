"""``/generate`` and ``/generate_stream``: inference by plain JSON, the second as server-sent events. Both
take any model; a stream is as long as the model makes it. Part of the HTTP door.
"""

from __future__ import annotations

from contextlib import closing

from gpuserve.core.errors import Internal
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http import generate_codec
from gpuserve.front.doors.http.answers import error_body, json_answer
from gpuserve.front.doors.http.awaited_inference import (
    RequestReader,
    ResponseQueue,
    document,
    event,
    send_events,
    sending,
    start_events,
    traced,
)
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.server_status import STATUS
from gpuserve.front.service.inference_service import InferenceService


class GenerateEndpoints:
    """``/generate`` and ``/generate_stream``, for requests of at most ``max_request_nbytes``."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
    ) -> None:
        self._service = service
        self._reader = RequestReader(service, max_request_nbytes, forwarding)

    async def generate(self, route: Route, client: AwaitedRequest) -> None:
        """Send the one response, as JSON; RequestError: it failed, or there is not exactly one."""
        bodies: list[bytes | memoryview] = []
        executor = self._service.json_executor
        request = await self._read(route, client)
        with traced(request), closing(ResponseQueue(self._service, request)) as responses:
            while len(bodies) < 2 and (response := await responses.next(client)) is not None:
                bodies.append(await document(response, generate_codec.response_json, executor))
            if len(bodies) != 1:
                raise Internal(generate_codec.ONE_RESPONSE)
            with sending(request):
                json_answer(bytes(bodies[0])).send(client.exchange)

    async def stream(self, route: Route, client: AwaitedRequest) -> None:
        """Send each response as an event; a first error is a RequestError, later ones are events."""
        exchange = client.exchange
        request = await self._read(route, client)
        with traced(request), closing(ResponseQueue(self._service, request)) as responses:
            failure = await send_events(
                client, request, responses, generate_codec.response_json, self._service.json_executor
            )
        if failure is not None and failure.untried:  # as it is where it is refused here
            try:
                raise failure
            finally:
                del failure  # whose traceback has this frame
        start_events(exchange, 200 if failure is None else STATUS[failure.code][0])
        if failure is not None:
            exchange.send(event(error_body(str(failure))))
        exchange.finish()

    async def _read(self, route: Route, client: AwaitedRequest) -> InferRequest:
        """The whole request; RequestError: the model does not exist, or the body is none for it."""
        spec = self._service.models.find(route.model_name, route.model_version).spec

        def parse(parts: list[bytes]) -> InferRequest:
            return generate_codec.parse_generate_request(b"".join(parts), spec, route.model_version)

        return await self._reader.read(client, parse, _itself)


async def _itself(request: InferRequest) -> InferRequest:
    return request
