"""``Server`` from construction to ``stop()``: in any thread, more than once, more than one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from bound import FLOATS_IN_AND_OUT, TIMEOUT_S, InBackground, ask, free_server, status
from processes import wait_until

from gpuserve import Request, Server
from gpuserve.core.errors import StartupError


def adding(amount: float) -> Any:
    def add(requests: list[Request]) -> list[dict[str, Any]]:
        return [{"OUTPUT_1": one["INPUT_1"] + np.float32(amount)} for one in requests]

    return add


def test_run_returns_when_ready_and_again_does_nothing() -> None:
    with free_server() as server:
        server.bind("m", adding(1), **FLOATS_IN_AND_OUT)
        assert not server.is_alive()
        server.run()
        addresses = server.addresses
        assert status(server, "/v2/health/ready") == 200
        assert set(addresses) == {"http", "grpc", "metrics"}
        server.run()
        assert server.addresses == addresses
        assert server.is_alive()


@pytest.mark.thorough
def test_stop_may_come_at_any_time_and_often() -> None:
    server = free_server()
    server.stop()
    server.bind("m", adding(1), **FLOATS_IN_AND_OUT)
    server.stop()
    server.run()
    stops = [InBackground(server.stop) for _ in range(3)]
    for one in stops:
        one.result()
    server.stop()
    assert not server.is_alive()
    assert server.addresses == {}


def test_a_server_is_run_again_with_its_models() -> None:
    server = free_server()
    server.bind("m", adding(1), **FLOATS_IN_AND_OUT)
    for _ in range(2):
        server.run()
        assert ask(server, "m", 1.0) == [2]
        server.stop()
    server.bind("n", adding(2), **FLOATS_IN_AND_OUT, isolation="thread")
    with server:
        server.run()
        assert (ask(server, "m", 1.0), ask(server, "n", 1.0)) == ([2], [3])


@pytest.mark.thorough
def test_two_servers_in_one_process() -> None:
    with free_server() as first, free_server() as second:
        for server, amount in ((first, 1), (second, 2)):
            server.bind("m", adding(amount), **FLOATS_IN_AND_OUT)
            server.run()
        assert (ask(first, "m", 0.0), ask(second, "m", 0.0)) == ([1], [2])
        first.stop()
        assert ask(second, "m", 0.0) == [2]


@pytest.mark.thorough
def test_serve_in_another_thread_ends_with_stop() -> None:
    with free_server() as server:
        server.bind("m", adding(1), **FLOATS_IN_AND_OUT)
        served = InBackground(server.serve)
        wait_until(lambda: server.addresses, "it serves")
        assert ask(server, "m", 1.0) == [2]
        assert served.thread.is_alive()
        server.stop()
        served.result()
        assert not server.is_alive()


@pytest.mark.thorough
def test_serve_of_a_server_that_runs_only_waits() -> None:
    with free_server() as server:
        server.bind("m", adding(1), **FLOATS_IN_AND_OUT)
        server.run()
        served = InBackground(server.serve)
        server.bind("n", adding(2), **FLOATS_IN_AND_OUT)
        assert ask(server, "n", 1.0) == [3]
        server.stop()
        served.result()


def test_a_model_that_cannot_be_loaded_fails_the_start_and_nothing_runs() -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no weights here")

        def __call__(self, requests: Any) -> Any:
            raise AssertionError("it was not made")

    server = free_server()
    server.bind("good", adding(1), **FLOATS_IN_AND_OUT)
    server.bind("bad", Broken, **FLOATS_IN_AND_OUT)
    for start in (server.run, server.serve):
        with pytest.raises(StartupError, match=r"model 'bad': instance 0 .* no weights here"):
            start()
        assert not server.is_alive()


@pytest.mark.thorough
def test_an_exception_in_the_block_of_a_server_stops_it() -> None:
    with pytest.raises(ZeroDivisionError), free_server() as server:  # noqa: PT012
        server.bind("m", adding(1), **FLOATS_IN_AND_OUT)
        server.run()
        raise ZeroDivisionError
    assert not server.is_alive()


def test_a_port_that_is_taken_fails_the_start() -> None:
    with free_server() as first:
        first.run()
        port = int(first.addresses["http"].rpartition(":")[2])
        second = free_server(http_port=port)
        with pytest.raises(StartupError, match=str(port)):
            second.run()
        assert not second.is_alive()


@pytest.mark.thorough
def test_a_name_is_bound_from_however_many_threads() -> None:
    with free_server() as server:
        server.run()
        start = threading.Barrier(3)

        def bind(amount: int) -> int:
            start.wait(TIMEOUT_S)
            server.bind("m", adding(amount), **FLOATS_IN_AND_OUT)
            return amount

        assert [one.result() for one in [InBackground(bind, amount) for amount in (1, 2, 3)]] == [1, 2, 3]
        (served,) = ask(server, "m", 0.0)
        assert served in {1, 2, 3}
        server.bind("m", adding(7), **FLOATS_IN_AND_OUT)
        assert ask(server, "m", 0.0) == [7]


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(TypeError, match="Server has no setting 'htpp_port'; did you mean 'http_port'"):
        Server(htpp_port=8000)
    with pytest.raises(TypeError, match="expected one of host, http_port, "):
        Server(xyzzy=1)
