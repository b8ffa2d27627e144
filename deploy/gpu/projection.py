"""Products with a fixed matrix, on the GPU of the instance: the inputs are there already."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuserve.decorators import batch


class Projection:
    """``rows`` and ``columns`` are those of the matrix, which is made once."""

    def __init__(self, rows: int, columns: int) -> None:
        import cupy

        matrix = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
        self._matrix = cupy.asarray(matrix)

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        """``x``: float32, [rows of the batch, rows]. Answers ``y``: float32, [rows of the batch, columns]."""
        return {"y": x @ self._matrix}
