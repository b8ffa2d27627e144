"""Callables whose inputs and outputs a client has in memory of its device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gpuserve.decorators import batch


@batch
def twice(x: Any) -> Any:
    """On the device where the input is there, on the host otherwise."""
    return {"y": x * 2}


@batch
def twice_on_host(x: Any) -> Any:
    return {"y": x.get() * 2}


@batch
def twice_on_device(x: Any) -> Any:
    import cupy

    return {"y": cupy.asarray(x) * 2}


@batch
def address(x: Any) -> Any:
    """Where the input is, for the test to see whether two are at the same place."""
    return {"y": np.full((len(x), 1), x.data.ptr, np.int64)}


@batch
def inverse(x: Any) -> Any:
    return {"y": ~x}


@batch
def as_it_is(x: Any) -> Any:
    return {"y": x}


@batch
def before(x: Any) -> Any:
    """The sum of what the last call was given."""
    kept = getattr(before, "kept", x)
    before.kept = x  # type: ignore[attr-defined]
    return {"y": kept.sum(axis=1, keepdims=True)}


class Gated:
    """Runs a batch for each byte in a FIFO, and says which process it did."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)

    def __call__(self, requests: Any) -> Any:
        os.read(self._fd, 1)
        return [{"y": one["x"] * 2} for one in requests]


@batch
def process(x: Any) -> Any:
    """Which process runs it, and the sum of its input."""
    return {"y": x * 2, "pid": np.full((len(x), 1), os.getpid(), np.int64)}
