"""Decoding of ``ModelInferRequest`` bytes into an ``InferRequest``. Pure.

This module checks the form of a request; ``requests/validation.py`` checks it against the model.

Templates speed up small requests: a client sends the same names, types and shapes again and again. These come
first in the message, so the bytes before the tensors, less the id, identify the earlier parse result. Tensors
in shared memory are named there as well; the region itself is looked up for each request. Requests with rare
features (custom parameters, classification, contents outside of ``raw_input_contents``, another order of
fields) have no template and are parsed by protobuf.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.protocols.grpc.typed_contents import contents_data, cut_contents, long_contents
from gpuserve.front.requests import limits
from gpuserve.front.requests import parameters as known
from gpuserve.front.requests.inference import NOTHING, Data, InferRequest, InputTensor, RegionSlice
from gpuserve.front.requests.inference import Sequence as RequestSequence
from gpuserve.front.requests.limits import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    check_count,
    check_entries,
    check_parameter_name,
    shown,
)

#: protobuf parses messages without raw contents up to this size on the event loop, which takes at most 5 ms.
SHORT_NBYTES: Final = 64 << 10


def decode(message_type: Any, body: bytes | bytearray | memoryview) -> Any:
    """Parse a protobuf message of ``message_type``. Raise InvalidArgument if the bytes are malformed."""
    try:
        return message_type.FromString(body)
    except DecodeError:
        raise InvalidArgument(
            f"the request body is not a {message_type.DESCRIPTOR.name}: its protobuf encoding is malformed"
        ) from None


def parse_refused_message(body: bytes | bytearray | memoryview) -> Any:
    """Parse a refused request's message for its name and id; None if the bytes are malformed."""
    try:
        return decode(pb.ModelInferRequest, body)
    except InvalidArgument:
        return None


def parse_infer_request(body: bytes | bytearray | memoryview) -> InferRequest:
    """Return the request of a short message. Raises InvalidArgument. ``GrpcBodyScanner`` reads long ones."""
    if type(body) is bytes and (request := request_by_template(body)) is not None:
        return request
    message = decode(pb.ModelInferRequest, body)
    return infer_request(message, message.raw_input_contents)


def parse_beside_raws(rest: bytes | bytearray, raws: Sequence[Data]) -> InferRequest:
    """Return the request of a message whose raw contents were taken out. A long one takes time, in Python.

    Raises InvalidArgument if it is malformed or contradicts itself, and ResourceExhausted if it is too large.
    """
    if len(rest) <= SHORT_NBYTES:
        return infer_request(decode(pb.ModelInferRequest, rest), raws)
    cut = cut_contents(rest)
    return infer_request(decode(pb.ModelInferRequest, cut.rest), raws, cut.contents)


def infer_request(
    message: Any, raws: Sequence[Data], contents: Mapping[int, Sequence[memoryview]] = MappingProxyType({})
) -> InferRequest:
    """Return the request of a parsed message with its ``raws``, and the ``contents`` cut out of its inputs,
    by position. Raises InvalidArgument if the message contradicts itself.
    """
    model_name = message.model_name
    outputs = message.outputs
    given = request_parameters(message.parameters, model_name) if message.parameters else NO_PARAMETERS
    inputs, in_regions = _inputs(message.inputs, raws, contents, model_name)
    check_count("outputs", len(outputs), MAX_OUTPUTS, model_name)
    special = [one for one in outputs if one.parameters]
    request = InferRequest(
        model_name,
        message.model_version,
        message.id,
        dict(given.custom),
        inputs,
        tuple([one.name for one in outputs]),
        given.timeout_s,
        given.priority,
        given.empty_final,
        NOTHING,
        NOTHING,
        given.sequence,
    )
    if special:
        request.placements, request.class_counts = _special_outputs(special, model_name)
    if in_regions or special:
        request.regions = known.regions_of(inputs, request.placements)
    return request


