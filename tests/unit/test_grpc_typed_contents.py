"""Typed contents of long gRPC requests: read as protobuf reads them, with little memory, within limits."""

from __future__ import annotations

from typing import Any

import expensive
import pytest
from expensive import field, varint
from fuzzing.costs import check_cost
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.protocols.grpc.infer_decoder import SHORT_NBYTES, parse_infer_request
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.json_values import MAX_VALUES

#: Makes a request long, and is nothing that is read.
PADDING = pb.ModelInferRequest(id="i" * SHORT_NBYTES).SerializeToString()


def typed(datatype: str, *contents: bytes) -> bytes:
    """A request of one input with these serialised contents, one after the other."""
    parts = b"".join(field(5, one) for one in contents)
    return field(1, b"m") + field(5, field(1, b"x") + field(2, datatype.encode()) + parts)


def scanned(message: bytes) -> InferRequest:
    scanner = GrpcBodyScanner(lambda *_: None, 1 << 30, Share(Intake(1 << 40, lambda: None)), framed=False)
    for at in range(0, len(message), 1 << 20):
        scanner.feed(message[at : at + (1 << 20)])
    return scanner.finish()


def told(read: Any, message: bytes) -> Any:
    try:
        request = read(message)
    except RequestError as error:
        return type(error), str(error)
    return [(one.name, one.datatype, one.shape, bytes(one.data)) for one in request.inputs]


_NUMBERS = {
    "bool_contents": ("BOOL", st.booleans()),
    "int_contents": ("INT32", st.integers(-(1 << 31), (1 << 31) - 1)),
    "int64_contents": ("INT64", st.integers(-(1 << 63), (1 << 63) - 1)),
    "uint_contents": ("UINT8", st.integers(0, 300)),
    "uint64_contents": ("UINT64", st.integers(0, (1 << 64) - 1)),
    "fp32_contents": ("FP32", st.floats(width=32)),
    "fp64_contents": ("FP64", st.floats()),
    "bytes_contents": ("BYTES", st.binary(max_size=20)),
}


@given(st.data(), st.sampled_from(sorted(_NUMBERS)), st.booleans())
def test_long_requests_are_read_as_protobuf_reads_them(data: Any, name: str, in_two: bool) -> None:
    datatype, elements = _NUMBERS[name]
    given_elements = data.draw(st.lists(elements, max_size=40))
    contents = pb.InferTensorContents(**{name: given_elements}).SerializeToString()
    message = typed(datatype, contents, *([contents] if in_two else []))
    assert told(scanned, message + PADDING) == told(parse_infer_request, message)


_NUMBER = {"bool_contents": 1, "int_contents": 2, "uint_contents": 4}


@given(st.sampled_from(sorted(_NUMBER)), st.lists(st.integers(0, 200), max_size=20))
def test_elements_need_not_be_packed(name: str, elements: list[int]) -> None:
    contents = b"".join(varint(_NUMBER[name] << 3) + varint(one) for one in elements)
    message = typed(_NUMBERS[name][0], contents)
    assert told(scanned, message + PADDING) == told(parse_infer_request, message)


@given(st.lists(st.integers(0, 7), max_size=6), st.binary(max_size=12))
def test_whatever_is_in_contents_is_told_as_protobuf_tells_it(wire_types: list[int], tail: bytes) -> None:
    contents = b"".join(varint(3 << 3 | one) + b"\1\0\0\0\0\0\0\0" for one in wire_types) + tail
    message = typed("INT64", contents)
    expected, got = told(parse_infer_request, message), told(scanned, message + PADDING)
    if isinstance(expected, tuple):
        assert got[0] is expected[0]
    else:
        assert got == expected


def test_a_position_is_told_that_counts_all_elements() -> None:
    contents = field(4, b"\1" * (1 << 17)) + field(4, varint(300))
    with pytest.raises(InvalidArgument, match=f"element {1 << 17} for input tensor 'x'.* is 300"):
        scanned(typed("UINT8", contents))


MIB = 1 << 20
#: What is read of these; of the others something is refused.
READ = {"packed integers", "packed long integers", "packed booleans", "packed floats"}
READ |= {one for one in expensive.GRPC if one.startswith("raw strings")}


@pytest.mark.parametrize("nbytes", [80 << 10, pytest.param(30 * MIB, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("shape", expensive.GRPC)
def test_the_cost_of_a_byte_is_bounded(shape: str, nbytes: int) -> None:
    message = expensive.GRPC[shape](nbytes)
    check_cost(scanned, message)
    if nbytes > 4 * MIB:  # and shorter names are allowed
        assert isinstance(told(scanned, message), list) is (shape in READ)


def test_as_many_strings_as_json_may_have() -> None:
    strings = [b"%d" % n for n in range(MAX_VALUES)]
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="BYTES", shape=[MAX_VALUES])
    tensor.contents.bytes_contents.extend(strings)
    expected = told(parse_infer_request, message.SerializeToString())
    assert told(scanned, message.SerializeToString()) == expected
    tensor.contents.bytes_contents.append(b"")
    with pytest.raises(ResourceExhausted, match="hold more than 131072 elements that are not packed"):
        scanned(message.SerializeToString())
