"""The rules that tie a request to its model, and the sentences that clients know."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.requests.inference import Data, InferRequest, InputTensor
from gpuserve.front.requests.limits import (
    MAX_NAME_NBYTES,
    check_parameter_name,
    shown,
    shown_names,
    shown_shape,
)
from gpuserve.front.requests.validation import CheckedRequest, ModelCheck
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import ITEMSIZE, TensorSpec, check_bytes, encode_bytes, holds_elements

A = TensorSpec("A", "FP32", (4,))
B = TensorSpec("B", "INT8", (-1,))
OPTIONAL = TensorSpec("O", "INT8", (-1,), optional=True)


def model_check_for(*inputs: TensorSpec, max_batch_size: int = 8) -> ModelCheck:
    outputs = (TensorSpec("Y", "FP32", (4,)), TensorSpec("Z", "FP32", (4,)))
    return ModelCheck(ModelSpec("m", inputs or (A,), outputs, max_batch_size, ()))


def tensor(name: str, datatype: str, shape: tuple[int, ...], data: Data | None = None) -> InputTensor:
    if data is None:
        data = bytes(abs(int(np.prod(shape, dtype=object))) * ITEMSIZE.get(datatype, 1))
    return InputTensor(name, datatype, shape, data)


def a(rows: int = 1) -> InputTensor:
    return tensor("A", "FP32", (rows, 4))


def request(*inputs: InputTensor, outputs: tuple[str, ...] = (), request_id: str = "") -> InferRequest:
    return InferRequest("m", "", request_id, {}, list(inputs), outputs, None)


def refusal(check: ModelCheck, given_request: InferRequest) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check.check(given_request)
    with pytest.raises(InvalidArgument, match=re.escape(str(caught.value))):
        check.check(given_request)  # nothing wrong is remembered as right
    return str(caught.value)


def test_of_several_wrong_inputs_the_last_is_named() -> None:
    """As Triton does, so that a client's test finds the name that it looks for."""
    check = model_check_for(A, B)
    wrong = [tensor("A", "FP32", (1, 3)), tensor("B", "INT8", (1, 2, 2))]
    assert "input 'B'" in refusal(check, request(*wrong))
    assert "input 'A'" in refusal(check, request(wrong[0], tensor("B", "INT8", (1, 2))))


@pytest.mark.parametrize(
    ("declared", "max_batch_size", "given_input", "checked"),
    [
        pytest.param(A, 8, a(3), CheckedRequest(3, (("A", (4,)),), 48), id="rows"),
        pytest.param(B, 8, tensor("B", "INT8", (2, 0)), CheckedRequest(2, (("B", (0,)),), 0), id="empty"),
        pytest.param(
            TensorSpec("A", "FP32", (2, -1)),
            0,
            tensor("A", "FP32", (2, 5)),
            CheckedRequest(1, None, 40),
            id="without batches the whole shape",
        ),
        pytest.param(
            TensorSpec("A", "FP32", ()), 0, tensor("A", "FP32", ()), CheckedRequest(1, None, 4), id="scalar"
        ),
        pytest.param(
            TensorSpec("S", "BYTES", (-1,)),
            8,
            tensor("S", "BYTES", (1, 0), b""),
            CheckedRequest(1, (("S", (0,)),), 0),
            id="no strings",
        ),
    ],
)
def test_rows_shapes_and_bytes_are_counted(
    declared: TensorSpec, max_batch_size: int, given_input: InputTensor, checked: CheckedRequest
) -> None:
    check = model_check_for(declared, max_batch_size=max_batch_size)
    assert check.check(request(given_input)) == checked


@pytest.mark.parametrize("datatype", ITEMSIZE)
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_every_datatype_is_accepted(datatype: str, max_batch_size: int) -> None:
    data = encode_bytes([b"a", b"bcd", b""]) if datatype == "BYTES" else bytes(3 * ITEMSIZE[datatype])
    check = model_check_for(TensorSpec("A", datatype, (3,)), max_batch_size=max_batch_size)
    shape = (1, 3) if max_batch_size else (3,)
    assert check.check(request(tensor("A", datatype, shape, data))).nbytes == len(data)


def test_data_in_an_arena_is_measured_like_bytes() -> None:
    check = model_check_for(TensorSpec("A", "BYTES", (1,)), TensorSpec("T", "BOOL", (1,)))
    strings, flags = bytearray(encode_bytes([b"abc"])), bytearray(b"\1")
    blocks = [Block(0, 0, len(data), memoryview(data)) for data in (strings, flags)]
    given_request = request(tensor("A", "BYTES", (1, 1), blocks[0]), tensor("T", "BOOL", (1, 1), blocks[1]))
    assert check.check(given_request).nbytes == 8
    strings[0] = 9
    assert "incomplete string data" in refusal(check, given_request)


def test_inputs_are_put_in_the_order_of_declaration() -> None:
    b = tensor("B", "INT8", (1, 2))
    given_request = request(b, a())
    assert model_check_for(A, B).check(given_request).merge_key == (("A", (4,)), ("B", (2,)))
    assert [one.name for one in given_request.inputs] == ["A", "B"]


