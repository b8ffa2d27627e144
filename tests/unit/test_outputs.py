"""What a callable may answer, what it may not and in which words, and how answers are laid out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from present import present

from gpuserve.front.ipc.scatter import split_outputs
from gpuserve.front.requests.inference import OutputTensor
from gpuserve_worker.inference.inference_request import BatchedOutputs, Request, Response
from gpuserve_worker.inference.outputs import BatchAnswers, OutputError, OutputRules
from gpuserve_worker.memory.arena import Arena, OutOfMemory
from gpuserve_worker.memory.batch_tensors import OutputWriter
from gpuserve_worker.memory.client_regions import ClientRegions
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import ITEMSIZE, TensorSpec, decode_bytes, element_count, numpy_dtype

Y = TensorSpec("y", "FP32", (-1,))
LABEL = TensorSpec("label", "BYTES", (1,))
Z = TensorSpec("z", "FP32", (-1,))


class Front:
    """A writer over an arena of 1 GiB, and what a front would make of what it wrote."""

    def __init__(self, limit_nbytes: int = 1 << 30) -> None:
        self.arena = Arena(limit_nbytes, lambda *_: None, lambda _: None)
        self.writer = OutputWriter(self.arena, ClientRegions())

    def array(self, tensor: wire.WireTensor) -> Any:
        data = tensor.payload
        if isinstance(data, wire.Ref):
            data = bytes(self.writer._blocks[data.segment, data.offset].view)
        if tensor.datatype == "BYTES":
            flat = np.empty(element_count(tensor.shape), object)
            flat[:] = decode_bytes(data, element_count(tensor.shape))
            return flat.reshape(tensor.shape)
        return np.ndarray(tensor.shape, numpy_dtype(tensor.datatype), data)


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.writer.close()
    front.arena.close()


def requests(*rows: int, asked: tuple[str, ...] = ()) -> list[Any]:
    return [wire.WireRequest(one, {}, asked) for one in rows]


def rules(*specs: TensorSpec, batching: bool = True, strict: bool = False, **more: Any) -> OutputRules:
    return OutputRules("m", specs or (Y,), batching=batching, strict=strict, **more)


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape).astype(dtype)


def whole(front: Front, answers: BatchAnswers) -> dict[str, Any]:
    outputs, responses, _ = front.writer.write(answers, ())
    assert responses is None
    return {one.name: front.array(one) for one in outputs or ()}


def each(front: Front, answers: BatchAnswers) -> list[Any]:
    outputs, responses, _ = front.writer.write(answers, requests(*[1] * len(answers.each or ())))
    if outputs is not None:  # of the only request, where there is no batch axis
        responses = (outputs,)
    return [
        one if isinstance(one, wire.WireFailure) else {t.name: front.array(t) for t in one}
        for one in responses or ()
    ]


# ---- what is accepted -----------------------------------------------------------------------


def test_batched_outputs_are_sent_as_they_are_and_mappings_of_requests_are_joined(front: Front) -> None:
    first, second = floats(1, 2), floats(2, 2)
    expected = np.concatenate([first, second])
    for result in (BatchedOutputs({"y": expected}, (1, 2)), [{"y": first}, {"y": second}]):
        answers = rules().check(result, requests(1, 2))
        np.testing.assert_array_equal(whole(front, answers)["y"], expected)


@pytest.mark.parametrize("width", [3, 30_000])
def test_answers_of_different_widths_are_one_tensor_with_the_shape_of_each(front: Front, width: int) -> None:
    given = [floats(1, 2), floats(2, width), floats(1, 0)]
    answers = rules().check([{"y": one} for one in given], requests(1, 2, 1))
    outputs, responses, _ = front.writer.write(answers, ())
    assert responses is None
    assert outputs is not None
    (sent,) = outputs
    assert sent.shape == ((1, 2), (2, width), (1, 0))
    payload = sent.payload
    if isinstance(payload, wire.Ref):
        payload = bytes(front.writer._blocks[payload.segment, payload.offset].view)
    tensor = OutputTensor(sent.name, sent.datatype, sent.shape, payload)
    parts = [one for (one,) in split_outputs([tensor], [1, 2, 1])]
    assert [(one.shape, bytes(one.data)) for one in parts] == [(one.shape, one.tobytes()) for one in given]
    with pytest.raises(ValueError, match="for requests of"):
        split_outputs([tensor], [2, 1, 1])


def test_an_exception_object_fails_its_own_request_and_different_outputs_stay_apart(front: Front) -> None:
    answers = rules(Y, Z).check([{"y": floats(1, 2)}, {"z": floats(1, 2)}], requests(1, 1))
    assert [list(one) for one in each(front, answers)] == [["y"], ["z"]]
    answers = rules().check([ValueError("not /etc/passwd"), {"y": floats(1, 2)}], requests(1, 1))
    failed, answered = each(front, answers)
    assert failed == wire.WireFailure("INTERNAL", "not passwd")
    assert list(answered) == ["y"]


def test_returned_requests_stand_for_their_data_and_map_by_position(front: Front) -> None:
    answers = rules().check([Request({"x": floats(1, 2)}), Request({"x": floats(1, 2)})], requests(1, 1))
    assert whole(front, answers)["y"].shape == (2, 2)


@pytest.mark.parametrize(
    ("data", "asked"),
    [
        ({"debug": object()}, ()),  # undeclared
        ({}, ()),  # a declared output may be left out
        ({"label": object()}, ("y",)),  # nobody asks for it
    ],
)
def test_outputs_that_are_left_out_or_dropped(front: Front, data: Any, asked: tuple[str, ...]) -> None:
    answers = rules(Y, LABEL).check([{"y": floats(1, 2), **data}], requests(1, asked=asked))
    assert list(whole(front, answers)) == ["y"]


def test_one_asks_for_less_than_another(front: Front) -> None:
    data = BatchedOutputs({"y": floats(2, 2), "label": np.array([["a"], ["b"]])}, (1, 1))
    asked = [*requests(1, asked=("y",)), *requests(1)]
    assert list(whole(front, rules(Y, LABEL).check(data, asked))) == ["y", "label"]


@pytest.mark.parametrize("batched", [True, False])
def test_a_requested_output_may_not_be_left_out(front: Front, batched: bool) -> None:
    data = {"y": floats(1, 2)}
    asked = requests(1, asked=("label",))
    answers = rules(Y, LABEL).check(BatchedOutputs(data, (1,)) if batched else [data], asked)
    (failed,) = each(front, answers)
    assert isinstance(failed, wire.WireFailure)
    assert "returned no output 'label', which the request asks for" in failed.text


@pytest.mark.parametrize("datatype", sorted(set(ITEMSIZE) - {"BYTES"}))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_datatype_and_shape(front: Front, datatype: str, shape: tuple[int, ...]) -> None:
    value = floats(*shape, dtype=numpy_dtype(datatype))
    spec = TensorSpec("y", datatype, (-1,) * len(shape))
    checked = rules(spec, batching=False, strict=True).check([{"y": value}], requests(1))
    (answered,) = each(front, checked)
    assert answered["y"].dtype == numpy_dtype(datatype)
    np.testing.assert_array_equal(answered["y"], value)


BYTES_VALUES = {
    "objects": np.array([[b"a\x00"], ["é"]], dtype=object),
    "fixed bytes": np.array([[b"a"], [b"bc"]]),
    "str": np.array([["a"], ["é"]]),
    "lists": [["a"], [b"a\x00"]],
    "numpy bytes": np.array([[np.bytes_(b"a")], [bytearray(b"b")]], dtype=object),
}


@pytest.mark.parametrize("value", BYTES_VALUES.values(), ids=BYTES_VALUES)
def test_byte_strings(front: Front, value: Any) -> None:
    answers = rules(LABEL, strict=True).check([{"label": value}], requests(2))
    expected = [one.encode() if isinstance(one, str) else bytes(one) for row in value for one in row]
    assert whole(front, answers)["label"].ravel().tolist() == expected


class Foreign:
    """A tensor of another library."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self._array, Exception):
            raise self._array
        return self._array


