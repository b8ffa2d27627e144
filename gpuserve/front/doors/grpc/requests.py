"""Inference over gRPC: the bytes of a ``ModelInferRequest`` to an ``InferRequest``. Pure. What a request says
about its own form is checked here; what it says about the model, in ``validation``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.doors.grpc.contents import contents_data
from gpuserve.front.doors.grpc.parameters import NO_PARAMETERS, request_parameters, tensor_parameters
from gpuserve.front.doors.grpc.templates import request_by_template
from gpuserve.front.doors.grpc.typed_contents import cut_contents, long_contents
from gpuserve.front.v2.limits import MAX_INPUTS, MAX_OUTPUTS, check_count, shown
from gpuserve.front.v2.tensor_parameters import (
    KINDS_OF_GRPC,
    class_count,
    region_slice,
    regions_of,
)
from gpuserve.front.v2.types import NOTHING, Data, InferRequest, InputTensor, RegionSlice

#: A message without raw contents up to this size is parsed by protobuf, on the event loop: 5 ms at most.
SHORT_NBYTES: Final = 64 << 10
_ALL_OUTPUTS: Final[tuple[tuple[str, ...], Sequence[Any]]] = ((), ())


def decode(message_type: Any, body: bytes | bytearray | memoryview) -> Any:
    """A protobuf message of ``message_type`` out of its bytes; InvalidArgument: the bytes are none."""
    try:
        return message_type.FromString(body)
    except DecodeError:
        raise InvalidArgument(
            f"the request body is not a {message_type.DESCRIPTOR.name}: its protobuf encoding is malformed"
        ) from None


def message_of(body: bytes | bytearray | memoryview) -> Any:
    """The message of a request that was refused, to name it by; None: the bytes are none."""
    try:
        return decode(pb.ModelInferRequest, body)
    except InvalidArgument:
        return None


def parse_infer_request(body: bytes | bytearray | memoryview) -> InferRequest:
    """Return the request of a short serialised message; InvalidArgument if it is malformed or contradicts
    itself. A long one is read by ``GrpcBodyScanner``.
    """
    if type(body) is bytes and (request := request_by_template(body)) is not None:
        return request
    message = decode(pb.ModelInferRequest, body)
    return infer_request(message, message.raw_input_contents)


def parse_beside_raws(rest: bytes | bytearray, raws: Sequence[Data]) -> InferRequest:
    """Return the request of a serialised message out of which its raw contents were taken.

    Raises InvalidArgument if it is malformed or contradicts itself, and ResourceExhausted if it is too large.
    A long one takes time, in Python that other threads can interrupt.
    """
    if len(rest) <= SHORT_NBYTES:
        return infer_request(decode(pb.ModelInferRequest, rest), raws)
    cut = cut_contents(rest)
    return infer_request(decode(pb.ModelInferRequest, cut.rest), raws, cut.contents)


def infer_request(
    message: Any, raws: Sequence[Data], contents: Mapping[int, Sequence[memoryview]] = MappingProxyType({})
) -> InferRequest:
    """The request of a parsed message with its raw contents in order, and the ``contents`` that were cut out
    of its inputs, by their positions; InvalidArgument: contradictory.
    """
    model_name = message.model_name
    outputs = message.outputs
    given = request_parameters(message.parameters, model_name) if message.parameters else NO_PARAMETERS
    inputs, in_regions = _inputs(message.inputs, raws, contents, model_name)
    names, special = _output_names(outputs, model_name) if outputs else _ALL_OUTPUTS
    request = InferRequest(
        model_name,
        message.model_version,
        message.id,
        dict(given.custom),
        inputs,
        names,
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
        request.regions = regions_of(inputs, request.placements)
    return request


def _inputs(
    inputs: Any, raws: Sequence[Data], contents: Mapping[int, Sequence[memoryview]], model_name: str
) -> tuple[list[InputTensor], bool]:
    """The inputs, and whether any of them lies in a region, which takes no entry of ``raws``."""
    check_count("inputs", len(inputs), MAX_INPUTS, model_name)
    entries = iter(raws)
    in_regions = False
    tensors = []
    for position, tensor in enumerate(inputs):
        data: Data | None
        if tensor.parameters and (data := _region_data(tensor, model_name)) is not None:
            in_regions = True
        elif tensor.HasField("contents") and not (
            raws and position not in contents and _is_empty(tensor.contents)
        ):
            data = _contents(tensor, contents.get(position), bool(raws), model_name)
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


def _is_empty(contents: Any) -> bool:
    """Whether there is nothing in it, as in what MLServer's client sends beside raw contents."""
    return not contents.ListFields()


def _contents(
    tensor: Any, cut: Sequence[memoryview] | None, has_raws: bool, model_name: str
) -> bytes | memoryview:
    if has_raws:
        raise InvalidArgument(
            "contents field must not be specified when using raw_input_contents for "
            f"'{shown(tensor.name)}' for model '{shown(model_name)}'"
        )
    if cut is not None:
        return long_contents(cut, tensor.name, tensor.datatype, model_name)
    return contents_data(tensor.contents, tensor.name, tensor.datatype, model_name)


def _region_data(tensor: Any, model_name: str) -> Data | None:
    data = region_slice(tensor_parameters(tensor.parameters), tensor.name, KINDS_OF_GRPC)
    if data is not None and tensor.HasField("contents"):
        raise InvalidArgument(
            "unexpected 'content' provided when using shared memory for input tensor "
            f"'{shown(tensor.name)}' for model '{shown(model_name)}'"
        )
    return data


def _output_names(outputs: Any, model_name: str) -> tuple[tuple[str, ...], Sequence[Any]]:
    """The names of the outputs asked for, and those of them that are not simply to be answered."""
    check_count("outputs", len(outputs), MAX_OUTPUTS, model_name)
    names = []
    special = []
    for output in outputs:
        names.append(output.name)
        if output.parameters:
            special.append(output)
    return tuple(names), special


def _special_outputs(outputs: Any, model_name: str) -> tuple[Mapping[str, RegionSlice], Mapping[str, int]]:
    placements, class_counts = {}, {}
    for output in outputs:
        given = tensor_parameters(output.parameters)
        if (place := region_slice(given, output.name, KINDS_OF_GRPC)) is not None:
            placements[output.name] = place
        if count := class_count(given, output.name, KINDS_OF_GRPC):
            class_counts[output.name] = count
            if place is not None:
                raise InvalidArgument(
                    "output can't set both 'shared_memory_region' and 'classification', "
                    f"as output '{shown(output.name)}' does for model '{shown(model_name)}'"
                )
    return placements, class_counts
