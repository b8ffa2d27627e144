"""Finds the nearest of many vectors, which stay in the GPU's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch

DIMENSIONS = 64


def table(count: int) -> NDArray[np.float32]:
    """The vectors that are searched, float32 [count, 64], each of length 1. The same in every process."""
    vectors = np.random.default_rng(0).standard_normal((count, DIMENSIONS), dtype=np.float32)
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


class Nearest:
    """Holds a table of vectors on its GPU; the nearest has the largest product with a query.

    Args:
        count: how many vectors.
    """

    def __init__(self, count: int) -> None:
        import cupy  # here and not above: clients that import this file need no GPU

        self._vectors = cupy.asarray(table(count))

    @batch
    def __call__(self, query: Any) -> dict[str, Any]:
        """``query``: CuPy array, float32 [rows, 64]. ``index`` and ``score``: CuPy arrays, [rows, 1]."""
        scores = query @ self._vectors.T
        return {"index": scores.argmax(axis=1, keepdims=True), "score": scores.max(axis=1, keepdims=True)}
