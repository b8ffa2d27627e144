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


class Dozing(Heavy):
    """As ``Heavy``, and can sleep: without weights. Raises or hangs in a method if a file tells it to."""

    def sleep(self) -> None:
        self._obey("sleep")
        self._weights = self._weights[:0]

    def wake(self) -> None:
        self._obey("wake")
        self._weights = np.ones(1, np.uint8)

    def _obey(self, method: str) -> None:
        with (self._folder / "naps").open("a") as naps:
            naps.write(f"{method} ")
        if (self._folder / f"{method}_raises").exists():
            raise OSError(f"no {method}")
        while (self._folder / f"{method}_hangs").exists():
            time.sleep(0.002)
