"""OpenAI's API over HTTP: endpoints, request bodies, and errors in OpenAI's form.

Bodies travel to a model and back unchanged. Only the members that route a request are read here; workers
read the rest (``gpuserve/openai``). A JSON parser keeps the GIL until it returns, also in a thread, so a long
body is first reduced to an outline, slice by slice: nested strings and long strings lose their content, and
a body with too many values is refused. Parsing the outline takes a few milliseconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from gpuserve.core import errors
from gpuserve.core.errors import Code, Internal, InvalidArgument, NotFound, RequestError, ResourceExhausted
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.net.request_rate_limiter import retry_after_s
from gpuserve.front.protocols.access.endpoints import OPENAI_PREFIX, Endpoint, Route, RouteError
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.protocols.http import async_inference as inference
from gpuserve.front.protocols.http import http_responses as responses
from gpuserve.front.protocols.http.async_inference import PendingResponses, RequestReader, sse_event
from gpuserve.front.protocols.http.http_responses import HttpAnswer, json_answer
from gpuserve.front.requests.inference import Data, InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.json_arrays import SHORT_NBYTES
from gpuserve.front.requests.json_values import MAX_VALUES, compact
from gpuserve.front.requests.limits import shown
from gpuserve.front.requests.server_status import STATUS
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.model import openai_declaration as openai
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import BYTES

MAX_BODY_NBYTES: Final = 32 << 20
#: The worker's name of each endpoint.
_NAMES: Final = {
    Endpoint.OPENAI_CHAT: "chat",
    Endpoint.OPENAI_COMPLETIONS: "completions",
    Endpoint.OPENAI_EMBEDDINGS: "embeddings",
}
_DONE: Final = sse_event(b"[DONE]")


def openai_endpoints(
    service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None
) -> responses.EndpointFamily:
    """Return all endpoints of OpenAI's API, for requests of at most ``max_request_nbytes``."""
    models = OpenAIModels(service)
    reader = RequestReader(service, min(max_request_nbytes, MAX_BODY_NBYTES), forwarding)
    endpoints = OpenAIInference(service, reader)
    form = responses.ErrorFormat(openai_failure, openai_refused, openai_forbidden)
    return responses.EndpointFamily(
        OPENAI_PREFIX.encode(),
        form,
        {Endpoint.OPENAI_MODELS: models.listed, Endpoint.OPENAI_MODEL: models.one},
        dict.fromkeys(_NAMES, endpoints.answer),
    )


