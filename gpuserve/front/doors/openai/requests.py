"""The body of a request of OpenAI's API to an ``InferRequest``: only what says where it goes, and how it is
answered, is read here. All else is read by the worker. Pure.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from gpuserve.core.errors import InvalidArgument, NotFound
from gpuserve.front.doors.openai.outline import outline
from gpuserve.front.requests.inference import Data, InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.json_arrays import SHORT_NBYTES
from gpuserve.front.requests.limits import shown
from gpuserve.model import openai_declaration as openai
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import BYTES

#: Before each element of a tensor of byte strings.
_LENGTH_NBYTES: Final = 4


class OpenAIRequest(InferRequest):
    """A request of OpenAI's API. ``streams``: its answer is to be a stream."""

    __slots__ = ("streams",)

    def __init__(self, spec: ModelSpec, endpoint: str, data: Data, *, streams: bool) -> None:
        shape = (1, 1) if spec.max_batch_size else (1,)
        tensor = InputTensor(openai.REQUEST, BYTES, shape, data)
        super().__init__(spec.name, "", "", {openai.ENDPOINT: endpoint}, [tensor], (), None)
        self.streams = streams


class Asked(NamedTuple):
    """The members of a request's body that route it, and the body as the parts of a tensor."""

    model: str
    streams: bool
    parts: list[bytes]


def read_body(parts: list[bytes]) -> Asked:
    """Read where the request goes whose body is in these parts.

    Raises:
        InvalidArgument: the body is no JSON object, or does not name a model.
        ResourceExhausted: the body has too many values.
    """
    nbytes = sum(map(len, parts))
    is_short = nbytes <= SHORT_NBYTES
    try:
        document = orjson.loads(b"".join(parts) if is_short else outline(parts))
    except orjson.JSONDecodeError as error:
        detail = str(error) if is_short else error.msg  # an outline has other positions
        raise InvalidArgument(f"the body is no JSON: {detail}") from None
    if not isinstance(document, dict):
        raise InvalidArgument("the body must be a JSON object")
    model, streams = document.get("model"), document.get("stream")
    if not isinstance(model, str):
        raise InvalidArgument(f"model: expected the name of a model, given {_given(document, 'model')}")
    if streams is not None and not isinstance(streams, bool):
        raise InvalidArgument(f"stream: expected true or false, given {_given(document, 'stream')}")
    return Asked(model, streams is True, [nbytes.to_bytes(_LENGTH_NBYTES, "little"), *parts])


def for_openai(spec: ModelSpec) -> ModelSpec:
    """The model itself; NotFound: it is none for OpenAI's clients."""
    if not spec.openai:
        raise NotFound(f"the model '{shown(spec.name)}' is not for OpenAI's clients: it needs openai: true")
    return spec


def document_of(response: InferResponse) -> memoryview:
    """Return the JSON document in a response of a model, which is valid until the response is closed."""
    return memoryview(response.outputs[0].data)[_LENGTH_NBYTES:]


def _given(document: dict[Any, Any], member: str) -> str:
    if member not in document:
        return "none"
    return shown(orjson.dumps(document[member]).decode())
