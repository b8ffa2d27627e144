"""Awaits answers, and notices clients that go away while their request waits.

ASGI tells it only to who asks ``receive()``; a task for that beside every request would cost more than
a small request does. So nobody asks for the first ``PATIENCE_S`` of a request, which most do not
outlive; those that do get a task each. Over HTTP/1.1 the kernel is asked as well (``closing_peers``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from gpuserve.front.endpoint.asgi import Receive
from gpuserve.front.endpoint.closing_peers import Peer, closing_peers
from gpuserve.front.endpoint.v2 import InferResponse
from gpuserve.front.scheduler.pending import PendingRequest

#: How old a request is before its client is watched, and how often that is looked at.
PATIENCE_S: Final = 0.02
#: How often the kernel's table is read while requests over HTTP/1.1 wait.
TABLE_PERIOD_S: Final = 0.1


class Waiting:
    """Something that waits on a future. ``gone``: its client left, and the future was cancelled."""

    __slots__ = ("_receive", "_watcher", "future", "gone", "peer", "since")

    def __init__(
        self, future: asyncio.Future[Any], receive: Receive, since: float, peer: Peer | None
    ) -> None:
        self.peer = peer
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
        self.give_up()

    def give_up(self) -> None:
        """Its client left."""
        if not self.future.done():
            self.gone = True
            self.future.cancel()


class DisconnectWatch:
    """All requests of the front that wait."""

    def __init__(self) -> None:
        self._young: deque[Waiting] = deque()
        #: Those that wait over HTTP/1.1 and are no longer young.
        self._by_peer: list[Waiting] = []
        self._loop = asyncio.get_running_loop()
        self._sweep_due = False

    async def answer(
        self, pending: PendingRequest, receive: Receive, peer: Peer | None = None
    ) -> InferResponse | None:
        """The answer of a submitted request; None where its client went away, and it was taken back.

        ``peer`` is the connection, where it is HTTP/1.1.

        Raises:
            RequestError: see ``Driver.submit``.
        """
        waiting = self.add(pending.answer, receive, peer)
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

    def add(self, future: asyncio.Future[Any], receive: Receive, peer: Peer | None = None) -> Waiting:
        """The future is cancelled if the client goes away; ``finish()`` ends that."""
        waiting = Waiting(future, receive, self._loop.time(), peer)
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
                if waiting.peer is not None:
                    self._watch_peer(waiting)
        self._sweep_due = bool(young)
        if young:
            self._loop.call_later(PATIENCE_S, self._sweep)

    def _watch_peer(self, waiting: Waiting) -> None:
        self._by_peer.append(waiting)
        if len(self._by_peer) == 1:
            self._loop.call_later(TABLE_PERIOD_S, self._ask_kernel)

    def _ask_kernel(self) -> None:
        self._by_peer = [waiting for waiting in self._by_peer if not waiting.future.done()]
        if not self._by_peer:
            return
        closing = closing_peers()
        for waiting in self._by_peer:
            if waiting.peer in closing:
                waiting.give_up()
        self._loop.call_later(TABLE_PERIOD_S, self._ask_kernel)
