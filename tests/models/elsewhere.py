"""Models that run in an environment of their own, where ``only_there`` is."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpuserve import Tensor
from gpuserve.decorators import batch


class Elsewhere:
    """Says what its environment is."""

    inputs = (Tensor(name="x", dtype=np.float32, shape=(1,)),)
    outputs = (Tensor(name="prefix", dtype=bytes, shape=(1,)), Tensor(name="y", dtype=np.float32, shape=(1,)))
    max_batch_size = 4

    def __init__(self) -> None:
        import only_there  # type: ignore[import-not-found]

        self._factor = only_there.FACTOR

    @batch
    def __call__(self, x: Any) -> Any:
        return {"prefix": np.full((len(x), 1), sys.prefix.encode(), dtype=object), "y": self._factor * x}