class OpenAIModels:
    """The endpoints that list models for OpenAI's clients."""

    def __init__(self, service: InferenceService) -> None:
        self._models = service.models
        self._owner = service.name
        self._created = int(time.time())

    def listed(self, _route: Route) -> HttpAnswer:
        specs = [spec for spec in self._models.all_specs() if spec.openai]
        names = sorted({name for spec in specs for name in (spec.name, *spec.openai_names)})
        return json_answer({"object": "list", "data": [self._document(name) for name in names]})

    def one(self, route: Route) -> HttpAnswer:
        try:
            checked_openai_spec(self._models.find_for_openai(route.model_name).spec)
        except RequestError as error:
            return openai_failure(error)
        return json_answer(self._document(route.model_name))

    def _document(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": self._owner}


class OpenAIInference:
    """The endpoints that run models for OpenAI's clients."""

    def __init__(self, service: InferenceService, reader: RequestReader) -> None:
        self._service = service
        self._reader = reader

    async def answer(self, route: Route, client: AsyncRequest) -> None:
        """Run a request and send its response. Raise RequestError if it failed and nothing was sent."""
        if not self._service.models.has_openai():
            raise NotFound("no model of this server is for OpenAI's clients: expected one with openai: true")
        make_request = partial(self._request, _NAMES[route.endpoint], client)
        request = await self._reader.read(client, read_body, make_request)
        with inference.closing_trace(request), closing(PendingResponses(self._service, request)) as pending:
            if request.streams:
                await _send_stream(client, request, pending)
            else:
                response = await _single_response(client, pending)
                document = response_document(response)
                with inference.timing_send(request):
                    client.exchange.answer(responses.JSON_OK, (document,), len(document), response.close)

    async def _request(self, endpoint: str, client: AsyncRequest, routed: RoutedBody) -> OpenAIInferRequest:
        driver = self._service.models.find_for_openai(routed.model)
        spec = checked_openai_spec(driver.spec)
        data = await inference.copy_to_arena(routed.parts, driver, client.share)
        return OpenAIInferRequest(spec, endpoint, data, streams=routed.streams)


async def _single_response(client: AsyncRequest, pending: PendingResponses) -> InferResponse:
    """Return the only response, to be closed. Raise RequestError if the model gave none or several."""
    response = await pending.next(client)
    if response is None:
        raise Internal("the model gave no response where one was due")
    try:
        more = await pending.next(client)
    except Exception:
        response.close()
        raise
    if more is not None:
        more.close()
        response.close()
        raise Internal("the model gave several responses where one was due")
    return response


async def _send_stream(client: AsyncRequest, request: OpenAIInferRequest, pending: PendingResponses) -> None:
    """Send each response as an event. Raise RequestError for a first error; a later one is the last event."""
    exchange = client.exchange
    failure = await inference.send_events(client, request, pending, response_document)
    if failure is not None and not exchange.started:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame
    with inference.timing_send(request):
        inference.start_events(exchange)
        exchange.send(_DONE if failure is None else sse_event(openai_error_body(failure)), end=True)


#: The length prefix of an element of a BYTES tensor.
_LENGTH_NBYTES: Final = 4


class OpenAIInferRequest(InferRequest):
    """A request of OpenAI's API. ``streams``: the client wants a stream."""

    __slots__ = ("streams",)

    def __init__(self, spec: ModelSpec, endpoint: str, data: Data, *, streams: bool) -> None:
        shape = (1, 1) if spec.max_batch_size else (1,)
        tensor = InputTensor(openai.REQUEST, BYTES, shape, data)
        super().__init__(spec.name, "", "", {openai.ENDPOINT: endpoint}, [tensor], (), None)
        self.streams = streams


class RoutedBody(NamedTuple):
    """The members of a body that route the request, and the body as the parts of a tensor."""

    model: str
    streams: bool
    parts: list[bytes]


def read_body(parts: list[bytes]) -> RoutedBody:
    """Return a body's routing members; raise InvalidArgument, or ResourceExhausted for too many values."""
    nbytes = sum(map(len, parts))
    is_short = nbytes <= SHORT_NBYTES
    try:
        document = orjson.loads(b"".join(parts) if is_short else outline_json(parts))
    except orjson.JSONDecodeError as error:
        detail = str(error) if is_short else error.msg  # an outline has other positions
        raise InvalidArgument(f"the body is no JSON: {detail}") from None
    if not isinstance(document, dict):
        raise InvalidArgument("the body must be a JSON object")
    model, streams = document.get("model"), document.get("stream")
    if not isinstance(model, str):
        given = _shown_member(document, "model")
        raise InvalidArgument(f"model: expected the name of a model, given {given}")
    if streams is not None and not isinstance(streams, bool):
        raise InvalidArgument(f"stream: expected true or false, given {_shown_member(document, 'stream')}")
    return RoutedBody(model, streams is True, [nbytes.to_bytes(_LENGTH_NBYTES, "little"), *parts])


def checked_openai_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec. Raise NotFound if the model is not for OpenAI's clients."""
    if not spec.openai:
        raise NotFound(f"the model '{shown(spec.name)}' is not for OpenAI's clients: it needs openai: true")
    return spec


def response_document(response: InferResponse) -> memoryview:
    """Return the JSON document in a response of a model, which is valid until the response is closed."""
    return memoryview(response.outputs[0].data)[_LENGTH_NBYTES:]


def _shown_member(document: dict[Any, Any], member: str) -> str:
    if member not in document:
        return "none"
    return shown(orjson.dumps(document[member]).decode())


#: The most that one call of a C function processes, so that the GIL is released in between.
_SLICE_NBYTES: Final = 64 << 10
#: The maximum size of an outline. 131,072 numbers of 24 digits need less.
_MAX_NBYTES: Final = 4 << 20
#: The maximum length of a string that keeps its content; the name of a model has 128 characters, escaped 768.
_MAX_STRING_NBYTES: Final = 1024
_ELIDED: Final = '"…"'.encode()
#: The replacement of an escaped backslash or quotation mark. No model name has a slash.
_ESCAPED: Final = rb"\/"
_SEPARATORS: Final = frozenset({b":", b",", b": ", b", "})


def outline_json(parts: Iterable[bytes]) -> bytes:
    """Return the outline of a JSON text in parts. Malformed JSON may become well-formed.

    Raises:
        ResourceExhausted: The text has more than ``MAX_VALUES`` values, or its outline is too large.
    """
    kept: list[bytes] = []
    string = cut = b""
    in_string = False
    depth = n_separators = n_strings = nbytes = 0
    starts = ((part, start) for part in parts for start in range(0, len(part), _SLICE_NBYTES))
    for piece in (part[start : start + _SLICE_NBYTES] for part, start in starts):
        text = (cut + piece).replace(b"\\\\", _ESCAPED).replace(b'\\"', _ESCAPED)
        cut = b"\\" if text.endswith(b"\\") else b""  # escapes the first byte of the next slice
        first, *others = text.removesuffix(cut).split(b'"')
        for number, part in enumerate((first, *others)):
            if number:  # after a quotation mark
                if in_string:
                    is_kept = depth < 2 and len(string) <= _MAX_STRING_NBYTES
                    kept.append(b'"%b"' % string if is_kept else _ELIDED)
                    nbytes += len(kept[-1])
                    n_strings += 1
                in_string = not in_string
                string = b""
            if in_string:
                string += part[: _MAX_STRING_NBYTES + 1 - len(string)]
                continue
            n_separators += part.count(b",") + part.count(b":")
            if part not in _SEPARATORS:
                part = part.translate(None, b" \t\r\n")
                depth += part.count(b"[") + part.count(b"{") - part.count(b"]") - part.count(b"}")
            kept.append(part)
            nbytes += len(part)
        if max(n_separators, n_strings - 1) > MAX_VALUES:
            raise ResourceExhausted(f"the body holds more values than expected, at most {MAX_VALUES}")
        if nbytes > _MAX_NBYTES:
            raise ResourceExhausted(
                f"the body holds more than {_MAX_NBYTES} bytes beside its texts, expected at most so many"
            )
    if in_string:
        kept.append(b'"')  # makes the parser refuse the text
    return b"".join(kept)


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_PATHS: Final = "/v1/models, /v1/models/NAME, /v1/chat/completions, /v1/completions or /v1/embeddings"
#: An error text about a member of the body begins with the member's name: "messages.0.role: …".
_PARAM: Final = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*): ")
#: The type and code of each error, other than the default server error.
_KINDS: Final = {
    Code.INVALID_ARGUMENT: (_INVALID, None),
    Code.NOT_FOUND: (_INVALID, "model_not_found"),
    Code.RESOURCE_EXHAUSTED: (_INVALID, "request_too_large"),
    Code.UNIMPLEMENTED: (_INVALID, None),
    Code.UNKNOWN: (_INVALID, None),
    Code.DEADLINE_EXCEEDED: ("timeout", "timeout"),
    Code.UNAVAILABLE: (_SERVER, "unavailable"),
    Code.NO_MEMORY: (_SERVER, "unavailable"),
}


