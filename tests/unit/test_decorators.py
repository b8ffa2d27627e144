"""Decorated callables see arrays, whether the worker calls them or a test of the user does."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

from gpuserve.decorators import batch, first_value, sample
from gpuserve_worker.request import Batch, BatchedOutputs, Request, RequestBatch, accepts_batch


def rows(*values: float) -> Any:
    return np.array(values, np.float32).reshape(-1, 1)


def worker_batch(*names: str, batching: bool = True) -> Batch:
    """Two requests of one and two rows, as the worker passes them; outputs of these names."""
    if not batching:
        return Batch({"x": rows(1, 2)}, [(1, {}, ())], names, False)
    return Batch({"x": rows(1, 2, 3)}, [(1, {"k": 1}, ()), (2, {}, ("y",))], names, True)


def given_forms() -> dict[str, Any]:
    return {
        "a batch": worker_batch("y"),
        "the worker's list": worker_batch("y").as_list(),
        "requests": [Request({"x": rows(1)}), Request({"x": rows(2, 3)})],
        "dicts": [{"x": rows(1)}, {"x": rows(2, 3)}],
    }


class Doubler:
    factor = 2

    @batch
    def __call__(self, x: Any) -> Any:
        """Twice the input."""
        return {"y": x * self.factor}

    @batch
    def method(self, **inputs: Any) -> Any:
        return [inputs["x"] * self.factor]


@batch
def doubled(x: Any) -> Any:
    return x * 2


CALLABLES = {"function": doubled, "object": Doubler(), "method": Doubler().method}


@pytest.mark.parametrize("form", given_forms())
@pytest.mark.parametrize("call", CALLABLES.values(), ids=CALLABLES)
def test_batch_joins_the_rows_and_cuts_the_outputs(call: Any, form: str) -> None:
    outputs = call(given_forms()[form])
    assert isinstance(outputs, BatchedOutputs)
    first, second = outputs
    (name,) = first
    assert first[name].tolist() == [[2]]
    assert second[name].tolist() == [[4], [6]]
    assert outputs[-1][name].tolist() == [[4], [6]]
    assert [one[name].tolist() for one in outputs[:1]] == [[[2]]]


def test_a_batch_is_passed_on_without_a_copy() -> None:
    given = worker_batch("y")
    seen = []
    batch(lambda x: seen.append(x) or x)(given)
    assert seen[0] is given.arrays["x"]


def test_outputs_by_position_take_the_declared_names() -> None:
    outputs = batch(lambda x: (x, x + 1))(worker_batch("y", "z"))
    assert list(outputs.arrays) == ["y", "z"]
    assert outputs.arrays["z"].tolist() == [[2], [3], [4]]


def test_outputs_by_position_without_declaration() -> None:
    assert list(batch(lambda x: [x, x])([{"x": rows(1)}]).arrays) == ["OUTPUT_1", "OUTPUT_2"]


def test_a_model_that_does_not_batch_has_no_rows_to_check() -> None:
    assert batch(lambda x: {"y": x.sum()})(worker_batch("y", batching=False)) == [{"y": 3}]
    assert batch(lambda x: {"y": x.sum()})(worker_batch("y", batching=False).as_list()) == [{"y": 3}]


def test_the_signature_and_the_name_stay() -> None:
    assert str(inspect.signature(Doubler.__call__)) == "(self, x: 'Any') -> 'Any'"
    assert Doubler.__call__.__doc__ == "Twice the input."
    assert doubled.__name__ == "doubled"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([1], "returned 1 outputs, but the model declares 2: y, z"),
        (None, "Unsupported output type NoneType"),
        ("text", "Unsupported output type str"),
        ({"y": rows(1)}, r"'y' of shape \(1, 1\), but the batch has 3 rows"),
        ({"y": 1.5}, r"'y' of shape \(\), but the batch has 3 rows"),
    ],
    ids=["number", "None", "str", "rows", "scalar"],
)
def test_outputs_that_do_not_fit_the_batch(result: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        batch(lambda x: result)(worker_batch("y", "z"))


def test_requests_with_different_inputs_are_not_joined() -> None:
    with pytest.raises(ValueError, match="different sets of inputs"):
        doubled([{"x": rows(1)}, {"z": rows(1)}])


def test_an_exception_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        batch(lambda x: 1 / 0)(worker_batch("y"))


ALONE = {"batch": worker_batch("y", batching=False), "dicts": [{"x": rows(1, 2)}]}


@pytest.mark.parametrize("given", ALONE.values(), ids=ALONE)
def test_sample_gives_the_arrays_of_the_one_request(given: Any) -> None:
    ((name, value),) = sample(lambda x: [x.sum()])(given)[0].items()
    assert value == 3
    assert name == ("y" if isinstance(given, Batch) else "OUTPUT_1")


def test_sample_refuses_more_than_one_request() -> None:
    with pytest.raises(ValueError, match="one request at a time, but the batch holds 2"):
        sample(lambda x: [x])(worker_batch("y"))


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
    with pytest.raises(ValueError, match="input 'k' are not equal"):
        first_value("k")(lambda requests: requests)(given)
    assert first_value("k", strict=False)(lambda requests: requests)(given)[0]["k"] == 1


@pytest.mark.parametrize("array", [np.float32(1), np.zeros((0, 1))], ids=["scalar", "no rows"])
def test_first_value_needs_rows(array: Any) -> None:
    with pytest.raises(ValueError, match="to have rows"):
        first_value("k")(lambda requests: requests)([{"k": np.asarray(array)}])


def test_only_the_decorated_callable_itself_is_given_a_batch() -> None:
    @functools.wraps(doubled)
    def wrapper(requests: Any) -> Any:
        return doubled(requests)

    assert all(accepts_batch(one) for one in CALLABLES.values())
    assert not accepts_batch(wrapper)
    assert not accepts_batch(functools.partial(doubled))
    assert not accepts_batch(lambda requests: requests)
    assert not accepts_batch(len)
    assert not accepts_batch(first_value("k")(doubled))


def test_a_batch_as_a_list_knows_all_that_requests_know() -> None:
    first, second = worker_batch("y", "z").as_list()
    assert (first.parameters, second.parameters) == ({"k": 1}, {})
    assert first.requested_output_names == ["y", "z"]
    assert second.requested_output_names == ["y"]
    assert np.shares_memory(second["x"], second.data["x"])
    assert dict(second)["x"].tolist() == [[2], [3]]
    assert repr(first) == "Request(x: (1, 1))"


def test_arguments_that_were_given_before_come_along() -> None:
    @batch
    def scaled(first: Any, x: Any, factor: int) -> Any:
        return {"y": first + factor * x}

    @sample
    def scaled_sample(x: Any, factor: int) -> Any:
        return {"y": factor * x}

    partial = functools.partial(scaled, 1, factor=3)
    assert partial(worker_batch("y")).arrays["y"].ravel().tolist() == [4, 7, 10]
    (answer,) = functools.partial(scaled_sample, factor=3)(worker_batch("y", batching=False))
    assert answer["y"].ravel().tolist() == [3, 6]
