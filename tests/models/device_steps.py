"""Steps of ensembles on a GPU. They write to their inputs, as any callable may."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve.decorators import batch


@batch
def doubled(x: Any) -> dict[str, Any]:
    """Twice, in place."""
    x *= 2
    return {"y": x}


@batch
def plus_one(x: Any) -> dict[str, Any]:
    """One more, in place."""
    x += 1
    return {"y": x}


@batch
def added(a: Any, b: Any) -> dict[str, Any]:
    """The sum, in place."""
    a += b
    b *= 0
    return {"y": a}


def write_whole(path: Path, text: str) -> None:
    """Write a file that whoever waits for it finds whole: it may be looked at as soon as it is there."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


class Gate:
    """The input doubled, in place, and the worker's process; not before ``shut`` is gone."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        x *= 2
        write_whole(self._directory / "pid", str(os.getpid()))
        while (self._directory / "shut").exists():
            time.sleep(0.002)
        return {"y": x, "pid": np.full((len(x), 1), os.getpid())}


class Told:
    """One more, not in place; the process that did it is in ``owner``."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        write_whole(self._directory / "owner", str(os.getpid()))
        return {"y": x + 1}
