"""The server: connections of one event loop, their periodic checks, and the listeners that accept them."""

from __future__ import annotations

import abc
import asyncio
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.net.admission import Admission, source_of
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.connection import Connection, LoopBudget
from gpuserve.front.net.exchange import RequestHandler
from gpuserve.front.net.http1_protocol import Http1
from gpuserve.front.net.http2_protocol import Http2
from gpuserve.front.net.listeners import (
    PlainListener,
    TlsHandshakes,
    TlsListener,
    duplicate_listener,
    tls_context,
)


class IngressCounts(NamedTuple):
    """Counters of an ingress process since its start (names as in ``Admission``), and what it holds now."""

    n_requests: int
    cpu_s: float
    restarts: int
    refused: Mapping[str, int]
    late: Mapping[str, int]
    limited: Mapping[str, int]
    intake_refused: int
    reclaimed: Mapping[str, int]
    n_held: int
    n_streams: int
    unsent_nbytes: int
    intake_nbytes: int
    arena_nbytes: int
    arena_blocks: int


class IngressRow(NamedTuple):
    """The state of one ingress process."""

    number: int
    pid: int | None
    state: str
    n_connections: int
    counts: IngressCounts


class ProtocolServer(abc.ABC):
    """A server of the protocols. Methods that a subclass does not need do nothing."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Accept connections. Return once the server accepts."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Stop accepting, and close the connections."""

    async def stop_accepting(self) -> None:  # noqa: B027
        """Accept the clients that have connected by now and no others; serve the open connections."""

    def announce(self) -> None:  # noqa: B027
        """Ask each client, once, to send no more requests. Requests in flight are served."""

    @property
    def n_unaware(self) -> int:
        """The number of connections whose clients may not have read the announcement yet."""
        return 0

    @property
    def n_held(self) -> int:
        """The number of requests, without health watches, of clients asked to send no more."""
        return 0

    def adjust(self, changes: Mapping[str, Any]) -> None:  # noqa: B027
        """Apply other limits, by the names of ``Limits``, unless the server shares ``Admission``."""

    def ingress_rows(self) -> Iterable[IngressRow]:
        """Return the ingress processes of this server."""
        return ()

    def ingress_up(self, message: Any, fds: list[int]) -> None:  # noqa: B027
        """Use an ingress process that the supervisor reported by ``IngressUp``, with its descriptors."""

    def ingress_down(self, message: Any) -> None:  # noqa: B027
        """Note the end of an ingress process that the supervisor reported by ``IngressDown``."""

    def limit_age(self, max_age_s: float) -> None:  # noqa: B027
        """Limit the age of new connections, in seconds; 0: no limit."""

    async def renew(self) -> None:  # noqa: B027
        """Reload the TLS files for new connections. Raise OSError or ValueError if the files are invalid."""


#: Seconds between two checks of all connections.
_CHECK_S: Final = 1.0
#: The minimum, with a short maximum age.
_MIN_CHECK_S: Final = 0.1
#: The time limit of checks in one iteration; one connection with 4096 incomplete requests takes 10 ms.
_CHECK_BUDGET_S: Final = 0.005
#: The random variation of the maximum age.
_AGE_JITTER: Final = 0.1
#: Seconds without reading after which a client is closed while ``max_unsent_nbytes`` are exceeded.
_STUCK_S: Final = 2.0
#: Seconds to close connections. After a drain every request is answered and idle connections close at once,
#: so this is for clients that are slow to read.
CLOSE_TIMEOUT_S: Final = 3.0
_CLOSE_POLL_S: Final = 0.01


class PendingConnections(Protocol):
    """Connections in preparation: TLS handshakes, or sockets that another process passes."""

    @property
    def is_busy(self) -> bool: ...

    def check(self, now: float) -> None:
        """Close those that are overdue."""


