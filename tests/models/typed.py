"""Callables whose types say all that is served, as their users would write them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from gpuserve import Last, StepResult
from gpuserve.typed import Bytes, Float32, Int32, Name, Parameter, Shape, UInt8, batch, sample

Image = Annotated[UInt8, Shape(2, -1, 3)]


class Scores(NamedTuple):
    scores: Annotated[Float32, Shape(2)]
    label: Annotated[Bytes, Shape(1)]


class Moments(TypedDict):
    mean: Annotated[NDArray[np.float64], Shape()]
    largest: Annotated[Float32, Shape(1)]


@batch(max_batch_size=8)
def classify(image: Image, bias: Annotated[Float32, Shape(2)] | None = None) -> Scores:
    scores = image.mean(axis=(2, 3), dtype=np.float32)
    if bias is not None:
        scores = scores + bias
    labels = np.where(scores[:, :1] > scores[:, 1:], b"top", b"bottom").astype(object)
    return Scores(scores, labels)


@sample
def moments(x: Float32) -> Moments:
    return {"mean": np.asarray(x.mean(dtype=np.float64)), "largest": x.max(keepdims=True)}


@batch
async def negate(x: Annotated[Int32, Shape(-1, 2)]) -> Annotated[Int32, Shape(-1, 2), Name("y")]:
    return -x


@sample
def count(n: Annotated[Int32, Shape(1)]) -> Iterator[Annotated[Int32, Shape(1), Name("i")]]:
    for i in range(int(n[0])):
        yield np.array([i], np.int32)


@batch
async def count_later(n: Annotated[Int32, Shape(1)]) -> AsyncIterator[Annotated[Int32, Shape(1), Name("i")]]:
    for i in range(int(n.max())):
        yield np.full_like(n, i)


@batch(max_batch_size=16)
def scale(
    x: Float32, factor: Parameter[float], text: Parameter[str | None] = None, *, rows: Parameter[bool] = False
) -> Float32:
    """``rows``: how many there were, in each."""
    if text == "minus":
        factor = -factor
    return np.full_like(x, len(x)) if rows else x * np.float32(factor)


class Shifted:
    def __init__(self, by: float = 1.0) -> None:
        self.by = np.float32(by)

    @batch(max_batch_size=4)
    def __call__(self, x: Float32) -> Annotated[Float32, Name("shifted")]:
        return x + self.by


@batch
def misnamed(x: Float32) -> dict[str, Float32]:  # its config says what it returns
    return {"z": x}


class Counted(NamedTuple):
    value: Annotated[Int32, Shape(1)]
    label: Annotated[Bytes, Shape(1)]


class Climb:
    """A stepped callable: a request with ``n`` gets ``start``, ``start + step``, … in n responses."""

    max_active = 4

    @sample
    def admit(
        self, n: Annotated[Int32, Shape(1)], step: Parameter[int], start: Parameter[int] = 0
    ) -> Iterator[int]:
        return iter(range(start, start + step * int(n[0]), step))

    def step(self, active: Sequence[Iterator[int]]) -> Sequence[StepResult[Counted]]:
        values = [next(one, None) for one in active]
        return [
            Last() if one is None else Counted(np.array([one], np.int32), np.array([str(one)], object))
            for one in values
        ]


class Halve:
    """A stepped callable with one output, whose methods are coroutines. It gives two responses a step."""

    @sample
    async def admit(self, x: Annotated[Float32, Shape(1)]) -> Float32:
        return x

    async def step(
        self, active: Sequence[Float32]
    ) -> list[StepResult[Annotated[Float32, Shape(1), Name("half")]]]:
        return [Last([x / np.float32(2), x / np.float32(4)]) for x in active]
