"""Values that all rows share, and values for inputs that are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decorating import model, rows, serving, worker_batch

from gpuserve.decorators import (
    BatchError,
    ConstantPadder,
    DefaultsError,
    NoModelError,
    StackError,
    ValuesError,
    batch,
    fill_optionals,
    first_value,
    group_by_values,
    pad_batch,
)
from gpuserve_worker.inference.inference_request import Batch, Request, RequestBatch, accepts_batch
from gpuserve_worker.protocol.tensor import TensorSpec


def shared(*values: float) -> dict[str, Any]:
    return {"x": rows(*values), "k": np.full((len(values), 1), 7)}


def test_first_value_under_batch() -> None:
    seen = []

    @batch
    @first_value("k", "absent")
    def call(x: Any, k: Any) -> Any:
        seen.append(k)
        return x * k

    outputs = call([shared(1), shared(2, 3)])
    assert outputs.arrays["OUTPUT_1"].tolist() == [[7], [14], [21]]
    assert seen == [7]
    assert isinstance(seen[0], np.generic)


def test_first_value_over_requests_keeps_what_belongs_to_them() -> None:
    seen: Any = []
    call = first_value("k")(lambda requests: seen.extend(requests) or requests)
    given = RequestBatch([Request(shared(1, 2), {"p": 1}, ["y"])], ["y"], True)
    returned = call(given)
    assert (seen[0]["k"], seen[0].parameters) == (7, {"p": 1})
    assert isinstance(returned, RequestBatch)
    assert returned.output_names == ("y",)
    assert first_value("k")(lambda requests: requests)([shared(1)])[0]["k"] == 7


def test_first_value_of_a_method_and_of_wide_rows() -> None:
    class Model:
        @first_value("k", squeeze_single_values=False)
        def __call__(self, requests: Any) -> Any:
            return requests

    assert Model()([shared(1)])[0]["k"].shape == (1,)
    wide = {"k": np.ones((2, 3))}
    assert first_value("k")(lambda requests: requests)([wide])[0]["k"].tolist() == [1, 1, 1]


def test_first_value_of_byte_strings() -> None:
    given = [{"k": np.array([[b"a"], [b"a"]], object)}]
    assert first_value("k")(lambda requests: requests)(given)[0]["k"] == b"a"


def test_first_value_of_unequal_rows() -> None:
    given = [{"k": rows(1, 2)}]
    with pytest.raises(ValuesError, match="input 'k' are not equal"):
        first_value("k")(lambda requests: requests)(given)
    assert first_value("k", strict=False)(lambda requests: requests)(given)[0]["k"] == 1


@pytest.mark.parametrize("array", [np.float32(1), np.zeros((0, 1))], ids=["scalar", "no rows"])
def test_first_value_needs_rows(array: Any) -> None:
    with pytest.raises(ValuesError, match="to have rows"):
        first_value("k")(lambda requests: requests)([{"k": np.asarray(array)}])


def test_first_value_tells_that_the_model_does_not_batch() -> None:
    unbatched = model(max_batch_size=0)
    with pytest.raises(BatchError, match="@first_value decorator can only be used with models that batch"):
        serving(unbatched, first_value("x")(lambda x: x), x=rows(1))
    with pytest.raises(BatchError, match="can only be used with models that batch"):
        first_value("x")(lambda requests: requests)(RequestBatch([Request({"x": rows(1)})], ["y"], False))


def test_first_value_goes_below_batch() -> None:
    with pytest.raises(StackError, match="@first_value works on the arrays that @batch makes"):
        first_value("k")(batch(lambda x: x))


@pytest.mark.parametrize("use", [first_value, lambda: first_value()(len), lambda: first_value(1)(len)])
def test_first_value_is_given_names(use: Any) -> None:
    arguments = (lambda x: x,) if use is first_value else ()
    with pytest.raises(TypeError, match=r"given names of inputs, as @first_value\('name'\), but was given"):
        use(*arguments)


def test_a_changed_request_hears_of_its_cancellation() -> None:
    seen: list[Request] = []
    given = Request(shared(1, 2))
    first_value("k")(lambda requests: seen.extend(requests) or requests)([given])
    assert not seen[0].cancelled
    given.cancelled = True
    assert seen[0].cancelled


# ---- fill_optionals -----------------------------------------------------------------------------

ONE = np.array([5], np.float32)


@batch
def add(x: Any, k: Any) -> Any:
    return {"y": x + k}


def add_each(requests: Any) -> Any:
    return [{"y": one["x"] + one["k"]} for one in requests]


@pytest.mark.parametrize("function", [add, add_each])
def test_fill_optionals_repeats_the_default_for_each_row(function: Any) -> None:
    given = [{"x": rows(1, 2)}, {"x": rows(3), "k": rows(10)}]
    first, second = serving(model(), fill_optionals(k=ONE)(function), given)
    assert first["y"].tolist() == [[6], [7]]
    assert second["y"].tolist() == [[13]]
    assert "k" not in given[0]


def test_fill_optionals_of_the_workers_batch() -> None:
    function = fill_optionals(k=ONE)(add)
    assert accepts_batch(function)
    given = worker_batch("y")
    assert serving(model(), function, given).arrays["y"].tolist() == [[6], [7], [8]]
    assert list(given.arrays) == ["x"]


def test_fill_optionals_over_requests_without_any_input() -> None:
    both = model(inputs=(TensorSpec("k", "FP32", (1,), True),))
    given = Batch({}, [(2, {}, ())], ("y",), True)
    outputs = serving(both, fill_optionals(k=ONE)(batch(lambda k: {"y": k})), given)
    assert outputs.arrays["y"].tolist() == [[5], [5]]


def test_fill_optionals_passes_on_a_batch_that_lacks_nothing() -> None:
    seen: Any = []
    given = Batch({"x": rows(1), "k": rows(2)}, [(1, {}, ())], ("y",), True)
    serving(model(), fill_optionals(k=ONE)(batch(lambda x, k: seen.append(k) or x)), given)
    assert seen[0] is given.arrays["k"]


def test_fill_optionals_where_the_model_does_not_batch() -> None:
    seen: Any = []
    given = [{"x": ONE}]
    call = fill_optionals(k=ONE)(lambda requests: seen.extend(requests) or requests)
    serving(model(max_batch_size=0), call, given)
    assert seen[0]["k"].tolist() == [5]
    seen[0]["k"] += 1
    assert ONE.tolist() == [5]


@pytest.mark.parametrize("default", [np.array(["a"]), np.array([b"a"]), np.array([b"a"], object)], ids=repr)
def test_fill_optionals_of_byte_strings(default: Any) -> None:
    words = model(inputs=(TensorSpec("x", "FP32", (1,)), TensorSpec("k", "BYTES", (1,), True)))
    seen: Any = []
    serving(words, fill_optionals(k=default)(batch(lambda x, k: seen.append(k) or x)), worker_batch("y"))
    assert seen[0].tolist() == [[b"a"]] * 3
    assert seen[0].dtype == object


@pytest.mark.parametrize(
    ("defaults", "text"),
    [
        ({"z": ONE}, "default for the input 'z', which model 'm' does not have; its inputs are 'x', 'k'"),
        ({"k": np.array([1])}, "input 'k' of @fill_optionals must be FP32, as the model declares, but is"),
        ({"k": rows(1)}, r"must have the shape \(1,\), without a batch axis, but has \(1, 1\)"),
        ({"k": np.array([1j])}, "complex128 has no v2 datatype"),
    ],
    ids=["name", "dtype", "shape", "complex"],
)
def test_defaults_that_do_not_fit_the_model(defaults: Any, text: str) -> None:
    with pytest.raises(DefaultsError, match=text):
        serving(model(), fill_optionals(**defaults)(add), [{"x": rows(1)}])


def test_defaults_are_checked_once_for_a_model_and_again_for_another() -> None:
    call = fill_optionals(k=ONE)(add)
    assert serving(model(), call, worker_batch("y")).arrays["y"].tolist() == [[6], [7], [8]]
    with pytest.raises(DefaultsError, match="model 'other' does not have"):
        serving(model(name="other", inputs=()), call, worker_batch("y"))


def test_a_default_is_an_array() -> None:
    with pytest.raises(DefaultsError, match=r"input 'k' of @fill_optionals must be a numpy array, .* int"):
        fill_optionals(k=1)


def test_fill_optionals_is_given_defaults() -> None:
    with pytest.raises(TypeError, match=r"given defaults by the names of inputs, as @fill_optionals\(name="):
        fill_optionals()
    with pytest.raises(TypeError, match="given defaults"):
        fill_optionals(add)


def test_fill_optionals_needs_the_model() -> None:
    with pytest.raises(NoModelError, match="@fill_optionals needs to know the model, but the callable"):
        fill_optionals(k=ONE)(add)([{"x": rows(1)}])


def test_fill_optionals_goes_above_batch() -> None:
    with pytest.raises(TypeError, match=r"@fill_optionals expected a list of requests.*functions below"):
        serving(model(), batch(fill_optionals(k=ONE)(lambda x, k: x)), worker_batch("y"))


# ---- decorators padding ----------------------------------------------------------------------


def sizes_of(*counts: int) -> list[int]:
    """The size of the batch that a padded callable is given for these numbers of rows."""
    seen: list[int] = []
    call = batch(pad_batch(lambda x: seen.append(len(x)) or {"y": x}))
    for count in counts:
        given = [{"x": rows(*range(count))}]
        assert serving(model(), call, given).arrays["y"].tolist() == given[0]["x"].tolist()
    return seen


def test_the_next_preferred_size_then_the_largest() -> None:
    assert sizes_of(1, 2, 3, 4, 5, 8, 9) == [2, 2, 4, 4, 8, 8, 9]


def test_the_last_row_is_repeated() -> None:
    seen: Any = []
    serving(model(), pad_batch(lambda x: seen.append(x.ravel().tolist()) or [x]), x=rows(1, 2, 3))
    assert seen == [[1, 2, 3, 3]]


@pytest.mark.parametrize("form", ["mapping", "list", "array", "cut already"])
def test_outputs_are_cut_back_in_every_form(form: str) -> None:
    @batch
    @pad_batch
    def call(x: Any) -> Any:
        return {"mapping": {"y": x}, "list": [x], "array": x, "cut already": {"y": x[:3]}}[form]

    first, second = serving(model(), call, [{"x": rows(1)}, {"x": rows(2, 3)}])
    (name,) = first
    assert first[name].tolist() == [[1]]
    assert second[name].tolist() == [[2], [3]]


async def awaited(x: Any) -> Any:
    return {"y": x}


def yielding(x: Any) -> Any:
    yield [x]


async def yielding_async(x: Any) -> Any:
    yield [x]


@pytest.mark.parametrize("function", [awaited, yielding, yielding_async])
def test_answers_of_every_kind_are_cut_back(function: Any) -> None:
    answer = serving(model(), batch(pad_batch(function)), [{"x": rows(1, 2, 3)}])
    outputs = answer[0] if isinstance(answer, list) else answer
    assert outputs.arrays.popitem()[1].tolist() == [[1], [2], [3]]


def test_values_that_first_value_took_are_not_padded() -> None:
    three = model(inputs=(TensorSpec("x", "FP32", (1,)), TensorSpec("w", "FP32", (3,))))
    seen: Any = []

    @batch
    @first_value("w")
    @pad_batch
    def call(x: Any, w: Any) -> Any:
        seen.append((len(x), w.tolist()))
        return {"y": x}

    serving(three, call, [{"x": rows(1, 2, 3), "w": np.ones((3, 3), np.float32)}])
    assert seen == [(4, [1, 1, 1])]


def test_padding_above_a_grouped_generator() -> None:
    @batch
    @pad_batch
    @group_by_values("x")
    def call(x: Any) -> Any:
        yield {"y": x}

    answers = serving(model(), call, [{"x": rows(1)}, {"x": rows(2)}, {"x": rows(3)}])
    assert [[one if one is None else one["y"].tolist() for one in answer] for answer in answers] == [
        [[[1]], None, None],
        [None, [[2]], None],
        [None, None, [[3]]],
    ]


def test_an_output_of_another_length_is_told_as_under_batch() -> None:
    with pytest.raises(BatchError, match=r"output 'y' of shape \(7, 1\), but the batch has 3 rows"):
        serving(model(), batch(pad_batch(lambda x: {"y": np.ones((7, 1))})), [{"x": rows(1, 2, 3)}])


def test_pad_batch_goes_below_batch() -> None:
    with pytest.raises(StackError, match="@pad_batch works on the arrays that @batch makes"):
        pad_batch(batch(lambda x: x))
    with pytest.raises(StackError, match="@pad_batch must be below @batch"):
        serving(model(), pad_batch(lambda requests: requests), [{"x": rows(1)}])


def test_pad_batch_needs_a_model_that_batches() -> None:
    with pytest.raises(NoModelError, match="@pad_batch needs to know the model"):
        pad_batch(lambda x: x)(x=rows(1))
    with pytest.raises(BatchError, match="The @pad_batch decorator can only be used with models that batch"):
        serving(model(max_batch_size=0), pad_batch(lambda x: x), x=rows(1))


def test_a_batch_without_rows_is_not_padded() -> None:
    assert serving(model(), batch(pad_batch(lambda x: [x])), [{"x": rows()}]).rows == (0,)


def test_a_group_without_elements_is_padded_as_the_others_are() -> None:
    groups = [{"n": np.array([[b"a", b"b"]], object)}, {"n": np.empty((1, 0), object)}]
    assert [one["n"].tolist() for one in ConstantPadder(np.nan)(groups)] == [[[b"a", b"b"]], [[b"", b""]]]
