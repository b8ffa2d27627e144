"""Inference over gRPC: ``ModelInferRequest`` bytes to an ``InferRequest``, and an ``InferResponse`` to bytes.

Pure: no stream, no loop, no model lookup. What a request says about its own form is checked here
(where an input's data is, what a parameter's type is); what it says about the model, in ``validation``.

Requests are parsed by protobuf. Responses are assembled by hand around it: fields 1, 2 and 5 (names,
shapes) repeat from one response to the next and are serialised once, and field 6, the tensors, is a
tag and a length before bytes that need not pass through protobuf. Protobuf takes fields in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import Internal, InvalidArgument, Unimplemented
from gpuserve.front.endpoint.grpc_contents import contents_data
from gpuserve.front.endpoint.grpc_framing import frame
from gpuserve.front.endpoint.limits import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    MAX_PARAMETERS,
    check_count,
    check_name,
    shown,
)
from gpuserve.front.endpoint.v2 import Data, InferRequest, InferResponse, InputTensor, OutputTensor

Piece: TypeAlias = bytes | memoryview

#: A response, or a tensor in one, below this size is joined into one piece; above, it is not copied.
LARGE_NBYTES: Final = 64 << 10
#: What one gRPC message may measure; clients cannot read more.
MAX_MESSAGE_NBYTES: Final = (1 << 31) - 1
#: Responses with more outputs than this are not remembered, which bounds the memory of the cache.
_CACHED_OUTPUTS: Final = 16
_ID_TAG: Final = b"\x1a"
_RAW_TAG: Final = b"\x32"

_INT64: Final = range(-(1 << 63), 1 << 63)
_UINT64: Final = range(1 << 64)
_CUSTOM_CHOICES: Final = frozenset({"bool_param", "int64_param", "string_param", "double_param"})
_INTEGER_CHOICES: Final = frozenset({"int64_param", "uint64_param"})
_EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"


def decode(message_type: Any, body: bytes | bytearray | memoryview) -> Any:
    """A protobuf message of ``message_type`` out of its bytes.

    Raises:
        InvalidArgument: the bytes are none.
    """
    try:
        return message_type.FromString(body)
    except DecodeError:
        raise InvalidArgument(
            f"the request body is not a {message_type.DESCRIPTOR.name}: its protobuf encoding is malformed"
        ) from None


def parse_infer_request(body: bytes | bytearray | memoryview) -> InferRequest:
    """The request that the bytes of a ``ModelInferRequest`` hold.

    Raises:
        InvalidArgument: malformed, or contradicting itself.
        Unimplemented: it asks for shared memory or classification.
    """
    message = decode(pb.ModelInferRequest, body)
    return infer_request(message, message.raw_input_contents)


def infer_request(message: Any, raws: Sequence[Data]) -> InferRequest:
    """The request of a parsed ``ModelInferRequest`` whose raw contents are ``raws``, in order.

    Raises:
        InvalidArgument: the request contradicts itself.
        Unimplemented: it asks for shared memory or classification.
    """
    model_name = message.model_name
    outputs = message.outputs
    given = _request_parameters(message.parameters, model_name) if message.parameters else _NO_PARAMETERS
    return InferRequest(
        model_name,
        message.model_version,
        message.id,
        dict(given.custom),
        _inputs(message.inputs, raws, model_name),
        _output_names(outputs, model_name) if outputs else (),
        given.timeout_s,
        given.priority,
        given.empty_final,
    )


def _inputs(inputs: Any, raws: Sequence[Data], model_name: str) -> list[InputTensor]:
    check_count("inputs", len(inputs), MAX_INPUTS, model_name)
    entries = iter(raws)
    tensors = []
    for tensor in inputs:
        name, datatype = tensor.name, tensor.datatype
        if tensor.parameters:
            _refuse_shared_memory("input", tensor, model_name)
        if tensor.HasField("contents"):
            if raws:
                raise InvalidArgument(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{shown(name)}' for model '{shown(model_name)}'"
                )
            data: Data = contents_data(tensor.contents, name, datatype, model_name)
        elif (entry := next(entries, None)) is not None:
            data = entry
        else:
            raise InvalidArgument(
                f"unable to find data for input tensor '{shown(name)}' for model "
                f"'{shown(model_name)}' in request."
            )
        tensors.append(InputTensor(name, datatype, tuple(tensor.shape), data))
    if next(entries, None) is not None:
        raise InvalidArgument(
            f"the request for model '{shown(model_name)}' has {len(raws)} entries in raw_input_contents, "
            f"expected one for each of its {len(tensors)} inputs"
        )
    return tensors


def _output_names(outputs: Any, model_name: str) -> tuple[str, ...]:
    check_count("outputs", len(outputs), MAX_OUTPUTS, model_name)
    for output in outputs:
        if output.parameters:
            _refuse_shared_memory("output", output, model_name)
            if "classification" in output.parameters:
                raise Unimplemented(
                    f"output '{shown(output.name)}' for model '{shown(model_name)}' has parameter "
                    "'classification', which this server does not support: expected to be asked for tensors"
                )
    return tuple([output.name for output in outputs])


def _refuse_shared_memory(what: str, tensor: Any, model_name: str) -> None:
    if "shared_memory_region" in tensor.parameters:
        raise Unimplemented(
            f"{what} '{shown(tensor.name)}' for model '{shown(model_name)}' has parameter "
            "'shared_memory_region', which this server does not support: expected the tensor in the message"
        )


class _Parameters(NamedTuple):
    """What a request's parameters say: those for the model, and those that the protocol reads itself."""

    custom: dict[str, Any]
    timeout_s: float | None = None
    priority: int = 0
    empty_final: bool = False


