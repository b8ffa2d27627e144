"""Listening sockets: accepting connections, and TLS handshakes.

A TLS connection is counted when accepted and costs only a descriptor until its client sends data. A handshake
needs the key's CPU time, so handshakes start one at a time, in turn by client address: a flood of them leaves
the event loop to others.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.net.admission import Admission, source_of
from gpuserve.front.net.connection import FRESH_S, Connection
from gpuserve_worker.protocol.datagram import SpareDescriptor

#: The kernel's default maximum (net.core.somaxconn).
BACKLOG: Final = 4096
#: Connections accepted in one iteration of the loop.
_MAX_ACCEPTED: Final = 64
#: Seconds until accepting is retried after a lack of descriptors or memory.
_RETRY_S: Final = 0.5
#: TCP keepalive: a client whose machine has vanished is noticed after one to two minutes.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
#: Takes ownership of a connection. The second argument is the client's address, None on a unix socket.
OnAccepted: TypeAlias = Callable[[socket.socket, str | None], None]


def duplicate_listener(fd: int) -> socket.socket:
    """Return a socket on a duplicate of the descriptor, with TCP keepalive for accepted connections."""
    listener = socket.socket(fileno=os.dup(fd))
    listener.setblocking(False)
    for option in () if listener.family == socket.AF_UNIX else _KEEPALIVE:
        listener.setsockopt(*option)  # accepted sockets inherit the options
    return listener


def _accept_and_close(listener: socket.socket, on_accepted: OnAccepted, last_fd: int | None) -> None:
    """Accept the connections that wait, and close the listener, with its last descriptor if there is one.

    Closing a listener resets the connections that wait, so nothing is done between the two.
    """
    accepted: list[tuple[socket.socket, Any]] = []
    with suppress(OSError):  # none waits any more, or no descriptor is left
        while len(accepted) < BACKLOG:
            accepted.append(listener.accept())
    listener.close()
    if last_fd is not None:
        os.close(last_fd)
    for connection, peer in accepted:
        on_accepted(connection, _address_of(connection, peer))


def _address_of(accepted: socket.socket, peer: Any) -> str | None:
    return None if accepted.family == socket.AF_UNIX else peer[0]


class Acceptor:
    """An accept loop in the running event loop, from ``open`` to ``close``."""

    def __init__(self, listener: socket.socket, on_accepted: OnAccepted) -> None:
        self._listener = listener
        self._on_accepted = on_accepted
        self._spare = SpareDescriptor()
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        self._spare.hold()
        self._listener.listen(BACKLOG)
        self._listen()

    def close(self, last_fd: int | None = None) -> None:
        """Stop accepting, after those who have connected by now. ``last_fd`` is closed."""
        self._loop.remove_reader(self._listener)
        _accept_and_close(self._listener, self._on_accepted, last_fd)
        self._spare.release()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                if self._refuse():
                    continue
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_RETRY_S, self._listen)
                return
            self._on_accepted(accepted, _address_of(accepted, peer))

    def _refuse(self) -> bool:
        """Close a connection without a descriptor, so its client does not wait. Return success."""
        if not self._spare.release():
            self._spare.hold()
            return False
        try:
            self._listener.accept()[0].close()
        except OSError:
            return False
        finally:
            self._spare.hold()
        return True


# ---- without TLS ---------------------------------------------------------------------------------

#: A listener whose queue has so many connections after one was accepted has a burst.
_BURST: Final = 2
#: Seconds in which a burst is served. A longer burst begins anew.
_BURST_S: Final = 1.0
#: The bytes of ``struct tcp_info`` with the length of a listener's queue.
_QUEUE_LENGTH: Final = slice(24, 28)


class PlainListener:
    """A listening socket without TLS: one server of asyncio, and up to ``n_servers`` during a burst.

    libuv accepts one connection of each server in a turn of the event loop, and a turn for each connection
    makes batches of one request. A connection wakes all servers of its socket, so that a lone connection
    would pay for those that have nothing to accept. The queue of a unix socket has no length that could be
    asked for, so such a socket always has all servers.
    """

    def __init__(self, fd: int, make_connection: Callable[[], Connection], n_servers: int) -> None:
        self._listener = duplicate_listener(fd)
        self._make_connection = make_connection
        self._is_unix = self._listener.family == socket.AF_UNIX
        self._n_servers = n_servers
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._burst_servers: list[asyncio.Server] = []
        self._burst: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        await self._add(self._servers, self._n_servers if self._is_unix else 1)

    def close(self, last_fd: int | None = None) -> None:
        """Stop accepting, after those who have connected by now. ``last_fd`` is closed."""
        if self._burst is not None:
            self._burst.cancel()
        for server in self._servers + self._burst_servers:
            server.close()
        _accept_and_close(self._listener, self._connect, last_fd)

    def _connect(self, accepted: socket.socket, address: str | None) -> None:
        accepted.setblocking(False)
        connected = self._loop.connect_accepted_socket(self._make_connection, accepted)
        task = self._loop.create_task(connected)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, servers: list[asyncio.Server], count: int) -> None:
        create: Any = self._loop.create_unix_server if self._is_unix else self._loop.create_server
        for _ in range(count):
            listener = duplicate_listener(self._listener.fileno())
            servers.append(await create(self._on_accepted, sock=listener, backlog=BACKLOG))

    def _on_accepted(self) -> Connection:
        if self._burst is None and not self._is_unix:
            info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE_LENGTH.stop)
            if int.from_bytes(info[_QUEUE_LENGTH], sys.byteorder) >= _BURST:
                self._burst = self._loop.create_task(self._serve_burst())
        return self._make_connection()

    async def _serve_burst(self) -> None:
        with suppress(OSError):  # no descriptor is left, and the servers that exist go on
            await self._add(self._burst_servers, self._n_servers - 1)
        await asyncio.sleep(_BURST_S)
        while self._burst_servers:
            self._burst_servers.pop().close()
        self._burst = None


# ---- TLS -----------------------------------------------------------------------------------------

#: Seconds from the connection to the end of the handshake.
HANDSHAKE_S: Final = 15.0
#: Seconds between the starts of two handshakes. The key's CPU work takes 1 or 2 ms, and other requests need
#: some iterations of the loop.
_HANDSHAKE_INTERVAL_S: Final = 0.002
#: The maximum number of handshakes of one address in progress: each holds some 100 KiB.
MAX_HANDSHAKES_PER_ADDRESS: Final = 256


class _PendingHandshake:
    """An accepted connection without TLS yet, and the callback that releases its place in the admission."""

    __slots__ = ("_has_place", "_release_place", "address", "socket", "source", "until_s")

    def __init__(
        self, accepted: socket.socket, address: str | None, release_place: Callable[[], None], until_s: float
    ) -> None:
        self.socket = accepted
        self.address = address
        self.source = source_of(address)
        self.until_s = until_s
        self._release_place = release_place
        self._has_place = True

    def release(self) -> None:
        """Release the place, once."""
        if self._has_place:
            self._has_place = False
            self._release_place()


class TlsListener:
    """A listening socket whose admitted connections are secured. Accepts from its creation on."""

    def __init__(self, listener: socket.socket, handshakes: TlsHandshakes, admission: Admission) -> None:
        self.handshakes = handshakes
        self._admission = admission
        self._acceptor = Acceptor(listener, self._on_accepted)
        self._acceptor.open()

    def close(self, last_fd: int | None = None) -> None:
        """Stop accepting, and wait ``FRESH_S`` for handshakes that have not begun. ``last_fd`` is closed."""
        self._acceptor.close(last_fd)
        self.handshakes.close()

    def _on_accepted(self, accepted: socket.socket, address: str | None) -> None:
        if self._admission.admit(address, accepted.fileno()):
            self.handshakes.on_accepted(accepted, address, partial(self._admission.release, address))
        else:
            accepted.close()


class TlsHandshakes:
    """The TLS handshakes of one listener. ``context`` is used for new ones."""

    def __init__(
        self,
        make_connection: Callable[[Callable[[], None]], Connection],
        admission: Admission,
        context: ssl.SSLContext,
    ) -> None:
        self.context = context
        self._make_connection = make_connection
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        #: Connections without any data yet, and those that wait for their handshake, by address.
        self._silent: set[_PendingHandshake] = set()
        self._waiting: dict[str | bytes, deque[_PendingHandshake]] = {}
        self._n_begun: Counter[str | bytes] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_scheduled = False
        self._is_closing = False

    @property
    def is_busy(self) -> bool:
        """True if handshakes have begun, wait to begin, or may begin."""
        return bool(self._tasks or self._waiting or self._silent)

    def close(self) -> None:
        """From now on close connections whose first bytes do not arrive within ``FRESH_S``."""
        self._is_closing = True

    def check(self, now: float) -> None:
        """Close connections that have not begun a handshake in time; begun ones have their own timeout."""
        less_s = HANDSHAKE_S - FRESH_S if self._is_closing else 0.0
        for pending in [one for one in self._silent if now > one.until_s - less_s]:
            self._loop.remove_reader(pending.socket)
            self._silent.discard(pending)
            self._close(pending)
            if now > pending.until_s:
                self._count_late(pending)
        for source, queue in list(self._waiting.items()):
            while queue and now > queue[0].until_s:
                self._count_late(queue[0])
                self._close(queue.popleft())
            if not queue:
                del self._waiting[source]

    # ---- waiting handshakes -------------------------------------------------------------------

    def on_accepted(
        self, accepted: socket.socket, address: str | None, release_place: Callable[[], None]
    ) -> None:
        """Secure an admitted connection once its client sends data."""
        accepted.setblocking(False)
        pending = _PendingHandshake(accepted, address, release_place, self._loop.time() + HANDSHAKE_S)
        self._silent.add(pending)
        self._loop.add_reader(accepted, self._on_first_bytes, pending)

    def _on_first_bytes(self, pending: _PendingHandshake) -> None:
        """Queue a connection whose client has begun a handshake or has gone."""
        self._loop.remove_reader(pending.socket)
        self._silent.discard(pending)
        self._waiting.setdefault(pending.source, deque()).append(pending)
        self._start_next_soon()

    def _close(self, pending: _PendingHandshake) -> None:
        pending.socket.close()
        pending.release()

    def _count_late(self, pending: _PendingHandshake) -> None:
        client = None if pending.address is None else (pending.address, 0)
        self._admission.count_late("handshake", client)

    # ---- running handshakes -------------------------------------------------------------------

    def _start_next_soon(self) -> None:
        if not self._next_scheduled:
            self._next_scheduled = True
            self._loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        self._next_scheduled = False
        for source in self._waiting:
            if self._n_begun[source] < MAX_HANDSHAKES_PER_ADDRESS:
                break
        else:
            return
        queue = self._waiting.pop(source)
        self._begin(queue.popleft())
        if queue:
            self._waiting[source] = queue  # after the other addresses
        self._next_scheduled = True
        self._loop.call_later(_HANDSHAKE_INTERVAL_S, self._start_next)

    def _begin(self, pending: _PendingHandshake) -> None:
        self._n_begun[pending.source] += 1
        task = self._loop.create_task(self._secure(pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _secure(self, pending: _PendingHandshake) -> None:
        connection = self._make_connection(pending.release)
        left_s = max(0.1, pending.until_s - self._loop.time())
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, pending.socket, ssl=self.context, ssl_handshake_timeout=left_s
            )
        except OSError:  # not TLS, an untrusted certificate, or the client is gone
            if self._loop.time() > pending.until_s:
                self._count_late(pending)
        finally:
            if not connection.endpoints.tls:  # the handshake failed, so the connection releases nothing
                pending.release()
            self._n_begun[pending.source] -= 1
            if not self._n_begun[pending.source]:
                del self._n_begun[pending.source]
            self._start_next_soon()


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or newer that requires a client certificate if there is a CA for them."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # renegotiation costs as much as a handshake
    context.load_cert_chain(files.certfile, files.keyfile)
    context.set_alpn_protocols(["h2", "http/1.1"])
    if files.client_ca:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
