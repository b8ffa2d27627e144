"""Requests whose beginning was seen before: whatever comes, they are what the parser makes of them."""

from __future__ import annotations

import time

import pytest
from exploring import examples
from fuzzing.grpc_messages import INPUTS, check, field, parsed, plain_requests, told
from hypothesis import given, settings
from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.protocols.grpc.infer_decoder import parse_infer_request, request_by_template


@settings(max_examples=examples(600), deadline=None)
@given(INPUTS)
def test_a_request_is_what_the_parser_makes_of_it(body: bytes) -> None:
    check(body)


@settings(max_examples=examples(100), deadline=None)
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