VALUES = {
    "float64": floats(1, 3, dtype=np.float64),
    "int": floats(1, 3, dtype=np.int64),
    "bool": np.array([[False, True, True]]),
    "bfloat16": floats(1, 3, dtype=ml_dtypes.bfloat16),
    "big-endian": floats(1, 3, dtype=">f4"),
    "not contiguous": floats(3, 1).T,
    "reversed": floats(1, 3)[:, ::-1],
    "broadcast": np.broadcast_to(np.float32(1), (1, 3)),
    "objects": np.array([[0, 1.5, True]], dtype=object),
    "list": [[0, 1, 2]],
    "foreign": Foreign(floats(1, 3)),
    "read-only": np.frombuffer(floats(1, 3).tobytes(), np.float32).reshape(1, 3),
    "masked": np.ma.masked_array(floats(1, 3)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("copies", [1, 2], ids=["alone", "joined"])
def test_whatever_is_numbers_is_cast_to_the_declared_type(front: Front, value: Any, copies: int) -> None:
    answers = rules().check([{"y": value}] * copies, requests(*[1] * copies))
    array = whole(front, answers)["y"]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, np.concatenate([np.asarray(value, np.float32)] * copies))


def test_a_nan_becomes_some_integer_without_a_warning(front: Front) -> None:
    spec = TensorSpec("y", "INT32", (-1,))
    answers = rules(spec).check([{"y": np.array([[np.nan, 2.7]])}], requests(1))
    assert whole(front, answers)["y"][0, 1] == 2


@pytest.mark.parametrize("value", [2.5, 2, True, np.float64(2.5)], ids=repr)
def test_scalars(front: Front, value: Any) -> None:
    checked = rules(TensorSpec("y", "FP32", ()), batching=False).check([{"y": value}], requests(1))
    assert each(front, checked)[0]["y"] == value


@pytest.mark.parametrize("exact", [False, True])
def test_strict_takes_another_byte_order(front: Front, exact: bool) -> None:
    answers = rules(strict=True, exact=exact).check([{"y": floats(1, 3, dtype=">f4")}], requests(1))
    np.testing.assert_array_equal(whole(front, answers)["y"], floats(1, 3))


#: What the callable returns, what is declared: casts that lose nothing but, at worst, bits of large integers.
SAFE = [("float16", "FP32"), ("float32", "FP64"), ("int32", "INT64"), ("int32", "FP64"), ("uint8", "INT16")]
SAFE += [("int16", "FP32"), ("bool", "UINT8"), ("bool", "BF16"), ("int64", "FP64"), ("bfloat16", "FP32")]
UNSAFE = [("float64", "FP32"), ("int64", "INT32"), ("int32", "FP32"), ("uint8", "INT8"), ("int8", "UINT8")]
UNSAFE += [("int8", "BOOL"), ("float32", "INT64"), ("float32", "BF16"), ("float16", "BF16")]


@pytest.mark.parametrize(("given", "declared"), SAFE)
def test_strict_casts_what_is_safe_and_exact_casts_nothing(front: Front, given: str, declared: str) -> None:
    array = np.array([[0, 1, 1]]).astype(getattr(ml_dtypes, given, given))
    spec = TensorSpec("y", declared, (3,))
    made = whole(front, rules(spec, strict=True).check([{"y": array}], requests(1)))["y"]
    assert made.dtype == numpy_dtype(declared)
    assert made.astype(float).tolist() == [[0, 1, 1]]
    with pytest.raises(OutputError, match="the callable returned an array of"):
        rules(spec, strict=True, exact=True).check([{"y": array}], requests(1))


@pytest.mark.parametrize(("given", "declared"), UNSAFE)
def test_strict_refuses_casts_that_may_lose_something(given: str, declared: str) -> None:
    way = f"return it as {numpy_dtype(declared).name}, or say strict"
    text = f"an array of {given}, which is not cast without being asked: {way}"
    data = {"y": np.zeros((1, 2), given)}
    for result in ([data], BatchedOutputs(data, (1,))):
        with pytest.raises(OutputError, match=re.escape(text)):
            rules(TensorSpec("y", declared, (2,)), strict=True).check(result, requests(1))


FIT = [
    ([0, 255], "UINT8"),
    ([-(1 << 31), 0], "INT32"),
    ([1, 2], "FP16"),
    ([1.5, 2], "FP32"),
    ([True, False], "INT8"),
]
UNFIT = [
    ([0, 256], "UINT8"),
    ([-1, 0], "UINT64"),
    ([1 << 40, 0], "INT32"),
    ([1.5, 2], "INT32"),
    ([1, 0], "BOOL"),
]


def test_strict_takes_numbers_of_python_that_the_declared_type_can_hold(front: Front) -> None:
    for value, declared in FIT:
        answers = rules(TensorSpec("y", declared, (2,)), strict=True).check([{"y": [value]}], requests(1))
        assert whole(front, answers)["y"].tolist() == [value]
    for value, declared in UNFIT:
        with pytest.raises(OutputError, match="Output 'y' of model 'm' must be"):
            rules(TensorSpec("y", declared, (2,)), strict=True).check([{"y": [value]}], requests(1))


ABSENT = "The inference callable of model 'm' returned no output 'z', which the model declares"


def test_strict_wants_every_output_that_nobody_left_out(front: Front) -> None:
    some, both = {"y": floats(1, 2)}, {"y": floats(1, 2), "z": floats(1, 2)}
    checked = rules(Y, Z, strict=True)
    for result in ([some], BatchedOutputs(some, (1,))):
        with pytest.raises(OutputError, match=ABSENT):
            checked.check(result, requests(1))
        assert list(whole(front, checked.check(result, requests(1, asked=("y",))))) == ["y"]
    mixed = [*requests(1), *requests(1, asked=("y",))]
    with pytest.raises(OutputError, match=ABSENT):
        checked.check(BatchedOutputs({"y": floats(2, 2)}, (1, 1)), mixed)
    whole_one, failed = each(front, checked.check([both, some], requests(1, 1)))
    assert (list(whole_one), failed) == (["y", "z"], wire.WireFailure("INTERNAL", ABSENT))


@pytest.mark.parametrize("more", [{}, {"strict": True, "exact": True}, {"strict": True, "decoupled": True}])
def test_otherwise_an_output_may_be_left_out(front: Front, more: Any) -> None:
    answers = rules(Y, Z, **more).check([{"y": floats(1, 2)}], requests(1))
    assert list(each(front, answers)[0] if "decoupled" in more else whole(front, answers)) == ["y"]


def test_a_request_goes_by_position_and_is_checked(front: Front) -> None:
    checked = rules(Y, Z, strict=True)
    answers = checked.check([Request({"a": floats(1, 2), "b": floats(1, 3)})], requests(1))
    assert {name: one.shape for name, one in whole(front, answers).items()} == {"y": (1, 2), "z": (1, 3)}
    with pytest.raises(OutputError, match="must have shape"):
        checked.check([Request({"a": floats(1, 2), "b": floats(1, 2, 3)})], requests(1))


def test_a_shape_that_fits_is_no_pass_for_the_next_one(front: Front) -> None:
    checked = rules(TensorSpec("y", "FP32", (-1, 2)), strict=True)
    for shape, fits in (((1, 3, 2), True), ((1, 3, 2), True), ((1, 3, 1), False), ((1, 0, 2), True)):
        if fits:
            assert whole(front, checked.check([{"y": floats(*shape)}], requests(1)))["y"].shape == shape
        else:
            with pytest.raises(OutputError, match="must have shape"):
                checked.check([{"y": floats(*shape)}], requests(1))


# ---- what is refused ------------------------------------------------------------------------

ONE = {"y": floats(1, 2)}
REFUSED: dict[str, tuple[Any, str]] = {
    "None": (None, "must return a list with one mapping of output names to arrays for each request, but"),
    "a mapping": (ONE, "for each request, but returned dict"),
    "a string": ("y", "but returned str"),
    "a generator": ((one for one in [ONE]), "but returned generator"),
    "an array": (floats(1, 2), "but returned ndarray"),
    "too many": ([ONE, ONE], "returned 2 responses for 1 request"),
    "too few": ([], "returned 0 responses for 1 request"),
    "no mapping": ([floats(1, 2)], "must be a mapping of output names to arrays, but one is ndarray"),
    "a name that is none": ([{1: floats(1, 2)}], "is named 1: names must be str"),
    "only unknown names": (
        [{"a": 1, "b": 2}],
        "None of the returned outputs 'a', 'b' is declared; model 'm' declares 'y'",
    ),
    "no array": ([{"y": None}], "must be an array, but the callable returned NoneType"),
    "a dict inside": ([{"y": {"a": 1}}], "must be an array, but the callable returned dict"),
    "a ragged list": ([{"y": [[1], [1, 2]]}], "cannot be made an array"),
    "an unwilling tensor": (
        [{"y": Foreign(TypeError("can't convert cuda:0 device type tensor to numpy"))}],
        "Output 'y' of model 'm' cannot be made an array: can't convert cuda:0 device type tensor to numpy",
    ),
    "strings": ([{"y": np.array([["one"]])}], "must be FP32 (float32), but the callable returned"),
    "complex": ([{"y": np.array([[1j]])}], "returned an array of complex128"),
    "dates": ([{"y": np.array([["2020-01-01"]], "M8[D]")}], "returned an array of datetime64[D]"),
    "objects that are no numbers": ([{"y": np.array([[object()]])}], "returned an array of object"),
    "None in a list": ([{"y": [["a", None]]}], "returned an array of object"),
}


@pytest.mark.parametrize(("result", "text"), REFUSED.values(), ids=REFUSED)
def test_nonsense_is_refused_with_a_sentence(result: Any, text: str) -> None:
    with pytest.raises(OutputError, match=re.escape(text)):
        rules().check(result, requests(1))


ROWS = "must have 1 row on its first axis, as its input has, but its shape is (2, 1)"
SHAPE = "must have shape (-1,) without the batch axis, but the callable returned"
STRICT: dict[str, tuple[Any, str]] = {
    "too many rows": ({"y": floats(2, 1)}, ROWS),
    "no rows": ({"y": np.float32(1)}, "but its shape is ()"),
    "a text": ({"y": np.array([["1"]])}, "must be FP32 (float32), but the callable returned"),
    "by position": ({"z": 1}, "Output 'z' is not declared; model 'm' declares 'y'"),
    "surplus": ({"y": floats(1, 2), "z": 1}, "Output 'z' is not declared"),
    "dtype": ({"y": floats(1, 2, dtype=np.float64)}, "must be FP32 (float32), but the callable returned"),
    "rank": ({"y": floats(1)}, f"{SHAPE} ()"),
    "higher rank": ({"y": floats(1, 2, 2)}, f"{SHAPE} (2, 2)"),
}


@pytest.mark.parametrize(("data", "text"), STRICT.values(), ids=STRICT)
def test_strict_refuses_what_is_not_declared_and_what_else_is_sent_as_it_is(data: Any, text: str) -> None:
    with pytest.raises(OutputError, match=re.escape(text)):
        rules(strict=True).check([data], requests(1))


def test_strict_checks_each_dimension_and_rows_of_batched_outputs_are_those_of_the_batch() -> None:
    text = "must have shape (3, -1), but the callable returned (2, 5)"
    with pytest.raises(OutputError, match=re.escape(text)):
        rules(TensorSpec("y", "FP32", (3, -1)), batching=False, strict=True).check(
            [{"y": floats(2, 5)}], requests(1)
        )
    with pytest.raises(OutputError, match="must have 3 rows"):
        rules().check(BatchedOutputs({"y": floats(2, 2)}, (1, 2)), requests(1, 2))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (floats(1, 1), "must be BYTES (bytes or str), but the callable returned an array of float32"),
        (np.array([[1]], object), "a BYTES tensor holds bytes or str, but an element is int"),
        ([[None]], "an element is NoneType"),
    ],
    ids=["numbers", "objects", "None"],
)
def test_what_is_no_byte_string(value: Any, text: str) -> None:
    with pytest.raises(OutputError, match=re.escape(text)):
        rules(LABEL, strict=True).check([{"label": value}], requests(1))


