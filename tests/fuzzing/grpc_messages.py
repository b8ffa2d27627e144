"""Messages of ModelInfer: those of the templates are what the parser makes of them."""

from __future__ import annotations

from typing import Any

import expensive
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from fuzzing import costs
from gpuserve.core.errors import RequestError
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.protocols.grpc.infer_decoder import (
    SHORT_NBYTES,
    decode,
    infer_request,
    parse_infer_request,
)
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.requests.inference import InferRequest, RegionSlice

NAMES = st.sampled_from(["", "x", "y", "modèle", "a" * 130])
SHAPES = st.lists(st.sampled_from([-1, 0, 1, 300, 1 << 62]), max_size=3)
RAWS = st.sampled_from([b"", b"\0" * 4, b"\xff" * 200])


def varint(number: int, spare: int = 0) -> bytes:
    """A number, in more bytes than it needs."""
    parts = bytearray()
    while number > 0x7F or spare:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
        spare -= not number and spare > 0
    return bytes(parts) + bytes([number])


def field(number: int, payload: bytes, wire_type: int = 2, spare: int = 0) -> bytes:
    tag = varint(number << 3 | wire_type)
    return tag + (varint(len(payload), spare) if wire_type == 2 else b"") + payload


@st.composite
def in_a_region(draw: st.DrawFn, tensor: Any) -> None:
    """Have a tensor lie there, perhaps in a way that cannot be."""
    parameters = tensor.parameters
    parameters["shared_memory_region"].string_param = draw(NAMES)
    if draw(st.integers(0, 5)):
        parameters["shared_memory_byte_size"].int64_param = draw(st.sampled_from([4, 4, 4, 0, -1]))
    if draw(st.booleans()):
        parameters["shared_memory_offset"].int64_param = draw(st.sampled_from([0, 8, -1]))
    match draw(st.integers(0, 9)):
        case 0:
            parameters["shared_memory_offset"].string_param = "1"
        case 1:
            parameters["shared_memory_region"].int64_param = 1
        case 2:
            parameters["classification"].int64_param = 1


@st.composite
def tensors(draw: st.DrawFn) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name=draw(NAMES), datatype=draw(st.sampled_from(["FP32", "BYTES", ""])), shape=draw(SHAPES)
    )
    if draw(st.integers(0, 9)) == 0:
        tensor.contents.fp32_contents.append(1.0)
    if draw(st.integers(0, 9)) == 0:
        tensor.parameters["k"].bool_param = True
    if draw(st.integers(0, 4)) == 0:
        draw(in_a_region(tensor))
    return bytes(tensor.SerializeToString())


@st.composite
def fields(draw: st.DrawFn) -> bytes:
    """One field of a request, mostly right."""
    number = draw(st.integers(1, 9))
    if draw(st.integers(0, 15)) == 0:
        wire_type = draw(st.sampled_from([0, 1, 3, 4, 5, 6, 7]))
        return field(number, draw(st.binary(max_size=9)), wire_type)
    match number:
        case 1 | 2 | 3:
            payload = draw(st.one_of(NAMES.map(str.encode), st.just(b"\xff"), st.binary(max_size=3)))
        case 5:
            payload = draw(st.one_of(tensors(), st.binary(max_size=3)))
        case 6:
            output = pb.ModelInferRequest.InferRequestedOutputTensor(name=draw(NAMES))
            if draw(st.integers(0, 2)) == 0:
                draw(in_a_region(output))
            payload = output.SerializeToString()
        case 7:
            payload = draw(RAWS)
        case _:
            payload = draw(st.binary(max_size=4))
    return field(number, payload, spare=draw(st.sampled_from([0] * 9 + [1, 4, 9, 10])))


@st.composite
def plain_requests(draw: st.DrawFn) -> bytes:
    """What a client sends."""
    raws = draw(st.lists(RAWS, max_size=3))
    message = pb.ModelInferRequest(
        model_name=draw(NAMES),
        model_version=draw(st.sampled_from(["", "1"])),
        id=draw(NAMES),
        raw_input_contents=raws,
    )
    for _ in raws:
        message.inputs.add(name=draw(NAMES), datatype="FP32", shape=draw(SHAPES))
    for name in draw(st.lists(NAMES, max_size=2)):
        message.outputs.add(name=name)
    return bytes(message.SerializeToString())


@st.composite
def requests_with_regions(draw: st.DrawFn) -> bytes:
    """Some of whose tensors lie there."""
    message = pb.ModelInferRequest.FromString(draw(plain_requests()))
    for one in (*message.inputs, *message.outputs):
        if draw(st.booleans()):
            draw(in_a_region(one))
    del message.raw_input_contents[draw(st.integers(0, 3)) :]
    return bytes(message.SerializeToString(deterministic=True))


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """Such a request with one byte changed, cut, or with something before or after."""
    body = bytearray(draw(plain_requests()))
    if body and draw(st.booleans()):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(body)))
    extra = draw(st.one_of(st.just(b""), fields()))
    return draw(st.sampled_from([bytes(body), bytes(body[:cut]), extra + body, bytes(body) + extra]))


def parsed(body: bytes) -> InferRequest:
    """What the parser alone makes of a message."""
    message = decode(pb.ModelInferRequest, body)
    return infer_request(message, message.raw_input_contents)


def told(parse: Any, body: bytes) -> object:
    """Everything of a request, or its error."""
    try:
        request = parse(body)
    except RequestError as error:
        return type(error), str(error)
    values = {name: getattr(request, name) for name in InferRequest.__slots__}
    values["inputs"] = [(one.name, one.datatype, one.shape, plain(one.data)) for one in request.inputs]
    values["placements"] = {name: plain(place) for name, place in request.placements.items()}
    values["regions"] = [plain(place) for place in request.regions]
    return values


def plain(data: object) -> object:
    return (data.region, data.offset, data.nbytes) if isinstance(data, RegionSlice) else data


@st.composite
def expensive_requests(draw: st.DrawFn) -> bytes:
    """Many fields, elements or texts, as deep as fields nest."""
    if draw(st.booleans()):
        return draw(costs.expensive(expensive.GRPC))
    body = draw(costs.repeated(st.one_of(fields(), tensors(), st.binary(min_size=1, max_size=6)), fields()))
    for number in draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), max_size=3)):
        body = field(number, body)
    return body


INPUTS = st.one_of(
    plain_requests(),
    requests_with_regions(),
    spoilt(),
    st.lists(fields(), max_size=8).map(b"".join),
    st.binary(max_size=24),
    expensive_requests(),
)


def read(body: bytes) -> InferRequest:
    """As a call reads a message: at once if it is short, else part by part."""
    if len(body) <= SHORT_NBYTES:
        return parse_infer_request(body)
    scanner = GrpcBodyScanner(lambda *_: None, 1 << 30, Share(Intake(1 << 40, lambda: None)), framed=False)
    for at in range(0, len(body), SHORT_NBYTES):
        scanner.feed(body[at : at + SHORT_NBYTES])
    return scanner.finish()


def check(body: bytes) -> None:
    """Read twice: the second time out of what is remembered."""
    expected = told(parsed, body)
    assert told(parse_infer_request, body) == expected
    assert told(parse_infer_request, body) == expected
