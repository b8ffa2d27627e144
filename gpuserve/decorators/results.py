"""What a call gave, whatever its kind: an answer, something to await for it, a generator of answers, an async
generator of them. Nothing of requests or arrays is known here. Whatever is built over a result is of its
kind: nothing is awaited or iterated before its consumer does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

Change: TypeAlias = Callable[[Any], Any]


def is_deferred(result: Any) -> bool:
    """Whether the answer, or the answers, have yet to be awaited or iterated."""
    return isinstance(result, Awaitable | Iterator | AsyncIterator)


def then(change: Change, result: Any) -> Any:
    """A result of the same kind, with ``change`` applied to each answer in it."""
    if isinstance(result, Awaitable):
        return _awaited(change, result)
    if isinstance(result, Iterator):
        return _each(change, result)
    if isinstance(result, AsyncIterator):
        return _each_async(change, result)
    return change(result)


def in_turn(
    calls: Sequence[Callable[[], Any]],
    combine: Callable[[list[Any]], Any],
    part: Callable[[int, Any], Any],
) -> Any:
    """One result out of several calls of one function, each begun when the one before has ended.

    ``combine`` is given the answers of all calls. Where the function gives generators, their answers
    come one by one instead, as ``part(position of the call, answer)``.
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
    return then(change, await result)


def _each(change: Change, answers: Iterator[Any]) -> Generator[Any, None, Any]:
    """What a generator returns at its end is passed on: who iterates it may have something to say of it."""
    try:
        while True:
            try:
                answer = next(answers)
            except StopIteration as end:
                return end.value
            yield change(answer)
            del answer  # the next one is made without it
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
