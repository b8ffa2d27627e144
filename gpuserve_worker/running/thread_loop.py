"""The event loop of a worker thread. Only a main thread has one by itself, and plain callables ask for it by
``asyncio.get_event_loop()``. What awaits or yields has a loop of its own, see ``async_loop.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def event_loop_of_thread() -> Iterator[None]:
    """An event loop that does not run, for the calling thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()