@pytest.mark.parametrize("exact", [False, True])
def test_rows_of_other_answers_are_their_own_where_that_is_not_checked(front: Front, exact: bool) -> None:
    lenient = rules(strict=exact, exact=exact)
    wide, narrow = {"y": floats(1, 2)}, {"y": floats(3, 2)}
    assert whole(front, lenient.check([wide], requests(64)))["y"].shape == (1, 2)
    answers = each(front, lenient.check([wide, narrow], requests(64, 3)))
    assert [one["y"].shape for one in answers] == [(1, 2), (3, 2)]
    # As many rows as the batch has, and yet not those of its requests.
    answers = each(front, lenient.check([wide, narrow], requests(3, 1)))
    assert [one["y"].shape for one in answers] == [(1, 2), (3, 2)]


def test_an_answer_without_axes_or_outputs_is_sent_as_it_is(front: Front) -> None:
    scalar = {"y": np.array(5, np.float32)}
    assert whole(front, rules().check([scalar], requests(64)))["y"].shape == ()
    answers = each(front, rules().check([scalar, {"y": floats(1, 2)}], requests(1, 1)))
    assert [one["y"].shape for one in answers] == [(), (1, 2)]
    word = each(front, rules(LABEL).check([{"label": np.array(b"ab")}] * 2, requests(1, 1)))
    assert [one["label"][()] for one in word] == [b"ab", b"ab"]
    assert whole(front, rules().check([{}], requests(2))) == {}
    assert whole(front, rules().check([{}, {}], requests(2, 1))) == {}


