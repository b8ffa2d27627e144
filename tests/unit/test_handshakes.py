"""TLS before it is there: who is counted, who is let go, and whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from processes import until
from tls import make_certificate

from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.net import listeners as handshakes
from gpuserve.front.net.admission import Admission, Limits
from gpuserve.front.net.listeners import HANDSHAKE_S, TlsHandshakes, TlsListener, tls_context


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    both = str(make_certificate(tmp_path_factory.mktemp("tls")))
    return tls_context(TlsFiles(both, both))


class Made(asyncio.Protocol):
    """A connection, as far as it matters here."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave = leave
        self.endpoints = SimpleNamespace(tls=False)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.endpoints.tls = True


class Listened:
    """A listener, what it has made, and its clients."""

    def __init__(self, context: ssl.SSLContext, admission: Admission) -> None:
        self.admission = admission
        self.made: list[Any] = []
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        self._address = listening.getsockname()
        handshakes = TlsHandshakes(self._make, admission, context)
        self.listener = TlsListener(listening, handshakes, admission)

    def _make(self, leave: Callable[[], None]) -> Any:
        made: Any = Made(leave)
        self.made.append(made)
        return made

    async def client(self) -> socket.socket:
        """A connection that was admitted or refused."""
        before = self._n_judged()
        made = socket.create_connection(self._address, 5)
        await until(lambda: self._n_judged() > before)
        return made

    def _n_judged(self) -> int:
        return self.admission.n_open + sum(self.admission.refused.values())


@contextlib.asynccontextmanager
async def listening(context: ssl.SSLContext, most: int = 9) -> AsyncIterator[Listened]:
    one = Listened(context, Admission(Limits(max_connections=most), 1 << 16))
    yield one
    one.listener.close()


async def test_who_says_nothing_is_counted_and_let_go(context: ssl.SSLContext) -> None:
    async with listening(context) as one:
        client = await one.client()
        assert one.admission.n_open == 1
        now = asyncio.get_running_loop().time()
        one.listener.handshakes.check(now)
        assert one.admission.n_open == 1
        one.listener.handshakes.check(now + HANDSHAKE_S + 1)
        assert client.recv(1) == b""
        client.close()
        assert (one.admission.n_open, one.admission.late["handshake"], one.made) == (0, 1, [])


async def test_who_is_one_too_many_is_refused_before_any_handshake(context: ssl.SSLContext) -> None:
    async with listening(context, most=1) as one:
        first, second = await one.client(), await one.client()
        assert second.recv(1) == b""
        assert sum(one.admission.refused.values()) == 1
        first.close()
        second.close()
        await until(lambda: one.admission.n_open == 0)


async def test_what_is_no_handshake_gives_its_place_back(context: ssl.SSLContext) -> None:
    async with listening(context) as one:
        client = await one.client()
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: one.admission.n_open == 0)
        assert not one.listener.handshakes.is_busy
        client.close()
        assert not one.made[0].endpoints.tls


async def test_a_connection_keeps_its_place_until_it_gives_it_back(context: ssl.SSLContext) -> None:
    async with listening(context) as one:
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

        client = await one.client()
        secured = await asyncio.to_thread(trusting.wrap_socket, client)
        await until(lambda: not one.listener.handshakes.is_busy)
        assert one.admission.n_open == 1
        assert one.made[0].endpoints.tls
        one.made[0].transport.abort()
        secured.close()
        one.made[0].leave()
        one.made[0].leave()
        assert one.admission.n_open == 0


async def test_addresses_take_turns_within_a_limit(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES_PER_ADDRESS", 5)
    async with listening(context) as one:

        def begin(caller: Any) -> None:
            begun.append(caller.source)
            one.listener.handshakes._n_begun[caller.source] += 1

        monkeypatch.setattr(one.listener.handshakes, "_begin", begin)
        one.listener.handshakes._waiting.update(
            {
                name: deque(mock.Mock(source=name) for _ in range(n))
                for name, n in (("a", 9), ("b", 1), ("c", 2))
            }
        )
        one.listener.handshakes._start_next()
        assert begun == ["a"]
        await until(lambda: len(begun) == 8)
        assert begun == ["a", "b", "c", "a", "c", "a", "a", "a"]
        await until(lambda: not one.listener.handshakes._next_scheduled)
        assert len(begun) == 8
        one.listener.handshakes._waiting.clear()
