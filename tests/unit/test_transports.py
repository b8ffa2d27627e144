"""Which transports there are, and what is told of one that cannot be had."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import uvloop

from gpuserve import Server
from gpuserve.config.load import load_file
from gpuserve.config.settings.server import GRPCIO, NATIVE
from gpuserve.core.errors import ConfigError
from gpuserve.front.net.admission import Admission, Limits
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.exchange import ConnectionEndpoints
from gpuserve.front.net.server import Connections, NativeServer

uvloop.new_event_loop().close()  # libuv opens a pipe for signals with the first loop, and keeps the pipe


def config(tmp_path: Path, transport: str) -> str:
    file = tmp_path / "config.yaml"
    model = "{name: m, callable: pkg.mod:f, inputs: [], outputs: [{name: y, dtype: FP32, shape: [1]}]}"
    file.write_text(f"server: {{transport: {transport}}}\nmodels: [{model}]\n")
    return str(file)


@pytest.mark.parametrize("name", [NATIVE, GRPCIO])
def test_those_that_there_are(tmp_path: Path, name: str) -> None:
    Server(transport=name)
    assert load_file(config(tmp_path, name), {}).settings.transport == name


def test_one_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="transport must be one of 'native' or 'grpcio', got 'http3'"):
        Server(transport="http3")


async def test_who_holds_nothing_is_not_closed_for_what_others_hold() -> None:
    """Who reads, however slowly, stays; and so does who waits, sends, or has nothing to read."""
    made = partial(mock.Mock, n_incomplete=0)
    reads = made(backlog_nbytes=90, stuck_s=0.0)
    stuck = made(backlog_nbytes=20, stuck_s=9.0)
    idle = made(backlog_nbytes=0, stuck_s=9.0)
    admission = Admission(Limits(max_unsent_nbytes=80))
    connections = Connections(admission)
    connections.members |= {reads, stuck, idle}
    connections.check_all()
    assert [one.abort.called for one in (reads, stuck, idle)] == [False, True, False]


async def test_who_has_most_of_too_many_half_requests_is_closed() -> None:
    """All connections of an address count together: many with few each go before one that has more."""
    many = [
        mock.Mock(
            backlog_nbytes=0, n_incomplete=4, endpoints=ConnectionEndpoints(("10.0.0.1", n), ("", 0), False)
        )
        for n in range(5)
    ]
    other = mock.Mock(
        backlog_nbytes=0, n_incomplete=8, endpoints=ConnectionEndpoints(("10.0.0.2", 1), ("", 0), False)
    )
    admission = Admission(Limits(max_half_requests=16))
    connections = Connections(admission)
    connections.members |= {*many, other}
    connections.check_all()
    assert sum(one.abort.called for one in many) == 3
    assert not other.abort.called


def test_a_turn_of_the_event_loop_accepts_several_connections() -> None:
    """With one a turn, 64 clients that connect for each request get batches of one request."""
    n_clients = 64

    async def count_turns() -> int:
        with socket.create_server(("127.0.0.1", 0), backlog=n_clients) as listener:
            admission = Admission()
            connections = Connections(admission)
            handlers = {os.dup(listener.fileno()): mock.Mock()}
            server = NativeServer(handlers, AsyncRequests(), connections, admission)
            await server.start()
            clients = [socket.create_connection(listener.getsockname()) for _ in range(n_clients)]
            n_turns = 0
            while len(connections.members) < n_clients:
                await asyncio.sleep(0)
                n_turns += 1
            for client in clients:
                client.close()
            await server.stop()
        return n_turns

    assert uvloop.run(count_turns()) < n_clients / 4


def test_only_a_burst_of_connections_has_several_servers() -> None:
    """A connection wakes all servers of its listener, of which a lone connection needs one."""

    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, ExitStack() as clients:
            admission = Admission()
            connections = Connections(admission)
            handlers = {os.dup(listener.fileno()): mock.Mock()}
            server = NativeServer(handlers, AsyncRequests(), connections, admission)
            await server.start()

            async def connect(n_clients: int) -> None:
                expected = len(connections.members) + n_clients
                for _ in range(n_clients):
                    clients.enter_context(socket.create_connection(listener.getsockname()))
                while len(connections.members) < expected:  # noqa: ASYNC110 - nothing tells of a connection
                    await asyncio.sleep(0)

            n_at_rest = n_descriptors_of(listener)
            await connect(1)
            assert n_descriptors_of(listener) == n_at_rest
            await connect(64)
            assert n_descriptors_of(listener) > n_at_rest
            async with asyncio.timeout(30):
                while n_descriptors_of(listener) > n_at_rest:  # noqa: ASYNC110 - the servers end by a timer
                    await asyncio.sleep(0.01)
            await connect(1)
            assert n_descriptors_of(listener) == n_at_rest
            await server.stop()

    uvloop.run(check())


def n_descriptors_of(listener: socket.socket) -> int:
    """Return how many descriptors of this process are of the same socket."""
    name = os.readlink(f"/proc/self/fd/{listener.fileno()}")
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own descriptor
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names.count(name)
