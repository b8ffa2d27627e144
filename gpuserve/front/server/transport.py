"""The listeners of the endpoint's own server, for connections in the loop that accepts them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Any

from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.exchange import Accept
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.transport import Transport
from gpuserve.front.server.acceptor import BACKLOG, own_listener
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.handshakes import Handshakes, TlsListener, tls_context


class NativeTransport(Transport):
    """HTTP/1.1, HTTP/2 and gRPC on every listener, in the loop of the front. ``listeners`` are descriptors,
    each with what accepts its requests. They are closed by ``stop``, which also ends what ``requests`` runs.
    """

    def __init__(
        self,
        listeners: Mapping[int, Accept],
        requests: AwaitedRequests,
        connections: Connections,
        admission: Admission,
        tls: TlsFiles | None = None,
    ) -> None:
        self._listeners = listeners
        self._requests = requests
        self._connections = connections
        self._admission = admission
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server | TlsListener] = []

    async def start(self) -> None:
        self._servers = [await self._listen(*one) for one in self._listeners.items()]
        self._connections.open()

    def announce(self) -> None:
        self._connections.announce()

    @property
    def n_unaware(self) -> int:
        return self._connections.n_unaware

    @property
    def n_held(self) -> int:
        return self._connections.n_held

    def limit_age(self, max_age_s: float) -> None:
        self._connections.limit_age(max_age_s)

    async def renew(self) -> None:
        context = None if self._tls is None else tls_context(self._tls)
        for server in self._servers:
            if context is not None and isinstance(server, TlsListener):
                server.handshakes.context = context

    async def stop(self) -> None:
        await asyncio.sleep(0)  # who has connected meanwhile is accepted: closing would reset the connection
        for server in self._servers:
            server.close()
        for fd in self._listeners:
            os.close(fd)
        await self._connections.close()
        await self._requests.stop()

    async def _listen(self, fd: int, accept: Accept) -> asyncio.Server | TlsListener:
        listener, made = own_listener(fd), self._connections.maker(accept)
        if self._tls is not None:
            handshakes = Handshakes(made, self._admission, tls_context(self._tls))
            self._connections.arrivals.append(handshakes)
            return TlsListener(listener, handshakes, self._admission)
        is_unix = listener.family == socket.AF_UNIX
        create: Any = self._loop.create_unix_server if is_unix else self._loop.create_server
        server: asyncio.Server = await create(made, sock=listener, backlog=BACKLOG)
        return server
