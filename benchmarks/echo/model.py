"""The echo model as this server runs it."""

from __future__ import annotations

import numpy as np

from gpuserve.decorators import batch


@batch
def echo(x: np.ndarray) -> dict[str, np.ndarray]:
    """x: [rows, n] FP32, returned as y."""
    return {"y": x}