@pytest.mark.parametrize(
    ("given", "spec", "sent"),
    [
        (np.array([["1.5"], ["2"]]), Y, [1.5, 2]),
        (np.array([[b"1.5"], [b"2"]]), Y, [1.5, 2]),
        (np.array([["1.5"], [2]], object), Y, [1.5, 2]),
        (np.array([[None], [2]], object), Y, [np.nan, 2]),
        (np.array([[1.5], [2]], np.float32), LABEL, [b"1.5", b"2.0"]),
        (np.array([[1.1234567], [2]]), LABEL, [b"1.1234567", b"2.0"]),
        (np.array([[15], [2]]), LABEL, [b"15", b"2"]),
        (np.array([[True], [False]]), LABEL, [b"True", b"False"]),
        (np.array([[b"x"], [None]], object), LABEL, [b"x", b"None"]),
        (np.array([["é"], [1.5]], object), LABEL, ["é".encode(), b"1.5"]),
    ],
)
def test_texts_become_numbers_and_numbers_texts_where_that_is_not_checked(
    front: Front, given: Any, spec: TensorSpec, sent: list[Any]
) -> None:
    found = whole(front, rules(spec).check([{spec.name: given}], requests(2)))[spec.name]
    expected = np.array(sent, object if spec is LABEL else np.float32)
    np.testing.assert_array_equal(found, expected[:, None])