def _inputs(
    inputs: Any, raws: Sequence[Data], contents: Mapping[int, Sequence[memoryview]], model_name: str
) -> tuple[list[InputTensor], bool]:
    """Return the inputs, and whether any input lies in a region, which uses no entry of ``raws``."""
    check_count("inputs", len(inputs), MAX_INPUTS, model_name)
    entries = iter(raws)
    in_regions = False
    tensors = []
    for position, tensor in enumerate(inputs):
        data: Data | None
        if tensor.parameters and (data := _tensor_region(tensor)) is not None:
            in_regions = True
            if tensor.HasField("contents"):
                raise InvalidArgument(
                    "unexpected 'content' provided when using shared memory for input tensor "
                    f"'{shown(tensor.name)}' for model '{shown(model_name)}'"
                )
        elif tensor.HasField("contents") and not (
            # MLServer's client sends empty contents beside raw contents.
            raws and position not in contents and not tensor.contents.ListFields()
        ):
            if raws:
                raise InvalidArgument(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{shown(tensor.name)}' for model '{shown(model_name)}'"
                )
            if position in contents:
                data = long_contents(contents[position], tensor.name, tensor.datatype, model_name)
            else:
                data = contents_data(tensor.contents, tensor.name, tensor.datatype, model_name)
        elif (data := next(entries, None)) is None:
            raise InvalidArgument(
                f"unable to find data for input tensor '{shown(tensor.name)}' for model "
                f"'{shown(model_name)}' in request."
            )
        tensors.append(InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    if next(entries, None) is not None:
        expected = sum(type(one.data) is not RegionSlice for one in tensors)
        raise InvalidArgument(
            f"the request for model '{shown(model_name)}' has {len(raws)} entries in raw_input_contents, "
            f"expected one for each of its {expected} inputs outside of shared memory"
        )
    return tensors, in_regions


def _special_outputs(outputs: Any, model_name: str) -> tuple[Mapping[str, RegionSlice], Mapping[str, int]]:
    placements, class_counts = {}, {}
    for output in outputs:
        given = tensor_parameters(output.parameters)
        if (place := known.region_slice(given, output.name, known.KINDS_OF_GRPC)) is not None:
            placements[output.name] = place
        if count := known.class_count(given, output.name, known.KINDS_OF_GRPC):
            class_counts[output.name] = count
            if place is not None:
                raise InvalidArgument(
                    "output can't set both 'shared_memory_region' and 'classification', "
                    f"as output '{shown(output.name)}' does for model '{shown(model_name)}'"
                )
    return placements, class_counts


# ---- templates -----------------------------------------------------------------------------------

_ID_TAG: Final = 3 << 3 | 2
_RAW_TAG: Final = 7 << 3 | 2
#: model_name, model_version, id, parameters, inputs, outputs: all of them say their length.
_HEAD_TAGS: Final = frozenset(number << 3 | 2 for number in range(1, 7))
#: Longer keys get no template.
_MOST_NBYTES: Final = 1024
_REMEMBERED: Final = 2048
#: An upper bound on the number of tensors; a range costs less than a counter.
_RAWS: Final = range(MAX_INPUTS)
#: Shifts of the second to the fifth byte of a length, which reaches 2 GiB.
_SHIFTS: Final = (7, 14, 21, 28)


class Template(NamedTuple):
    """A request without id and tensors, with region slices of inputs by position and of outputs by name."""

    model_name: str
    model_version: str
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[str, ...]
    places: dict[int, RegionSlice]
    placements: dict[str, RegionSlice]


def request_by_template(body: bytes) -> InferRequest | None:
    """Return the request in a serialised ``ModelInferRequest``, or None if the message has no template."""
    try:
        parts = _split_message(body)
        if parts is None:
            return None
        key, id_bytes, raws = parts
        template = _cached_template(key)
        if template is None or len(template.inputs) != len(raws) + len(template.places):
            return None
        request_id = id_bytes.decode() if id_bytes else ""
    except (IndexError, UnicodeDecodeError):  # malformed: the parser reports what is wrong
        return None
    if template.places or template.placements:
        return _request_with_regions(template, request_id, raws)
    inputs = [
        InputTensor(name, datatype, shape, data)
        for (name, datatype, shape), data in zip(template.inputs, raws, strict=True)
    ]
    model_name, model_version, _, outputs, _, _ = template
    return InferRequest(model_name, model_version, request_id, {}, inputs, outputs, None)


def _request_with_regions(template: Template, request_id: str, raws: list[bytes]) -> InferRequest:
    places = {position: place.unresolved_copy() for position, place in template.places.items()}
    placements = {name: place.unresolved_copy() for name, place in template.placements.items()}
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


def _split_message(body: bytes) -> tuple[bytes, bytes, list[bytes]] | None:
    """Return the bytes before the tensors without the id, the id, and each tensor's data; None for a message
    of another form. Raise IndexError if the message ends within a field.
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
            length, start = _read_length(body, position + 1)
        if tag == _ID_TAG:
            if kept:  # the last id counts, but the parser checks all of them
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
            length, start = _read_length(body, position + 1)
        position = start + length
        raws.append(body[start:position])
    return (key, request_id, raws) if position == nbytes else None


def _read_length(body: bytes, position: int) -> tuple[int, int]:
    """Return a multi-byte length and its end position. Raise IndexError if it is cut off or far too large."""
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
def _cached_template(key: bytes) -> Template | None:
    """Return the template of these bytes, or None if requests with them are not plain."""
    try:
        message = pb.ModelInferRequest.FromString(key)
        inputs, outputs = message.inputs, message.outputs
        if message.parameters or message.id or any(one.HasField("contents") for one in inputs):
            return None
        if len(inputs) > MAX_INPUTS or len(outputs) > MAX_OUTPUTS:
            return None
        if any(known.CLASSIFICATION in one.parameters for one in outputs):
            return None
        places = [_tensor_region(one) for one in inputs]
        placements = {one.name: place for one in outputs if (place := _tensor_region(one)) is not None}
    except (DecodeError, InvalidArgument):  # the parser reports the error again
        return None
    return Template(
        message.model_name,
        message.model_version,
        tuple((one.name, one.datatype, tuple(one.shape)) for one in inputs),
        tuple(one.name for one in outputs),
        {position: place for position, place in enumerate(places) if place is not None},
        placements,
    )


def _tensor_region(tensor: Any) -> RegionSlice | None:
    """Return the region slice of a tensor, if any. Raise InvalidArgument if the slice is invalid."""
    return known.region_slice(tensor_parameters(tensor.parameters), tensor.name, known.KINDS_OF_GRPC)


# ---- parameters ----------------------------------------------------------------------------------

_CUSTOM_CHOICES: Final = frozenset({"bool_param", "int64_param", "string_param", "double_param"})
_INTEGER_CHOICES: Final = frozenset({"int64_param", "uint64_param"})
_EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"


class RequestParameters(NamedTuple):
    """Request parameters: ``custom`` ones for the model, and those that the protocol itself reads."""

    custom: dict[str, Any]
    timeout_s: float | None = None
    priority: int = 0
    empty_final: bool = False
    sequence: RequestSequence | None = None


NO_PARAMETERS: Final = RequestParameters({})


def request_parameters(given: Any, model_name: str) -> RequestParameters:
    """Read the ``parameters`` of a request. Raise InvalidArgument for a wrong type or value, or too many."""
    check_count("parameters", len(given), limits.MAX_PARAMETERS, model_name)
    custom = {}
    timeout_us = priority = 0
    empty_final = in_sequence = False
    for key, value in given.items():
        check_parameter_name(key, model_name)
        choice = value.WhichOneof("parameter_choice")
        if key == "timeout":
            timeout_us = _unsigned_value(key, choice, value, "int64_param", model_name)
        elif key == "priority":
            priority = _unsigned_value(key, choice, value, "int64_param or uint64_param", model_name)
        elif key in known.SEQUENCE_KEYS:
            in_sequence = True
        elif key.startswith("triton_"):
            _check_reserved(key, choice, model_name)
            empty_final = value.bool_param
        elif choice in _CUSTOM_CHOICES:
            custom[key] = getattr(value, choice)
        else:
            raise _wrong_choice(key, "int64_param, bool_param, or string_param", choice, model_name)
    sequence = _sequence(given, model_name) if in_sequence else None
    return RequestParameters(custom, timeout_us / 1e6 or None, priority, empty_final, sequence)


def _sequence(given: Any, model_name: str) -> RequestSequence | None:
    correlation_id: Any = 0
    if known.ID in given:
        correlation_id = _typed_value(known.ID, given, ("int64_param", "string_param"), model_name)
    keys = known.START, known.END
    flags = [key in given and _typed_value(key, given, ("bool_param",), model_name) for key in keys]
    return known.sequence_of(correlation_id, start=flags[0], end=flags[1])


def _typed_value(key: str, given: Any, expected: tuple[str, ...], model_name: str) -> Any:
    choice = given[key].WhichOneof("parameter_choice")
    if choice not in expected:
        raise _wrong_choice(key, " or ".join(expected), choice, model_name)
    return getattr(given[key], choice)


def _unsigned_value(key: str, choice: str | None, value: Any, expected: str, model_name: str) -> int:
    if choice not in _INTEGER_CHOICES:
        raise _wrong_choice(key, expected, choice, model_name)
    number: int = getattr(value, choice)
    if number < 0:
        raise InvalidArgument(
            f"invalid value for '{key}', expected value >= 0. The request for model "
            f"'{shown(model_name)}' gave {number}."
        )
    return number


def _check_reserved(key: str, choice: str | None, model_name: str) -> None:
    """Check the single reserved key, which asks for an empty final response; unary calls may give it too."""
    if key != _EMPTY_FINAL_RESPONSE:
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
            f"starting with 'triton_' are allowed: {_EMPTY_FINAL_RESPONSE}. The request for model "
            f"'{shown(model_name)}' gave '{shown(key)}'."
        )
    if choice != "bool_param":
        raise _wrong_choice(key, "bool_param", choice, model_name)


def _wrong_choice(key: str, expected: str, given: str | None, model_name: str) -> InvalidArgument:
    return InvalidArgument(
        f"invalid value type for '{shown(key)}' parameter, expected {expected}. The request for model "
        f"'{shown(model_name)}' gave {given or 'no value'}."
    )


def tensor_parameters(given: Any) -> dict[str, Any]:
    """Return a tensor's parameters as plain values or None. Raise InvalidArgument if there are too many."""
    check_entries("parameters of one tensor or model", given)
    values = {}
    for key, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        values[key] = getattr(value, choice) if choice else None
    return values
