"""Callables over inputs that lie in a client's shared memory, which something happens to meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuserve.decorators import batch


def _shrink(x: Any) -> None:
    """Where the file of the input has the name that is spelled by the input itself, shrink it."""
    name = bytes(x.ravel()[:64].astype(np.uint8)).partition(b"\0")[0]
    if name:
        os.truncate(b"/dev/shm/" + name, 0)


@batch
def gives_back_what_it_shrank(x: Any) -> Any:
    _shrink(x)
    return {"y": x}


@batch
def reads_what_it_shrank(x: Any) -> Any:
    before = x.sum()
    _shrink(x)
    if x.sum() != before:
        raise ValueError("the input has changed")
    return {"y": x * 1}


@batch
def keeps(x: Any) -> Any:
    keeps.kept = x  # type: ignore[attr-defined]
    return {"y": x * 1}


def never_called(requests: Any) -> Any:
    raise AssertionError("the callable was called")


def twice(requests: Any) -> Iterator[Any]:
    for _ in range(2):
        yield [{"y": one["x"]} for one in requests]


async def outlives_its_front(requests: Any) -> Any:
    """Does not let itself be cancelled."""
    import asyncio

    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        if requests[0]["x"].flat[1] == 1:
            raise ValueError("cancelled") from None
    return [{"y": one["x"]} for one in requests]
