"""The models of the benchmarks as this server and PyTriton run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

try:
    from gpuserve.decorators import batch
except ImportError:  # in PyTriton's environment
    from pytriton.decorators import batch

if TYPE_CHECKING:
    from gpuserve import Request


@batch
def echo(x: np.ndarray) -> dict[str, np.ndarray]:
    """x: [rows, n] FP32 or BYTES, returned as y."""
    return {"y": x}


def echo_one(requests: list[Request]) -> list[dict[str, np.ndarray]]:
    """x: [n] FP32 of each request, returned as y."""
    return [{"y": one["x"]} for one in requests]


@batch
def eight_inputs(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    """a to h: [rows, n] FP32; a is returned as y."""
    return {"y": inputs["a"]}


@batch
def tokens(count: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """count: [rows, 1] INT32. Yields so many responses; each token: [rows, 1] INT32 is its number."""
    for number in range(count.max()):
        yield {"token": np.full_like(count, number)}
