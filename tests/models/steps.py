"""Inference callables that are steps of ensembles. Those of numbers write to their inputs, as any may."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from gpuserve import current_model
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
def looked_at(x: Any) -> dict[str, Any]:
    """As it came, by a callable that says that it never writes."""
    assert not x.flags.writeable
    return {"y": x}


@batch
def added(a: Any, b: Any) -> dict[str, Any]:
    """The sum, in place."""
    a += b
    b[:] = 0
    return {"y": a}


@batch
def summed(x: Any) -> dict[str, Any]:
    """One number for each row."""
    return {"y": x.sum(axis=1, keepdims=True)}


@batch
def spread(x: Any) -> dict[str, Any]:
    """A row as wide as the number in it says."""
    return {"y": np.ones((len(x), int(x.flat[0])), np.float32)}


@batch
def shouted(text: Any) -> dict[str, Any]:
    """Texts in capitals."""
    return {"loud": np.char.upper(text.astype(bytes)).astype(object)}


def picky(requests: Any) -> Any:
    """Refuses negative numbers, and dies of 13."""
    if any((one["x"] == 13).any() for one in requests):
        os.abort()
    if any((one["x"] < 0).any() for one in requests):
        raise ValueError("no negative numbers")
    return [{"y": one["x"]} for one in requests]


class Gate:
    """Waits until its FIFO has been opened for writing and closed; which process does is in a file beside."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def __call__(self, requests: Any) -> Any:
        with open(f"{self.fifo}.pid", "w") as file:
            file.write(str(os.getpid()))
        with open(self.fifo, "rb") as gate:
            gate.read()
        return [{"y": one["x"]} for one in requests]


def told(requests: Any) -> Any:
    """The parameters of each request, and its number."""
    return [
        {"seen": np.array([[json.dumps(one.parameters, sort_keys=True)]], object), "y": one["x"]}
        for one in requests
    ]


class Counted:
    """The requests of each sequence so far."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    @batch
    def __call__(self, x: Any, start: Any, corrid: Any) -> dict[str, Any]:
        counts = []
        for begins, sequence in zip(start.ravel(), corrid.ravel(), strict=True):
            self.counts[sequence] = 1 if begins else self.counts.get(sequence, 0) + 1
            counts.append([self.counts[sequence]])
        return {"y": np.array(counts, np.float32)}


def streamed(requests: Any) -> Any:
    """A stream."""
    yield [{"y": one["x"]} for one in requests]


def who(requests: Any) -> Any:
    """As it came, and from which process."""
    pid = np.array([[os.getpid()]], np.int64)
    return [{"y": one["x"], "pid": pid} for one in requests]


def asks_chain(requests: Any) -> Any:
    """What the ensemble ``diamond`` says, all of it together."""
    answers = [current_model().infer("diamond", {"x": one["x"]}) for one in requests]
    return [{"y": one["y"] + one["d"] + one["f"]} for one in answers]


def passed_on(requests: Any) -> Any:
    """Of each input that is there an output, and no other."""
    return [{f"{name}_out": array for name, array in one.items()} for one in requests]
