"""Notices clients that go away while their request waits.

ASGI tells it only to who asks ``receive()``; a task for that beside every request would cost more than
a small request does. So nobody asks for the first ``PATIENCE_S`` of a request, which most do not
outlive; those that do get a task each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from gpuserve.front.endpoint.asgi import Receive

#: How old a request is before its client is watched, and how often that is looked at.
PATIENCE_S: Final = 0.02


class Waiting:
    """One request that waits for its answer. ``gone``: its client left and its task was cancelled."""

    __slots__ = ("_receive", "_task", "_watcher", "done", "gone", "since")

    def __init__(self, task: asyncio.Task[Any], receive: Receive, since: float) -> None:
        self._task = task
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self.since = since
        self.done = False
        self.gone = False

    def finish(self) -> None:
        """It has its answer."""
        self.done = True
        if self._watcher is not None:
            self._watcher.cancel()

    def watch(self) -> None:
        """Ask for the disconnect from now on."""
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.done:
            self.gone = True
            self._task.cancel()


class DisconnectWatch:
    """All requests of the front that wait."""

    def __init__(self) -> None:
        self._young: deque[Waiting] = deque()
        self._loop = asyncio.get_running_loop()
        self._sweep_due = False

    def add(self, receive: Receive) -> Waiting:
        """The request of the running task waits from now on; ``finish()`` it."""
        task = asyncio.current_task()
        assert task is not None
        waiting = Waiting(task, receive, self._loop.time())
        self._young.append(waiting)
        if not self._sweep_due:
            self._sweep_due = True
            self._loop.call_later(PATIENCE_S, self._sweep)
        return waiting

    def _sweep(self) -> None:
        young, before = self._young, self._loop.time() - PATIENCE_S
        while young and (young[0].done or young[0].since <= before):
            waiting = young.popleft()
            if not waiting.done:
                waiting.watch()
        self._sweep_due = bool(young)
        if young:
            self._loop.call_later(PATIENCE_S, self._sweep)
