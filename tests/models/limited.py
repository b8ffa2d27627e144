"""Callables whose memory on their GPU is limited."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuserve.decorators import batch


class Beside:
    """Takes memory of the GPU past CuPy's pool, as other libraries do."""

    def __init__(self, nbytes: int) -> None:
        from cupy.cuda import runtime

        self.address = runtime.malloc(nbytes)

    @batch
    def __call__(self, x: Any) -> Any:
        return {"y": x * 2}


class LimitOfTorch:
    """Imports torch when it is loaded. Answers with the part of the GPU that torch may take."""

    def __init__(self) -> None:
        import torch

        self._fractions = torch.cuda.fractions  # of the stand-in

    @batch
    def __call__(self, x: Any) -> Any:
        return {"y": np.full_like(x, self._fractions[0])}


class Wasteful:
    """Takes 1 GiB for a negative number."""

    @batch
    def __call__(self, x: Any) -> Any:
        import cupy

        if float(x[0, 0].get()) < 0:
            cupy.empty(1 << 30, cupy.uint8)
        return {"y": x * 2}
