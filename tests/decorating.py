"""What the tests of the decorators call decorated callables with: rows, batches, a model that is served."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np

from gpuserve.decorators import (
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    model_context,
    pad_batch,
    sample,
)
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.model_context import ModelContext, enter_model
from gpuserve_worker.protocol.tensor import TensorSpec

#: Every decorator, with arguments where it takes some.
DECORATORS: dict[str, Any] = {
    "batch": batch,
    "sample": sample,
    "first_value": first_value("k"),
    "fill_optionals": fill_optionals(k=np.zeros(1, np.float32)),
    "group_by_keys": group_by_keys,
    "group_by_values": group_by_values("x"),
    "pad_batch": pad_batch,
    "model_context": model_context,
}


def rows(*values: float) -> Any:
    """One float a row."""
    return np.array(values, np.float32).reshape(-1, 1)


def worker_batch(*names: str, batching: bool = True) -> Batch:
    """Two requests of one and two rows, as the worker passes them; outputs of these names."""
    if not batching:
        return Batch({"x": rows(1, 2)}, [(1, {}, ())], names, False)
    return Batch({"x": rows(1, 2, 3)}, [(1, {"k": 1}, ()), (2, {}, ("y",))], names, True)


def model(**more: Any) -> ModelContext:
    """Inputs x and, optional, k; output y; batches of at most 8, better 2 or 4."""
    fields: dict[str, Any] = {
        "name": "m",
        "version": 1,
        "instance": "m/0",
        "device": "cpu",
        "inputs": (TensorSpec("x", "FP32", (1,)), TensorSpec("k", "FP32", (1,), True)),
        "outputs": (TensorSpec("y", "FP32", (1,)),),
        "max_batch_size": 8,
        "preferred_batch_sizes": (4, 2),
        "decoupled": False,
    }
    return ModelContext(**{**fields, **more})


def serving(served: ModelContext, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the callable gives in a worker of this model; all of it, where it yields or has to be awaited."""

    def run() -> Any:
        enter_model(served)
        return complete(function(*args, **kwargs))

    return contextvars.copy_context().run(run)


def complete(result: Any) -> Any:
    """The answer, or the list of answers, whatever kind of callable gave the result."""
    if isinstance(result, Iterator):
        return list(result)
    if isinstance(result, AsyncIterator):
        return asyncio.run(_listed(result))
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


async def _listed(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]