def test_requests_merge_only_with_the_same_inputs_and_inner_shapes() -> None:
    check = model_check_for(A, B, OPTIONAL)

    def key(size: int, *more: InputTensor) -> object:
        return check.check(request(a(1), tensor("B", "INT8", (1, size)), *more)).merge_key

    optional = tensor("O", "INT8", (1, 3))
    assert (
        key(3) == key(3) == model_check_for(A, B).check(request(a(2), tensor("B", "INT8", (2, 3)))).merge_key
    )
    assert key(3) != key(4)
    assert key(3) != key(3, optional)
    assert key(3, optional) == key(3, optional)


BATCH_SIZE = "inference request batch-size must be <= 8 for 'm' and at least 1, got "
SHAPE = (
    "unexpected shape for input 'A' for model 'm'. Expected [-1,4], got {}. The first dimension is the batch."
)
NO_SHAPE = "input 'A' has no shape but model requires batch dimension for 'm', expected [-1,4], got []"
DATATYPE = "inference input 'A' data-type is '{}', but model 'm' expects 'FP32'"


@pytest.mark.parametrize(
    ("given_input", "sentence"),
    [
        (tensor("A", "FP32", ()), NO_SHAPE),
        (a(9), BATCH_SIZE + "9 for input 'A'"),
        (a(0), BATCH_SIZE + "0 for input 'A'"),
        (tensor("A", "FP32", (10**5000, 4), b""), BATCH_SIZE + "a number of over 20 digits"),
        (tensor("A", "FP32", (1, 5)), SHAPE.format("[1,5]")),
        (tensor("A", "FP32", (4,)), SHAPE.format("[4]")),
        (tensor("A", "FP32", (1,) * 100_000, b""), "… 100000 dimensions]"),
        (
            tensor("A", "FP32", (1, -4)),
            "All input dimensions should be specified for input 'A' for model 'm', got [1,-4]",
        ),
        (tensor("A", "FP64", (1, 4)), DATATYPE.format("FP64")),
        (tensor("A", "INT32", (1, 4)), DATATYPE.format("INT32")),
        (tensor("A", "\0" * 9999, (1, 4)), "but model 'm' expects 'FP32'"),
        (
            tensor("A", "FP32", (1, 4), bytes(15)),
            "input byte size mismatch for input 'A' for model 'm'. Expected 16, got 15",
        ),
    ],
)
def test_an_input_that_does_not_fit_is_refused_also_after_one_that_fits(
    given_input: InputTensor, sentence: str
) -> None:
    for check in (model_check_for(), model_check_for(A, OPTIONAL)):
        for _ in range(2):
            text = refusal(check, request(given_input))
            assert sentence in text
            assert len(text) < 1000
            assert check.check(request(a())).rows == 1


def test_without_batching_the_note_is_left_out() -> None:
    text = refusal(model_check_for(max_batch_size=0), request(tensor("A", "FP32", (1, 4))))
    assert text == "unexpected shape for input 'A' for model 'm'. Expected [4], got [1,4]."


@pytest.mark.parametrize(
    ("datatype", "right", "wrong", "sentence"),
    [
        ("BOOL", b"\1\0", b"\1\2", "input 'A' for model 'm' is BOOL, expected bytes of 0 or 1, got 2"),
        ("BYTES", encode_bytes([b"a", b"b"]), bytes(10), "unexpected number of string elements 3"),
    ],
)
def test_bytes_that_have_rules_are_looked_at_in_every_request(
    datatype: str, right: bytes, wrong: bytes, sentence: str
) -> None:
    check = model_check_for(TensorSpec("A", datatype, (-1,)))
    assert check.check(request(tensor("A", datatype, (1, 2), right))).nbytes == len(right)
    assert sentence in refusal(check, request(tensor("A", datatype, (1, 2), wrong)))


@pytest.mark.parametrize("shape", [(2**62, 2**62), (2**61, 1), (0, 2**62), (10**30, 0)])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_shape_that_no_array_can_have_is_refused(datatype: str, shape: tuple[int, ...]) -> None:
    check = model_check_for(TensorSpec("A", datatype, (-1, -1)), max_batch_size=0)
    text = refusal(check, request(tensor("A", datatype, shape, b"")))
    assert "the shape of input 'A' for model 'm' is too large" in text


MISSING = (
    "for model 'm'. Got input(s) {}, but missing required input(s) {}. Please provide all required input(s)."
)


