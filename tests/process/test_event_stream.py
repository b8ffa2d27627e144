"""The events of a running server, as commands and programs follow them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bound import FLOATS_IN_AND_OUT, ask, free_server
from commands import ask as ask_operator
from commands import gpuserve
from operated import TIMEOUT_S, Client, OperatedServer, Orders, config, model
from processes import finished, wait_until
from serving import GPUSERVE

import gpuserve as package
from gpuserve.core.errors import ControlError, InvalidArgument
from gpuserve.core.event_log import FACTS, EventKind
from gpuserve.front.observability.metrics.change_detection import BURST

#: What every event may have.
ABOUT = ("time", "number", "kind", "model", "version", "instance")
#: Subscribes as another user, and says what became of the connection.
STRANGER = """
import os, sys, zmq
from zmq.utils.monitor import recv_monitor_message
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
context = zmq.Context()
socket = context.socket(zmq.SUB)
socket.set(zmq.RECONNECT_IVL, -1)
ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
monitor = socket.get_monitor_socket(ends)
socket.subscribe(b"")
socket.connect(sys.argv[1])
print(zmq.Event(recv_monitor_message(monitor)["event"]).name)
socket.disable_monitor(); monitor.close(0); socket.close(0); context.term()
"""


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("events") / "orders")


@pytest.fixture(scope="module")
def shared(orders: Orders) -> Iterator[OperatedServer]:
    """A server of the models "m" and "n"."""
    settings = {"host": "127.0.0.1", "model_control": "explicit"}
    models = model("m", orders), model("n", orders)
    with OperatedServer(config(orders.directory.parent, *models, **settings)) as server:
        yield server.wait_ready()


def following(server: OperatedServer, *kinds: str, **options: Any) -> package.EventStream:
    return package.events(server.addresses["HTTP"], kinds, **options)


def until(stream: package.EventStream, **facts: Any) -> list[dict[str, Any]]:
    """What comes up to an event with these facts, which is the last."""
    found: list[dict[str, Any]] = []
    while (event := stream.next(TIMEOUT_S)) is not None:
        found.append(event)
        assert event.keys() <= {*ABOUT, *FACTS[EventKind(event["kind"])]}
        if facts.items() <= event.items():
            return found
    raise AssertionError(f"no event {facts} among {found}")


def test_a_worker_that_dies_and_its_successor(shared: OperatedServer) -> None:
    with following(shared, model="m") as stream:
        (dead,) = [one for one in shared.workers if _model_of(shared, one) == "m"]
        os.kill(dead, signal.SIGKILL)
        found = until(stream, kind="instance_state", state="READY")
    kinds = [(one["kind"], one.get("state", one.get("reason"))) for one in found]
    assert kinds[:4] == [
        ("instance_state", "WAITING"),
        ("instance_died", "signal SIGKILL"),
        ("instance_state", "DOWN"),
        ("instance_restart", None),
    ]
    assert {one["model"] for one in found} == {"m"}
    numbers = [one["number"] for one in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _model_of(server: OperatedServer, pid: int) -> str:
    rows = ask_operator(server.addresses["HTTP"], "status").result["models"]
    return next(str(row["name"]) for row in rows for one in row["instances"] if one["pid"] == pid)


def test_what_an_operator_does(shared: OperatedServer) -> None:
    at = shared.addresses["HTTP"]
    with following(shared) as stream:
        ask_operator(at, "scale", counts={"n": 2})
        assert until(stream, kind="scaled", model="n")[-1]["instances"] == 2
        ask_operator(at, "scale", counts={"n": 1})
        until(stream, kind="scaled", instances=1)
        ask_operator(at, "unload", model="n")
        until(stream, kind="model_unloaded", model="n", version=1)
        ask_operator(at, "load", model="n")
        assert until(stream, kind="model_loaded", model="n")[-1]["instances"] == 1
        ask_operator(at, "reload")
        assert until(stream, kind="config_reloaded")[-1]["ok"] is True
        ask_operator(at, "drain")
        assert until(stream, kind="drained", service="OUT_OF_SERVICE")[-1]["unfinished"] == 0
        ask_operator(at, "drain", undo=True)
        until(stream, kind="drained", service="IN_SERVICE")


def test_a_front_that_dies_and_samples_after_it(shared: OperatedServer) -> None:
    with following(shared, "front_died", "sample") as stream:
        until(stream, kind="sample")
        dead = shared.front
        os.kill(dead, signal.SIGKILL)
        assert until(stream, kind="front_died")[-1]["pid"] == dead
        until(stream, kind="sample")


def test_a_sample_says_how_fast_models_work(shared: OperatedServer) -> None:
    shared.wait_model_ready("m")
    with following(shared, "sample") as stream:
        samples = until(stream, kind="sample")
        for value in range(5):
            assert shared.infer("m", float(value)).status == 200
        samples += until(stream, kind="sample")
        while not _row(samples[-1], "m")["requests_per_s"]:
            samples += until(stream, kind="sample")
    sample = samples[-1]
    assert sample["server"]["state"] == "SERVING"
    assert sample["server"]["ready"] is True
    assert sample["server"]["requests_per_s"] > 0
    m = _row(sample, "m")
    assert m["batch_size"] == 1.0
    assert 0 < m["p50_s"] <= m["p99_s"]
    (instance,) = m["instances"]
    assert instance["batches_per_s"] > 0
    assert 0 < instance["busy"] < 1
    assert instance["memory_nbytes"] > 1 << 20
    assert _row(sample, "n")["requests_per_s"] == 0
    assert samples[1]["time"] - samples[0]["time"] == pytest.approx(1.0, abs=0.9)


def _row(sample: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in sample["models"] if one["name"] == name]
    return dict(found)


def test_past_events_come_once_and_before_the_next(shared: OperatedServer) -> None:
    with following(shared, past=True) as stream:
        at = shared.addresses["HTTP"]
        ask_operator(at, "reload")
        found = until(stream, kind="server_state", state="SERVING")
        found += until(stream, kind="config_reloaded")
    assert found[0]["state"] == "STARTING"
    numbers = [one["number"] for one in found]
    assert numbers == sorted(set(numbers))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("uid", "is_let_in"), [(0, True), (65534, False)])
def test_another_user_gets_nothing(shared: OperatedServer, uid: int, is_let_in: bool) -> None:
    address = ask_operator(shared.addresses["HTTP"], "events").result["address"]
    program = [sys.executable, "-c", STRANGER, address, str(uid)]
    done = finished(program, check=True)
    assert (done.stdout == "HANDSHAKE_SUCCEEDED\n") == is_let_in


def test_asynchronous_code_follows_as_well(shared: OperatedServer) -> None:
    async def first_two() -> list[str]:
        with following(shared, "config_reloaded") as stream:
            loop = asyncio.get_running_loop()
            at, found = shared.addresses["HTTP"], []
            asked = loop.run_in_executor(None, ask_operator, at, "reload")
            async for event in stream:
                found.append(event["kind"])
                await asked
                if len(found) == 2:
                    break
                asked = loop.run_in_executor(None, ask_operator, at, "reload")
        return found

    assert asyncio.run(asyncio.wait_for(first_two(), TIMEOUT_S)) == ["config_reloaded"] * 2


@pytest.mark.thorough
def test_who_follows_wrongly_is_told(shared: OperatedServer) -> None:
    with pytest.raises(InvalidArgument, match="no event 'instance_dead'; did you mean 'instance_died'"):
        following(shared, "instance_dead")
    with pytest.raises(InvalidArgument, match="no event 'instance_dead'; did you mean 'instance_died'"):
        package.events(shared.addresses["HTTP"], "instance_dead")
    with pytest.raises(ControlError, match="no server of this user runs at localhost:1"):
        package.events("localhost:1")
    found = gpuserve("events", "instance_dead", server=shared)
    assert (found.status, found.stdout) == (2, "")
    assert "no event 'instance_dead'" in " ".join(found.stderr.replace("│", " ").split())
    assert gpuserve("events", "--server", "localhost:1").status == 1


# ---- commands -------------------------------------------------------------------------------


class Command:
    """A command that goes on until it is interrupted."""

    def __init__(self, server: OperatedServer, *arguments: str) -> None:
        command = [GPUSERVE, *arguments, "--server", server.addresses["HTTP"]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._stdout = self.process.stdout

    def line(self) -> str:
        return self._stdout.readline()

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, stderr


def test_the_command_shows_events_until_ctrl_c(shared: OperatedServer) -> None:
    shown, plain = (Command(shared, "events", "--past", *more) for more in (("--json",), ("server_state",)))
    assert json.loads(shown.line())["state"] == "STARTING"
    assert plain.line().split()[1:] == ["server_state", "STARTING"]
    assert plain.line().split()[1:] == ["server_state", "SERVING"]
    assert (shown.interrupt(), plain.interrupt()) == ((0, ""), (0, ""))


def test_the_last_lines_of_the_log_and_the_next(shared: OperatedServer) -> None:
    found = gpuserve("logs", server=shared)
    assert found.status == 0
    assert any("ready: HTTP" in line for line in found.stdout.splitlines())
    assert all(isinstance(json.loads(line), dict) for line in found.stdout.splitlines())
    of_m = gpuserve("logs", "m", server=shared).stdout.splitlines()
    assert {json.loads(line)["model"] for line in of_m} == {"m"}
    follower = Command(shared, "logs", "-f", "--json", "m")
    for line in of_m:
        assert json.loads(follower.line())["line"] == line
    os.kill(int(json.loads(shared.infer("m", 1.0).body)["outputs"][2]["data"][0]), signal.SIGKILL)
    while "died (signal SIGKILL)" not in (line := follower.line()):
        pass
    assert json.loads(line)["model"] == "m"
    assert follower.interrupt() == (0, "")
    missing = gpuserve("logs", "mm", server=shared)
    assert missing.status == 1
    assert "there is no model 'mm'; did you mean 'm'" in missing.stderr


def test_the_status_is_shown_until_ctrl_c(shared: OperatedServer) -> None:
    watched = Command(shared, "status", "--watch", "--json")
    states = [json.loads(watched.line())["server"]["state"] for _ in range(2)]
    assert states == ["SERVING"] * 2
    assert watched.interrupt() == (0, "")


def _wrong(client: Client) -> int:
    """Ask for what model "m" does not take, and return the status of the answer."""
    body = {"inputs": [{"name": "other", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
    client.connection.request("POST", "/v2/models/m/infer", json.dumps(body))
    with client.connection.getresponse() as answer:
        answer.read()
        return answer.status


def test_a_burst_of_refusals_is_an_event(shared: OperatedServer) -> None:
    with following(shared, "refusals") as stream, shared.client() as client:
        deadline = time.monotonic() + TIMEOUT_S
        while (told := stream.next(0.0)) is None and time.monotonic() < deadline:
            assert _wrong(client) == 400
    assert told is not None
    assert told["model"] == "m"
    assert told["reasons"] == {"invalid": told["refusals"]}
    assert told["refusals"] >= BURST


def same(requests: Any) -> Any:
    return [{"OUTPUT_1": one["INPUT_1"]} for one in requests]


# ---- ends -----------------------------------------------------------------------------------


def test_a_server_in_a_program_ends_with_its_last_events_and_without_threads() -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    with free_server() as server:  # the first one also imports
        server.bind("m", same, **FLOATS_IN_AND_OUT)
        server.run()
        before, names = tasks(), threading.active_count()
        with package.events(server.addresses["http"]) as stream:
            assert tasks() > before
            ask(server, "m", 1.0)
            server.stop()
            found = []
            while not stream.is_over:  # all were unread at the end
                found.append(stream.next(TIMEOUT_S))
            assert [one for one in found if one][-1]["state"] == "STOPPED"
            assert list(stream) == []
    wait_until(lambda: tasks() < before, "no thread is left")
    assert threading.active_count() < names + 1


@pytest.mark.thorough
def test_on_a_terminal_the_status_is_drawn_over_itself(shared: OperatedServer) -> None:
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [GPUSERVE, "status", "--watch", "--server", shared.addresses["HTTP"]]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=subprocess.PIPE, env=environment
    )
    os.close(its_end)
    drawn = b""
    while drawn.count(b"\x1b[H") < 3:
        drawn += os.read(terminal, 1 << 16)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    os.close(terminal)
    assert (process.returncode, stderr) == (0, b"")
    screen = drawn.split(b"\x1b[H")[2].decode().replace("\x1b[K", "").replace("\x1b[J", "")
    lines = screen.splitlines()
    assert lines[0].startswith("gpuserve: SERVING, ready, up ")
    assert max(map(len, lines)) <= 60
    assert len(lines) < 24


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_and_an_ingress_process_that_dies(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    models = model("m", orders), model("broken", orders, "load_fails")
    settings = {"host": "127.0.0.1", "exit_on_error": False, "ingress_processes": 2}
    with (
        OperatedServer(config(tmp_path, *models, **settings)).until_killed() as server,
        following(server, "model_load_failed", "door_died", past=True) as stream,
    ):
        failed = until(stream, kind="model_load_failed")[-1]
        assert (failed["model"], failed["version"]) == ("broken", 1)
        assert "instance cpu#0 could not be started" in failed["reason"]
        ingress = ask_operator(server.addresses["HTTP"], "status").result["server"]["doors"]
        os.kill(ingress[1]["pid"], signal.SIGKILL)
        died = until(stream, kind="door_died")[-1]
        assert (died["door"], died["restart_in_s"]) == (1, 0.0)
        assert died["reason"].startswith("signal SIGKILL")


@pytest.mark.thorough
def test_two_servers_of_one_process_have_a_name_each(tmp_path: Path) -> None:
    with free_server() as one, free_server() as other:
        for server in (one, other):
            server.bind(
                "m",
                lambda requests: [{"OUTPUT_1": each["INPUT_1"]} for each in requests],
                **FLOATS_IN_AND_OUT,
            )
            server.run()
        addresses = [
            ask_operator(server.addresses["http"].removeprefix("http://"), "events").result["address"]
            for server in (one, other)
        ]
    assert addresses[0] == f"ipc://@gpuserve/{os.geteuid()}/events/{os.getpid()}"
    assert re.fullmatch(rf"{addresses[0]}\.[0-9a-f]{{16}}", addresses[1])
