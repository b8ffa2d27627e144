"""A change of a running server fails unexpectedly: the change is refused, and the server serves on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Ran, gpuserve
from exploring import variants
from operated import TIMEOUT_S, Client, OperatedServer, Orders, config, model
from processes import cpu_s, wait_until
from serving import GPUSERVE, unlikely_port

from gpuserve.front.ipc.heap_memory import TRIM_PERIOD_S
from gpuserve.supervisor.control.operator_client import listening_names

SLOW = pytest.mark.thorough
_numbers = itertools.count(100)


@contextmanager
def without_descriptors(server: OperatedServer, pid: int, spare: int = 0) -> Iterator[None]:
    """Let a process open only ``spare`` more descriptors: the numbers that are free below its highest are
    taken by idle connections, to the operator's socket or to the HTTP port.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    names = listening_names(Path("/proc/net/unix").read_text("utf-8", "replace"))
    port = int(server.addresses["HTTP"].rpartition(":")[2])
    name = next(one for one in names if one.port == port)
    with contextlib.ExitStack() as opened:
        while free := _free(pid):
            sock = opened.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if pid == server.pid else socket.socket()
            )
            sock.connect(name.encode() if pid == server.pid else ("127.0.0.1", port))
            wait_until(lambda free=free: _free(pid) != free, "the connection is accepted")
        used = _used(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(used) + 1 + spare, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _used(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def _free(pid: int) -> set[int]:
    """Return the numbers below the highest descriptor that a new descriptor would get."""
    used = _used(pid)
    return set(range(max(used))) - used


def serves(server: OperatedServer, client: Client) -> bool:
    """Whether the same processes as ever answer a request on an open connection."""
    return server.process.poll() is None and client.infer("m", 1.0).output("y") == [2.0]


class InferringSteadily:
    """A client that infers all the time until the end of the block; ``lost`` is what was not answered."""

    def __init__(self, server: OperatedServer) -> None:
        self.lost: list[str] = []
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> InferringSteadily:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with self._server.client() as client:
            while not self._ended.wait(0.005):
                try:
                    assert client.infer("m", 1.0).output("y") == [2.0]
                except Exception as error:
                    self.lost.append(repr(error))
                    return


def refused(ran: Ran) -> str:
    """Return the one sentence by which a command said that the change was refused."""
    assert ran.status not in {0, -6, -11}, ran
    assert "Traceback" not in ran.stderr
    return ran.stderr.strip()


@pytest.fixture(scope="module")
def long_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """A server that all refused operations of this file are tried at, one after the other."""
    folder = tmp_path_factory.mktemp("served")
    path = config(folder, *_MODELS(folder), model_control="explicit", load_at_start=["m"])
    with OperatedServer(path).until_ended() as server:
        yield server


def _MODELS(folder: Path) -> list[dict[str, Any]]:
    return [model("m", Orders(folder / "orders")), model("other", Orders(folder / "others"))]


def _config(server: OperatedServer) -> Path:
    return Path(server._command[2])


@pytest.mark.parametrize(
    "key", variants("drain_timeout_s", "idle_timeout_s", "max_connections", "log_level", "max_arena_nbytes")
)
def test_a_reload_with_a_number_beyond_all_bounds_is_refused(long_served: OperatedServer, key: str) -> None:
    path = _config(long_served)
    before = path.read_text()
    path.write_text(before.replace('"lame_duck_s": 0', f'"lame_duck_s": 0, "{key}": 1{"0" * 400}'))
    try:
        with long_served.client() as client, InferringSteadily(long_served) as load:
            text = refused(gpuserve("reload", server=long_served))
            assert key in text
            assert serves(long_served, client)
        assert load.lost == []
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    "command",
    [
        "scale m=2",
        *(
            pytest.param(other, marks=SLOW)
            for other in ("reload", "load other", "unload other", "reload m", "logs", "unload nothing")
        ),
    ],
)
@pytest.mark.parametrize("spare", [0, pytest.param(1, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_an_operation_without_descriptors_loses_no_request(
    long_served: OperatedServer, command: str, spare: int
) -> None:
    path = _config(long_served)
    document = json.loads(path.read_text())
    document["models"][0]["queue"] = {"max_requests": next(_numbers)}  # there is something to reload
    path.write_text(json.dumps(document))
    with long_served.client() as client, InferringSteadily(long_served) as load:
        with without_descriptors(long_served, long_served.pid, spare):
            assert gpuserve(*command.split(), server=long_served).status in {0, 1, 3, 4}
            status = gpuserve("status", "--json", server=long_served)
            assert serves(long_served, client)
        assert (status.status, status.document["server"]["state"]) == (0, "SERVING")
        assert serves(long_served, client)
    assert load.lost == []


@pytest.mark.thorough
def test_a_poll_without_descriptors_changes_nothing(tmp_path: Path) -> None:
    settings = {"model_control": "poll", "repository_poll_s": 0.05}
    path = config(tmp_path, model("m", Orders(tmp_path / "orders")), **settings)
    with OperatedServer(path).until_ended() as server:
        with server.client() as client, InferringSteadily(server) as load:
            with without_descriptors(server, server.pid):
                path.write_text(path.read_text().replace('"max_batch_size": 64', '"max_batch_size": 63'))
                server.wait_log("the config is not reloaded, and nothing has changed")
                assert serves(server, client)
            path.write_text(path.read_text().replace('"max_batch_size": 63', '"max_batch_size": 62'))
            server.wait_log("config reload: model m is reloaded")
            assert serves(server, client)
        assert load.lost == []


@pytest.mark.thorough
def test_a_front_without_descriptors_lives_through_its_housekeeping(tmp_path: Path) -> None:
    port = unlikely_port()
    path = config(tmp_path, model("m", Orders(tmp_path / "orders")), health_port=port)
    with (
        OperatedServer(path).until_ended() as server,
        server.client() as client,
        contextlib.ExitStack() as probes,
    ):
        front = server.front
        assert serves(server, client)
        with without_descriptors(server, front):
            n_lines = len(server.log)
            for _ in range(100):
                probe = probes.enter_context(socket.socket())
                probe.connect(("127.0.0.1", port))
            server.wait_log("the health port has no descriptor left for a connection")
            began = time.monotonic()  # two rounds of housekeeping
            wait_until(lambda: time.monotonic() - began > 2.5 * TRIM_PERIOD_S, "the heap was looked at twice")
            assert serves(server, client)
        assert server.front == front
        assert len(server.log) - n_lines < 10
        assert serves(server, client)


def test_a_front_without_descriptors_refuses_connections_and_does_not_spin(tmp_path: Path) -> None:
    path = config(tmp_path, model("m", Orders(tmp_path / "orders")))
    with OperatedServer(path).until_ended() as server, server.client() as client:
        assert client.infer("m", 1.0).output("y") == [2.0]
        with without_descriptors(server, server.front):
            before = cpu_s(server.front)
            began = time.monotonic()
            for _ in range(20):
                assert server.status("/v2/health/live") == 0  # refused, not kept waiting
            assert time.monotonic() - began < 5.0
            assert cpu_s(server.front) - before < 1.0
            assert serves(server, client)
        assert server.status("/v2/health/live") == 200


@pytest.mark.thorough
def test_a_reload_that_hangs_keeps_no_other_command_waiting_without_a_word(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "hangs.py").write_text(f"open({str(gate)!r}).read()\n\ndef hangs(x): ...\n")
    path = config(tmp_path, model("m", Orders(tmp_path / "orders")))
    with OperatedServer(path).until_ended() as server:
        document = json.loads(path.read_text())
        document["models"].append({"name": "new", "callable": "hangs.py:hangs"})
        path.write_text(json.dumps(document))
        command = [GPUSERVE, "reload", "--server", server.addresses["HTTP"]]
        with (
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first,
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second,
        ):
            assert first.stderr is not None
            assert second.stderr is not None
            told, _, _ = select.select([first.stderr, second.stderr], [], [], TIMEOUT_S)
            assert "a reload has been running for" in told[0].readline()  # whichever came later
            assert gpuserve("status", server=server).status == 0
            assert gpuserve("logs", server=server).status == 0
            assert server.infer("m", 1.0).output("y") == [2.0]
            del document["models"][1]
            path.write_text(json.dumps(document))
            gate.write_text("")  # the module comes back
            assert {first.wait(TIMEOUT_S), second.wait(TIMEOUT_S)} <= {0, 1, 4}