@pytest.mark.parametrize(
    ("inputs", "given_inputs", "sentence"),
    [
        ([A, B], [a()], "expected 2 inputs but got 1 inputs " + MISSING.format("['A']", "['B']")),
        (
            [A, OPTIONAL],
            [tensor("O", "INT8", (1, 1))],
            "expected number of inputs between 1 and 2 but got 1 inputs " + MISSING.format("['O']", "['A']"),
        ),
        ([A], [], "expected 1 inputs but got 0 inputs " + MISSING.format("[]", "['A']")),
        ([A], [a(), a()], "input 'A' already exists in request"),
        ([A, B], [a(), a()], "input 'A' already exists in request"),
        (
            [A],
            [tensor("nope", "FP32", (1, 4))],
            "unexpected inference input 'nope' for model 'm', expected ['A']",
        ),
        (
            [A, B],
            [a(2), tensor("B", "INT8", (3, 1))],
            "input 'B' batch size does not match other inputs for 'm', expected 2, got 3",
        ),
    ],
)
def test_inputs_are_those_of_the_model_with_as_many_rows(
    inputs: list[TensorSpec], given_inputs: list[InputTensor], sentence: str
) -> None:
    assert refusal(model_check_for(*inputs), request(*given_inputs)).startswith(sentence)


def test_the_request_id_is_named_and_long_names_are_cut() -> None:
    text = refusal(model_check_for(), request(a(9), request_id="r-1"))
    assert text.startswith("[request id: r-1] inference request batch-size")
    text = refusal(model_check_for(), request(tensor("x" * 65536, "FP32", (1, 4)), request_id="i" * 65536))
    assert "unexpected inference input 'xxx" in text
    assert len(text) < 300


def test_outputs_are_taken_in_any_order_and_wrong_ones_are_refused() -> None:
    for outputs in [(), ("Y",), ("Z", "Y")]:
        assert model_check_for().check(request(a(), outputs=outputs)).rows == 1
    check = model_check_for()
    unknown = refusal(check, request(a(), outputs=("Y", "nope")))
    assert unknown == "unexpected inference output 'nope' for model 'm', expected ['Y','Z']"
    twice = refusal(check, request(a(), outputs=("Y", "Y")))
    assert "output 'Y' already exists in request" in twice


ELEMENTS = "string elements for inference input 'S' for model 'm', got"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (encode_bytes([b"a"]), f"expected 2 {ELEMENTS} 1"),
        (b"", f"expected 2 {ELEMENTS} 0"),
        (
            encode_bytes([b"a", b"b", b"c"]),
            "unexpected number of string elements 3 for inference input 'S' for model 'm', expecting 2",
        ),
        (
            encode_bytes([b"a"]) + b"\1\0",
            "incomplete string length indicator for inference input 'S' for model 'm', expecting 4 bytes but "
            "only 2 bytes available",
        ),
        (
            encode_bytes([b"a"]) + struct.pack("<I", 2**32 - 1) + b"xyz",
            "incomplete string data for inference input 'S' for model 'm', expecting string of length "
            "4294967295 but only 3 bytes available",
        ),
    ],
)
def test_wrong_strings_are_refused(data: bytes, sentence: str) -> None:
    check = model_check_for(TensorSpec("S", "BYTES", (2,)))
    assert sentence in refusal(check, request(tensor("S", "BYTES", (1, 2), data)))


def test_a_huge_count_of_strings_is_refused_at_once() -> None:
    check = model_check_for(TensorSpec("S", "BYTES", (-1,)), max_batch_size=0)
    assert "got 1" in refusal(check, request(tensor("S", "BYTES", (2**59,), encode_bytes([b"a"]))))


@given(
    st.lists(st.binary(max_size=6), max_size=6), st.binary(max_size=5), st.integers(0, 7), st.integers(0, 40)
)
def test_the_walk_over_strings_agrees_with_the_plain_one(
    elements: list[bytes], tail: bytes, count: int, cut: int
) -> None:
    for data in (encode_bytes(elements), encode_bytes(elements) + tail, encode_bytes(elements)[:cut]):
        for expected in (count, len(elements)):
            assert holds_elements(memoryview(data), expected) is (check_bytes(data, expected) is None)


def test_too_many_names_are_refused_by_their_number() -> None:
    check = model_check_for()
    many = [a() for _ in range(2000)]
    assert "has 2000 inputs, expected at most 1024" in refusal(check, request(*many))
    assert "has 2000 outputs, expected at most 1024" in refusal(check, request(a(), outputs=("Y",) * 2000))
    crowded = request(a())
    crowded.parameters = {str(n): n for n in range(300)}
    assert "has 300 parameters, expected at most 256" in refusal(check, crowded)


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    check = model_check_for(B)
    for size in range(3000):
        assert check.check(request(tensor("B", "INT8", (1, size)))).nbytes == size
    assert "byte size mismatch" in refusal(check, request(tensor("B", "INT8", (1, 2999), b"")))


def test_names_are_shown_on_one_line_and_measured_in_bytes() -> None:
    assert shown("a\nb\0\ud800é") == "a\\nb\\x00\\ud800é"
    assert shown("x" * 200) == "x" * 128 + "…"
    assert shown_names(str(n) for n in range(20)).endswith("'15',… 20 in all]")
    assert shown_shape(range(17)) == "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,… 17 dimensions]"
    assert shown_shape(range(3)) == "[0,1,2]"
    check_parameter_name("é" * (MAX_NAME_NBYTES // 2), "m")
    with pytest.raises(InvalidArgument, match=r"parameter 'é+…' for model 'm' is longer than the 256 bytes"):
        check_parameter_name("é" * (MAX_NAME_NBYTES // 2 + 1), "m")
