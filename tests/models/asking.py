"""Inference callables that ask other models of their server."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpuserve import ModelCallError, current_model
from gpuserve.decorators import batch


@batch
def doubled(x: Any) -> dict[str, Any]:
    """What the others ask."""
    return {"y": x * 2}


def picky(requests: Any) -> Any:
    """Refuses negative numbers."""
    if any((one["x"] < 0).any() for one in requests):
        raise ValueError("no negative numbers")
    return [{"y": one["x"]} for one in requests]


def count(requests: Any) -> Iterator[Any]:
    """0, 1, 2 … as many as asked for."""
    for number in range(int(requests[0]["x"].flat[0])):
        yield [{"y": np.full((1, 1), number, np.float32)} for _ in requests]


@batch
def asks(x: Any) -> dict[str, Any]:
    """Twice what ``doubled`` says, plus one."""
    answer = current_model().infer("doubled", {"x": x})["y"]
    answer += 1  # it is the caller's own
    return {"y": answer}


def keeps(requests: Any) -> Any:
    """Keeps the answers of all calls."""
    kept = [current_model().infer("doubled", {"x": one["x"]})["y"] for one in requests for _ in range(3)]
    keeps.kept = kept  # type: ignore[attr-defined]
    return [{"y": one} for one in kept[::3]]


def asks_in_threads(requests: Any) -> Any:
    """Asks from eight threads at once, while its own waits for them."""
    context = current_model()
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda n: context.infer("doubled", {"x": requests[0]["x"] + n})["y"], range(32))
        )
    return [{"y": sum(answers)} for _ in requests]


def asks_behind(requests: Any) -> Any:
    """A thread goes on asking after the callable has returned."""
    context, x = current_model(), requests[0]["x"].copy()
    if not hasattr(asks_behind, "done"):
        asks_behind.done = threading.Event()  # type: ignore[attr-defined]
        asks_behind.answers = []  # type: ignore[attr-defined]

        def go_on() -> None:
            for _ in range(50):
                asks_behind.answers.append(context.infer("doubled", {"x": x})["y"])  # type: ignore[attr-defined]
            asks_behind.done.set()  # type: ignore[attr-defined]

        threading.Thread(target=go_on, daemon=True).start()
        return [{"y": np.zeros_like(x)}]
    asks_behind.done.wait(10)  # type: ignore[attr-defined]
    return [{"y": sum(asks_behind.answers)}]  # type: ignore[attr-defined]


async def asks_async(requests: Any) -> Any:
    """Several questions of one batch at once."""
    import asyncio

    context = current_model()
    answers = await asyncio.gather(*[context.infer_async("doubled", {"x": one["x"]}) for one in requests])
    return [{"y": one["y"] + 1} for one in answers]


async def asks_blocking(requests: Any) -> Any:
    """Waits on the event loop itself, which is allowed if slow."""
    return [{"y": current_model().infer("doubled", {"x": one["x"]})["y"] + 1} for one in requests]


def asks_stream(requests: Any) -> Any:
    """The sum of a stream."""
    answers = current_model().stream("count", {"x": requests[0]["x"]})
    return [{"y": sum(one["y"] for one in answers)}]


async def passes_stream(requests: Any) -> AsyncIterator[Any]:
    """A stream of a stream."""
    async for one in current_model().stream_async("count", {"x": requests[0]["x"]}):
        yield [{"y": one["y"] * 10}]


def asks_first_of_stream(requests: Any) -> Any:
    """Leaves a stream of a million after one response."""
    answers = current_model().stream("count", {"x": np.full((1, 1), 1_000_000, np.float32)})
    first = next(answers)
    answers.close()
    return [{"y": first["y"]}]


def passes_on_failure(requests: Any) -> Any:
    """Its request fails as the one it asked."""
    return [current_model().infer("picky", {"x": one["x"]}) for one in requests]


def tells_codes(requests: Any) -> Any:
    """The codes of three calls that fail."""
    codes = []
    x = requests[0]["x"]
    for model, inputs in (("nobody", {"x": x}), ("doubled", {"z": x}), ("doubled", {"x": [object()]})):
        try:
            current_model().infer(model, inputs)
        except ModelCallError as error:
            codes.append(f"{error.code.value}: {error}")
    return [{"said": np.array([codes], object)}]


def impatient(requests: Any) -> Any:
    """Does not wait longer than 50 ms."""
    try:
        current_model().infer("slow", {"x": requests[0]["x"]}, timeout_s=0.05)
    except ModelCallError as error:
        return [{"said": np.array([[error.code.value]], object)}]
    return [{"said": np.array([["it came"]], object)}]


def slow(requests: Any) -> Any:
    """Takes long."""
    import time

    time.sleep(0.5)
    return [{"y": one["x"]} for one in requests]


def fragile(requests: Any) -> Any:
    """Dies at 13, each time."""
    import os

    if any((one["x"] == 13).any() for one in requests):
        os.abort()
    return [{"y": one["x"]} for one in requests]


def asks_fragile(requests: Any) -> Any:
    """Its question kills who is asked."""
    return [current_model().infer("fragile", {"x": one["x"]}) for one in requests]
