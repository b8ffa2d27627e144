"""Requests as callables see them, and their parameters as parameters of functions."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from decorating import complete, rows
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.decorators import batch, sample
from gpuserve.decorators.batching import ParameterError
from gpuserve.typed import Float32, Parameter
from gpuserve_worker.inference.inference_request import Batch, Request
from gpuserve_worker.protocol.payloads import requests, requests_as_tuples

CALLS: list[tuple[int, int]] = []


@batch
def times(x: Float32, by: Parameter[int] = 1) -> Any:
    CALLS.append((len(x), by))
    return {"y": x * np.float32(by)}


@batch
async def times_later(x: Float32, by: Parameter[int] = 1) -> Any:
    return {"y": x * np.float32(by)}


@batch
def times_twice(x: Float32, by: Parameter[int] = 1) -> Iterator[Any]:
    yield {"y": x * np.float32(by)}
    yield {"y": x * np.float32(-by)}


@batch
async def times_twice_later(x: Float32, by: Parameter[int] = 1) -> AsyncIterator[Any]:
    yield {"y": x * np.float32(by)}
    yield {"y": x * np.float32(-by)}


@sample
def every_kind(
    x: Float32,
    whole: Parameter[int],
    part: Parameter[float] = 0.5,
    flag: Parameter[bool] = False,
    text: Parameter[str | None] = None,
) -> Any:
    return {"y": (whole, part, flag, text)}


def batch_of(*parameters: dict[str, Any]) -> Batch:
    """A request of one row for each: the first is 1, the second 2, and so on."""
    values = rows(*range(1, len(parameters) + 1))
    return Batch({"x": values}, [(1, one, ()) for one in parameters], ("y",), True)


def answers(result: Any) -> list[Any]:
    return [
        str(one) if isinstance(one, Exception) else None if one is None else one["y"].tolist()
        for one in complete(result)
    ]


def test_one_call_for_equal_values_and_in_the_order_of_the_requests() -> None:
    CALLS.clear()
    assert answers(times(batch_of({"by": 3}, {"other": 1}, {"by": 3}, {}))) == [[[3]], [[2]], [[9]], [[4]]]
    assert CALLS == [(2, 3), (2, 1)]
    result = times(batch_of({"by": 2}, {"by": 2}))
    assert type(result).__name__ == "BatchedOutputs", "all are equal, so nothing is cut"
    assert CALLS[2:] == [(2, 2)]


WRONG = "parameter 'by' of the request must be an int, given the str 'x'"


@pytest.mark.parametrize("function", [times, times_later])
def test_a_wrong_value_fails_its_own_request(function: Any) -> None:
    assert answers(function(batch_of({"by": 2}, {"by": "x"}, {}))) == [[[2]], WRONG, [[3]]]
    assert answers(function(batch_of({"by": "x"}))) == [WRONG]


@pytest.mark.parametrize("function", [times_twice, times_twice_later])
def test_streams_of_different_values(function: Any) -> None:
    parts = [answers(part) for part in complete(function(batch_of({"by": 2}, {"by": "x"}, {"by": 3})))]
    first, second = ([[[2]], None, None], [[[-2]], None, None]), ([None, None, [[9]]], [None, None, [[-9]]])
    assert parts == [*first, [None, WRONG, None], *second]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_whatever_the_values_each_request_gets_its_own(values: list[int]) -> None:
    CALLS.clear()
    given = answers(times(batch_of(*({"by": one} for one in values))))
    assert given == [[[one * place]] for place, one in enumerate(values, 1)]
    assert len(CALLS) == len(set(values))


def ask(**parameters: Any) -> Any:
    (answer,) = every_kind(Batch({"x": rows(1)}, [(1, parameters, ())], ("y",), False))
    return answer if isinstance(answer, ParameterError) else answer["y"]


def test_a_type_that_no_request_can_carry_and_every_kind_of_value() -> None:
    assert ask(whole=3) == (3, 0.5, False, None)
    given = ask(whole=-1, part=2, flag=True, text="é")
    assert (given, type(given[1])) == ((-1, 2.0, True, "é"), float)

    @batch
    def wrong(x: Float32, by: Parameter[list[int]]) -> Any: ...

    with pytest.raises(TypeError, match="Parameter 'by' must be an int, float, bool or str, but its type is"):
        wrong(batch_of({"by": 1}))


GIVEN = "of the request must be"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "'whole' of the request is missing: expected an int"),
        ({"whole": 1.0}, f"'whole' {GIVEN} an int, given the float 1.0"),
        ({"whole": True}, f"'whole' {GIVEN} an int, given the bool True"),
        ({"whole": 1, "part": "1"}, f"'part' {GIVEN} a float, given the str '1'"),
        ({"whole": 1, "flag": 1}, f"'flag' {GIVEN} a bool, given the int 1"),
        ({"whole": 1, "text": 1}, f"'text' {GIVEN} a str, given the int 1"),
    ],
)
def test_other_values(parameters: Any, text: str) -> None:
    error = ask(**parameters)
    assert text in str(error)
    assert error.code.value == "INVALID_ARGUMENT"


def test_by_hand_and_by_partial() -> None:
    assert times(rows(2), by=4)["y"].tolist() == [[8]]
    assert times(rows(2))["y"].tolist() == [[2]]
    assert answers(times([Request({"x": rows(2)}, {"by": 3}), {"x": rows(5)}])) == [[[6]], [[5]]]
    fixed = functools.partial(times, by=7)
    assert answers(fixed(batch_of({"by": 2}))) == [[[7]]]


# ---- a request as the callable sees it ----


def test_a_request_is_a_mutable_mapping_with_the_arguments_of_pytriton() -> None:
    x = np.zeros(1)
    request = Request({"x": x}, parameters={"p": 1}, span=None, requested_output_names=["y"])
    assert request["x"] is x
    assert (request.parameters, request.requested_output_names) == ({"p": 1}, ["y"])
    assert (request.span, request.cancelled) == (None, False)
    request["z"] = np.ones(1)
    del request["x"]
    assert (list(request), len(request), request.get("x")) == (["z"], 1, None)
    with pytest.raises(ZeroDivisionError), request.traced_span("fails"):
        _ = 1 / 0


def test_other_data_of_the_same_request() -> None:
    request = Request({"x": np.zeros(1)}, {"p": 1}, None, ["y"])
    changed = request.with_data({"z": np.ones(1)})
    assert list(changed) == ["z"]
    assert list(request) == ["x"]
    assert (changed.parameters, changed.requested_output_names) == ({"p": 1}, ["y"])
    request.cancelled = True
    assert changed.cancelled
    assert changed.with_data({}).cancelled


def test_requests_that_travel_as_their_rows_have_all_fields_and_parameters_of_their_own() -> None:
    told = (2, (1, {"k": 1}, ("y",), (), None, (), None), 2)
    assert [tuple(one) for one in requests(told)] == [
        (2, {}, (), (), None, (), None),
        (1, {"k": 1}, ("y",), (), None, (), None),
        (2, {}, (), (), None, (), None),
    ]
    batch = Batch({"x": np.arange(5)}, requests_as_tuples(told), ("y", "z"), batching=True)
    assert batch.rows == (2, 1, 2)
    first, second, third = batch.as_list()
    first.parameters["mine"] = True
    assert (second.parameters, third.parameters) == ({"k": 1}, {})
    assert (first.requested_output_names, second.requested_output_names) == (["y", "z"], ["y"])
    again = Batch({"x": np.arange(5)}, requests_as_tuples(told), (), batching=True)
    assert again.as_list()[0].parameters == {}
