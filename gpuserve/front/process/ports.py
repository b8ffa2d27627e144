"""The ports of a front: the servers on its listeners, opened, given renewed certificates, closed together."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeAlias

from gpuserve.config.settings.server import GRPCIO, ServerSettings
from gpuserve.config.settings.tls import tls_files
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.transport import DoorRow, Transport
from gpuserve.front.live.page import LivePage
from gpuserve.front.process import assembly
from gpuserve.front.process.certificates import CertificateWatch
from gpuserve.front.process.connection_metrics import connection_families, intake_families
from gpuserve.front.server.limits import limits_of
from gpuserve.front.service.control import Say
from gpuserve.front.service.service import InferenceService
from gpuserve.supervisor.control.front_messages import IngressDown, IngressUp

#: Starts a task; when it fails, the front cannot go on.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]

#: What ``door_rows`` have, in their order.
_DOOR: Final = ("number", "pid", "state", "connections", "requests", "cpu_s", "restarts")


class Ports:
    """The transports of a front, none before ``open``; what they are asked is in ``Transport``."""

    def __init__(
        self,
        service: InferenceService,
        settings: ServerSettings,
        spawn: Spawn,
        live: LivePage | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self._service = service
        self._live = live
        self._settings = settings
        self._spawn = spawn
        self._say = say
        self._transports: list[Transport] = []
        self._admission = Admission(limits_of(settings), n_processes=settings.doors)

    async def open(self, listeners: dict[str, int]) -> None:
        """Accept connections on the listeners: descriptors by role ("http", "grpc", "metrics", "health")."""
        service, settings = self._service, self._settings
        grpc_port = None
        if settings.transport == GRPCIO and "grpc" in listeners:
            grpc_port = _port(listeners.pop("grpc"))
        service.metrics_page.add(lambda: connection_families(self._admission, tuple(self.doors())))
        service.metrics_page.add(lambda: intake_families(service.intake, tuple(self.doors())))
        if self._live is not None:
            self._live.feed.more = self._watched
        self._transports += assembly.transports(
            service, settings, listeners, grpc_port, self._admission, self._say, self._live
        )
        for transport in self._transports:
            await transport.start()
        files = tls_files(settings)
        if files is not None and self._transports:
            certificates = CertificateWatch(files, self._renew_certificates)
            service.metrics_page.add(certificates.families)
            self._spawn(certificates.run())

    async def close(self) -> None:
        for transport in self._transports:
            await transport.stop()

    def announce(self) -> None:
        for transport in self._transports:
            transport.announce()

    @property
    def n_unaware(self) -> int:
        return sum(one.n_unaware for one in self._transports)

    @property
    def n_held(self) -> int:
        return sum(one.n_held for one in self._transports)

    def adjust(self, settings: ServerSettings) -> None:
        """What connections may take is as the settings say now."""
        limits = limits_of(settings)
        self._admission.adjust(limits)
        for transport in self._transports:
            transport.adjust(dataclasses.asdict(limits))

    def door_up(self, message: IngressUp, fds: list[int]) -> None:
        for transport in self._transports:
            transport.door_up(message, fds)

    def door_down(self, message: IngressDown) -> None:
        for transport in self._transports:
            transport.door_down(message)

    def doors(self) -> Iterator[DoorRow]:
        """The doors that are processes of their own."""
        for transport in self._transports:
            yield from transport.doors()

    def door_rows(self) -> tuple[tuple[int, int | None, str, int, int, float, int], ...]:
        """What a ``Census`` says of the doors."""
        return tuple(one[:4] + one.counts[:3] for one in self.doors())

    @property
    def n_connections(self) -> int:
        return self._admission.n_open

    def _watched(self) -> dict[str, Any]:
        """What the live page shows of the ports."""
        doors = [dict(zip(_DOOR, one, strict=True)) for one in self.door_rows()]
        return {"connections": self.n_connections, "doors": doors}

    def limit_age(self, max_age_s: float) -> None:
        for transport in self._transports:
            transport.limit_age(max_age_s)

    async def _renew_certificates(self) -> None:
        for transport in self._transports:
            await transport.renew()


def _port(listener_fd: int) -> int:
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        return int(listener.getsockname()[1])
