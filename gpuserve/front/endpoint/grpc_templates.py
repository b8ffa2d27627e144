"""What repeats from one small ``ModelInferRequest`` to the next: everything but the tensors and the id.

Pure. A client sends the same names, types and shapes again and again. They come first in the message, and
the tensors last, so the bytes before the tensors, less the id, tell what was parsed of them the last time.
What is rare about a request (parameters, shared memory, contents outside of ``raw_input_contents``, another
order of fields) has no template, and is parsed in ``grpc_requests``.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.endpoint.limits import MAX_INPUTS, MAX_OUTPUTS
from gpuserve.front.endpoint.v2 import InferRequest, InputTensor

_ID_TAG: Final = 3 << 3 | 2
_RAW_TAG: Final = 7 << 3 | 2
#: model_name, model_version, id, parameters, inputs, outputs: all of them say their length.
_HEAD_TAGS: Final = frozenset(number << 3 | 2 for number in range(1, 7))
#: Longer ones are not remembered.
_MOST_NBYTES: Final = 1024
_REMEMBERED: Final = 1024


class Template(NamedTuple):
    """A request without its id and its tensors."""

    model_name: str
    model_version: str
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[str, ...]


class _Split(NamedTuple):
    """The parts of a message: what a template is found by, the id, and the tensors."""

    key: bytes
    request_id: bytes
    raws: list[bytes]


def request_by_template(body: bytes) -> InferRequest | None:
    """The request in a serialised ``ModelInferRequest``; None where it has no template."""
    try:
        parts = _split(body)
        if parts is None:
            return None
        template = _template(parts.key)
        if template is None or len(template.inputs) != len(parts.raws):
            return None
        request_id = parts.request_id.decode() if parts.request_id else ""
    except (IndexError, UnicodeDecodeError):  # malformed: the parser has the words for it
        return None
    inputs = [
        InputTensor(name, datatype, shape, data)
        for (name, datatype, shape), data in zip(template.inputs, parts.raws, strict=True)
    ]
    model_name, model_version, _, outputs = template
    return InferRequest(model_name, model_version, request_id, {}, inputs, outputs, None)


def _split(body: bytes) -> _Split | None:
    """The parts of a message whose tensors come last; None for any other.

    Raises:
        IndexError: it ends within a field.
    """
    position, nbytes = 0, len(body)
    key, request_id = b"", b""
    kept = 0
    while position < nbytes and (tag := body[position]) != _RAW_TAG:
        if tag not in _HEAD_TAGS:
            return None
        length, start = _length(body, position + 1)
        if tag == _ID_TAG:
            key, kept = key + body[kept:position], start + length
            request_id = body[start:kept]
        position = start + length
    key = key + body[kept:position] if kept else body[:position]
    if len(key) > _MOST_NBYTES:
        return None
    raws = []
    while position < nbytes:
        if body[position] != _RAW_TAG:
            return None
        length, start = _length(body, position + 1)
        position = start + length
        raws.append(body[start:position])
    return _Split(key, request_id, raws) if position == nbytes else None


def _length(body: bytes, position: int) -> tuple[int, int]:
    """A length and where it ends."""
    byte = body[position]
    position += 1
    if byte < 0x80:
        return byte, position
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        byte = body[position]
        position += 1
        number |= (byte & 0x7F) << shift
        shift += 7
    return number, position


@functools.lru_cache(maxsize=_REMEMBERED)
def _template(key: bytes) -> Template | None:
    """The template that these bytes are; None: a request of them is not a plain one."""
    try:
        message = pb.ModelInferRequest.FromString(key)
    except DecodeError:
        return None
    inputs, outputs = message.inputs, message.outputs
    special = message.parameters or message.id or any(one.parameters for one in (*inputs, *outputs))
    if special or any(one.HasField("contents") for one in inputs):
        return None
    if len(inputs) > MAX_INPUTS or len(outputs) > MAX_OUTPUTS:
        return None
    return Template(
        message.model_name,
        message.model_version,
        tuple((one.name, one.datatype, tuple(one.shape)) for one in inputs),
        tuple(one.name for one in outputs),
    )
