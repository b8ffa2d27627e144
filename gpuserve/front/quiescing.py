"""A front out of service at an operator's word: not ready, while everything that comes is still served.

::

    not ready ─► lame duck ─► notice ─► quiet
                 served       served    served

As at the end of a front (``draining.py``), but without one: it goes on until ``resume()``. Connections made
after the notice are not told, or clients that know no other server would connect for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gpuserve.front.draining import NOTICE_S
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.transport import Transport

#: How often it is looked whether everything is finished.
_POLL_S: Final = 0.02
#: Nothing has to come for so long: between two requests there is a moment without any.
QUIET_S: Final = 0.5


class QuiescingEnd(NamedTuple):
    """How many requests wait or run in the end, and whether no others have come of late."""

    unfinished: int
    is_quiet: bool


class Quiescing:
    """Whether this front is in service. ``transports`` may become more; ``unfinished`` counts the requests
    that wait or run, ``accepted`` all that have come.
    """

    def __init__(
        self,
        service: InferenceService,
        transports: Sequence[Transport],
        unfinished: Callable[[], int],
        accepted: Callable[[], int],
    ) -> None:
        self._service = service
        self._transports = transports
        self._unfinished = unfinished
        self._accepted = accepted
        #: Another one each time that it is out of service; None: it is in service.
        self._absence: object | None = None

    def leave(self) -> None:
        """Not ready from now on."""
        if self._absence is None:
            self._absence = object()
            self._service.leave()

    def resume(self) -> None:
        """Ready again, if all else is. Clients that were told to go come back when they connect anew."""
        self._absence = None
        self._service.stay()

    async def run(self, lame_duck_s: float, timeout_s: float) -> QuiescingEnd | None:
        """Return when nothing waits, runs or comes, or ``timeout_s`` after the lame duck.

        None where it was resumed meanwhile, whatever has come after that.
        """
        self.leave()
        absence = self._absence
        await asyncio.sleep(lame_duck_s)
        started = quiet_since = time.monotonic()
        accepted, has_come = self._accepted(), False
        while self._absence is absence:
            now = time.monotonic()
            aware = self._tell_clients(now - started < NOTICE_S)
            left = max(self._unfinished(), sum(one.n_held for one in self._transports))
            if self._accepted() != accepted:
                accepted, quiet_since, has_come = self._accepted(), now, True
            is_quiet = now - quiet_since >= QUIET_S
            if (aware and is_quiet and not left) or now >= started + timeout_s:
                return QuiescingEnd(left, is_quiet or not has_come)
            await asyncio.sleep(_POLL_S)
        return None

    def _tell_clients(self, is_notice: bool) -> bool:
        """Tell the clients of all connections, during the notice; whether that is done."""
        if not is_notice:
            return True
        for transport in self._transports:
            transport.announce()
        return not any(transport.n_unaware for transport in self._transports)
