"""What ``openai: true`` says of a model besides itself: its tensors, its stream, and what its callable is
wrapped in. Bodies of HTTP go to the worker as they are; ``gpuserve/openai`` reads them there.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.declare.model import Tensor

OPENAI: Final = "openai"
#: The body of a request, and the JSON of a response or of a chunk.
REQUEST: Final = "request"
RESPONSE: Final = "response"
#: The parameter of a request that says which endpoint it came to: chat, completions or embeddings.
ENDPOINT: Final = "endpoint"
#: Makes an inference callable of what a user wrote.
ADAPTER: Final = "gpuserve.openai.model:adapted"
INPUTS: Final = (Tensor(name=REQUEST, dtype="bytes", shape=(1,)),)
OUTPUTS: Final = (Tensor(name=RESPONSE, dtype="bytes", shape=(1,)),)

_INPUT: Final = {"name": REQUEST, "dtype": "bytes", "shape": [1]}
_OUTPUT: Final = {"name": RESPONSE, "dtype": "bytes", "shape": [1]}
#: The methods of a callable that answer an endpoint each, and the classes of what they are given.
METHODS: Final = ("chat", "complete", "embed")
REQUESTS: Final = frozenset({"ChatRequest", "CompletionRequest", "EmbeddingRequest"})
#: A stream has any number of responses.
NOT_DECOUPLED: Final = "decoupled: false does not go with openai: the chunks of a stream are responses"


def completed(data: Any) -> Any:
    """Plain data of a whole configuration, where each model with ``openai: true`` has its tensors."""
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, list) or not any(map(is_openai, models)):
        return data
    return {**data, "models": [_completed(one) if is_openai(one) else one for one in models]}


def is_openai(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get(OPENAI) is True


def _completed(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"inputs": [_INPUT], "outputs": [_OUTPUT], "decoupled": True, **entry}


def declared_by(target: Any) -> dict[str, Any]:
    """What a callable for OpenAI's clients says of its model, as an entry; nothing where it is none.

    It is one by its attribute ``openai``, or where a function of it takes one of OpenAI's requests.
    """
    return _completed({OPENAI: True}) if is_for_openai(target) else {}


def is_for_openai(target: Any) -> bool:
    said = getattr(target, OPENAI, None)
    if isinstance(said, bool):
        return said
    own = [one for name in METHODS if callable(one := getattr(target, name, None))]
    called = target.__call__ if isinstance(target, type) else target
    return any(annotation_words(one) & REQUESTS for one in own or [called])


def annotation_words(function: Any) -> set[str]:
    """The names in the annotations of a function's parameters. They need not mean anything where it is: a
    function that has travelled left behind what only its annotations name.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, or nothing to call
        return set()
    words: set[str] = set()
    for one in parameters:
        given = one.annotation
        plain = isinstance(given, type) and not typing.get_args(given)
        words |= {given.__name__} if plain else set(re.findall(r"\w+", str(given)))
    return words


def tensors_problem(key: str, given: Any) -> str | None:
    """What is wrong with the tensors under a key of a model with ``openai: true``; None where nothing is."""
    if given in ([_INPUT], [_OUTPUT], INPUTS, OUTPUTS):
        return None
    return f"{key} do not go with openai: the server knows the tensors of its requests"