# ---- where the bytes go ---------------------------------------------------------------------


def test_large_outputs_lie_in_the_arena_until_the_front_has_read_them(front: Front) -> None:
    """Small ones travel in the message."""
    outputs, _, _ = front.writer.write(rules().check([{"y": floats(1, 4096)}], requests(1)), ())
    assert len(present(outputs)[0].payload) == wire.INLINE_NBYTES
    assert front.arena.statistics().allocated == 0
    outputs, _, _ = front.writer.write(rules().check([{"y": floats(1, 4097)}], requests(1)), ())
    (output,) = present(outputs)
    assert isinstance(output.payload, wire.Ref)
    np.testing.assert_array_equal(front.array(output), floats(1, 4097))
    place = (output.payload.segment, output.payload.offset)
    front.writer.free([place])
    assert front.arena.statistics().blocks == 0
    with pytest.raises(KeyError):
        front.writer.free([place])


def test_any_layout_is_written_in_row_major_order(front: Front) -> None:
    for value in (np.asfortranarray(floats(60, 80, dtype=">f8")), floats(80, 60).T):
        before = front.arena.statistics().allocated
        answers = rules().check([{"y": value}], requests(60))
        np.testing.assert_array_equal(whole(front, answers)["y"], value)
        assert front.arena.statistics().allocated == before + 1


