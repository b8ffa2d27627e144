"""The declaration that ``openai: true`` implies: tensors, ``decoupled``, and the adapter around the callable.

Workers receive HTTP bodies unchanged; ``gpuserve/openai`` parses them there.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.backends.registry import is_model_path
from gpuserve.model.declaration import Tensor
from gpuserve_worker.inference.stepping import is_stepped

OPENAI: Final = "openai"
#: Tensors: the body of a request, and the JSON of a response or of a chunk.
REQUEST: Final = "request"
RESPONSE: Final = "response"
#: The request parameter with the endpoint: chat, completions or embeddings.
ENDPOINT: Final = "endpoint"
#: The function that makes an inference callable of the user's object.
ADAPTER: Final = "gpuserve.openai.adapter:adapt_callable"
INPUTS: Final = (Tensor(name=REQUEST, dtype="bytes", shape=(1,)),)
OUTPUTS: Final = (Tensor(name=RESPONSE, dtype="bytes", shape=(1,)),)

_INPUT: Final = {"name": REQUEST, "dtype": "bytes", "shape": [1]}
_OPTIONAL_INPUT: Final = {**_INPUT, "optional": True}
_TENSOR_KEYS: Final = ("inputs", "outputs")
#: Further keys that the runtime of a folder declares.
_ENGINE_KEYS: Final = ("openai_names", "concurrency")
_OUTPUT: Final = {"name": RESPONSE, "dtype": "bytes", "shape": [1]}
#: The methods of a callable, one for each endpoint, and the classes of their requests.
METHODS: Final = ("chat", "complete", "embed")
REQUESTS: Final = frozenset({"ChatRequest", "CompletionRequest", "EmbeddingRequest"})
#: A stream has any number of responses, so the model is decoupled.
NOT_DECOUPLED: Final = "decoupled: false does not go with openai: the chunks of a stream are responses"


def with_openai_tensors(data: Any) -> Any:
    """Return the plain data of a configuration in which each model with ``openai: true`` has its tensors."""
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, list) or not any(map(is_openai, models)):
        return data
    return {**data, "models": [completed(one) if is_openai(one) else one for one in models]}


def with_own_tensors(declared: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's tensors and those of a model file, with a batch axis if the file has one and the server
    makes no batches, and the options of the file's engine. All inputs are optional.
    """
    axis = [-1] if declared.get("max_batch_size") and not entry.get("max_batch_size") else []
    own = {key: [{**one, "shape": [*axis, *one["shape"]]} for one in declared[key]] for key in _TENSOR_KEYS}
    return {
        **{key: declared[key] for key in _ENGINE_KEYS if key in declared},
        "inputs": [_OPTIONAL_INPUT, *({**one, "optional": True} for one in own["inputs"])],
        "outputs": [_OUTPUT, *own["outputs"]],
    }


def is_openai(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get(OPENAI) is True


def completed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with ``openai: true`` and what that implies."""
    if is_model_path(str(entry.get("callable"))):  # it declares tensors of its own
        return {"decoupled": True, **entry}
    return {"inputs": [_INPUT], "outputs": [_OUTPUT], "decoupled": True, **entry}


def is_for_openai(target: Any) -> bool:
    """Return whether the attribute ``openai`` says so, or a function takes one of OpenAI's requests."""
    marked = getattr(target, OPENAI, None)
    if isinstance(marked, bool):
        return marked
    methods = ("admit",) if is_stepped(target) else METHODS
    own = [one for name in methods if callable(one := getattr(target, name, None))]
    called = getattr(target, "__call__", None) if isinstance(target, type) else target  # noqa: B004
    return any(annotation_names(one) & REQUESTS for one in own or [called])


def has_openai_method(target: Any) -> bool:
    return any(callable(getattr(target, name, None)) for name in METHODS)


def annotation_names(function: Any) -> set[str]:
    """Return the names in the annotations of a function's parameters.

    The annotations are not evaluated: an unpickled function may lack names that only its annotations use.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C, or an object that cannot be called
        return set()
    words: set[str] = set()
    for one in parameters:
        given = one.annotation
        plain = isinstance(given, type) and not typing.get_args(given)
        words |= {given.__name__} if plain else set(re.findall(r"\w+", str(given)))
    return words


def tensors_problem(key: str, given: Any) -> str | None:
    """Return the error in the tensors under a key of a model with ``openai: true``, or None."""
    if given in (None, [_INPUT], [_OUTPUT], INPUTS, OUTPUTS) or given[:1] in ([_OPTIONAL_INPUT], [_OUTPUT]):
        return None
    return f"{key} do not go with openai: the server knows the tensors of its requests"
