"""Functions under ``batch`` and ``sample`` see arrays, whether a worker calls them or a test of the user."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import numpy as np
import pytest
from decorating import DECORATORS, model, rows, serving, worker_batch

from gpuserve.decorators import BatchError, DecoratorError, batch, first_value, sample
from gpuserve.decorators import wrapping as errors
from gpuserve_worker.inference.inference_request import Batch, BatchedOutputs, Request, accepts_batch


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
        ([1], "returned 1 output, but the model declares 2: y, z"),
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
    with pytest.raises(BatchError, match="different sets of inputs: one has 'x', another 'z'; put @group_by"):
        doubled([{"x": rows(1)}, {"z": rows(1)}])


def test_requests_with_different_shapes_are_not_joined() -> None:
    with pytest.raises(BatchError, match=r"input 'x' has the shapes \(1, 1\) and \(1, 3\): they may differ"):
        doubled([{"x": rows(1)}, {"x": np.ones((1, 3), np.float32)}])


def test_no_requests_are_a_batch_without_rows() -> None:
    assert list(batch(lambda: {})([])) == []


def test_outputs_may_be_a_mapping_of_any_class() -> None:
    outputs = batch(lambda x: types.MappingProxyType({"y": x}))(worker_batch("y"))
    assert outputs[1]["y"].tolist() == [[2], [3]]


@pytest.mark.parametrize("given", [(), ([1, 2],), ({"x": rows(1)},)], ids=repr)
@pytest.mark.parametrize("decorator", [batch, sample])
def test_what_is_no_list_of_requests(decorator: Any, given: Any) -> None:
    text = "was given no positional argument" if not given else f"an object of type {type(given[0]).__name__}"
    with pytest.raises((TypeError, BatchError), match=f"{text}; functions below @batch|at a time"):
        decorator(lambda x: x)(*given)


class Adder:
    def __init__(self, amount: float) -> None:
        self.amount = amount

    @batch
    def add(self, x: Any, k: Any = 0.0) -> Any:
        return x + k + np.float32(self.amount)


@pytest.mark.parametrize("decorator", [batch, sample, batch(max_batch_size=4)])
def test_called_by_hand_with_arrays_it_is_the_function(decorator: Any) -> None:
    doubled = decorator(lambda x, k=0: 2 * x + k)
    assert doubled(rows(1, 2)).tolist() == doubled(x=rows(1, 2)).tolist() == [[2], [4]]
    assert doubled(rows(1, 2), k=1).tolist() == doubled(rows(1, 2), np.float32(1)).tolist() == [[3], [5]]


def test_a_method_called_by_hand_with_arrays() -> None:
    adder = Adder(1)
    assert adder.add(rows(1)).tolist() == adder.add(x=rows(1)).tolist() == [[2]]
    (answer,) = adder.add([{"x": rows(1)}])
    assert [one.tolist() for one in answer.values()] == [[[2]]]


@pytest.mark.parametrize("size", [0, -1, 1.5, "8"])
def test_the_size_of_a_batch_is_a_number_of_rows(size: Any) -> None:
    with pytest.raises(TypeError, match="max_batch_size of @batch must be an integer of at least 1, got"):
        batch(max_batch_size=size)


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


def test_only_the_decorated_callable_itself_is_given_a_batch() -> None:
    @functools.wraps(doubled)
    def wrapper(requests: Any) -> Any:
        return doubled(requests)

    assert all(accepts_batch(one) for one in CALLABLES.values())
    assert not accepts_batch(wrapper)
    assert accepts_batch(functools.partial(functools.partial(doubled)))
    assert not accepts_batch(functools.partial(wrapper))
    assert not accepts_batch(lambda requests: requests)
    assert not accepts_batch(len)
    assert not accepts_batch(first_value("k")(lambda requests: requests))


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


# ---- decorators mistakes ---------------------------------------------------------------------


WITH_ARGUMENTS = {"first_value", "fill_optionals", "group_by_values"}
PLAIN = {name: one for name, one in DECORATORS.items() if name not in WITH_ARGUMENTS}
NAMES = {name: f"@{name}" for name in DECORATORS}


class Model:
    def __call__(self, x: Any) -> Any:
        return {"y": x}


def one_input(x: Any) -> Any:
    return {"y": x}


def two_inputs(x: Any, k: Any) -> Any:
    return {"y": x + k}


@pytest.mark.parametrize("name", DECORATORS)
def test_a_class_is_not_decorated(name: str) -> None:
    with pytest.raises(TypeError, match=f"{NAMES[name]} was put on the class Model; .* the method __call__"):
        DECORATORS[name](Model)


@pytest.mark.parametrize("name", DECORATORS)
def test_what_cannot_be_called_is_not_decorated(name: str) -> None:
    with pytest.raises(TypeError, match=f"{NAMES[name]} was put on an object of type int, which cannot be"):
        DECORATORS[name](3)
    with pytest.raises(TypeError, match=f"{NAMES[name]} was put on a classmethod; put it below @classmethod"):
        DECORATORS[name](classmethod(one_input))


@pytest.mark.parametrize("name", PLAIN)
def test_parentheses_where_none_belong(name: str) -> None:
    with pytest.raises(TypeError, match=f"{NAMES[name]} is written without parentheses"):
        PLAIN[name]()


MISFITS: Any = [
    (one_input, {"x": rows(1), "z": rows(1)}, r"one_input\(x\) cannot be called with the inputs x, z: .*'z'"),
    (two_inputs, {"x": rows(1)}, r"two_inputs\(x, k\) cannot be called with the inputs x: .*'k'"),
    (lambda: {}, {"x": rows(1)}, r"<lambda>\(\) cannot be called with the inputs x"),
    (functools.partial(two_inputs), {}, r"two_inputs\(x, k\) cannot be called with no inputs: "),
]


@pytest.mark.parametrize(
    "decorator", [batch, sample, lambda f: batch(first_value("none")(f))], ids=["batch", "sample", "stack"]
)
@pytest.mark.parametrize(("function", "inputs", "text"), MISFITS, ids=["more", "fewer", "none", "partial"])
def test_parameters_that_are_not_the_inputs(function: Any, inputs: Any, text: str, decorator: Any) -> None:
    with pytest.raises(TypeError, match=text):
        decorator(function)([inputs])


def test_an_optional_input_that_has_no_default() -> None:
    with pytest.raises(TypeError, match="; k is optional and not in the request: give the parameter a"):
        serving(model(), batch(two_inputs), [{"x": rows(1)}])


def test_a_type_error_of_the_function_is_its_own() -> None:
    def fails(x: Any) -> Any:
        return one_input(x, x, x)  # type: ignore[call-arg]

    for decorator in (batch, sample):
        with pytest.raises(TypeError, match=r"^one_input\(\) takes 1 positional argument but 3 were given$"):
            decorator(fails)([{"x": rows(1)}])


def test_every_error_is_a_decorator_error_and_what_its_name_says() -> None:
    kinds = {
        name: one
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, Exception) and one is not DecoratorError
    }
    assert all(issubclass(one, DecoratorError) for one in kinds.values())
    assert all(issubclass(one, ValueError | RuntimeError | LookupError) for one in kinds.values())
