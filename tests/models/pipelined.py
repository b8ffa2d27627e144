"""Callables on a GPU that take their time, run out of its memory, or leave it in an error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import cupy

from gpuserve.decorators import batch
from gpuserve_worker.inference.model_context import current_model

#: A request that begins with this value is the one that goes wrong.
POISON = 13.0


def _is_poisoned(x: Any) -> bool:
    return bool((cupy.asnumpy(x[:, 0]) == POISON).any())


@batch
def waited_for(x: Any) -> dict[str, Any]:
    """As most models: what it returns has been computed."""
    y = x * 2
    cupy.cuda.Stream.null.synchronize()
    return {"y": y}


@batch
def started(x: Any) -> dict[str, Any]:
    """Returns long before the device has done its work."""
    return {"y": x * 2}


@batch
def passed_on(x: Any) -> dict[str, Any]:
    """Its input, after a kernel."""
    x * 2
    return {"y": x}


@batch
def heads(x: Any) -> dict[str, Any]:
    """The first million of each row, doubled: it returns before the device has done that."""
    return {"y": x[:, : 1 << 20] * 2}


class Hoards:
    """After the first call its library keeps nearly all of the device's memory, with nothing in it."""

    def __init__(self) -> None:
        free, _ = cupy.cuda.runtime.memGetInfo()
        self._nbytes = free - (4 << 20)

    def _hoard(self) -> None:
        cupy.empty(self._nbytes, cupy.uint8)
        self._nbytes = 0

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        self._hoard()
        return {"y": cupy.asnumpy(x[:, :1])}


class HoardsAndAwaits(Hoards):
    """The same, with others under way."""

    @batch
    async def __call__(self, x: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        self._hoard()
        return {"y": cupy.asnumpy(x[:, :1])}


@batch
def raises(x: Any) -> dict[str, Any]:
    raise ValueError("as the test wants")


class Captures:
    """Has a graph of kernels made at every call, as compiled models have at some; that takes a while."""

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def _capture(self) -> None:
        runtime = cupy.cuda.runtime
        runtime.streamBeginCapture(self._stream.ptr, runtime.streamCaptureModeGlobal)
        time.sleep(0.03)
        runtime.streamEndCapture(self._stream.ptr)

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        self._capture()
        return {"y": x * 2}


class CapturesAndAwaits(Captures):
    """The same, with others under way."""

    @batch
    async def __call__(self, x: Any) -> dict[str, Any]:
        y = x * 2
        await asyncio.sleep(0)
        self._capture()
        return {"y": y}


def _ask_for(rows: int) -> None:
    """More memory than the device has, for more than four rows; for fewer a little. So nothing fills up a
    device that others use, and no pool keeps its memory.
    """
    _, total = cupy.cuda.runtime.memGetInfo()
    cupy.empty(2 * total if rows > 4 else rows << 10, cupy.uint8)


class Hungry:
    """Has memory for four rows."""

    def __init__(self, attempts: str = "") -> None:
        self._attempts = attempts

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        if self._attempts:
            with open(self._attempts, "a") as file:
                print(len(x), file=file)
        x += 1  # a second run must not see it
        _ask_for(len(x))
        return {"y": x}


class HungryOnHost(Hungry):
    """As ``Hungry``, with inputs on the host that it does not write to."""

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        _ask_for(len(x))
        return {"y": cupy.asarray(x) * 2}


def greedy(requests: Any) -> list[dict[str, Any]]:
    """One request that begins with ``POISON`` is one too many, however few there are."""
    _, total = cupy.cuda.runtime.memGetInfo()
    if any(_is_poisoned(one["x"]) for one in requests):
        cupy.empty(2 * total, cupy.uint8)
    return [{"y": one["x"] * 2} for one in requests]


def _break_device() -> Any:
    """An array that nobody can read."""
    memory = cupy.cuda.UnownedMemory(0x10, 4096, None, 0)
    return cupy.ndarray((4,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))


@batch
def breaks(x: Any) -> dict[str, Any]:
    """The device is in an error when it returns, if it does."""
    if _is_poisoned(x):
        (_break_device() + 1).sum()
        cupy.cuda.Stream.null.synchronize()
    y = x * 2
    cupy.cuda.Stream.null.synchronize()
    return {"y": y}


@batch
def breaks_later(x: Any) -> dict[str, Any]:
    """The device is in an error some time after it has returned."""
    y = x * 2
    if _is_poisoned(x):
        _break_device() + 1
    return {"y": y}


@batch
def moves_away(x: Any) -> dict[str, Any]:
    """Makes another device the current one, and leaves it so."""
    y = x * 2
    cupy.cuda.Device(1).use()
    return {"y": y}


@batch
def exits(x: Any) -> dict[str, Any]:
    """Ends the process."""
    if _is_poisoned(x):
        raise SystemExit(5)
    return {"y": x * 2}


@batch
def killed(x: Any) -> dict[str, Any]:
    """Is killed at the first request that begins with ``POISON``; ``KILLED`` tells that it was."""
    mark = os.environ["KILLED"]
    if _is_poisoned(x) and not os.path.exists(mark):
        with open(mark, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return {"y": x * 2}


def asks(requests: Any) -> list[dict[str, Any]]:
    """Asks model "other" for its answer."""
    answers = []
    for one in requests:
        given = current_model().infer("other", {"x": cupy.asnumpy(one["x"])})
        answers.append({"y": given["y"]})
    return answers


async def hungry_async(requests: Any) -> list[dict[str, Any]]:
    """As ``Hungry``, of an async callable."""
    _ask_for(sum(len(one["x"]) for one in requests))
    return [{"y": one["x"] + 1} for one in requests]


async def breaks_async(requests: Any) -> list[dict[str, Any]]:
    """As ``breaks``, of an async callable."""
    if any(_is_poisoned(one["x"]) for one in requests):
        (_break_device() + 1).sum()
        cupy.cuda.Stream.null.synchronize()
    return [{"y": one["x"] * 2} for one in requests]
