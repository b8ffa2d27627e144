"""One connection to the server: the socket around a ``CallProtocol``, opened anew when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final, cast

from gpuserve.bench.calls.call import LOST, CallProtocol, ProtocolBroken
from gpuserve.bench.calls.load import LoadGenerator
from gpuserve.bench.calls.messages import Encryption, LoaderSetup
from gpuserve.bench.plan.errors import reason

_RETRY_S: Final = 0.1
_CONNECT_TIMEOUT_S: Final = 10.0


class LoadConnection(asyncio.Protocol):
    """Keeps one connection open; each new socket gets a protocol from ``make``, entered in ``by_calls``."""

    def __init__(
        self,
        setup: LoaderSetup,
        context: ssl.SSLContext | None,
        load: LoadGenerator,
        make: Callable[[], CallProtocol],
        by_calls: dict[CallProtocol, LoadConnection],
    ) -> None:
        self._setup = setup
        self._context = context
        self._load = load
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._closed = False
        self.calls: CallProtocol = make()
        self._by_calls = by_calls
        by_calls[self.calls] = self

    async def open(self) -> None:
        """Connect once, and wait until calls can be begun; OSError: no server is there that speaks this."""
        loop = asyncio.get_running_loop()
        name = self._setup.host if self._context else None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await loop.create_connection(
                    lambda: self, self._setup.host, self._setup.port, ssl=self._context, server_hostname=name
                )
                while not self.calls.room:
                    if not self.calls.usable or self._transport is None:
                        raise ConnectionError("the server closed the connection at once")
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise TimeoutError(f"no answer within {_CONNECT_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        """Close the socket for good; calls in flight are dropped without an end."""
        self._closed = True
        if self._reopening is not None:
            self._reopening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reopening
        self._by_calls.pop(self.calls, None)
        self._load.pool.remove(self.calls)
        if self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        """Close the socket; a new one is opened."""
        if self._transport is not None:
            self._transport.abort()

    def write(self) -> None:
        out = self.calls.out
        if out and self._transport is not None:
            self._transport.write(bytes(out))
            out.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.calls.opened()
        self.write()
        if self.calls.room:
            self._load.connected(self.calls, time.monotonic())

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        calls, had_room = self.calls, self.calls.room
        try:
            calls.take(data, now)
        except ProtocolBroken as error:
            self._load.cannot_connect(str(error))
            self.abort()
        if not had_room and calls.room:
            self._load.connected(calls, now)
        self._load.pool.touched.add(calls)
        flush(self._load, self._by_calls)
        if not calls.usable and not calls.in_flight:
            self.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        """Fail the calls of the connection, and open it anew."""
        self._transport = None
        if self._closed:
            return
        now = time.monotonic()
        lost = self.calls
        self._by_calls.pop(lost, None)
        self.calls = self._make()
        self._by_calls[self.calls] = self
        self._load.pool.remove(lost)
        lost.lost(LOST, now)
        flush(self._load, self._by_calls)
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        while not self._closed:
            try:
                await self.open()
                return
            except OSError as error:
                self._load.cannot_connect(reason(error))
                await asyncio.sleep(_RETRY_S)


def flush(load: LoadGenerator, by_calls: dict[CallProtocol, LoadConnection]) -> None:
    """Send what the protocols of all connections have in ``out``."""
    touched = load.pool.touched
    while touched:
        connection = by_calls.get(touched.pop())
        if connection is not None:
            connection.write()


def tls_context(tls: Encryption | None, *, http2: bool) -> ssl.SSLContext | None:
    """The TLS context of the connections, None for none; OSError or ssl.SSLError: a file cannot be read."""
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=tls.ca or None)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key or None)
    if http2:
        context.set_alpn_protocols(["h2"])
    return context
