"""Callables that await or yield. INT32 in and out, any width, unless it says otherwise."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

from gpuserve.core.errors import InvalidArgument
from gpuserve_worker.inference.failure import UnrecoverableError

Requests = list[Any]


def _each(requests: Requests, value: int) -> list[dict[str, Any]]:
    return [{"y": np.full((1, 1), value, np.int32)} for _ in requests]


def count(requests: Requests) -> Iterator[Any]:
    """As many responses as the first request says: 0, 1, 2, …"""
    for value in range(int(requests[0]["x"].flat[0])):
        yield _each(requests, value)


async def count_async(requests: Requests) -> AsyncIterator[Any]:
    """The same, with something to await between them."""
    for value in range(int(requests[0]["x"].flat[0])):
        await asyncio.sleep(0)
        yield _each(requests, value)


def each_to_its_own(requests: Requests) -> Iterator[Any]:
    """Every request gets as many responses as it says, and None in between for the others."""
    wanted = [int(request["x"].flat[0]) for request in requests]
    for value in range(max(wanted)):
        yield [{"y": np.full((1, 1), value, np.int32)} if value < most else None for most in wanted]


def plain(requests: Requests) -> Any:
    """One response, returned."""
    return _each(requests, 7)


async def awaited(requests: Requests) -> Any:
    """One response, after something was awaited."""
    await asyncio.sleep(0)
    return _each(requests, 8)


def fails_half_way(requests: Requests) -> Iterator[Any]:
    """Three responses, then an error."""
    for value in range(3):
        yield _each(requests, value)
    raise ValueError("no more words")


def fails_for_one(requests: Requests) -> Iterator[Any]:
    """A response, then an error for the first request, then a response for whoever is left."""
    yield _each(requests, 0)
    yield [InvalidArgument("not you"), *_each(requests[1:], 1)]
    yield [None, *_each(requests[1:], 2)]


def returns(requests: Requests) -> Any:
    """A generator that was meant to yield."""
    if requests is None:
        yield None
    return _each(requests, 0)


def yields_nonsense(requests: Requests) -> Iterator[Any]:
    """A response that is none."""
    yield _each(requests, 0)
    yield 5


def endless(requests: Requests) -> Iterator[Any]:
    """Responses for ever; the file CLOSED_AT appears when it is closed."""
    value = 0
    try:
        while True:
            yield _each(requests, value)
            value += 1
    finally:
        _note(os.environ.get("CLOSED_AT"), str(value))


def floods(requests: Requests) -> Iterator[Any]:
    """The same, each of 64 KiB."""
    value = 0
    try:
        while True:
            yield [{"y": np.zeros((1, 1 << 14), np.int32)} for _ in requests]
            value += 1
    finally:
        _note(os.environ.get("CLOSED_AT"), str(value))


async def waits_for_ever(requests: Requests) -> AsyncIterator[Any]:
    """One response, and then nothing comes."""
    try:
        yield _each(requests, 0)
        await asyncio.Event().wait()
    finally:
        _note(os.environ.get("CLOSED_AT"), "awaited")


class Meeting:
    """Nobody gets an answer before ``expected`` requests are there at once."""

    def __init__(self, expected: int = 4) -> None:
        self._expected = expected
        self._there = 0
        self._all_there: asyncio.Event | None = None

    async def __call__(self, requests: Requests) -> Any:
        self._all_there = self._all_there or asyncio.Event()
        self._there += 1
        if self._there == self._expected:
            self._all_there.set()
        await self._all_there.wait()
        return _each(requests, self._there)


def broken_for_good(requests: Requests) -> Any:
    """Cannot do anything any more."""
    raise UnrecoverableError("no further inferences possible")


def returns_a_coroutine(requests: Requests) -> Any:
    """A plain function that gives what has to be awaited."""
    return awaited(requests)


def returns_two(requests: Requests) -> Any:
    """A plain function that gives two responses where one is due."""
    return iter([_each(requests, 0), _each(requests, 1)])


def forgets_to_await(requests: Requests) -> Any:
    """A coroutine in the place of an array."""
    coroutine = awaited(requests)
    coroutine.close()
    return [{"y": coroutine} for _ in requests]


def _note(path: str | None, text: str) -> None:
    if path is not None:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(f"{path}.part", path)


class LastFirst:
    """The answer to 1 is ready only after that to 2."""

    def __init__(self) -> None:
        self._answered: asyncio.Event | None = None

    async def __call__(self, requests: Requests) -> Any:
        self._answered = self._answered or asyncio.Event()
        value = int(requests[0]["x"].flat[0])
        if value == 1:
            await self._answered.wait()
        else:
            asyncio.get_running_loop().call_soon(self._answered.set)
        return _each(requests, value)


def dies(requests: Requests) -> Iterator[Any]:
    """One response, and the end of the process."""
    yield _each(requests, 0)
    os._exit(3)


class Warmed:
    """Answers with the rows of every call that came before, the warm-up's."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    async def __call__(self, requests: Requests) -> Any:
        await asyncio.sleep(0)
        seen = self._seen[:]
        self._seen.append(len(requests[0]["x"]))
        return [{"y": np.array([seen], np.int32)} for _ in requests]


class WarmedStream:
    """The same, as a stream: a response for each."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    def __call__(self, requests: Requests) -> Iterator[Any]:
        seen = self._seen[:]
        self._seen.append(len(requests[0]["x"]))
        for rows in seen or [0]:
            yield _each(requests, rows)


def fails_and_goes_on(requests: Requests) -> Iterator[Any]:
    """An error in the place of the only response, and then responses for ever."""
    try:
        yield [ValueError("not this one") for _ in requests]
        while True:
            yield _each(requests, 1)
    finally:
        _note(os.environ.get("CLOSED_AT"), "after the error")


async def swallows_cancellation(requests: Requests) -> AsyncIterator[Any]:
    """Goes on when it is cancelled."""
    try:
        while True:
            yield _each(requests, 0)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
    finally:
        _note(os.environ.get("CLOSED_AT"), "at last")


async def sleeps(requests: Requests) -> Any:
    """Has no answer for an hour."""
    await asyncio.sleep(3600)
    return _each(requests, 0)


def raises_generator_exit(requests: Requests) -> Any:
    """An exception that is no Exception, and does not mean the process."""
    raise GeneratorExit("out of place")


async def raises_generator_exit_async(requests: Requests) -> Any:
    """The same, async."""
    raise GeneratorExit("out of place")
