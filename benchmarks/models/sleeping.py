"""A model that takes its time and no CPU, as this server runs it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from gpuserve.decorators import batch

_PR_SET_TIMERSLACK = 29


def sleeping(seconds: float, *, ragged: bool = False) -> Callable[..., object]:
    """The model ``y = x`` that sleeps so long in every batch. x: [rows, n] FP32, padded if it is ragged."""
    precise = False

    @(batch(pad=0) if ragged else batch)
    def sleep(x: np.ndarray) -> dict[str, np.ndarray]:
        nonlocal precise
        if not precise:  # the thread that sleeps asks for it itself; without, each sleep is 50 µs longer
            precise = True
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        time.sleep(seconds)
        return {"y": x}

    return sleep
