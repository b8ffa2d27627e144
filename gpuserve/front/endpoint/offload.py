"""Moves zlib's work on large bodies to a thread, where it lets the event loop go on. Both doors use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

#: From this size on; below, the way to a thread and back costs more than the work.
THREAD_NBYTES: Final = 16 << 10

P = ParamSpec("P")
T = TypeVar("T")


async def offload(nbytes: int, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The result of ``work``, which packs or unpacks ``nbytes``."""
    if nbytes < THREAD_NBYTES:
        return work(*arguments, **options)
    return await asyncio.to_thread(work, *arguments, **options)
