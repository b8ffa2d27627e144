"""Requests whose beginning was seen before: whatever comes, they are what the parser makes of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import RequestError
from gpuserve.front.doors.grpc.requests import decode, infer_request, parse_infer_request
from gpuserve.front.doors.grpc.templates import request_by_template
from gpuserve.front.v2.types import InferRequest, RegionSlice

NAMES = st.sampled_from(["", "x", "y", "modèle", "a" * 130])
SHAPES = st.lists(st.sampled_from([-1, 0, 1, 300, 1 << 62]), max_size=3)
RAWS = st.sampled_from([b"", b"\0" * 4, b"\xff" * 200])


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


@settings(max_examples=examples(600), deadline=None)
@given(
    st.one_of(
        plain_requests(),
        requests_with_regions(),
        spoilt(),
        st.lists(fields(), max_size=8).map(b"".join),
        st.binary(max_size=24),
    )
)
def test_a_request_is_what_the_parser_makes_of_it(body: bytes) -> None:
    expected = told(parsed, body)
    assert told(parse_infer_request, body) == expected
    assert told(parse_infer_request, body) == expected  # out of what is remembered


@settings(max_examples=50, deadline=None)
@given(plain_requests())
def test_the_usual_request_has_a_template(body: bytes) -> None:
    assert request_by_template(body) is not None


def test_each_request_of_a_template_has_places_of_its_own() -> None:
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"abcd"])
    for one in (message.inputs.add(name="x"), message.inputs.add(name="y"), message.outputs.add(name="z")):
        if one.name != "x":
            one.parameters["shared_memory_region"].string_param = "r"
            one.parameters["shared_memory_byte_size"].int64_param = 64
    body = message.SerializeToString()
    first = request_by_template(body)
    assert first is not None
    x, y = first.inputs
    assert x.data == b"abcd"
    assert first.regions == (y.data, first.placements["z"])  # the very objects, which know no other equality
    for one in first.regions:
        one.number, one.device = 7, "cuda:0"  # as the region table resolves them
    second = request_by_template(body)
    assert second is not None
    assert [(one.number, one.device) for one in second.regions] == [(0, "")] * 2


SMALL = field(1, b"m") + field(5, pb.ModelInferRequest.InferInputTensor(name="x").SerializeToString())


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(field(3, b"\xff") + field(3, b"a") + SMALL + field(7, b""), id="an id that is no text"),
        pytest.param(SMALL + b"\x3a" + b"\x80" * 10 + b"\0", id="a length of eleven bytes"),
        pytest.param(SMALL + b"\x3a\x80\x80\x80\x80\x80\x00", id="a length of six bytes"),
        pytest.param(SMALL + b"\x3a\x81\x80\x80\x80\x00\x01", id="a length of more bytes than it needs"),
        pytest.param(SMALL + field(7, b"") + field(3, b"a"), id="an id after the tensors"),
        pytest.param(field(3, b"a" * 5000) + SMALL + field(7, b""), id="a long id"),
        pytest.param(field(3, b"a" * 5000) + SMALL * 50 + field(7, b"") * 50, id="a long id and many inputs"),
    ],
)
def test_what_is_odd_is_what_the_parser_makes_of_it(body: bytes) -> None:
    assert told(parse_infer_request, body) == told(parsed, body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x0a" + b"\xff" * (1 << 20), id="a length that does not end"),
        pytest.param((field(1, b"") + field(3, b"")) * (1 << 18), id="many names and ids"),
        pytest.param(field(1, b"") * (1 << 19), id="many names"),
        pytest.param(field(7, b"") * (1 << 19), id="many tensors"),
    ],
)
def test_nonsense_is_left_to_the_parser_at_once(body: bytes) -> None:
    began_at = time.process_time()
    assert request_by_template(body) is None
    assert time.process_time() - began_at < 0.05  # a walk over all of it takes far longer
