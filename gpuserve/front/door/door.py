"""A door put together: each message of the front goes to the part that obeys it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuserve.front.door.reception import ConnectionReception
from gpuserve.front.door.reports import Reports
from gpuserve.front.doors.logged import access_logged
from gpuserve.front.doors.opening import both_doors
from gpuserve.front.doors.passing_door import PassingDoor
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.memory.trimming import keep_trim
from gpuserve.front.observe.access_log import AccessLog
from gpuserve.front.passage import messages
from gpuserve.front.passage.forwarding import Forwarding
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.service import DoorService
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.limits import limits_of, part_of_door
from gpuserve.settings import logs
from gpuserve.settings.log import LogSettings
from gpuserve.settings.server import ServerSettings, adjusted
from gpuserve.settings.tls import tls_files
from gpuserve_worker.protocol import datagram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorParts:
    """What a door is made of, from the first message of the front on."""

    admission: Admission
    connections: Connections
    entrance: PassingDoor
    reception: ConnectionReception
    reports: Reports
    inference: DoorService
    awaited: AwaitedRequests


class Door:
    """One door. ``on_lost`` is called when the front is gone or the door cannot go on."""

    def __init__(
        self,
        passage: socket.socket,
        on_setup: Callable[[ServerSettings], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._passage = Passage(passage, self._hear, on_lost)
        self._on_setup = on_setup
        self._on_lost = on_lost
        self._settings = ServerSettings()
        self._parts: DoorParts | None = None
        self._obeyed_by: Mapping[type, Callable[[Any], None]] = {messages.DoorSetup: self._set_up}
        #: How many notices the front has given.
        self._notice = 0
        #: The addresses of connections that have ended in this turn.
        self._left: list[str | None] = []
        self._quit = asyncio.Event()

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_defect)
        self._passage.open()
        trimming = asyncio.get_running_loop().create_task(keep_trim(self._shrink))
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

    # ---- the front's word -------------------------------------------------------------------

    def _hear(self, message: Any, fds: list[int]) -> None:
        if type(message) is messages.Connect:
            assert self._parts is not None
            self._passage.post(messages.TakenConnections(1))  # which leaves before anything of it is read
            self._parts.reception.take(message, fds)
        elif fds:
            assert self._parts is not None
            self._parts.inference.attach(message, fds)
        else:
            self._obeyed_by[type(message)](message)

    def _set_up(self, setup: messages.DoorSetup) -> None:
        self._settings = ServerSettings.from_wire(setup.settings)
        settings = part_of_door(self._settings)
        self._on_setup(settings)
        forwarding = Forwarding(self._passage)
        inference = DoorService(settings, self._passage)
        admission = Admission(limits_of(settings))
        awaited = AwaitedRequests(inference.service.intake)
        http, grpc = both_doors(inference.service, settings, awaited, admission)
        connections = Connections(admission, settings.max_connection_age_s, setup.idle_paths)
        entrance = PassingDoor(grpc, http, forwarding.accept)
        accept = access_logged(AccessLog.of(settings), entrance.accept)
        reception = ConnectionReception(connections, accept, admission, tls_files(settings), self._leave)
        reports = Reports(self._status, self._passage.post)
        parts = self._parts = DoorParts(
            admission, connections, entrance, reception, reports, inference, awaited
        )
        self._obeyed_by = {**forwarding.obey, **inference.obey, **self._dispatch_table(parts)}
        connections.open()
        reports.open()

    def _dispatch_table(self, parts: DoorParts) -> Mapping[type, Callable[[Any], None]]:
        """Who obeys which message about connections; ``Connect`` has a descriptor, and is not in it."""
        return {
            messages.AdjustDoor: lambda message: self._adjust(parts, message),
            messages.DoorLog: lambda message: logs.adjust(LogSettings(**message.settings)),
            messages.Announce: lambda message: self._announce(parts, message),
            messages.Renew: lambda _: self._renew(parts),
            messages.StopDoor: lambda _: self._quit.set(),
        }

    def _adjust(self, parts: DoorParts, message: messages.AdjustDoor) -> None:
        self._settings = adjusted(self._settings, message.settings)
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
        if not self._left:
            asyncio.get_running_loop().call_soon(self._tell_left)
        self._left.append(address)

    def _tell_left(self) -> None:
        if self._left:
            left, self._left = self._left, []
            self._passage.post(messages.Left(tuple(left)))

    def _status(self) -> messages.Status:
        assert self._parts is not None
        connections, admission = self._parts.connections, self._parts.admission
        intake, arena = self._parts.inference.service.intake, self._parts.inference.arena_statistics()
        return messages.Status(
            notice=self._notice,
            n_unaware=connections.n_unaware if self._notice else 0,
            n_held=connections.n_held if self._notice else 0,
            n_requests=self._parts.entrance.n_requests,
            cpu_s=time.process_time(),
            n_streams=admission.streams.n_open,
            unsent_nbytes=sum(admission.unsent_nbytes.values()),
            refused=dict(admission.refused),
            late=dict(admission.late),
            intake_nbytes=intake.nbytes,
            intake_refused=intake.refused,
            arena_nbytes=arena.nbytes,
            arena_blocks=arena.blocks,
        )
