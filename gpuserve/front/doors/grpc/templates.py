"""What repeats from one small ``ModelInferRequest`` to the next: everything but the tensors and the id.

Pure. A client sends the same names, types and shapes again and again. They come first in the message, and
the tensors last, so the bytes before the tensors, less the id, tell what was parsed of them the last time.
Tensors in shared memory are named there, and repeat as well: a template has their places as they were sent.
Whether there is such a region is looked up for each request, as ever.

What is rare about a request (its own parameters, classification, contents outside of ``raw_input_contents``,
another order of fields) has no template, and is parsed in ``grpc_requests``.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.doors.grpc.parameters import tensor_parameters
from gpuserve.front.v2.limits import MAX_INPUTS, MAX_OUTPUTS
from gpuserve.front.v2.tensor_parameters import CLASSIFICATION, KINDS_OF_GRPC, region_slice
from gpuserve.front.v2.types import InferRequest, InputTensor, RegionSlice

_ID_TAG: Final = 3 << 3 | 2
_RAW_TAG: Final = 7 << 3 | 2
#: model_name, model_version, id, parameters, inputs, outputs: all of them say their length.
_HEAD_TAGS: Final = frozenset(number << 3 | 2 for number in range(1, 7))
#: Longer ones are not remembered.
_MOST_NBYTES: Final = 1024
_REMEMBERED: Final = 1024
#: How many tensors are looked for.
_RAWS: Final = range(MAX_INPUTS)
#: Of the second byte of a length to its fifth, with which 2 GiB can be told.
_SHIFTS: Final = (7, 14, 21, 28)


class Template(NamedTuple):
    """A request without its id and its tensors. ``places`` are those of the inputs that lie in regions, by
    position; ``placements`` those of outputs. They are copied for each request.
    """

    model_name: str
    model_version: str
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[str, ...]
    places: dict[int, RegionSlice]
    placements: dict[str, RegionSlice]


def request_by_template(body: bytes) -> InferRequest | None:
    """The request in a serialised ``ModelInferRequest``; None where it has no template."""
    try:
        parts = _split(body)
        if parts is None:
            return None
        key, id_bytes, raws = parts
        template = _template(key)
        if template is None or len(template.inputs) != len(raws) + len(template.places):
            return None
        request_id = id_bytes.decode() if id_bytes else ""
    except (IndexError, UnicodeDecodeError):  # malformed: the parser has the words for it
        return None
    if template.places or template.placements:
        return _with_regions(template, request_id, raws)
    inputs = [
        InputTensor(name, datatype, shape, data)
        for (name, datatype, shape), data in zip(template.inputs, raws, strict=True)
    ]
    model_name, model_version, _, outputs, _, _ = template
    return InferRequest(model_name, model_version, request_id, {}, inputs, outputs, None)


def _with_regions(template: Template, request_id: str, raws: list[bytes]) -> InferRequest:
    """The request of a template of which tensors lie in regions."""
    places = {position: place.again() for position, place in template.places.items()}
    placements = {name: place.again() for name, place in template.placements.items()}
    entries = iter(raws)
    inputs = [
        InputTensor(name, datatype, shape, places[position] if position in places else next(entries))
        for position, (name, datatype, shape) in enumerate(template.inputs)
    ]
    return InferRequest(
        template.model_name,
        template.model_version,
        request_id,
        {},
        inputs,
        template.outputs,
        None,
        placements=placements,
        regions=(*places.values(), *placements.values()),
    )


def _split(body: bytes) -> tuple[bytes, bytes, list[bytes]] | None:
    """What stands before the tensors but for the id, the id, and each tensor's data; None where a message has
    other parts, or another order. IndexError: it ends within a field.
    """
    position, nbytes = 0, len(body)
    head_nbytes = nbytes if nbytes < _MOST_NBYTES else _MOST_NBYTES
    key, request_id = b"", b""
    kept = 0
    while position < head_nbytes and (tag := body[position]) != _RAW_TAG:
        if tag not in _HEAD_TAGS:
            return None
        length, start = body[position + 1], position + 2
        if length >= 0x80:
            length, start = _length(body, position + 1)
        if tag == _ID_TAG:
            if kept:  # the last one counts, but the parser judges all of them
                return None
            key, kept = body[:position], start + length
            request_id = body[start:kept]
            head_nbytes += kept - position
            head_nbytes = nbytes if nbytes < head_nbytes else head_nbytes
        position = start + length
    key = key + body[kept:position] if kept else body[:position]
    if len(key) > _MOST_NBYTES:
        return None
    raws: list[bytes] = []
    for _ in _RAWS:
        if position >= nbytes:
            break
        if body[position] != _RAW_TAG:
            return None
        length, start = body[position + 1], position + 2
        if length >= 0x80:
            length, start = _length(body, position + 1)
        position = start + length
        raws.append(body[start:position])
    return (key, request_id, raws) if position == nbytes else None


def _length(body: bytes, position: int) -> tuple[int, int]:
    """A length of more than one byte and its end, if not padded; IndexError: cut off, or far too large."""
    number = body[position] & 0x7F
    position += 1
    for shift in _SHIFTS:
        byte = body[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise IndexError


@functools.lru_cache(maxsize=_REMEMBERED)
def _template(key: bytes) -> Template | None:
    """The template that these bytes are; None: a request of them is not a plain one."""
    try:
        message = pb.ModelInferRequest.FromString(key)
        inputs, outputs = message.inputs, message.outputs
        if message.parameters or message.id or any(one.HasField("contents") for one in inputs):
            return None
        if len(inputs) > MAX_INPUTS or len(outputs) > MAX_OUTPUTS:
            return None
        if any(CLASSIFICATION in one.parameters for one in outputs):
            return None
        places = [_place(one) for one in inputs]
        placements = {one.name: place for one in outputs if (place := _place(one)) is not None}
    except (DecodeError, InvalidArgument):  # again for the parser to tell
        return None
    return Template(
        message.model_name,
        message.model_version,
        tuple((one.name, one.datatype, tuple(one.shape)) for one in inputs),
        tuple(one.name for one in outputs),
        {position: place for position, place in enumerate(places) if place is not None},
        placements,
    )


def _place(tensor: Any) -> RegionSlice | None:
    """The region that a tensor lies in, or is to be written to, if any; InvalidArgument: it cannot be."""
    return region_slice(tensor_parameters(tensor.parameters), tensor.name, KINDS_OF_GRPC)
