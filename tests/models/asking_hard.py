"""Inference callables that ask other models of their server at awkward moments."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np

from gpuserve import ModelCallError, current_model


def _told(error: ModelCallError) -> Any:
    return {"y": np.array([[f"{error.code.value}: {error}"]], object)}


def tells(requests: Any) -> Any:
    """What another model says, or why it says nothing."""
    try:
        answer = current_model().infer("other", {"x": requests[0]["x"]})
    except ModelCallError as error:
        return [_told(error) for _ in requests]
    return [{"y": np.array([[repr(answer["y"].ravel()[:4].tolist())]], object)} for _ in requests]


async def tells_async(requests: Any) -> Any:
    """The same, on an event loop."""
    try:
        answer = await current_model().infer_async("other", {"x": requests[0]["x"]})
    except ModelCallError as error:
        return [_told(error) for _ in requests]
    return [{"y": np.array([[repr(answer["y"].ravel()[:4].tolist())]], object)} for _ in requests]


class Gated:
    """Waits for its FIFO while another of its threads waits for an answer."""

    def __init__(self, fifo: str) -> None:
        sys.setswitchinterval(1e-6)  # its threads meet in every line
        self.fifo = fifo
        self.asking: threading.Thread | None = None
        self.heard: list[str] = []

    def ask(self, context: Any) -> None:
        while True:
            try:
                context.infer("other", {"x": np.zeros((1, 1), np.float32)})
                return
            except ModelCallError as error:
                self.heard.append(error.code.value)

    def __call__(self, requests: Any) -> Any:
        if self.asking is None:
            self.asking = threading.Thread(target=self.ask, args=(current_model(),), daemon=True)
            self.asking.start()
        if requests[0]["x"].flat[0] == 1:
            with open(self.fifo, "rb") as gate:
                gate.read()
        return [{"y": one["x"]} for one in requests]


class AsksLate:
    """Asks once its FIFO has been opened and closed."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def __call__(self, requests: Any) -> Any:
        with open(self.fifo, "rb") as gate:
            gate.read()
        return [current_model().infer("doubled", {"x": one["x"]}) for one in requests]


class AsksWhileItLoads:
    """No server has called it yet."""

    def __init__(self) -> None:
        current_model().infer("other", {})

    def __call__(self, requests: Any) -> Any:
        return requests


def gives_up(requests: Any) -> Any:
    """Has an event loop of its own, and does not wait longer than 50 ms."""

    async def main() -> Any:
        asking = current_model().infer_async("other", {"x": requests[0]["x"]})
        try:
            return await asyncio.wait_for(asking, 0.05)
        except TimeoutError:
            return {"y": np.zeros((1, 1), np.float32)}

    return [asyncio.run(main()) for _ in requests]


class Keeps:
    """Keeps the answer until it is asked with a negative number."""

    def __init__(self) -> None:
        self.kept: Any = None

    def __call__(self, requests: Any) -> Any:
        if requests[0]["x"].flat[0] < 0:
            self.kept = None
        else:
            self.kept = current_model().infer("other", {"x": requests[0]["x"]})["y"][0, 4:8]
        return [{"y": np.zeros((1, 1), np.float32)} for _ in requests]


def asks_in_a_thread(requests: Any) -> Any:
    """Its own thread waits for another one, which asks."""
    context, answers = current_model(), []
    thread = threading.Thread(target=lambda: answers.append(context.infer("other", {"x": requests[0]["x"]})))
    thread.start()
    thread.join()
    return answers


def asks_itself(requests: Any) -> Any:
    """As often, one within the other, as its first input says."""
    depth = requests[0]["x"].copy()
    if depth.flat[0] <= 0:
        return [{"y": one["x"]} for one in requests]
    y = current_model().infer(current_model().name, {"x": depth[:1] - 1})["y"]
    return [{"y": y + 1} for _ in requests]


async def asks_itself_async(requests: Any) -> Any:
    """The same, while its other batches go on."""
    depth = requests[0]["x"].copy()
    if depth.flat[0] <= 0:
        return [{"y": one["x"]} for one in requests]
    answer = await current_model().infer_async(current_model().name, {"x": depth[:1] - 1})
    return [{"y": answer["y"] + 1} for _ in requests]


def gives_up_on_slow(requests: Any) -> Any:
    """As ``gives_up``, on a model that takes half a second."""

    async def main() -> Any:
        try:
            await asyncio.wait_for(current_model().infer_async("slow", {"x": requests[0]["x"]}), 0.02)
        except TimeoutError:
            return {"y": np.zeros((1, 1), np.float32)}
        return {"y": np.ones((1, 1), np.float32)}

    return [asyncio.run(main()) for _ in requests]


class AsksBeside:
    """Threads that ask all the time, and never read on a stream that they have begun."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.heard: dict[str, int] = {}

    def ask(self, context: Any) -> None:
        x, kept = np.zeros((1, 1 << 14), np.float32), []
        while True:
            try:
                kept = [*kept[-3:], context.infer("doubled", {"x": x})["y"]]
                next(context.stream("count", {"x": np.full((1, 1), 1000, np.float32)}))
                told = "answered"
            except ModelCallError as error:
                told = error.code.value
            self.heard[told] = self.heard.get(told, 0) + 1

    def __call__(self, requests: Any) -> Any:
        while len(self.threads) < 3:
            thread = threading.Thread(target=self.ask, args=(current_model(),), daemon=True)
            self.threads.append(thread)
            thread.start()
        return [{"y": np.full((1, 1), self.heard.get("answered", 0), np.float32)} for _ in requests]