def openai_failure(error: RequestError) -> HttpAnswer:
    body, status = openai_error_body(error), STATUS[error.code][0]
    if isinstance(error, errors.QueueFull):
        return responses.retry_later(body, 429)
    if isinstance(error, errors.RateLimited):
        return responses.retry_later(body, 429, retry_after_s(error))
    return responses.retry_later(body, 503) if status == 503 else json_answer(body, status)


def openai_refused(refusal: RouteError) -> HttpAnswer:
    text = f"{refusal.text}: expected {_PATHS}"
    more = ((b"allow", refusal.allow.encode()),) if refusal.allow else ()
    return json_answer(_body(text, _INVALID, None, "unknown_url"), refusal.status, *more)


def openai_forbidden(error: RequestError) -> HttpAnswer:
    return json_answer(_body(str(error), _INVALID, None, "invalid_api_key"), 401)


def openai_error_body(error: RequestError) -> bytes:
    text = str(error)
    if isinstance(error, errors.QueueFull | errors.RateLimited):
        return _body(text, "requests", None, "rate_limit_exceeded")
    kind, code = _KINDS.get(error.code, (_SERVER, None))
    if error.code is Code.NOT_FOUND:
        return _body(text, kind, "model", code)
    found = _PARAM.match(text) if error.code is Code.INVALID_ARGUMENT else None
    return _body(text, kind, found and found[1], code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return compact({"error": error}).encode()
