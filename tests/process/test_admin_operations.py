"""Operations that clients have begun by the admin API, when something ends before they do."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from operated import TIMEOUT_S, InBackground, OperatedServer
from processes import wait_until
from repositories import Client, clients_are_closed, entry, write

__all__ = ["clients_are_closed"]  # it is for every test here


@contextmanager
def operated(folder: Path, **settings: Any) -> Iterator[tuple[OperatedServer, Path]]:
    """A server of "m", whose next load waits for a word in a FIFO, and that FIFO."""
    path, fifo = folder / "config.yaml", folder / "load"
    os.mkfifo(fifo)
    with OperatedServer(
        write(path, entry("m", 1.0), host="127.0.0.1", admin_api=True, **settings)
    ).until_killed() as server:
        write(path, entry("m", 2.0, load_fifo=str(fifo)), host="127.0.0.1", admin_api=True, **settings)
        yield server, fifo


class Reload:
    """A reload of "m" that has been asked for."""

    def __init__(self, server: OperatedServer) -> None:
        self._connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        self._connection.request("POST", "/v2/admin/models/m/reload")

    def answer(self) -> tuple[int, Any]:
        with self._connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    def close(self) -> None:
        self._connection.close()


def tag(server: OperatedServer) -> float:
    return Client("http", server.addresses["HTTP"]).infer("m").tag


def loading(server: OperatedServer) -> bool:
    return len(server.workers) == 2


def test_a_client_that_leaves_ends_nothing(tmp_path: Path) -> None:
    with operated(tmp_path) as (server, fifo):
        reload = Reload(server)
        wait_until(lambda: loading(server), "the new worker loads")
        reload.close()
        assert tag(server) == 1.0
        fifo.write_text("go")
        wait_until(lambda: tag(server) == 2.0, "the new model serves")
        assert server.end() == 0


@pytest.mark.thorough
def test_a_front_that_dies_takes_the_connection_and_not_the_operation(tmp_path: Path) -> None:
    with operated(tmp_path) as (server, fifo):
        reload = Reload(server)
        wait_until(lambda: loading(server), "the new worker loads")
        os.kill(server.front, signal.SIGKILL)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            reload.answer()
        reload.close()
        fifo.write_text("go")
        wait_until(lambda: server.status("/v2/models/m/ready") == 200, "the next front serves")
        wait_until(lambda: tag(server) == 2.0, "the new model serves")
        with server.client() as client:
            assert client.get("/v2/admin/status").status == 200
        assert server.end() == 0


def test_a_server_that_ends_answers_who_waits_for_an_operation(tmp_path: Path) -> None:
    with operated(tmp_path) as (server, _):
        reload = Reload(server)
        wait_until(lambda: loading(server), "the new worker loads")
        server.process.send_signal(signal.SIGTERM)
        status, told = reload.answer()
        assert (status, told) == (503, {"error": "Server exiting"})
        reload.close()
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.thorough
def test_a_drain_at_its_timeout_tells_what_is_left(tmp_path: Path) -> None:
    fifo = tmp_path / "run"
    os.mkfifo(fifo)
    path = write(tmp_path / "config.yaml", entry("m", run_fifo=str(fifo)), host="127.0.0.1", admin_api=True)
    with OperatedServer(path).until_ended() as server:
        running = InBackground(tag, server)
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it runs")
        connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        connection.request("POST", "/v2/admin/drain", b'{"timeout_s": 0.2}')
        answer = connection.getresponse()
        told = json.loads(answer.read())
        assert (answer.status, list(told), told["unfinished"]) == (504, ["error", "unfinished"], 1)
        connection.close()
        fifo.write_text("go")
        assert running.result() == 1.0
