"""The front killed: another one on the same ports, the same workers behind it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from operated import LARGE, TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import measured, wait_until
from serving import unlikely_port

#: What a client may see of a front that dies under it.
CONNECTION_ERRORS = (OSError, http.client.HTTPException)
SLACK = 4.0


def test_a_new_front_has_the_old_ports_and_the_old_workers(tmp_path: Path, orders: Orders) -> None:
    entry = model("m", orders, instances=[{"device": "cpu", "count": 2}])
    with OperatedServer(config(tmp_path, entry)).until_ended() as server:
        workers = server.workers
        assert server.infer("m", 1.0).output("calls") == [1]
        started = time.monotonic()
        server.replace_front()
        back_s = time.monotonic() - started
        measured(f"front killed: ready again after {back_s:.3f} s")
        assert back_s < 1.0 * SLACK
        for _ in range(3):
            assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.workers == workers
        assert {call["pid"] for call in orders.calls()} == set(workers)


@pytest.mark.thorough
def test_a_callable_keeps_its_state_over_fronts(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        assert server.infer("m", 1.0).output("calls") == [1]
        server.replace_front()
        assert server.infer("m", 1.0).output("calls") == [2]
        assert server.infer("m", 1.0, width=LARGE).status == 200
        server.replace_front()
        assert server.infer("m", 1.0, width=LARGE).status == 200
        assert server.infer("m", 1.0).output("calls") == [5]
        assert server.metric("gpuserve_arena_blocks", model="m") == 0


def test_what_is_in_flight_gets_a_connection_error_and_the_worker_goes_on(
    tmp_path: Path, orders: Orders
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        orders.shut()
        asked = InBackground(server.infer, "m", 1.0, width=LARGE)
        orders.wait_calls(1)
        server.replace_front()
        with pytest.raises(CONNECTION_ERRORS):
            asked.result()
        again = InBackground(server.infer, "m", 2.0)
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") >= 0, "it is asked")
        orders.open()
        assert again.result().output("calls") == [2]  # the first went on to its end, for nobody


@pytest.mark.thorough
def test_fronts_that_die_in_a_row_under_traffic(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        workers, over = server.workers, threading.Event()
        answers: list[list[float]] = []

        def traffic() -> None:
            while not over.is_set():
                try:
                    with server.client(timeout_s=5.0) as client:
                        while not over.is_set():
                            answers.append(client.infer("m", 21.0).output("y"))
                except CONNECTION_ERRORS:
                    continue

        clients = [InBackground(traffic) for _ in range(3)]
        for _ in range(5):
            server.replace_front()
            seen = len(answers)
            wait_until(lambda seen=seen: len(answers) > seen + 20, "traffic goes on")
        over.set()
        for one in clients:
            one.result()
        assert all(answer == [42.0] for answer in answers)
        assert server.workers == workers
        assert server.metric("gpuserve_running_requests", model="m") == 0


@pytest.mark.thorough
def test_a_front_and_a_worker_that_die_together(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        os.kill(server.workers[0], signal.SIGKILL)
        server.replace_front()
        assert server.infer("m", 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_a_front_that_dies_while_models_load_is_replaced(tmp_path: Path, orders: Orders) -> None:
    orders.shut()
    port = unlikely_port()
    flags = ("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
    with OperatedServer(config(tmp_path, model("m", orders, "load_slowly")), *flags) as server:
        server.addresses["HTTP"] = f"localhost:{port}"
        wait_until(lambda: server.status("/v2/health/live") == 200, "the front accepts")
        first = server.front
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.front not in {0, first}, "another front is started")
        orders.open()
        server.wait_ready()
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.end() == 0


@pytest.mark.thorough
def test_a_front_that_is_killed_before_it_ever_accepted_is_tried_once_more(
    tmp_path: Path, orders: Orders
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))) as server:
        wait_until(lambda: server.front, "the front is started")
        os.kill(server.front, signal.SIGKILL)
        server.wait_ready()
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.end() == 0


@pytest.mark.thorough
def test_a_front_that_is_killed_twice_before_it_ever_accepted_is_a_failure_of_the_start(
    tmp_path: Path, orders: Orders
) -> None:
    orders.shut()
    with OperatedServer(config(tmp_path, model("m", orders, "load_slowly"))) as server:
        killed = 0
        for _ in range(2):
            wait_until(lambda killed=killed: server.front not in {0, killed}, "a front is started")
            killed = server.front
            os.kill(killed, signal.SIGKILL)
        assert server.process.wait(TIMEOUT_S) == 3
        assert server.messages()[-1]["msg"] == "the front process could not be started: signal SIGKILL"


def test_a_front_ignores_the_signals_that_are_meant_for_the_supervisor(
    tmp_path: Path, orders: Orders
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        front = server.front
        os.kill(front, signal.SIGTERM)
        os.kill(front, signal.SIGINT)
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.front == front


# ---- sequences, of which the next front knows nothing --------------------------------------------


CALLABLES = Path(__file__).resolve().parents[1] / "models" / "sequenced.py"
NUMBER = {"dtype": "int32", "shape": [1]}
SUMS = {
    "name": "sums",
    "callable": f"{CALLABLES}:Sums",
    "inputs": [{"name": "x", **NUMBER}],
    "outputs": [{"name": name, **NUMBER} for name in ("y", "pid", "kept", "dropped")],
    "max_batch_size": 4,
    "sequence_batching": {"max_sequence_idle_us": 60_000_000},
}


def ask_sums(server: OperatedServer, value: int, **parameters: Any) -> dict[str, int] | str:
    """The outputs by name, or the error."""
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    body = json.dumps({"parameters": parameters, "inputs": [tensor]}).encode()
    url = f"http://{server.addresses['HTTP']}/v2/models/sums/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=TIMEOUT_S) as answer:
            return {one["name"]: one["data"][0] for one in json.load(answer)["outputs"]}
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["error"])


def test_a_new_front_begins_with_no_sequence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    server_keys = {"host": "127.0.0.1", "log_format": "json", "lame_duck_s": 0}
    path.write_text(json.dumps({"server": server_keys, "models": [SUMS]}))
    with OperatedServer(path).until_ended() as server:
        before = ask_sums(server, 1, sequence_id="a", sequence_start=True)
        assert isinstance(before, dict)
        server.replace_front()
        lost = ask_sums(server, 1, sequence_id="a")
        assert lost == (
            "sequence a of model 'sums' was lost with the front process that died: it has to begin anew with "
            "a request that has the START flag"
        )
        after = ask_sums(server, 5, sequence_id="b", sequence_start=True)
        assert isinstance(after, dict)
        assert after == {"y": 5, "pid": before["pid"], "kept": 1, "dropped": 1}