class Connections:
    """The open connections of one event loop, checked periodically from ``open`` to ``close``.

    Requests with paths below ``idle_paths`` may be open on an idle server. ``pending`` are waited for, too.
    """

    def __init__(
        self, admission: Admission, max_age_s: float = 0.0, idle_paths: tuple[str, ...] = ()
    ) -> None:
        self.members: set[Connection] = set()
        self.pending: list[PendingConnections] = []
        self._admission = admission
        self._idle_paths = idle_paths
        self._loop = asyncio.get_running_loop()
        self._budget = LoopBudget(self._loop.call_soon, self._loop.call_later)
        self._check: asyncio.Handle | None = None
        self.limit_age(max_age_s)

    def open(self) -> None:
        self._check = self._loop.call_later(self._check_s, self._on_check)

    async def close(self) -> None:
        """Close each connection once it is answered, and abort the rest after ``CLOSE_TIMEOUT_S``."""
        if self._check is not None:
            self._check.cancel()
        deadline = self._loop.time() + CLOSE_TIMEOUT_S
        while (self.members or any(one.is_busy for one in self.pending)) and self._loop.time() < deadline:
            for connection in list(self.members):
                connection.shut_down()
            await asyncio.sleep(_CLOSE_POLL_S)
            self.check_all()
        for connection in list(self.members):
            connection.abort()

    def connection_factory(self, handler: RequestHandler) -> Callable[..., Connection]:
        """Return a function that makes connections. With ``release_place`` they are admitted already."""
        protocols = partial(Http1, handler=handler), partial(Http2, handler=handler)

        def factory(release_place: Callable[[], None] | None = None) -> Connection:
            age_s = self._max_age_s
            if age_s != math.inf:  # connections that were made together should not end together
                age_s *= random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)  # nosec B311
            return Connection(
                *protocols, self._budget, self.members, self._loop, age_s, self._admission, release_place
            )

        return factory

    def announce(self) -> None:
        for connection in list(self.members):
            connection.announce()

    @property
    def n_unaware(self) -> int:
        return sum(not connection.aware for connection in self.members)

    @property
    def n_held(self) -> int:
        """The number of requests that hold up a drain, without those of ``idle_paths``."""
        held = (path for connection in self.members for path in connection.held)
        return sum(not path.startswith(self._idle_paths) for path in held)

    def limit_age(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s or math.inf
        self._check_s = min(_CHECK_S, max(_MIN_CHECK_S, self._max_age_s * _AGE_JITTER / 4))
        if self._check is not None:
            self._check.cancel()
            self._on_check()

    def check_all(self) -> None:
        now = self._loop.time()
        for connection in list(self.members):
            connection.check(now)
        self._check_rest(now)

    def _on_check(self) -> None:
        self._check_some(iter(list(self.members)))

    def _check_some(self, left: Iterator[Connection]) -> None:
        """Check connections for a few milliseconds, the others in the next iteration, and so on."""
        began = self._loop.time()
        for connection in left:
            if connection in self.members:
                connection.check(began)
            if self._loop.time() - began > _CHECK_BUDGET_S:
                self._check = self._loop.call_soon(self._check_some, left)
                return
        self._check_rest(began)
        self._check = self._loop.call_later(self._check_s, self._on_check)

    def _check_rest(self, now: float) -> None:
        for one in self.pending:
            one.check(now)
        self._close_unread()
        self._close_incomplete()

    def _close_unread(self) -> None:
        """If too many bytes are unread, close the clients that read nothing, the largest first."""
        unsent_nbytes = sum(one.backlog_nbytes for one in self.members)
        most_nbytes = self._admission.limits.max_unsent_nbytes
        if unsent_nbytes > most_nbytes:
            holding = [one for one in self.members if one.backlog_nbytes]
            for one in sorted(holding, key=lambda one: one.backlog_nbytes, reverse=True):
                if unsent_nbytes > most_nbytes and one.stuck_s >= _STUCK_S:
                    unsent_nbytes -= one.backlog_nbytes
                    one.count_late("answer")
                    one.abort()
        self._admission.unsent_nbytes[self] = unsent_nbytes

    def _close_incomplete(self) -> None:
        """If too many requests are incomplete, close connections of the addresses with the most first."""
        most, n = self._admission.limits.max_half_requests, sum([one.n_incomplete for one in self.members])
        if n <= most:
            return
        holding = []
        of_address = Counter[str | bytes]()
        for one in self.members:
            if one.n_incomplete:
                client = one.endpoints.client
                address = source_of(client and client[0])
                holding.append((address, one))
                of_address[address] += one.n_incomplete
        holding.sort(key=lambda pair: (of_address[pair[0]], pair[1].n_incomplete), reverse=True)
        for _, one in holding:
            if n > most:
                n -= one.n_incomplete
                one.count_late("body")
                one.abort()


#: Turns of the event loop in which asyncio makes the connection of an accepted socket.
_ACCEPT_TURNS: Final = 3
#: The most asyncio servers of one listener.
_ACCEPTORS: Final = 16
#: At most one server for so many descriptors that the process may have.
_ACCEPTOR_DESCRIPTORS: Final = 256


class NativeServer(ProtocolServer):
    """HTTP/1.1, HTTP/2 and gRPC on every listener, in the running event loop.

    Args:
        listeners: Descriptors, each with the handler of its requests. ``stop`` closes the descriptors.
        requests: The requests served by coroutines, which ``stop`` cancels.
        connections: The connections of this loop.
        admission: The limits of connections.
        tls: The files for TLS; None: without TLS.
    """

    def __init__(
        self,
        listeners: Mapping[int, RequestHandler],
        requests: AsyncRequests,
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
        #: Those that accept, by descriptor.
        self._servers: dict[int, PlainListener | TlsListener] = {}

    async def start(self) -> None:
        for fd, handler in self._listeners.items():
            self._servers[fd] = await self._listen(fd, handler)
        self._connections.open()

    async def stop_accepting(self) -> None:
        while self._servers:
            self._servers.popitem()[1].close()
        await self._finish_accepting()

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
        for server in self._servers.values():
            if context is not None and isinstance(server, TlsListener):
                server.handshakes.context = context

    async def stop(self) -> None:
        for fd in self._listeners:
            if fd in self._servers:
                self._servers.pop(fd).close(fd)
            else:
                os.close(fd)
        await self._finish_accepting()
        await self._connections.close()
        await self._requests.stop()

    async def _finish_accepting(self) -> None:
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)

    async def _listen(self, fd: int, handler: RequestHandler) -> PlainListener | TlsListener:
        factory = self._connections.connection_factory(handler)
        if self._tls is not None:
            handshakes = TlsHandshakes(factory, self._admission, tls_context(self._tls))
            self._connections.pending.append(handshakes)
            return TlsListener(duplicate_listener(fd), handshakes, self._admission)
        n_acceptors = min(_ACCEPTORS, 1 + self._admission.n_descriptors // _ACCEPTOR_DESCRIPTORS)
        listener = PlainListener(fd, factory, n_acceptors)
        await listener.open()
        return listener
