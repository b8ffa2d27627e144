"""A model that holds so many bytes, loads for so long, and can be told to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve.decorators import batch


class Heavy:
    def __init__(self, folder: str, nbytes: int = 0, load_s: float = 0.0) -> None:
        with (Path(folder) / "loads").open("a") as loads:
            loads.write(f"{os.getpid()}\n")
        while (Path(folder) / "closed").exists():
            time.sleep(0.002)
        if (Path(folder) / "broken").exists():
            raise OSError("the weights are broken")
        time.sleep(load_s)
        self._folder = Path(folder)
        self._weights = np.ones(nbytes, np.uint8)

    @batch
    def __call__(self, x: Any) -> Any:
        while (self._folder / "busy").exists():
            time.sleep(0.002)
        return {"y": x * 2, "pid": np.full(x.shape, os.getpid(), np.int64)}
