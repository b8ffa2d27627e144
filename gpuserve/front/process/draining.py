"""The ways of a front out of service, in the order in which they spare its clients.

For good, at the end of the server::

    not ready ─► lame duck ─► notice ─► finishing ─► drained
                 served       served    refused

Or at an operator's word, until ``resume()``::

    not ready ─► lame duck ─► notice ─► quiet
                 served       served    served

Not ready: probes and watches say so at once. Lame duck: requests are served as ever, until balancers have
heard. Notice: connections are told to take no more requests, and what comes before their clients know it is
served. Finishing: what was accepted is run, what comes now is refused.

At the end, where there is to be no lame duck there is no notice either: clients are told while the rest is
finished. One that was over before, because an operator had taken the server out of service, is not had again.
A notice is for the connections that are there when it is given, and each gets one. Those that are made after
it are left alone: their clients know no other server, and would be sent away again and again. At the end they
get theirs with the finishing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gpuserve.front.process.generations import Generations
from gpuserve.front.process.ports import Ports, Spawn
from gpuserve.front.service.control import Say
from gpuserve.front.service.health import ServerHealth
from gpuserve.supervisor.control import front_messages as messages

#: How long clients have to hear that their connections take no more requests. HTTP/1 clients hear it with
#: their next answer; HTTP/2 clients at once.
NOTICE_S: Final = 1.0
#: How often it is looked whether everything is finished, at the end and at an operator's word.
_FINISHING_POLL_S: Final = 0.005
_QUIESCING_POLL_S: Final = 0.02
#: Nothing has to come for so long: between two requests there is a moment without any.
QUIET_S: Final = 0.5


class Draining:
    """Takes one front out of service as the supervisor says, and tells it with ``say`` when that is done."""

    def __init__(
        self, health: ServerHealth, ports: Ports, generations: Generations, say: Say, spawn: Spawn
    ) -> None:
        self._health = health
        self._ports = ports
        self._generations = generations
        self._say = say
        self._spawn = spawn
        #: Another one each time that an operator takes it out of service; None: it is in service.
        self._absence: object | None = None

    # ---- for good -------------------------------------------------------------------------

    def drain(self, message: messages.Drain) -> None:
        """Begin to end; ``Drained`` follows when everything is finished, or at the timeout."""
        self._health.leave()  # at once: who asks after this is told so
        self._spawn(self._drain(message))

    async def _drain(self, message: messages.Drain) -> None:
        if message.lame_duck_s:
            await asyncio.sleep(message.lame_duck_s)
        deadline = time.monotonic() + message.timeout_s
        if message.notice:
            notice_end = min(deadline, time.monotonic() + NOTICE_S)
            self._ports.announce()
            await _until(lambda: not self._ports.n_unaware, notice_end)
        self._health.drain()
        self._ports.announce()
        await _until(lambda: not self._generations.unfinished(), deadline)
        unfinished = self._generations.unfinished()
        # A turn more for the answers that were just given to be written.
        await asyncio.sleep(_FINISHING_POLL_S)
        self._say(messages.Drained(unfinished))

    # ---- at an operator's word ------------------------------------------------------------

    def quiesce(self, message: messages.Quiesce) -> None:
        """Begin to leave service; ``Quiesced`` follows when idle, or ``timeout_s`` after the lame duck."""
        if self._absence is None:
            self._absence = object()
            self._health.leave()  # before what comes next is obeyed: never ready in between
        self._spawn(self._quiesce(message, self._absence))

    def resume(self, _: messages.Resume) -> None:
        self._absence = None
        self._health.stay()

    async def _quiesce(self, message: messages.Quiesce, absence: object) -> None:
        await asyncio.sleep(message.lame_duck_s)
        started = quiet_since = time.monotonic()
        self._ports.announce()
        accepted, has_come = self._generations.accepted(), False
        while self._absence is absence:
            now = time.monotonic()
            is_aware = now - started >= NOTICE_S or not self._ports.n_unaware
            left = max(self._generations.unfinished(), self._ports.n_held)
            if self._generations.accepted() != accepted:
                accepted, quiet_since, has_come = self._generations.accepted(), now, True
            is_quiet = now - quiet_since >= QUIET_S
            if (is_aware and is_quiet and not left) or now >= started + message.timeout_s:
                self._say(messages.Quiesced(message.ticket, left, is_quiet or not has_come))
                return
            await asyncio.sleep(_QUIESCING_POLL_S)


async def _until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_FINISHING_POLL_S)
