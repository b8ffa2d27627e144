"""Work on all models in slices, between which requests have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

#: So many models are one slice: some tens of microseconds.
_SLICE: Final = 16


async def in_slices(models: Iterable[T]) -> AsyncIterator[T]:
    for number, one in enumerate(models, 1):
        yield one
        if not number % _SLICE:
            await asyncio.sleep(0)
