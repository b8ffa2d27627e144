"""The connections that the front hands over to this door: each gets its protocol, some after a handshake."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.exchange.exchange import Accept
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.passage.messages import Connect
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.handshakes import Handshakes, tls_context


class ConnectionReception:
    """Takes sockets that have their place. ``left`` is told the address of each that has ended, once."""

    def __init__(
        self,
        connections: Connections,
        accept: Accept,
        admission: Admission,
        tls: TlsFiles | None,
        left: Callable[[str | None], None],
    ) -> None:
        self._made = connections.maker(accept)
        self._tls = tls
        self._left = left
        self._handshakes = None if tls is None else Handshakes(self._made, admission, tls_context(tls))
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        connections.arrivals.append(self)
        if self._handshakes is not None:
            connections.arrivals.append(self._handshakes)

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def check(self, now: float) -> None:
        """None of them waits for its client."""

    def take(self, message: Connect, fds: list[int]) -> None:
        """Have the connection, whose descriptor is the only one, from now on."""
        accepted, address = socket.socket(fileno=fds.pop()), message.address
        accepted.setblocking(False)
        give_back = partial(self._left, address)
        if message.tls and self._handshakes is not None:
            self._handshakes.take(accepted, address, give_back)
        else:
            task = self._loop.create_task(self._connect(accepted, give_back))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def renew(self) -> None:
        """Use the files of TLS anew; OSError, ValueError: they are of no use."""
        if self._handshakes is not None and self._tls is not None:
            self._handshakes.context = tls_context(self._tls)

    def close(self) -> None:
        """Wait for nobody who says nothing."""
        if self._handshakes is not None:
            self._handshakes.close()

    async def _connect(self, accepted: socket.socket, give_back: Callable[[], None]) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._made(give_back), accepted)
        except OSError:  # it was broken before it was made
            accepted.close()
            give_back()
