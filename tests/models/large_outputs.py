"""Outputs of the width that its first element asks for, and of every layout an array may have."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuserve.decorators import batch


@batch
def wide(x: Any) -> Any:
    return {"y": np.repeat(x[:, :1], int(x[0, 1]), axis=1)}


@batch
def transposed(x: Any) -> Any:
    """Not contiguous and big-endian."""
    return {"y": np.asfortranarray(x.astype(">f4"))[:, ::-1]}


@batch
def boundless(x: Any) -> Any:
    """Larger than any machine's memory, and next to nothing in its own."""
    return {"y": np.broadcast_to(np.float32(1), (1, 1 << 45))}
