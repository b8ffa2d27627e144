"""A batch whose callable awaits or yields, from its message to its answer. No callable is called here; see
``async_loop.py``.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

from gpuserve_worker import wire
from gpuserve_worker.intake import TakenIn
from gpuserve_worker.request import Request
from gpuserve_worker.session import Session

_Ended = TypeVar("_Ended")
_Ended_co = TypeVar("_Ended_co", covariant=True)


class _Copies(Protocol[_Ended_co]):
    """Copies under way."""

    def is_ready(self) -> bool: ...

    def wait(self) -> _Ended_co: ...


class UnderWay:
    """One batch: who still waits for it, and how many responses it may send."""

    def __init__(self, session: Session, run: wire.Run) -> None:
        self.session = session
        self.run = run
        self.task: asyncio.Task[None] | None = None
        #: What its callable was called with.
        self.taken: TakenIn | None = None
        #: The list that the callable was given, as long as somebody may want to mark one of it.
        self.requests: list[Request] = []
        self.given_up = False
        self._waiting = set(range(len(run.requests)))
        self._credit = wire.YIELD_WINDOW
        self._more_credit = asyncio.Event()

    def cancel_request(self, position: int) -> None:
        """Nobody waits for one of the requests."""
        if position < len(self.requests):
            self.requests[position].cancelled = True
        self._waiting.discard(position)
        if not self._waiting:
            self.give_up()

    def give_up(self) -> None:
        """Nobody waits for any of them."""
        if self.task is not None and not self.given_up:
            self.given_up = True
            self.task.cancel()

    def add_credit(self, yields: int) -> None:
        """So many responses have left the front."""
        self._credit += yields
        self._more_credit.set()

    async def take_credit(self) -> None:
        """Wait until a response may be sent, and at least until all others had their turn."""
        self._credit -= 1
        await asyncio.sleep(0)
        while self._credit <= 0:
            self._more_credit.clear()
            await self._more_credit.wait()


async def ended(copies: _Copies[_Ended]) -> _Ended:
    """What comes of copies from a device, when they are over. The other batches go on meanwhile.

    A cancellation is for the callable, which has returned: what was begun is brought to its end.
    """
    if copies.is_ready():
        return copies.wait()
    waiting = asyncio.ensure_future(asyncio.to_thread(copies.wait))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        return await waiting