def test_many_byte_strings(front: Front) -> None:
    values = [np.array([[bytes([i]) * 3000]], object) for i in range(8)]
    answers = rules(LABEL).check([{"label": one} for one in values], requests(*[1] * 8))
    assert whole(front, answers)["label"].ravel().tolist() == [bytes([i]) * 3000 for i in range(8)]
    assert front.arena.statistics().blocks == 1


def test_nothing_is_kept_when_there_is_no_memory() -> None:
    front = Front(limit_nbytes=20 << 20)
    specs = (Y, TensorSpec("z", "FP32", (-1,)))
    data = {"y": floats(1, 10_000), "z": np.broadcast_to(np.float32(1), (1, 1 << 30))}
    with pytest.raises(OutOfMemory):
        front.writer.write(rules(*specs).check([data], requests(1)), ())
    assert front.arena.statistics().blocks == 0
    front.arena.close()


LABELLED = {"y": floats(1, 2), "label": np.array([["a"]], object)}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({**LABELLED, "y": np.array([["text"]])}, "must be FP32"),
        ({**LABELLED, "y": object()}, "must be an array"),
        ({**LABELLED, "label": np.array([["\ud800"]], object)}, "Output 'label' of model 'm'"),
        ({7: floats(1, 2)}, "names must be str"),
        ({"z": floats(1, 2)}, "None of the returned outputs 'z' is declared"),
        (None, "must be a mapping"),
        (Response(LABELLED, {"n": object()}), "Response parameter 'n' of model 'm' is the object"),
    ],
)
def test_an_answer_that_cannot_be_sent_fails_its_own_request(front: Front, bad: Any, told: str) -> None:
    lines: list[str] = []
    checked = OutputRules("m", (Y, LABEL), batching=True, strict=False, tell=lines.append)
    good = Response(LABELLED, {"n": 1})
    answers = checked.check([good, bad, good], requests(1, 1, 1))
    first, failed, last = each(front, answers)
    assert first["y"].tolist() == last["y"].tolist() == [[0, 1]]
    assert (failed.code, told in failed.text) == ("INTERNAL", True)
    assert answers.parameters == ({"n": 1}, {}, {"n": 1})
    assert (len(lines), told in lines[0], "1 of 3 requests" in lines[0]) == (1, True, True)
    with pytest.raises(OutputError):
        checked.check([bad, bad], requests(1, 1))


