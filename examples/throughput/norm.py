"""The length of vectors: a model that costs next to nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch


@batch
def norm(x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """``x``: float32 [rows, n]. Answers ``norm``: float32 [rows, 1]."""
    return {"norm": np.sqrt((x * x).sum(axis=1, keepdims=True))}
