"""The messages of ``ModelStreamInfer``: a response or an error, wrapped, serialised and framed.

Pure: bytes out. ``ModelStreamInferResponse`` has two fields, ``error_message`` (1) and ``infer_response``
(2); both are a tag and a length before bytes, so nothing passes through protobuf a second time.
"""

from __future__ import annotations

from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import RequestError
from gpuserve.front.endpoint.grpc_framing import frame
from gpuserve.front.endpoint.grpc_responses import Piece, check_size, response_parts, varint
from gpuserve.front.endpoint.v2 import InferRequest, InferResponse

FINAL_RESPONSE: Final = "triton_final_response"
_RESPONSE_TAG: Final = b"\x12"


def _final_parameter(final: bool) -> bytes:
    message = pb.ModelInferResponse()
    message.parameters[FINAL_RESPONSE].bool_param = final
    encoded: bytes = message.SerializeToString()
    return encoded


#: The parameter that every response of a stream carries, serialised.
_FINAL: Final = {final: _final_parameter(final) for final in (True, False)}


def stream_response(response: InferResponse, *, final: bool) -> list[Piece]:
    """A response, in pieces that may be the outputs' own memory: close it when they are copied.

    Raises:
        Internal, InvalidArgument: gRPC cannot carry it; see ``encode_infer_response``.
    """
    parts = [*response_parts(response), _FINAL[final]]
    nbytes = sum(map(len, parts))
    head = _RESPONSE_TAG + varint(nbytes)
    return [frame(check_size(len(head) + nbytes)) + head, *parts]


def empty_final(request: InferRequest) -> list[Piece]:
    """The last word of a stream, without outputs, for a client that asked for it."""
    named = InferResponse(request.model_name, request.model_version, request.id, {}, [])
    return stream_response(named, final=True)


def stream_error(request: Any, error: RequestError, *, named: bool) -> list[Piece]:
    """An error that leaves the stream open. ``request`` is the request, or the message that became none; None
    where there was no message either. ``named``: the request was accepted, and this is its last response.
    """
    message = pb.ModelStreamInferResponse(error_message=str(error))
    if request is not None:
        message.infer_response.id = request.id
        if named:
            message.infer_response.model_name = request.model_name
            message.infer_response.model_version = request.model_version
            message.infer_response.parameters[FINAL_RESPONSE].bool_param = True
    encoded: bytes = message.SerializeToString()
    return [frame(len(encoded)), encoded]
