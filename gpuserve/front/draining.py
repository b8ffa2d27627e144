"""The end of a front, in the order in which it spares its clients::

    not ready ─► lame duck ─► notice ─► finishing ─► drained
                 served       served    refused

Not ready: probes and watches say so at once. Lame duck: requests are served as ever, until balancers have
heard. Notice: connections are told to take no more requests, and what comes before their clients know it is
served. Finishing: what was accepted is run, what comes now is refused. Where there is to be no lame duck
there is no notice either: clients are told while the rest is finished. One that was over before, because the
server was taken out of service, is not had again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.transport import Transport

#: How long clients have to hear that their connections take no more requests. HTTP/1 clients hear it with
#: their next answer; HTTP/2 clients at once.
NOTICE_S: Final = 1.0
#: How often it is looked whether everything is finished.
_POLL_S: Final = 0.005


class Drain:
    """One end. ``transports`` may become more; ``unfinished`` counts the requests that wait or run."""

    def __init__(
        self, service: InferenceService, transports: Sequence[Transport], unfinished: Callable[[], int]
    ) -> None:
        self._service = service
        self._transports = transports
        self._unfinished = unfinished

    async def run(self, lame_duck_s: float, timeout_s: float, *, notice: bool) -> int:
        """Return when everything is finished, or ``timeout_s`` after the lame duck; how much is not. The
        service has been told to leave.
        """
        if lame_duck_s:
            await asyncio.sleep(lame_duck_s)
        deadline = time.monotonic() + timeout_s
        if notice:
            await self._announce_until(self._all_aware, min(deadline, time.monotonic() + NOTICE_S))
        self._service.drain()
        await self._announce_until(lambda: not self._unfinished(), deadline)
        unfinished = self._unfinished()
        # A turn more for the answers that were just given to be written.
        await asyncio.sleep(_POLL_S)
        return unfinished

    async def _announce_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Tell the clients of all connections, those made meanwhile included."""
        while True:
            for transport in self._transports:
                transport.announce()
            if done() or time.monotonic() >= deadline:
                return
            await asyncio.sleep(_POLL_S)

    def _all_aware(self) -> bool:
        """Whether every client has heard, or will with an answer that it waits for."""
        return not any(transport.n_unaware for transport in self._transports)
