"""The endpoints of OpenAI's API, and their requests and responses as tensors, which only this file knows."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve.model.openai_declaration import ENDPOINT, REQUEST, RESPONSE
from gpuserve.openai.answers import BadRequest, NoSuchEndpoint
from gpuserve.openai.request_types import (
    DECISIVE,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TypedRequest,
    parse_request,
    require_honoured,
)

if TYPE_CHECKING:
    from gpuserve_worker.inference.inference_request import Request


class OpenAIEndpoint(enum.Enum):
    """An endpoint of OpenAI's API."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


#: The type of the requests of each endpoint.
REQUESTS: Final[dict[OpenAIEndpoint, type[TypedRequest]]] = {
    OpenAIEndpoint.CHAT: ChatRequest,
    OpenAIEndpoint.COMPLETIONS: CompletionRequest,
    OpenAIEndpoint.EMBEDDINGS: EmbeddingRequest,
}


def endpoint_of(parameters: Mapping[str, Any], known: Iterable[OpenAIEndpoint]) -> OpenAIEndpoint:
    """Return the endpoint of a request, of those that a model answers. Raise ``NoSuchEndpoint``."""
    endpoints = list(known)
    named = parameters.get(ENDPOINT)
    if named is None and len(endpoints) == 1:
        return endpoints[0]
    for one in endpoints:
        if one.value == named:
            return one
    names = " and ".join(f"{one.value}" for one in endpoints)
    raise NoSuchEndpoint(f"the model answers {names}, not {str(named)[:64]!r}")


def honoured_members(made: Any) -> frozenset[str]:
    """Return the decisive members in the attribute ``honours`` of a callable. Raise TypeError for others."""
    honours = frozenset(getattr(made, "honours", ()))
    if unknown := honours.difference(DECISIVE):
        raise TypeError(f"honours has {sorted(unknown)[0]!r}, expected some of {', '.join(DECISIVE)}")
    return honours


def parse_body(request: Request, endpoint: OpenAIEndpoint, honours: Container[str]) -> Any:
    """Return the typed request in the only body of an inference request. Raise ``BadRequest``."""
    bodies = request[REQUEST]
    if bodies.size != 1:
        raise BadRequest(f"expected one body in a request, given {bodies.size}")
    forwarded = {key: one for key, one in request.parameters.items() if key != ENDPOINT}
    parsed = parse_request(REQUESTS[endpoint], bodies.item(), forwarded)
    require_honoured(parsed, honours)
    return parsed


def response_of(document: bytes, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the outputs of an inference request whose body had the ``shape``."""
    tensor = np.empty(shape, dtype=object)
    tensor.fill(document)
    return {RESPONSE: tensor}
