"""A door put together: each message of the front goes to the part that obeys it. A door outlives its front:
the supervisor, whose child it is, connects it to each new one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import LogSettings
from gpuserve.config.settings.server import ServerSettings, with_changed_settings
from gpuserve.config.settings.tls import tls_files
from gpuserve.front.door.reception import ConnectionReception
from gpuserve.front.door.reports import Reports
from gpuserve.front.doors.logged import access_logged
from gpuserve.front.doors.opening import both_doors, rate_limit
from gpuserve.front.doors.passing_door import PassingDoor, asks_readiness, refuse
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.housekeeping import keep_running
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.request_rates import RequestRates
from gpuserve.front.memory.trimming import keep_trim
from gpuserve.front.observability.access_log import AccessLog
from gpuserve.front.passage import messages
from gpuserve.front.passage.forwarding import Forwarding
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.service import DoorService
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.limits import limits_of, part_of_door
from gpuserve.supervisor.control.front_messages import CONTROL
from gpuserve_worker.memory.orphans import ORPHANS
from gpuserve_worker.protocol import datagram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorParts:
    """What a door is made of, from the first message of the front on."""

    admission: Admission
    connections: Connections
    entrance: PassingDoor
    forwarding: Forwarding
    reception: ConnectionReception
    reports: Reports
    inference: DoorService
    awaited: AwaitedRequests


class Door:
    """One door. ``on_lost`` is called when the supervisor is gone or the door cannot go on."""

    def __init__(
        self,
        control: socket.socket,
        on_setup: Callable[[ServerSettings], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._passage = Passage(None, self._hear, self._on_front_lost)
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._settings = ServerSettings()
        self._parts: DoorParts | None = None
        self._obeyed_by: Mapping[type, Callable[[Any], None]] = {messages.DoorSetup: self._set_up}
        #: How many notices the present front has given.
        self._notice = 0
        #: What the processes before this one in its place have counted, by the fields of ``Status``.
        self._counted: dict[str, Any] = {}
        #: The addresses of all connections, and of those that have ended in this turn.
        self._addresses: Counter[str | None] = Counter()
        self._left: list[str | None] = []
        self._quit = asyncio.Event()

    async def run(self) -> None:
        self._loop.set_exception_handler(self._on_defect)
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._on_control)
        trimming = self._loop.create_task(keep_running(partial(keep_trim, self._shrink)))
        await self._quit.wait()
        trimming.cancel()
        assert self._parts is not None
        self._parts.reception.close()
        await self._parts.connections.close()
        await self._parts.awaited.stop()
        self._parts.inference.close()
        self._parts.reports.close()
        self._tell_left()
        self._passage.flush()

    def _shrink(self) -> None:
        if self._parts is not None:
            self._parts.inference.shrink()

    # ---- fronts come and go -------------------------------------------------------------------

    def _on_control(self) -> None:
        """Connect to a new front: no other word comes from the supervisor."""
        try:
            data, fds = datagram.receive(self._control, datagram.receive_buffer())
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self._on_lost()
            return
        CONTROL.decode(data)
        self._passage.finish()
        self._lose_front()
        self._passage.reopen(socket.socket(fileno=fds.pop()))
        if self._parts is not None:
            self._parts.entrance.find_front()
            self._parts.inference.resume()

    def _on_front_lost(self) -> None:
        """Called while messages are read, maybe for the sake of a request."""
        self._loop.call_soon(self._lose_front)

    def _lose_front(self) -> None:
        """Answer what the front had, which has ended, and hold what comes; once for each front."""
        parts = self._parts
        if parts is None or parts.inference.absence.is_now or self._passage.is_open:
            return
        self._left.clear()
        parts.entrance.lose_front()
        parts.inference.lose()
        parts.forwarding.lose()

    # ---- the front's word -------------------------------------------------------------------

    def _hear(self, message: Any, fds: list[int]) -> None:
        if type(message) is messages.Connect:
            assert self._parts is not None
            self._passage.post(messages.TakenConnections(1))  # which leaves before anything of it is read
            self._addresses[message.address] += 1
            self._parts.reception.take(message, fds)
        elif fds:
            assert self._parts is not None
            self._parts.inference.attach(message, fds)
        else:
            self._obeyed_by[type(message)](message)

    def _set_up(self, setup: messages.DoorSetup) -> None:
        self._counted = setup.counted
        self._settings = ServerSettings.from_wire(setup.settings)
        settings = part_of_door(self._settings)
        self._on_setup(settings)
        inference = DoorService(settings, self._passage)
        forwarding = Forwarding(self._passage, inference.absence, refuse, asks_readiness)
        admission = Admission(limits_of(settings), rates=RequestRates(reports=True))
        awaited = AwaitedRequests(inference.service.intake)
        http, grpc = both_doors(inference.service, settings, awaited, admission)
        connections = Connections(admission, settings.max_connection_age_s, setup.idle_paths)
        entrance = PassingDoor(grpc, http, forwarding.accept, rate_limit(settings, admission))
        accept = access_logged(AccessLog.of(settings), entrance.accept)
        reception = ConnectionReception(connections, accept, admission, tls_files(settings), self._leave)
        reports = Reports(self._status, self._report)
        parts = self._parts = DoorParts(
            admission, connections, entrance, forwarding, reception, reports, inference, awaited
        )
        self._obeyed_by = {**forwarding.obey, **inference.obey, **self._dispatch_table(parts)}
        connections.open()
        reports.open()

    def _dispatch_table(self, parts: DoorParts) -> Mapping[type, Callable[[Any], None]]:
        """Who obeys which message about connections; ``Connect`` has a descriptor, and is not in it."""
        return {
            messages.DoorSetup: lambda message: self._meet(parts, message),
            messages.AdjustDoor: lambda message: self._adjust(parts, message),
            messages.DoorLog: lambda message: logs.adjust(LogSettings(**message.settings)),
            messages.Announce: lambda message: self._announce(parts, message),
            messages.Renew: lambda _: self._renew(parts),
            messages.SpentTokens: lambda message: parts.admission.rates.charge(message.spent),
            messages.StopDoor: lambda _: self._quit.set(),
        }

    def _meet(self, parts: DoorParts, setup: messages.DoorSetup) -> None:
        """Go by the settings of another front, and tell it what this door has."""
        self._notice = 0
        self._adjust(parts, messages.AdjustDoor(setup.settings))
        self._renew(parts)  # they may have been renewed while nobody was there to say so
        self._left.clear()
        self._passage.post(messages.Holding(tuple(self._addresses.elements())))
        parts.reports.hurry()

    def _adjust(self, parts: DoorParts, message: messages.AdjustDoor) -> None:
        self._settings = with_changed_settings(self._settings, message.settings)
        settings = part_of_door(self._settings)
        parts.admission.adjust(limits_of(settings))
        if "max_connection_age_s" in message.settings:
            parts.connections.limit_age(settings.max_connection_age_s)

    def _announce(self, parts: DoorParts, message: messages.Announce) -> None:
        self._notice = message.notice
        parts.connections.announce()
        parts.reports.hurry()

    def _renew(self, parts: DoorParts) -> None:
        try:
            parts.reception.renew()
        except (OSError, ValueError) as error:  # the front could read them; they are others since
            logger.warning("the renewed TLS files are not used: %s", error)

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed. A connection lost for want of a descriptor is lost to the front's account."""
        loop.default_exception_handler(context)
        if datagram.is_starved(context.get("exception")):
            logger.critical("the door has no descriptor left for what it is given, and is replaced")
            self._on_lost()

    # ---- what the front is told --------------------------------------------------------------

    def _leave(self, address: str | None) -> None:
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]
        if not self._left:
            self._loop.call_soon(self._tell_left)
        self._left.append(address)

    def _tell_left(self) -> None:
        if self._left:
            left, self._left = self._left, []
            self._passage.post(messages.Left(tuple(left)))

    def _report(self, status: messages.Status) -> None:
        assert self._parts is not None
        self._passage.post(status)
        if spent := self._parts.admission.rates.take_spent():
            self._passage.post(messages.SpentTokens(spent))

    def _status(self) -> messages.Status:
        assert self._parts is not None
        connections, admission = self._parts.connections, self._parts.admission
        intake, arena = self._parts.inference.service.intake, self._parts.inference.arena_statistics()
        before = self._counted
        return messages.Status(
            notice=self._notice,
            n_unaware=connections.n_unaware if self._notice else 0,
            n_held=connections.n_held if self._notice else 0,
            n_requests=self._parts.entrance.n_requests + before.get("n_requests", 0),
            cpu_s=time.process_time() + before.get("cpu_s", 0.0),
            n_streams=admission.streams.n_open,
            unsent_nbytes=sum(admission.unsent_nbytes.values()),
            refused=dict(Counter(admission.refused) + Counter(before.get("refused"))),
            late=dict(Counter(admission.late) + Counter(before.get("late"))),
            limited=dict(Counter(admission.rates.refused) + Counter(before.get("limited"))),
            intake_nbytes=intake.nbytes,
            intake_refused=intake.refused + before.get("intake_refused", 0),
            arena_nbytes=arena.nbytes,
            arena_blocks=arena.blocks,
            reclaimed=dict(Counter(ORPHANS.reclaimed) + Counter(before.get("reclaimed"))),
        )
