"""A classifier that learns while it is asked: two methods of one object, each a model of the server."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch

FEATURES = 8
LEARNING_RATE = 0.5


class Classifier:
    """Logistic regression. Both models run in threads of one process, so they share the weights."""

    def __init__(self) -> None:
        self._weights = np.zeros(FEATURES + 1)
        self._lock = threading.Lock()

    @batch
    def train(self, x: NDArray[np.float32], label: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """One step down the gradient. ``x``: [rows, 8]; ``label``: 0 or 1, [rows, 1]. Answers ``loss``."""
        with self._lock:
            likely = self._likely(x)
            error = likely - label[:, 0]
            self._weights -= LEARNING_RATE * (_with_bias(x).T @ error) / len(x)
        loss = -np.log(np.where(label[:, 0] == 1, likely, 1 - likely) + 1e-9)
        return {"loss": loss[:, None].astype(np.float32)}

    @batch
    def infer(self, x: NDArray[np.float32]) -> dict[str, NDArray[np.int64]]:
        """``x``: [rows, 8]. Answers ``label``: 0 or 1, [rows, 1]."""
        with self._lock:
            likely = self._likely(x)
        return {"label": (likely > 0.5).astype(np.int64)[:, None]}

    def _likely(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        likely: NDArray[np.float64] = 1 / (1 + np.exp(-_with_bias(x) @ self._weights))
        return likely


def _with_bias(x: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.column_stack([x, np.ones(len(x))])
