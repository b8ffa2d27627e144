"""Values that all rows share, and values for inputs that are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decorating import model, rows, serving, worker_batch

from gpuserve.decorators import (
    BatchError,
    DefaultsError,
    NoModelError,
    StackError,
    ValuesError,
    batch,
    fill_optionals,
    first_value,
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
    assert seen[0]["k"] == 7
    assert seen[0].parameters == {"p": 1}
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
        (
            {"k": np.array([1])},
            "input 'k' of @fill_optionals must be FP32, as the model declares, but is INT64",
        ),
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
    with pytest.raises(
        DefaultsError, match=r"input 'k' of @fill_optionals must be a numpy array, but .* type int"
    ):
        fill_optionals(k=1)


def test_fill_optionals_is_given_defaults() -> None:
    with pytest.raises(
        TypeError, match=r"given defaults by the names of inputs, as @fill_optionals\(name=arr"
    ):
        fill_optionals()
    with pytest.raises(TypeError, match="given defaults"):
        fill_optionals(add)


def test_fill_optionals_needs_the_model() -> None:
    with pytest.raises(
        NoModelError, match="@fill_optionals needs to know the model, but the callable was not"
    ):
        fill_optionals(k=ONE)(add)([{"x": rows(1)}])


def test_fill_optionals_goes_above_batch() -> None:
    with pytest.raises(
        TypeError, match=r"@fill_optionals expected a list of requests.*functions below @batch"
    ):
        serving(model(), batch(fill_optionals(k=ONE)(lambda x, k: x)), worker_batch("y"))
