"""Callables under stacks of decorators, in every form and of every kind."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from gpuserve.decorators import (
    ConstantPadder,
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    model_context,
    pad_batch,
    sample,
)

SEVEN = np.array([7], np.float32)


def answer(x: Any, k: Any, model: Any) -> dict[str, Any]:
    """y is x times k; told is the model's name and the size of the batch that ran."""
    return {"y": x * k, "told": np.full((len(x), 1), f"{model.name} {len(x)}".encode(), object)}


class Stack:
    @fill_optionals(k=SEVEN)
    @group_by_keys
    @batch
    @group_by_values("k")
    @first_value("k")
    @pad_batch
    @model_context
    def __call__(self, x: Any, k: Any, model_context: Any) -> Any:
        return answer(x, k, model_context)


@fill_optionals(k=SEVEN)
@batch
@group_by_values("k")
@first_value("k")
@pad_batch
@model_context
async def stack_async(x: Any, k: Any, model_context: Any) -> Any:
    await asyncio.sleep(0)
    return answer(x, k, model_context)


@batch
@group_by_values("k", pad_fn=ConstantPadder(-1))
@first_value("k")
def wide(x: Any, k: Any) -> Any:
    """y is as wide as k says."""
    return [np.repeat(x, int(k), axis=1)]


@batch
@group_by_values("k")
@first_value("k")
def count(x: Any, k: Any) -> Any:
    """k times x, group by group."""
    for number in range(int(k)):
        yield {"y": x + number}


@batch
@first_value("k", strict=False)
async def count_async(x: Any, k: Any) -> Any:
    for number in range(int(k)):
        await asyncio.sleep(0)
        yield [x + number]


@sample
def pieces(x: Any) -> Any:
    """One element a response."""
    for position in range(len(x)):
        yield {"y": x[position : position + 1]}


@group_by_keys
def total(requests: Any) -> Any:
    return [{"y": sum(one.values())} for one in requests]


def add(amount: float, x: Any) -> Any:
    return {"y": x + np.float32(amount)}


added = batch(functools.partial(add, 5))


@batch
def misfit(x: Any, k: Any) -> Any:
    return {"y": x + k}


@batch
@first_value("k")
def equal(x: Any, k: Any) -> Any:
    return {"y": x * k}
