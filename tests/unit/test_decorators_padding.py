"""Batches that are filled up to a size that the model prefers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decorating import model, rows, serving

from gpuserve.decorators import (
    BatchError,
    ConstantPadder,
    NoModelError,
    StackError,
    batch,
    first_value,
    group_by_values,
    pad_batch,
)
from gpuserve_worker.protocol.tensor import TensorSpec


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
