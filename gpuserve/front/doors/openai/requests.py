"""The body of a request of OpenAI's API to an ``InferRequest``: only what says where it goes, and how it is
answered, is read here. All else is read by the worker. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from gpuserve.declare import openai
from gpuserve.declare.spec import ModelSpec
from gpuserve.errors import InvalidArgument, NotFound
from gpuserve.front.v2.limits import shown
from gpuserve.front.v2.types import InferRequest, InferResponse, InputTensor
from gpuserve_worker.protocol.tensor import BYTES

#: Before each element of a tensor of byte strings.
_LENGTH_NBYTES: Final = 4


class OpenAIRequest(InferRequest):
    """A request of OpenAI's API. ``streams``: its answer is to be a stream."""

    __slots__ = ("streams",)

    def __init__(self, spec: ModelSpec, endpoint: str, body: bytes, *, streams: bool) -> None:
        shape = (1, 1) if spec.max_batch_size else (1,)
        data = len(body).to_bytes(_LENGTH_NBYTES, "little") + body
        tensor = InputTensor(openai.REQUEST, BYTES, shape, data)
        super().__init__(spec.name, "", "", {openai.ENDPOINT: endpoint}, [tensor], (), None)
        self.streams = streams


def parsed(endpoint: str, model_of: Callable[[str], ModelSpec], body: bytes) -> OpenAIRequest:
    """The request in a body that came to an endpoint. Raises InvalidArgument: the body is no JSON object, or
    does not name a model; NotFound: the model is not for OpenAI's clients; what ``model_of`` raises.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgument("the body must be a JSON object")
    model, streams = document.get("model"), document.get("stream")
    if not isinstance(model, str):
        raise InvalidArgument(f"model: expected the name of a model, given {_given(document, 'model')}")
    if streams is not None and not isinstance(streams, bool):
        raise InvalidArgument(f"stream: expected true or false, given {_given(document, 'stream')}")
    return OpenAIRequest(for_openai(model_of(model)), endpoint, body, streams=streams is True)


def for_openai(spec: ModelSpec) -> ModelSpec:
    """The model itself; NotFound: it is none for OpenAI's clients."""
    if not spec.openai:
        raise NotFound(f"the model '{shown(spec.name)}' is not for OpenAI's clients: it needs openai: true")
    return spec


def document_of(response: InferResponse) -> bytes:
    """The JSON document that a model has put into its response."""
    return bytes(response.outputs[0].data[_LENGTH_NBYTES:])


def _given(document: dict[Any, Any], member: str) -> str:
    if member not in document:
        return "none"
    return shown(orjson.dumps(document[member]).decode())
