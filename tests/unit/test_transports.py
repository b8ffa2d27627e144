"""Which transports there are, and what is told of one that cannot be had."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvloop
from processes import until

from gpuserve import Server
from gpuserve.config.load import load_file
from gpuserve.config.settings.server import GRPCIO, NATIVE
from gpuserve.core.errors import ConfigError
from gpuserve.front.net.admission import Admission, Limits
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.exchange import ConnectionEndpoints
from gpuserve.front.net.server import Connections, NativeServer

uvloop.new_event_loop().close()  # libuv opens a pipe for signals with the first loop, and keeps the pipe


def test_those_that_there_are(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    model = "{name: m, callable: pkg.mod:f, inputs: [], outputs: [{name: y, dtype: FP32, shape: [1]}]}"
    for name in (NATIVE, GRPCIO):
        Server(transport=name)
        file.write_text(f"server: {{transport: {name}}}\nmodels: [{model}]\n")
        assert load_file(str(file), {}).settings.transport == name
    with pytest.raises(ConfigError, match="transport must be one of 'native' or 'grpcio', got 'http3'"):
        Server(transport="http3")


def n_closed(limits: Limits, *members: mock.Mock) -> int:
    connections = Connections(Admission(limits))
    connections.members |= {*members}
    connections.check_all()
    return sum(one.abort.called for one in members)


async def test_who_holds_nothing_is_not_closed_for_what_others_hold() -> None:
    """Who reads, however slowly, stays; and so does who waits, sends, or has nothing to read."""
    made = partial(mock.Mock, n_incomplete=0)
    stuck = made(backlog_nbytes=20, stuck_s=9.0)
    others = made(backlog_nbytes=90, stuck_s=0.0), made(backlog_nbytes=0, stuck_s=9.0)
    assert n_closed(Limits(max_unsent_nbytes=80), stuck, *others) == stuck.abort.call_count == 1


async def test_who_has_most_of_too_many_half_requests_is_closed() -> None:
    """All connections of an address count together: many with few each go before one that has more."""

    def made(n_incomplete: int, *peer: Any) -> mock.Mock:
        endpoints = ConnectionEndpoints(peer, ("", 0), False)
        return mock.Mock(backlog_nbytes=0, n_incomplete=n_incomplete, endpoints=endpoints)

    many, other = [made(4, "10.0.0.1", n) for n in range(5)], made(8, "10.0.0.2", 1)
    assert n_closed(Limits(max_half_requests=16), *many, other) == 3
    assert not other.abort.called


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[socket.socket, Callable[[int], Awaitable[int]]]]:
    """The listener of a server, and a function that connects clients and returns the turns that it took."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, ExitStack() as clients:
        admission = Admission()
        connections = Connections(admission)
        handlers = {os.dup(listener.fileno()): mock.Mock()}
        server = NativeServer(handlers, AsyncRequests(), connections, admission)
        await server.start()

        async def connect(n_clients: int) -> int:
            expected = len(connections.members) + n_clients
            for _ in range(n_clients):
                clients.enter_context(socket.create_connection(listener.getsockname()))
            n_turns = 0
            while len(connections.members) < expected:
                await asyncio.sleep(0)
                n_turns += 1
            return n_turns

        yield listener, connect
        await server.stop()


def test_a_turn_of_the_event_loop_accepts_several_connections() -> None:
    """With one a turn, 64 clients that connect for each request get batches of one request."""

    async def count_turns() -> int:
        async with listening() as (_, connect):
            return await connect(64)

    assert uvloop.run(count_turns()) < 64 / 4


def test_only_a_burst_of_connections_has_several_servers() -> None:
    """A connection wakes all servers of its listener, of which a lone connection needs one."""

    async def check() -> None:
        async with listening() as (listener, connect):
            n_at_rest = n_descriptors_of(listener)
            await connect(1)
            assert n_descriptors_of(listener) == n_at_rest
            await connect(64)
            assert n_descriptors_of(listener) > n_at_rest
            await until(lambda: n_descriptors_of(listener) == n_at_rest)  # the servers end by a timer
            await connect(1)
            assert n_descriptors_of(listener) == n_at_rest

    uvloop.run(check())


def n_descriptors_of(listener: socket.socket) -> int:
    """Return how many descriptors of this process are of the same socket."""
    name = os.readlink(f"/proc/self/fd/{listener.fileno()}")
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own descriptor
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names.count(name)
