"""Awaits answers, and notices clients that go away while their request waits.

ASGI tells it only to who asks ``receive()``; a task for that beside every request would cost more than
a small request does. So nobody asks for the first ``PATIENCE_S`` of a request, which most do not
outlive; those that do get a task each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from gpuserve.front.endpoint.asgi import Receive
from gpuserve.front.endpoint.v2 import InferResponse
from gpuserve.front.scheduler.flights import PendingRequest

#: How old a request is before its client is watched, and how often that is looked at.
PATIENCE_S: Final = 0.02


class Waiting:
    """Something that waits on a future. ``gone``: its client left, and the future was cancelled."""

    __slots__ = ("_receive", "_watcher", "future", "gone", "since")

    def __init__(self, future: asyncio.Future[Any], receive: Receive, since: float) -> None:
        self.future = future
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self.since = since
        self.gone = False

    def finish(self) -> None:
        """It waits no more."""
        if self._watcher is not None:
            self._watcher.cancel()

    def watch(self) -> None:
        """Ask for the disconnect from now on."""
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.future.done():
            self.gone = True
            self.future.cancel()


class DisconnectWatch:
    """All requests of the front that wait."""

    def __init__(self) -> None:
        self._young: deque[Waiting] = deque()
        self._loop = asyncio.get_running_loop()
        self._sweep_due = False

    async def answer(self, pending: PendingRequest, receive: Receive) -> InferResponse | None:
        """The answer of a submitted request; None where its client went away, and it was taken back.

        Raises:
            RequestError: see ``ModelDriver.infer``.
        """
        waiting = self.add(pending.answer, receive)
        try:
            response: InferResponse = await pending.answer
        except asyncio.CancelledError:
            pending.take_back()
            if waiting.gone:
                return None
            raise
        finally:
            waiting.finish()
        return response

    def add(self, future: asyncio.Future[Any], receive: Receive) -> Waiting:
        """The future is cancelled if the client goes away; ``finish()`` ends that."""
        waiting = Waiting(future, receive, self._loop.time())
        self._young.append(waiting)
        if not self._sweep_due:
            self._sweep_due = True
            self._loop.call_later(PATIENCE_S, self._sweep)
        return waiting

    def _sweep(self) -> None:
        young, before = self._young, self._loop.time() - PATIENCE_S
        while young and (young[0].future.done() or young[0].since <= before):
            waiting = young.popleft()
            if not waiting.future.done():
                waiting.watch()
        self._sweep_due = bool(young)
        if young:
            self._loop.call_later(PATIENCE_S, self._sweep)
