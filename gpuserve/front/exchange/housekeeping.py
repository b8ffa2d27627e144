"""Periodic work of a process that is not serving itself: its errors are logged, and the process serves on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger(__name__)

#: Seconds from an error to the next start of the work.
RESTART_S: Final = 10.0


async def keep_running(work: Callable[[], Awaitable[None]]) -> None:
    """Run work that goes on until its task is cancelled, and start it again after an error."""
    while True:
        try:
            await work()
            return
        except Exception:
            logger.exception("periodic work failed, and starts again in %.0f s", RESTART_S)
        await asyncio.sleep(RESTART_S)
