"""The endpoints of OpenAI's API: they find the model, have it run, and send what it gives as it is, whole or
as server-sent events. What is in the bodies is known to the workers (``gpuserve/openai``).
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import Internal, NotFound, RequestError
from gpuserve.front.doors.access.endpoints import OPENAI_PREFIX, Endpoint
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http.answers import JSON_OK, HttpAnswer, json_answer
from gpuserve.front.doors.http.awaited_inference import (
    RequestReader,
    ResponseQueue,
    event,
    placed,
    send_events,
    sending,
    start_events,
    traced,
)
from gpuserve.front.doors.http.family import ErrorForm, Family
from gpuserve.front.doors.openai import errors
from gpuserve.front.doors.openai.requests import Asked, OpenAIRequest, document_of, for_openai, read_body
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.requests.inference import InferResponse
from gpuserve.front.service.inference_service import InferenceService

MAX_BODY_NBYTES: Final = 32 << 20
#: What a worker knows each endpoint by.
_NAMES: Final = {
    Endpoint.OPENAI_CHAT: "chat",
    Endpoint.OPENAI_COMPLETIONS: "completions",
    Endpoint.OPENAI_EMBEDDINGS: "embeddings",
}
_DONE: Final = event(b"[DONE]")


def openai_endpoints(
    service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
) -> Family:
    """All endpoints of OpenAI's API, for requests of at most ``max_request_nbytes``."""
    models = OpenAIModels(service)
    inference = OpenAIInference(
        service, RequestReader(service, min(max_request_nbytes, MAX_BODY_NBYTES), forwarding)
    )
    form = ErrorForm(errors.failure, errors.refused, errors.forbidden)
    return Family(
        OPENAI_PREFIX.encode(),
        form,
        {Endpoint.OPENAI_MODELS: models.listed, Endpoint.OPENAI_MODEL: models.one},
        dict.fromkeys(_NAMES, inference.answer),
    )


class OpenAIModels:
    """Tells which models there are for OpenAI's clients."""

    def __init__(self, service: InferenceService) -> None:
        self._models = service.models
        self._owner = service.name
        self._created = int(time.time())

    def listed(self, _route: Route) -> HttpAnswer:
        names = sorted({spec.name for spec in self._models.all_specs() if spec.openai})
        return json_answer({"object": "list", "data": [self._document(name) for name in names]})

    def one(self, route: Route) -> HttpAnswer:
        try:
            spec = for_openai(self._models.find(route.model_name).spec)
        except RequestError as error:
            return errors.failure(error)
        return json_answer(self._document(spec.name))

    def _document(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": self._owner}


class OpenAIInference:
    """Runs models for OpenAI's clients."""

    def __init__(self, service: InferenceService, reader: RequestReader) -> None:
        self._service = service
        self._reader = reader

    async def answer(self, route: Route, client: AwaitedRequest) -> None:
        """Answer a request; RequestError: it failed, and nothing was sent."""
        if not self._service.models.has_openai():
            raise NotFound("no model of this server is for OpenAI's clients: expected one with openai: true")
        made_of = partial(self._request, _NAMES[route.endpoint], client)
        request = await self._reader.read(client, read_body, made_of)
        with traced(request), closing(ResponseQueue(self._service, request)) as responses:
            if request.streams:
                await _stream(client, request, responses)
            else:
                response = await _only(client, responses)
                document = document_of(response)
                with sending(request):
                    client.exchange.answer(JSON_OK, (document,), len(document), response.close)

    async def _request(self, endpoint: str, client: AwaitedRequest, asked: Asked) -> OpenAIRequest:
        driver = self._service.models.find(asked.model)
        spec = for_openai(driver.spec)
        data = await placed(asked.parts, driver, client.share)
        return OpenAIRequest(spec, endpoint, data, streams=asked.streams)


async def _only(client: AwaitedRequest, responses: ResponseQueue) -> InferResponse:
    """Return the one response, for the caller to close; RequestError: it failed, or there is not exactly
    one.
    """
    response = await responses.next(client)
    if response is None:
        raise Internal("the model gave no response where one was due")
    try:
        more = await responses.next(client)
    except Exception:
        response.close()
        raise
    if more is not None:
        more.close()
        response.close()
        raise Internal("the model gave several responses where one was due")
    return response


async def _stream(client: AwaitedRequest, request: OpenAIRequest, responses: ResponseQueue) -> None:
    """Send each response as an event; a first error is a RequestError, a later one is the last event."""
    exchange = client.exchange
    failure = await send_events(client, request, responses, document_of)
    if failure is not None and not exchange.started:
        try:
            raise failure
        finally:
            del failure  # whose traceback has this frame
    start_events(exchange)
    exchange.send(_DONE if failure is None else event(errors.error_body(failure)), end=True)
