"""What a call gave, whatever its kind: a value, something to await, a generator, an async generator. Where
one answer is due, as in a model that is not decoupled, ``only_result`` and ``await_only_result`` find it;
``try_result`` and ``try_async_result`` are for calls whose answer nobody wants.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

from gpuserve_worker.calling.outputs import OutputError
from gpuserve_worker.protocol.wire import YIELD_WINDOW


def is_deferred(result: Any) -> bool:
    """Whether something has yet to be awaited or iterated for the answer."""
    return inspect.isawaitable(result) or isinstance(result, Iterator | AsyncIterator)


def only_result(result: Any) -> Any:
    """The one answer in what a plain function gave, awaited here and now where it has to be; ``OutputError``:
    it is not one.
    """
    if not is_deferred(result):
        return result
    import asyncio  # few functions that are not async return what has to be awaited

    return asyncio.run(await_only_result(result))


async def await_only_result(result: Any) -> Any:
    """The one answer in what was given. Raises ``OutputError`` where there is not exactly one."""
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        return _only([one async for one in _first_two_of(result)])
    if isinstance(result, Iterator):
        return _only(_first_two(result))
    return result


def try_result(result: Any) -> None:
    """Take what a call of a warm-up gave and drop it, but run all that is to be run for it."""
    if is_deferred(result):
        import asyncio

        asyncio.run(try_async_result(result))


async def try_async_result(result: Any) -> None:
    """The same on the running event loop; a generator may never end, so it is closed after a window of
    responses.
    """
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        taken = 0
        async for _ in result:
            taken += 1
            if taken == YIELD_WINDOW:
                break
        if hasattr(result, "aclose"):
            await result.aclose()
    elif isinstance(result, Iterator):
        for _ in itertools.islice(result, YIELD_WINDOW):
            pass
        if hasattr(result, "close"):
            result.close()


def next_response(generator: Iterator[Any]) -> tuple[bool, Any]:
    """The next response of a generator: (True, response), or (False, None) at its end. Raises ``OutputError``
    where it ended with a value.
    """
    try:
        return True, next(generator)
    except StopIteration as end:
        if end.value is not None:
            raise OutputError(
                "The inference callable gave a generator that returned its response; expected to yield every "
                "response, with `yield` in place of `return`"
            ) from None
        return False, None


def _first_two(generator: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    while len(found) < 2:
        more, response = next_response(generator)
        if not more:
            break
        found.append(response)
    if hasattr(generator, "close"):
        generator.close()
    return found


async def _first_two_of(generator: AsyncIterator[Any]) -> AsyncIterator[Any]:
    count = 0
    async for response in generator:
        yield response
        count += 1
        if count == 2:
            break
    if hasattr(generator, "aclose"):
        await generator.aclose()


def _only(responses: list[Any]) -> Any:
    if len(responses) == 1:
        return responses[0]
    given = "more than one response" if responses else "a generator that ended without a response"
    raise OutputError(
        f"The inference callable gave {given}; expected exactly one response, or a model that is decoupled"
    )