_NO_PARAMETERS: Final = _Parameters({})


def _request_parameters(given: Any, model_name: str) -> _Parameters:
    check_count("parameters", len(given), MAX_PARAMETERS, model_name)
    custom = {}
    timeout_us = priority = 0
    empty_final = False
    for key, value in given.items():
        check_name("parameter", key, model_name)
        choice = value.WhichOneof("parameter_choice")
        if key == "timeout":
            timeout_us = _not_negative(key, choice, value, "int64_param", model_name)
        elif key == "priority":
            priority = _not_negative(key, choice, value, "int64_param or uint64_param", model_name)
        elif key.startswith("triton_"):
            _check_reserved(key, choice, model_name)
            empty_final = value.bool_param
        elif choice in _CUSTOM_CHOICES:
            custom[key] = getattr(value, choice)
        else:
            raise _wrong_choice(key, "int64_param, bool_param, or string_param", choice, model_name)
    return _Parameters(custom, timeout_us / 1e6 or None, priority, empty_final)


def _not_negative(key: str, choice: str | None, value: Any, expected: str, model_name: str) -> int:
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
    """There is one reserved key, for the end of a stream; a unary call may give it too."""
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


def encode_infer_response(response: InferResponse, *, framed: bool = False) -> list[Piece]:
    """A serialised ``ModelInferResponse``, as pieces to be sent one after the other.

    A small response is one piece. Tensors of ``LARGE_NBYTES`` and more are pieces of their own, and
    are the outputs' own memory: close the response after they are sent. ``framed`` puts the five
    bytes of gRPC's framing in front.

    Raises:
        Internal: the model set a response parameter that gRPC cannot carry.
        InvalidArgument: the response is larger than a gRPC message may be.
    """
    parts = response_parts(response)
    nbytes = check_size(sum(map(len, parts)))
    if framed:
        parts.insert(0, frame(nbytes))
    if nbytes < LARGE_NBYTES:
        return [b"".join(parts)]
    return _merged(parts)


def response_parts(response: InferResponse) -> list[Piece]:
    """The fields of a serialised ``ModelInferResponse``, one after the other; their order is free.

    Raises:
        Internal: the model set a response parameter that gRPC cannot carry.
    """
    parts: list[Piece] = [_head(response)]
    for output in response.outputs:
        parts.append(_raw_prefix(len(output.data)))
        parts.append(output.data)
    return parts


def check_size(nbytes: int) -> int:
    """The size of a message, if gRPC can carry it.

    Raises:
        InvalidArgument: it cannot.
    """
    if nbytes > MAX_MESSAGE_NBYTES:
        raise InvalidArgument(
            f"Response has byte size {nbytes} which exceeds gRPC's byte size limit {MAX_MESSAGE_NBYTES}."
        )
    return nbytes


def _merged(parts: Iterable[Piece]) -> list[Piece]:
    """The parts with neighbours below ``LARGE_NBYTES`` joined."""
    pieces: list[Piece] = []
    small: list[Piece] = []
    for part in parts:
        if len(part) < LARGE_NBYTES:
            small.append(part)
            continue
        if small:
            pieces.append(b"".join(small))
            small = []
        pieces.append(part)
    if small:
        pieces.append(b"".join(small))
    return pieces


def _head(response: InferResponse) -> bytes:
    """Every field but the tensors."""
    outputs = response.outputs
    if len(outputs) <= _CACHED_OUTPUTS:
        key = tuple([(output.name, output.datatype, output.shape) for output in outputs])
        head = _cached_names(response.model_name, response.model_version, key)
    else:
        head = _names(response.model_name, response.model_version, outputs)
    if response.id:
        request_id = response.id.encode("utf-8", "replace")
        head = b"".join((head, _ID_TAG, varint(len(request_id)), request_id))
    if response.parameters:
        head += _parameters_bytes(response)
    return head


def _names(model_name: str, model_version: str, outputs: Iterable[OutputTensor]) -> bytes:
    """Fields 1, 2 and 5 of a response."""
    message = pb.ModelInferResponse(model_name=model_name, model_version=model_version)
    for output in outputs:
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    head: bytes = message.SerializeToString()
    return head


@functools.lru_cache(maxsize=1024)
def _cached_names(
    model_name: str, model_version: str, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> bytes:
    tensors = [OutputTensor(name, datatype, shape, b"") for name, datatype, shape in outputs]
    return _names(model_name, model_version, tensors)


def _parameters_bytes(response: InferResponse) -> bytes:
    message = pb.ModelInferResponse()
    for key, value in response.parameters.items():
        try:
            setattr(message.parameters[key], _choice_of(value), value)
        except (TypeError, ValueError):
            raise Internal(
                f"model '{response.model_name}' set response parameter '{shown(str(key))}' to a "
                f"{type(value).__name__} that gRPC cannot carry: expected bool, int of 64 bits, float or str"
            ) from None
    encoded: bytes = message.SerializeToString()
    return encoded


def _choice_of(value: Any) -> str:
    match value:
        case bool():
            return "bool_param"
        case int() if value in _INT64:
            return "int64_param"
        case int() if value in _UINT64:
            return "uint64_param"
        case float():
            return "double_param"
        case str():
            return "string_param"
    raise TypeError(type(value).__name__)


@functools.lru_cache(maxsize=1024)
def _raw_prefix(nbytes: int) -> bytes:
    """What goes before one entry of ``raw_output_contents``."""
    return _RAW_TAG + varint(nbytes)


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
