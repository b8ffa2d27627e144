"""The listeners of the endpoint's own server, and the connections made on them."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.connection import Connection
from gpuserve.front.exchange.exchange import Accept
from gpuserve.front.exchange.limits import Admission, source_of
from gpuserve.front.exchange.transport import Transport
from gpuserve.front.exchange.turn import Turn
from gpuserve.front.server.handshakes import TlsListener, tls_context
from gpuserve.front.server.http1.protocol import Http1
from gpuserve.front.server.http2.protocol import Http2
from gpuserve.settings.tls import TlsFiles

logger = logging.getLogger(__name__)

_BACKLOG: Final = 4096
#: How often connections are looked at that take too long.
_CHECK_S: Final = 1.0
#: And with the shortest of ages.
_MIN_CHECK_S: Final = 0.1
#: So long connections are looked at in one go; one with 4096 half requests takes 10 ms.
_CHECKING_S: Final = 0.005
#: Of a connection's greatest age.
_AGE_JITTER: Final = 0.1
#: A client whose machine is gone without a word is noticed after a minute or two, however quiet it was.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
#: Who reads nothing for so long is closed where ``max_unsent_nbytes`` are held.
_STUCK_S: Final = 2.0
#: After our own drain every request is answered, and what idles is closed at once. What is waited for are
#: answers to clients that are slow to read them.
CLOSE_TIMEOUT_S: Final = 3.0
_CLOSE_POLL_S: Final = 0.01


class NativeTransport(Transport):
    """HTTP/1.1, HTTP/2 and gRPC on every listener, in the loop of the front. ``listeners`` are descriptors,
    each with what accepts its requests. They are closed by ``stop``, which also ends what ``requests`` runs.
    ``idle_paths`` are how paths begin whose requests may be open while there is nothing to do. ``admission``
    may be shared with others.
    """

    def __init__(
        self,
        listeners: Mapping[int, Accept],
        requests: AwaitedRequests,
        tls: TlsFiles | None = None,
        max_connection_age_s: float = 0.0,
        idle_paths: tuple[str, ...] = (),
        admission: Admission | None = None,
    ) -> None:
        self._admission = admission or Admission()
        self._listeners = listeners
        self._requests = requests
        self._idle_paths = idle_paths
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server | TlsListener] = []
        self._connections: set[Connection] = set()
        self._turn = Turn(self._loop.call_soon, self._loop.call_later)
        self._check: asyncio.Handle | None = None
        self.limit_age(max_connection_age_s)

    async def start(self) -> None:
        self._servers = [await self._listen(*one) for one in self._listeners.items()]
        self._check = self._loop.call_later(self._check_s, self._on_check)

    def announce(self) -> None:
        for connection in list(self._connections):
            connection.announce()

    @property
    def n_unaware(self) -> int:
        return sum(not connection.aware for connection in self._connections)

    @property
    def n_held(self) -> int:
        """Who watches health has none, nor who operates the server, and may be waiting for this."""
        held = (path for connection in self._connections for path in connection.held)
        return sum(not path.startswith(self._idle_paths) for path in held)

    def limit_age(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s or math.inf
        self._check_s = min(_CHECK_S, max(_MIN_CHECK_S, self._max_age_s * _AGE_JITTER / 4))
        if self._check is not None:
            self._check.cancel()
            self._on_check()

    async def renew(self) -> None:
        context = None if self._tls is None else tls_context(self._tls)
        for server in self._servers:
            if context is not None and isinstance(server, TlsListener):
                server.context = context

    async def stop(self) -> None:
        await asyncio.sleep(0)  # who has connected meanwhile is accepted: closing would reset the connection
        for server in self._servers:
            server.close()
        for fd in self._listeners:
            os.close(fd)
        if self._check is not None:
            self._check.cancel()
        deadline = self._loop.time() + CLOSE_TIMEOUT_S
        while (self._connections or self._is_securing) and self._loop.time() < deadline:
            for connection in list(self._connections):
                connection.shut_down()
            await asyncio.sleep(_CLOSE_POLL_S)
            self._check_all()
        for connection in list(self._connections):
            connection.abort()
        await self._requests.stop()

    @property
    def _is_securing(self) -> bool:
        return any(isinstance(one, TlsListener) and one.is_busy for one in self._servers)

    async def _listen(self, fd: int, accept: Accept) -> asyncio.Server | TlsListener:
        listener = socket.socket(fileno=os.dup(fd))
        listener.setblocking(False)
        is_unix = listener.family == socket.AF_UNIX
        for option in () if is_unix else _KEEPALIVE:
            listener.setsockopt(*option)  # what is accepted has them too
        made = self._made(accept)
        if self._tls is not None:
            listener.listen(_BACKLOG)
            return TlsListener(listener, made, self._admission, tls_context(self._tls))
        create: Any = self._loop.create_unix_server if is_unix else self._loop.create_server
        server: asyncio.Server = await create(made, sock=listener, backlog=_BACKLOG)
        return server

    def _made(self, accept: Accept) -> Callable[..., Connection]:
        """What makes the connections of a listener."""
        speaks = partial(Http1, accept=accept), partial(Http2, accept=accept)

        def made(leave: Callable[[], None] | None = None) -> Connection:
            # Connections that were made together do not end together.
            age_s = self._max_age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            members, loop = self._connections, self._loop
            return Connection(*speaks, self._turn, members, loop, age_s, self._admission, leave)

        return made

    def _on_check(self) -> None:
        self._check_some(iter(list(self._connections)))

    def _check_some(self, left: Iterator[Connection]) -> None:
        """Check connections for a few milliseconds, the others in the next turn; then all, in a while."""
        began = self._loop.time()
        for connection in left:
            if connection in self._connections:
                connection.check(began)
            if self._loop.time() - began > _CHECKING_S:
                self._check = self._loop.call_soon(self._check_some, left)
                return
        self._check_rest(began)
        self._check = self._loop.call_later(self._check_s, self._on_check)

    def _check_all(self) -> None:
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check(now)
        self._check_rest(now)

    def _check_rest(self, now: float) -> None:
        for server in self._servers:
            if isinstance(server, TlsListener):
                server.check(now)
        self._shed()
        self._shed_half()

    def _shed(self) -> None:
        """Where too much waits to be read, close who reads nothing, with the most first."""
        unsent_nbytes = sum(one.backlog_nbytes for one in self._connections)
        most_nbytes = self._admission.limits.max_unsent_nbytes
        if unsent_nbytes > most_nbytes:
            holding = [one for one in self._connections if one.backlog_nbytes]
            for one in sorted(holding, key=lambda one: one.backlog_nbytes, reverse=True):
                if unsent_nbytes > most_nbytes and one.stuck_s >= _STUCK_S:
                    unsent_nbytes -= one.backlog_nbytes
                    one.count_late("answer")
                    one.abort()
        self._admission.unsent_nbytes[self] = unsent_nbytes

    def _shed_half(self) -> None:
        """Where too many requests have not come whole, close who has them, of the address with the most."""
        most, n = self._admission.limits.max_half_requests, sum([one.n_half for one in self._connections])
        if n <= most:
            return
        holding = [(_address(one), one) for one in self._connections if one.n_half]
        of_address = Counter[str | bytes]()
        for address, one in holding:
            of_address[address] += one.n_half
        for _, one in sorted(holding, key=lambda pair: (of_address[pair[0]], pair[1].n_half), reverse=True):
            if n > most:
                n -= one.n_half
                one.count_late("body")
                one.abort()


def _address(connection: Connection) -> str | bytes:
    client = connection.ends.client
    return source_of(client and client[0])