def test_of_one_array_an_element_that_cannot_be_sent_fails_its_own_request_unless_rows_are_wrong(
    front: Front,
) -> None:
    lines: list[str] = []
    checked = OutputRules("m", (LABEL, Y), batching=True, strict=True, tell=lines.append)
    labels = np.array([["a"], ["b"], [None]], object)
    answers = checked.check(BatchedOutputs({"label": labels, "y": floats(3, 2)}, (2, 1)), requests(2, 1))
    first, second = each(front, answers)
    assert (first["label"].tolist(), first["y"].tolist()) == ([[b"a"], [b"b"]], [[0, 1], [2, 3]])
    told = "Output 'label' of model 'm': a BYTES tensor holds bytes or str, but an element is NoneType"
    assert second == wire.WireFailure("INTERNAL", told)
    assert lines == [f"{told} (1 of 2 requests of the batch)"]
    labels = np.array([["a"], ["b"], [None]], object)
    data = BatchedOutputs({"label": labels, "y": floats(2, 2)}, (2, 1))
    with pytest.raises(OutputError, match="'y' of model 'm' must have 3 rows on its first axis"):
        rules(LABEL, Y).check(data, requests(2, 1))


# ---- outputs of a step's responses, stacked for one message ----


def stack(datatype: str, shape: tuple[int, ...], *arrays: Any) -> Any:
    rules = OutputRules("m", [TensorSpec("y", datatype, shape)], batching=False, strict=True, decoupled=True)
    copied = rules.copy([{"y": one} for one in arrays], 1 << 14)
    return None if copied is None else rules.stack(copied)


WIDE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("array", [WIDE, WIDE[:, ::2], WIDE.T, np.asfortranarray(WIDE), WIDE[:0]])
def test_any_layout_is_stacked_in_c_order(array: Any) -> None:
    (made,) = stack("FP32", (-1, -1), array, array + 1)
    assert made.shape == (2, *array.shape)
    assert bytes(made.payload) == np.stack([array, array + 1]).tobytes()


def test_a_dtype_without_a_buffer_and_a_scalar() -> None:
    array = np.ones(3, ml_dtypes.bfloat16)
    (made,) = stack("BF16", (3,), array, array)
    assert bytes(made.payload) == array.tobytes() * 2
    (made,) = stack("INT64", (), np.array(7), np.array(8))
    assert (made.shape, bytes(made.payload)) == ((2,), np.array([7, 8]).tobytes())


def test_copies_of_different_arrays_do_not_change_with_them() -> None:
    rules = OutputRules("m", [TensorSpec("y", "FP32", (-1, -1))], batching=False, strict=True, decoupled=True)
    arrays = [WIDE.copy(), WIDE[:, ::2].copy().T, WIDE[:0].copy(), WIDE.astype(np.float64)]
    expected = [one.copy() for one in arrays]
    copied = rules.copy([{"y": one} for one in arrays], 1 << 14)
    for array in arrays:
        array[:] = -1
    assert copied is not None
    assert rules.stack(copied) is None
    for one, array in zip(copied.mappings(), expected, strict=True):
        np.testing.assert_array_equal(one["y"], array, strict=True)


@pytest.mark.parametrize(
    "arrays", [(WIDE, WIDE[:2]), (WIDE, WIDE.astype(np.float64)), (WIDE, [[1.0]]), (np.zeros((9, 999), "f"),)]
)
def test_responses_that_differ_or_are_large_are_not_stacked(arrays: Any) -> None:
    assert stack("FP32", (-1, -1), *arrays) is None
