"""A callable between the shapes of clients and those of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from gpuserve.config.triton.reshaping import reshaped
from gpuserve.decorators import batch
from gpuserve_worker.inference.callable_loading import kind_of
from gpuserve_worker.inference.inference_request import Batch, BatchedOutputs, Request, RequestBatch, Response
from gpuserve_worker.protocol.payloads import WireRequest

SHAPES = {"x": ((6,), (2, 3))}
BACK = {"y": ((2, 3), (6,))}


def requests(*rows: int) -> RequestBatch:
    return RequestBatch([Request({"x": np.ones((one, 6))}) for one in rows], ["y"], True)


def test_a_whole_batch_is_reshaped_at_once() -> None:
    @batch
    def double(x: Any) -> Any:
        assert x.shape == (3, 2, 3)
        return {"y": 2 * x, "other": x}

    given = Batch({"x": np.ones((3, 6))}, [WireRequest(1, {}, ()), WireRequest(2, {}, ())], ("y",), True)
    answer = reshaped(double, SHAPES, BACK)(given)
    assert isinstance(answer, BatchedOutputs)
    assert answer.arrays["y"].shape == (3, 6)
    assert answer.arrays["other"].shape == (3, 2, 3)


def test_requests_and_answers_of_each_kind() -> None:
    def model(requests: Sequence[Request]) -> list[Any]:
        assert [one["x"].shape for one in requests] == [(1, 2, 3), (2, 2, 3), (1, 2, 3)]
        first, second, _ = requests
        return [{"y": first["x"]}, Response({"y": second["x"]}, {"k": 1}), ValueError("no")]

    one, two, three = reshaped(model, SHAPES, BACK)(requests(1, 2, 1))
    assert one["y"].shape == (1, 6)
    assert (two["y"].shape, two.parameters) == ((2, 6), {"k": 1})
    assert isinstance(three, ValueError)


def test_every_kind_of_callable_stays_of_its_kind() -> None:
    class Model:
        def close(self) -> str:
            return "closed"

        def __call__(self, requests: Sequence[Request]) -> Iterator[list[Any]]:
            yield [{"y": one["x"]} for one in requests]

    async def awaited(requests: Sequence[Request]) -> list[Any]:
        return [{"y": one["x"]} for one in requests]

    async def yielded(requests: Sequence[Request]) -> AsyncIterator[list[Any]]:
        yield [{"y": one["x"]} for one in requests]

    async def first(stream: Any) -> Any:
        return await anext(stream)

    generator, coroutine, stream = (reshaped(one, SHAPES, BACK) for one in (Model(), awaited, yielded))
    kinds = [kind_of(one).name for one in (generator, coroutine, stream)]
    assert kinds == ["GENERATOR", "COROUTINE", "ASYNC_GENERATOR"]
    assert generator.close() == "closed"  # type: ignore[attr-defined]  # its worker asks for it
    later = [asyncio.run(one) for one in (coroutine(requests(1)), first(stream(requests(1))))]
    answers = [next(generator(requests(1))), *later]
    assert [one[0]["y"].shape for one in answers] == [(1, 6)] * 3


def test_free_sizes_keep_their_order_and_an_answer_of_another_size_is_told_with_both_shapes() -> None:
    def model(requests: Sequence[Request]) -> list[Any]:
        return [{"y": one["x"]} for one in requests]

    shapes = {"x": ((-1, 4, -1), (1, -1, -1, 4))}
    given = RequestBatch([Request({"x": np.ones((5, 4, 7))})], ["y"], False)
    (answer,) = reshaped(model, shapes, {})(given)
    assert answer["y"].shape == (1, 5, 7, 4)
    with pytest.raises(ValueError, match=r"'y' has the shape \[1, 6\], which cannot become \[1, 5\]"):
        reshaped(model, {}, {"y": ((1, 5), (5,))})(requests(1))
