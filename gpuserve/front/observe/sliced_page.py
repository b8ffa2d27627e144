"""Pages about all models, made in slices: hundreds of models take the event loop a hundred milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Final, TypeVar

#: How long a page may be worked at before others have their turn.
_SLICE_S: Final = 0.002

Made = TypeVar("Made")


class SlicedPage:
    """A page that ``rendering`` makes in short steps, one at a time; who ask meanwhile share the next."""

    def __init__(self, rendering: Callable[[], Generator[None, None, bytes]]) -> None:
        self._rendering = rendering
        #: The page that is being made, and the one after it.
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
        return await in_slices(self._rendering())


async def in_slices(making: Generator[None, None, Made]) -> Made:
    """What is made in short steps, so that others have their turns in between."""
    while True:
        ends_at = time.monotonic() + _SLICE_S
        try:
            while time.monotonic() < ends_at:
                next(making)
        except StopIteration as end:
            made: Made = end.value
            return made
        await asyncio.sleep(0)
