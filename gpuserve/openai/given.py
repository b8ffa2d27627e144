"""What a callable gives, one after the other, whatever its kind; and several such streams as one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

from gpuserve.openai.answers import Token

_One = TypeVar("_One")
#: A callable that does not wait lets others have their turn this often.
_SLICE_S: Final = 0.0005
_END: Final = object()


class _Raised(NamedTuple):
    error: Exception


async def each_given(result: Any) -> AsyncGenerator[Any]:
    """What a call gave: one text, a list, an iterator, something to await. It is closed with this."""
    if inspect.isawaitable(result):
        result = await result
    try:
        if isinstance(result, AsyncIterator):
            async for one in result:
                yield one
        elif isinstance(result, Iterator | list | tuple):
            ends = perf_counter() + _SLICE_S
            for one in result:
                yield one
                if perf_counter() >= ends:
                    await asyncio.sleep(0)
                    ends = perf_counter() + _SLICE_S
        else:  # nobody has told how many tokens a whole text is
            yield Token(result, 0) if isinstance(result, str) else result
    finally:
        await _close(result)


async def _close(result: Any) -> None:
    if isinstance(result, AsyncIterator) and hasattr(result, "aclose"):
        await result.aclose()
    elif isinstance(result, Iterator) and hasattr(result, "close"):
        result.close()


async def merged(streams: Sequence[AsyncGenerator[_One]]) -> AsyncGenerator[tuple[int, _One]]:
    """What comes of several streams, as it comes, each with the position of its stream. All are closed with
    this one; an error of one is raised.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for one in only:
                yield 0, one
        return
    came: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))
    pumps = [asyncio.create_task(_pump(number, one, came)) for number, one in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            number, one = await came.get()
            if isinstance(one, _Raised):
                raise one.error
            if one is _END:
                left -= 1
            else:
                yield number, one
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, stream: AsyncGenerator[Any], came: asyncio.Queue[tuple[int, Any]]) -> None:
    async with aclosing(stream):
        try:
            async for one in stream:
                await came.put((number, one))
            await came.put((number, _END))
        except Exception as error:  # user code may raise anything; who reads the streams is told
            await came.put((number, _Raised(error)))
