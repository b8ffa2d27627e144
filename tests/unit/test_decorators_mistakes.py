"""What is wrong with the use of a decorator is told where it is seen, in a sentence."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from decorating import DECORATORS, model, rows, serving

from gpuserve.decorators import (
    DecoratorError,
    batch,
    first_value,
    sample,
)
from gpuserve.decorators import wrapping as errors

PLAIN = {
    name: one
    for name, one in DECORATORS.items()
    if name not in {"first_value", "fill_optionals", "group_by_values"}
}
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
    with pytest.raises(
        TypeError, match=f"{NAMES[name]} was put on an object of type int, which cannot be called"
    ):
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
    with pytest.raises(
        TypeError, match="; k is optional and not in the request: give the parameter a default"
    ):
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
