"""Cooperative time slicing: long work on the event loop in short steps, with other tasks in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")
#: Rendering time before other tasks run.
_SLICE_S: Final = 0.002


class SlicedPage:
    """A page that ``rendering`` produces in short steps. Concurrent callers share the next page."""

    def __init__(self, rendering: Callable[[], Generator[None, None, bytes]]) -> None:
        self._rendering = rendering
        #: The page that is being rendered, and the one after it.
        self._present: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def page(self) -> bytes:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._made_after(self._present))
        return await asyncio.shield(self._next)

    async def _made_after(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        self._present, self._next = self._next, None
        return await run_in_slices(self._rendering())


async def run_in_slices(making: Generator[None, None, T]) -> T:
    """Run a generator to its end in slices, with other tasks in between, and return its result."""
    while True:
        ends_at = time.monotonic() + _SLICE_S
        try:
            while time.monotonic() < ends_at:
                next(making)
        except StopIteration as end:
            made: T = end.value
            return made
        await asyncio.sleep(0)


#: The number of models in one slice: some tens of microseconds.
_SLICE_ITEMS: Final = 16


async def iterate_in_slices(models: Iterable[T]) -> AsyncIterator[T]:
    for number, one in enumerate(models, 1):
        yield one
        if not number % _SLICE_ITEMS:
            await asyncio.sleep(0)
