"""Which endpoints a callable answers, and with which of its functions.

============================================  =====================================================
the callable has                              it answers
============================================  =====================================================
a method ``chat``, ``complete`` or ``embed``  that endpoint
none of them                                  the endpoint of what its parameter is annotated with:
                                              ChatRequest, CompletionRequest, EmbeddingRequest,
                                              or several of them joined by ``|``
============================================  =====================================================

Embeddings may be made for many requests at once: a parameter ``list[EmbeddingRequest]`` takes a batch, and
``list[str]`` the texts of a batch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gpuserve.model.openai_declaration import annotation_names
from gpuserve.openai.requests import ChatRequest, CompletionRequest, EmbeddingRequest, OpenAIRequest


class Endpoint(enum.Enum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


#: The method of each endpoint, and what is in its body.
METHODS: Final = {Endpoint.CHAT: "chat", Endpoint.COMPLETIONS: "complete", Endpoint.EMBEDDINGS: "embed"}
REQUESTS: Final[dict[Endpoint, type[OpenAIRequest]]] = {
    Endpoint.CHAT: ChatRequest,
    Endpoint.COMPLETIONS: CompletionRequest,
    Endpoint.EMBEDDINGS: EmbeddingRequest,
}


class Takes(enum.Enum):
    """What a function is called with."""

    REQUEST = "one request"
    REQUESTS = "the requests of a batch"
    TEXTS = "the texts of a batch"


class Handler(NamedTuple):
    """A function that answers an endpoint."""

    call: Callable[[Any], Any]
    takes: Takes = Takes.REQUEST


def handlers_of(made: Any) -> dict[Endpoint, Handler]:
    """The functions of a callable by endpoint. Raises TypeError: it has none."""
    found = {
        endpoint: Handler(method, _takes(endpoint, method))
        for endpoint, name in METHODS.items()
        if callable(method := getattr(made, name, None))
    }
    if not found and callable(made):
        words = annotation_names(made)
        named = [endpoint for endpoint, kind in REQUESTS.items() if kind.__name__ in words]
        found = {endpoint: Handler(made, _takes(endpoint, made)) for endpoint in named}
    if not found:
        raise TypeError(
            "a callable for openai: true needs a method chat, complete or embed, or a parameter annotated "
            "with ChatRequest, CompletionRequest or EmbeddingRequest of gpuserve.openai"
        )
    return found


def _takes(endpoint: Endpoint, function: Callable[..., Any]) -> Takes:
    words = annotation_names(function)
    if endpoint is not Endpoint.EMBEDDINGS or not words & {"list", "List", "Sequence"}:
        return Takes.REQUEST
    return Takes.TEXTS if "str" in words else Takes.REQUESTS
