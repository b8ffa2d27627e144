"""Parameters of requests as parameters of functions: their values, and requests of a batch that differ."""

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


def test_where_all_are_equal_nothing_is_cut() -> None:
    CALLS.clear()
    result = times(batch_of({"by": 2}, {"by": 2}))
    assert type(result).__name__ == "BatchedOutputs"
    assert CALLS == [(2, 2)]


WRONG = "parameter 'by' of the request must be an int, given the str 'x'"


@pytest.mark.parametrize("function", [times, times_later])
def test_a_wrong_value_fails_its_own_request(function: Any) -> None:
    assert answers(function(batch_of({"by": 2}, {"by": "x"}, {}))) == [[[2]], WRONG, [[3]]]
    assert answers(function(batch_of({"by": "x"}))) == [WRONG]


@pytest.mark.parametrize("function", [times_twice, times_twice_later])
def test_streams_of_different_values(function: Any) -> None:
    parts = [answers(part) for part in complete(function(batch_of({"by": 2}, {"by": "x"}, {"by": 3})))]
    assert parts == [
        [[[2]], None, None],
        [[[-2]], None, None],
        [None, WRONG, None],
        [None, None, [[9]]],
        [None, None, [[-9]]],
    ]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_whatever_the_values_each_request_gets_its_own(values: list[int]) -> None:
    CALLS.clear()
    given = answers(times(batch_of(*({"by": one} for one in values))))
    assert given == [[[one * place]] for place, one in enumerate(values, 1)]
    assert len(CALLS) == len(set(values))


def ask(**parameters: Any) -> Any:
    (answer,) = every_kind(Batch({"x": rows(1)}, [(1, parameters, ())], ("y",), False))
    return answer if isinstance(answer, ParameterError) else answer["y"]


def test_every_kind_of_value() -> None:
    assert ask(whole=3) == (3, 0.5, False, None)
    given = ask(whole=-1, part=2, flag=True, text="é")
    assert (given, type(given[1])) == ((-1, 2.0, True, "é"), float)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "'whole' of the request is missing: expected an int"),
        ({"whole": 1.0}, "'whole' of the request must be an int, given the float 1.0"),
        ({"whole": True}, "'whole' of the request must be an int, given the bool True"),
        ({"whole": 1, "part": "1"}, "'part' of the request must be a float, given the str '1'"),
        ({"whole": 1, "flag": 1}, "'flag' of the request must be a bool, given the int 1"),
        ({"whole": 1, "text": 1}, "'text' of the request must be a str, given the int 1"),
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


def test_a_type_that_no_request_can_carry() -> None:
    @batch
    def wrong(x: Float32, by: Parameter[list[int]]) -> Any: ...

    with pytest.raises(TypeError, match="Parameter 'by' must be an int, float, bool or str, but its type is"):
        wrong(batch_of({"by": 1}))
