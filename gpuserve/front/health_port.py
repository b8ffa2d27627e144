"""The health port: a thread with an event loop of its own, so that probes are answered while the front works.

The front tells it what changes; nothing is asked of the front for a probe. It speaks no TLS, also where every
other port does: a kubelet has no certificate.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from gpuserve.front.endpoint.health import HealthReport
from gpuserve.front.endpoint.health_door import HealthDoor
from gpuserve.front.endpoint.health_view import HealthView
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.server.transport import NativeTransport

logger = logging.getLogger(__name__)

#: How often the front shows that it turns, and is judged by that.
_TURN_S: Final = 1.0


class HealthPort:
    """See ``transport.Transport``. Made, started and stopped in the front's loop."""

    def __init__(self, service: InferenceService, listener_fd: int) -> None:
        self._service = service
        self._listener_fd = listener_fd
        self._view = HealthView(time.monotonic())
        self._loop = asyncio.new_event_loop()
        self._quit = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gpuserve-health", daemon=True)
        self._front = asyncio.get_running_loop()
        self._listening = self._front.create_future()
        self._ended = self._front.create_future()
        self._said: tuple[HealthReport, bool] | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._turn: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Answer from now on."""
        self._unwatch = self._service.watch(self._say)
        self._say()
        self._on_turn()
        self._thread.start()
        await asyncio.wait({self._listening, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()

    @property
    def n_held(self) -> int:
        """Nobody waits for more than a probe."""
        return 0

    def limit_age(self, max_age_s: float) -> None:
        """Its connections keep what they were made with."""

    async def renew(self) -> None:
        """There is no TLS here."""

    def announce(self) -> None:
        """Probes go on until the end."""

    @property
    def n_unaware(self) -> int:
        """Nobody has to be told."""
        return 0

    async def stop(self) -> None:
        """Close the connections, and end the thread."""
        self._unwatch()
        if self._turn is not None:
            self._turn.cancel()
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._quit.set)
            await self._ended

    # ---- in the front's thread ------------------------------------------------------------

    def _say(self) -> None:
        """Pass on what is so now, where that is something else than before."""
        said = self._service.health_report(), self._service.ended
        if said != self._said:
            self._said = said
            self._loop.call_soon_threadsafe(self._view.say, *said)

    def _on_turn(self) -> None:
        self._turn = self._front.call_later(_TURN_S, self._on_turn)
        self._loop.call_soon_threadsafe(self._view.turned, time.monotonic())

    # ---- in its own -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # a fault of ours
            logger.exception("the health port ended")
            self._front.call_soon_threadsafe(self._ended.set_exception, error)
        else:
            self._front.call_soon_threadsafe(self._ended.set_result, None)

    async def _serve(self) -> None:
        transport = NativeTransport(HealthDoor(self._view), {self._listener_fd: None})
        await transport.start()
        self._front.call_soon_threadsafe(self._listening.set_result, None)
        look = self._loop.create_task(self._look())
        await self._quit.wait()
        look.cancel()
        await transport.stop()

    async def _look(self) -> None:
        while True:
            self._view.look(time.monotonic())
            await asyncio.sleep(_TURN_S)
