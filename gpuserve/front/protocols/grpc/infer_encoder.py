"""Encoding of an ``InferResponse`` into ``ModelInferResponse`` bytes. Pure.

Responses are assembled by hand: names and shapes (fields 1, 2, 5) repeat and are serialised once, and tensors
(field 6) need not pass through protobuf.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import Internal, InvalidArgument
from gpuserve.front.protocols.grpc.grpc_protocol import PREFIX
from gpuserve.front.requests.inference import InferResponse
from gpuserve.front.requests.limits import shown

Piece: TypeAlias = bytes | memoryview

#: Responses and tensors below this size are joined into one piece; larger ones are not copied.
LARGE_NBYTES: Final = 64 << 10
#: The size limit of one gRPC message; clients cannot read more.
MAX_MESSAGE_NBYTES: Final = (1 << 31) - 1
#: Responses with more outputs are not cached, which bounds the memory of the cache.
_CACHED_OUTPUTS: Final = 16
_ID_TAG: Final = b"\x1a"
_RAW_TAG: Final = b"\x32"

_INT64: Final = range(-(1 << 63), 1 << 63)
_UINT64: Final = range(1 << 64)


def encode_infer_response(response: InferResponse, *, framed: bool = False) -> list[Piece]:
    """Return a serialised response in pieces, if ``framed`` with gRPC's prefix. Large pieces are the outputs'
    own memory: close the response once they are sent. Raises Internal or InvalidArgument if gRPC cannot carry
    it.
    """
    parts = response_parts(response)
    nbytes = sum(map(len, parts))
    if nbytes > MAX_MESSAGE_NBYTES:
        check_size(nbytes)
    if framed:
        parts.insert(0, PREFIX.pack(0, nbytes))
    if nbytes < LARGE_NBYTES:
        return [b"".join(parts)]
    return _join_small(parts)


def response_parts(response: InferResponse) -> list[Piece]:
    """Return the fields of a serialised response. Raise Internal if gRPC cannot carry a parameter."""
    parts: list[Piece] = [_head(response)]
    for output in response.outputs:
        parts.append(_raw_prefix(len(output.data)))
        parts.append(output.data)
    return parts


def check_size(nbytes: int) -> int:
    """Return the size of a message. Raise InvalidArgument if it is over gRPC's limit."""
    if nbytes > MAX_MESSAGE_NBYTES:
        raise InvalidArgument(
            f"Response has byte size {nbytes} which exceeds gRPC's byte size limit {MAX_MESSAGE_NBYTES}."
        )
    return nbytes


def _join_small(parts: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring parts that are below ``LARGE_NBYTES``."""
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
    outputs = response.outputs
    described = tuple([(output.name, output.datatype, output.shape) for output in outputs])
    serialise = _names_head if len(outputs) <= _CACHED_OUTPUTS else _names_head.__wrapped__
    head = serialise(response.model_name, response.model_version, described)
    if response.id:
        request_id = response.id.encode("utf-8", "replace")
        head = b"".join((head, _ID_TAG, varint(len(request_id)), request_id))
    if response.parameters:
        head += _parameters_bytes(response)
    return head


@functools.lru_cache(maxsize=2048)
def _names_head(
    model_name: str, model_version: str, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> bytes:
    message = pb.ModelInferResponse(model_name=model_name, model_version=model_version)
    for name, datatype, shape in outputs:
        message.outputs.add(name=name, datatype=datatype, shape=shape)
    head: bytes = message.SerializeToString()
    return head


def _parameters_bytes(response: InferResponse) -> bytes:
    message = pb.ModelInferResponse()
    for key, value in response.parameters.items():
        try:
            setattr(message.parameters[key], _parameter_field(value), value)
        except (TypeError, ValueError):
            raise Internal(
                f"model '{response.model_name}' set response parameter '{shown(str(key))}' to a "
                f"{type(value).__name__} that gRPC cannot carry: expected bool, int of 64 bits, float or str"
            ) from None
    encoded: bytes = message.SerializeToString()
    return encoded


def _parameter_field(value: Any) -> str:
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


@functools.lru_cache(maxsize=2048)
def _raw_prefix(nbytes: int) -> bytes:
    """Return the tag and length before one entry of ``raw_output_contents``."""
    return _RAW_TAG + varint(nbytes)


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
