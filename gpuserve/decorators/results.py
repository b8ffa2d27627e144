"""Results of calls of any kind: a value, an awaitable, a generator, an async generator.

A result derived from another one is of the same kind: nothing is awaited or iterated before its consumer does
so. This module knows neither requests nor arrays.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

Change: TypeAlias = Callable[[Any], Any]


def is_deferred(result: Any) -> bool:
    """Return whether the result has yet to be awaited or iterated."""
    return isinstance(result, Awaitable | Iterator | AsyncIterator)


def map_result(change: Change, result: Any) -> Any:
    """Return a result of the same kind, with ``change`` applied to each value."""
    if isinstance(result, Awaitable):
        return _awaited(change, result)
    if isinstance(result, Iterator):
        return _each(change, result)
    if isinstance(result, AsyncIterator):
        return _each_async(change, result)
    return change(result)


def call_in_sequence(
    calls: Sequence[Callable[[], Any]], combine: Callable[[list[Any]], Any], part: Callable[[int, Any], Any]
) -> Any:
    """Return one result of several calls of one function, each started after the previous one has ended, by
    ``combine`` of all values; of generators, each value as ``part(position of the call, value)``.
    """
    first = calls[0]()
    if isinstance(first, Awaitable):
        return _await_in_turn(first, calls, combine)
    if isinstance(first, Iterator):
        return _stream_in_turn(first, calls, part)
    if isinstance(first, AsyncIterator):
        return _stream_async_in_turn(first, calls, part)
    return combine([first, *[call() for call in calls[1:]]])


async def _awaited(change: Change, result: Awaitable[Any]) -> Any:
    return map_result(change, await result)


def _each(change: Change, answers: Iterator[Any]) -> Generator[Any, None, Any]:
    """Yield a generator's changed values, and return its return value, which its consumer may use."""
    try:
        while True:
            try:
                answer = next(answers)
            except StopIteration as end:
                return end.value
            yield change(answer)
            del answer  # release the value before the next one is made
    finally:
        if hasattr(answers, "close"):
            answers.close()


async def _each_async(change: Change, answers: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    try:
        async for answer in answers:
            yield change(answer)
    finally:
        if hasattr(answers, "aclose"):
            await answers.aclose()


async def _await_in_turn(
    first: Awaitable[Any], calls: Sequence[Callable[[], Any]], combine: Callable[[list[Any]], Any]
) -> Any:
    answers = [await first]
    for call in calls[1:]:
        answers.append(await call())  # noqa: PERF401 - one has to end before the next begins
    return combine(answers)


def _stream_in_turn(
    first: Iterator[Any], calls: Sequence[Callable[[], Any]], part: Callable[[int, Any], Any]
) -> Generator[Any, None, Any]:
    for position, call in enumerate(calls):
        returned = yield from _each(partial(part, position), call() if position else first)
        if returned is not None:
            return returned
    return None


async def _stream_async_in_turn(
    first: AsyncIterator[Any], calls: Sequence[Callable[[], Any]], part: Callable[[int, Any], Any]
) -> AsyncGenerator[Any, None]:
    for position, call in enumerate(calls):
        async with aclosing(_each_async(partial(part, position), call() if position else first)) as answers:
            async for answer in answers:
                yield answer
