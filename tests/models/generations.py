"""A model whose loads can be told apart, fail or wait: for loading and unloading while a server runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve.decorators import batch


class Tagged:
    """Answers with its tag, its process and the sum of the input.

    ``load_fifo``: it loads until the test writes to that FIFO. ``run_fifo``: so does each call. While
    ``broken`` exists it cannot be loaded.
    """

    def __init__(self, tag: float, load_fifo: str = "", run_fifo: str = "", broken: str = "") -> None:
        if broken and Path(broken).exists():
            raise RuntimeError("there are no weights")
        if load_fifo:
            Path(load_fifo).read_bytes()
        self.tag = tag
        self.run_fifo = run_fifo

    @batch
    def __call__(self, x: Any) -> Any:
        if self.run_fifo:
            Path(self.run_fifo).read_bytes()
        rows = (len(x), 1)
        return {
            "tag": np.full(rows, self.tag, np.float32),
            "pid": np.full(rows, os.getpid(), np.int64),
            "sum": x.sum(axis=1, keepdims=True, dtype=np.float32),
        }
