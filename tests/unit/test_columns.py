"""Answers that are all alike are taken a name at a time: with the same result as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuserve_worker.inference.outputs import BatchAnswers, OutputError, OutputRules, alike_columns
from gpuserve_worker.protocol.tensor import TensorSpec, numpy_dtype
from gpuserve_worker.protocol.wire import WireRequest

SPECS = (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "INT64", ()))
DTYPES = {one.name: numpy_dtype(one.datatype) for one in SPECS}


class Looked(dict[str, Any]):
    """A mapping that is looked at by itself, since it is no plain one."""


def answer(rows: int, width: int = 2) -> dict[str, Any]:
    return {"y": np.full((rows, width), rows, np.float32), "z": np.arange(rows)}


def requests(*rows: int, wanted: tuple[str, ...] = ()) -> list[WireRequest]:
    return [WireRequest(one, {}, wanted) for one in rows]


def told(answers: BatchAnswers) -> Any:
    """What is sent of them, as plain data."""
    assert answers.whole is not None
    return [
        (one.name, one.datatype, one.shape, one.nbytes, [part.tolist() for part in one.parts])
        for one in answers.whole
    ]


@pytest.mark.parametrize("wanted", [(), ("y",), ("z", "y")])
@pytest.mark.parametrize("strict", [False, True])
def test_the_result_is_that_of_looking_at_each(wanted: tuple[str, ...], strict: bool) -> None:
    rules = OutputRules("m", SPECS, batching=True, strict=strict)
    asked = requests(1, 3, 2, wanted=wanted)
    answers = [answer(rows) for rows in (1, 3, 2)]
    assert alike_columns(answers, asked, SPECS, DTYPES) is not None
    alike, each = rules.check(answers, asked), rules.check([Looked(one) for one in answers], asked)
    assert told(alike) == told(each)


@pytest.mark.parametrize(
    "other",
    [
        answer(3),
        {"y": answer(2)["y"]},
        {**answer(2), "more": 1},
        {**answer(2), "y": [[1.0, 2.0]] * 2},
        {**answer(2), "y": answer(2)["y"].astype(np.float64)},
        {**answer(2), "y": answer(2)["y"].astype(">f4")},
        ValueError("this one"),
        None,
    ],
    ids=["rows", "left out", "more", "a list", "float64", "byte order", "an error", "none"],
)
def test_one_that_is_not_alike_has_each_looked_at(other: Any) -> None:
    assert alike_columns([answer(2), other], requests(2, 2), SPECS, DTYPES) is None


def test_columns_of_different_widths_have_the_shape_of_each_request() -> None:
    columns = alike_columns([answer(2), answer(1, width=5)], requests(2, 1), SPECS, DTYPES)
    assert columns is not None
    assert [shape for _, shape, _ in columns] == [((2, 2), (1, 5)), (3,)]


def test_strings_are_looked_at_each() -> None:
    texts = TensorSpec("t", "BYTES", ())
    answers = [{"t": np.array([b"x"], object)}] * 2
    assert alike_columns(answers, requests(1, 1), [texts], {"t": numpy_dtype("BYTES")}) is None


def test_a_shape_that_is_not_the_declared_one_is_told_where_outputs_are_strict() -> None:
    rules = OutputRules("m", [TensorSpec("y", "FP32", (3,))], batching=True, strict=True)
    with pytest.raises(OutputError, match=r"must have shape \(3,\)"):
        rules.check([{"y": np.ones((1, 2), np.float32)}] * 2, requests(1, 1))
