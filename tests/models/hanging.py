"""Callables that do not come back where the input says so, each in its own way. FP32 in and out."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: A request with the first value in it hangs; one with the second only in the first process that it comes to.
HANGS, HANGS_IN_THE_FIRST_PROCESS = -1.0, -2.0
#: Longer than any test waits.
FOREVER_S = 600

Requests = list[Any]


def _hangs(requests: Requests) -> bool:
    return any((request["x"] == HANGS).any() for request in requests)


def _answers(requests: Requests) -> list[dict[str, Any]]:
    answers = []
    for request in requests:
        numbers = np.full((len(request["x"]), 1), os.getpid(), np.int64)
        answers.append({"y": request["x"] * 2, "pid": numbers, "calls": numbers})
    return answers


def sleep_in_c(seconds: int = FOREVER_S) -> None:
    """Sleep and keep the interpreter's lock."""
    ctypes.PyDLL(None).sleep(seconds)


def in_c(requests: Requests) -> Any:
    """Hang while no other thread of this process can run Python."""
    if _hangs(requests):
        sleep_in_c()
    return _answers(requests)


def in_c_with_all_signals_blocked(requests: Requests) -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    return in_c(requests)


def in_c_with_the_handler_replaced(requests: Requests) -> Any:
    for number in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    return in_c(requests)


async def awaiting(requests: Requests) -> Any:
    """Hang on something that never comes, while others go on."""
    if _hangs(requests):
        await asyncio.get_running_loop().create_future()
    return _answers(requests)


class Awaiting:
    """The same; ``mark`` is the file by which the first process is known."""

    def __init__(self, mark: str) -> None:
        self.is_first = not Path(mark).exists()
        Path(mark).touch()

    async def __call__(self, requests: Requests) -> Any:
        if self.is_first and any((one["x"] == HANGS_IN_THE_FIRST_PROCESS).any() for one in requests):
            await asyncio.get_running_loop().create_future()
        return await awaiting(requests)


def steps(requests: Requests) -> Iterator[Any]:
    """Give three responses, a while apart; hang before the second."""
    for number in range(3):
        if number:
            threading.Event().wait(0.2)
        if number and _hangs(requests):
            threading.Event().wait(FOREVER_S)
        yield _answers(requests)


async def steps_async(requests: Requests) -> AsyncIterator[Any]:
    yield _answers(requests)
    if _hangs(requests):
        await asyncio.sleep(FOREVER_S)
    yield _answers(requests)


class LoadsForever:
    """Loads until it is killed, in C."""

    def __init__(self) -> None:
        sleep_in_c()

    def __call__(self, requests: Requests) -> Any:
        return _answers(requests)
