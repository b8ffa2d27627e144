"""Workers that die, in every way and at every moment: what clients, neighbours and other models notice."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from exploring import variants
from models.mortal import POISON
from operated import LARGE, InBackground, OperatedServer, Orders, config, model
from processes import measured, wait_until

DEATHS = variants("SIGKILL", "segfault", "exit", "abort")
#: Times on a loaded machine are not times: the figures are printed, the bounds are generous.
SLACK = 4.0


def pids(answer: list[dict[str, object]]) -> list[object]:
    return [one["pid"] for one in answer]


@pytest.mark.parametrize("how", DEATHS)
def test_a_batch_whose_worker_dies_runs_once_more(tmp_path: Path, orders: Orders, how: str) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        (first,) = server.workers
        orders.die(how)
        started = time.monotonic()
        answer = server.infer("m", 1.0, 2.0)
        measured(f"death by {how} to the answer of the successor: {time.monotonic() - started:.3f} s")
        assert answer.output("y") == [2.0, 4.0]
        assert [call["rows"] for call in orders.calls()] == [2, 2]
        assert pids(orders.calls())[0] == first
        assert answer.output("pid") == [server.workers[0]] * 2
        assert server.workers != [first]
        assert server.metric("gpuserve_worker_restarts_total", model="m") == 1


@pytest.mark.thorough
def test_a_batch_whose_worker_dies_runs_on_another_instance_at_once(tmp_path: Path, orders: Orders) -> None:
    entry = model("m", orders, instances=[{"device": "cpu", "count": 2}])
    with OperatedServer(config(tmp_path, entry)).until_ended() as server:
        both = server.workers
        orders.die("SIGKILL")
        answer = server.infer("m", 3.0)
        assert answer.output("y") == [6.0]
        assert sorted(pids(orders.calls())) == both
        wait_until(lambda: len(server.workers) == 2, "two workers")


def test_the_death_of_an_idle_worker_is_noticed_at_once_and_it_is_back_soon(
    tmp_path: Path, orders: Orders
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        (first,) = server.workers
        with server.client() as client:
            assert client.get("/v2/models/m/ready").status == 200
            started = time.monotonic()
            os.kill(first, signal.SIGKILL)
            while client.get("/v2/models/m/ready").status == 200:
                pass
            noticed_s = time.monotonic() - started
            while client.get("/v2/models/m/ready").status != 200:
                pass
            back_s = time.monotonic() - started
        measured(f"idle worker killed: noticed after {noticed_s * 1e3:.1f} ms, back after {back_s:.3f} s")
        assert noticed_s < 0.01 * SLACK * 5
        assert back_s < 1.5 * SLACK
        assert server.workers != [first]
        assert server.infer("m", 1.0).output("y") == [2.0]


def test_a_worker_killed_in_the_middle_of_a_batch(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        orders.shut()
        asked = InBackground(server.infer, "m", 5.0)
        (call,) = orders.wait_calls(1)
        os.kill(int(call["pid"]), signal.SIGKILL)
        orders.wait_calls(2)
        orders.open()
        assert asked.result().output("y") == [10.0]
        assert len(orders.calls()) == 2


def test_a_request_that_kills_two_workers_fails_and_its_neighbours_are_answered(
    tmp_path: Path, orders: Orders
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        orders.shut()
        first = InBackground(server.infer, "m", 0.0)
        orders.wait_calls(1)  # the worker is busy: the next ones share a batch
        asked = {value: InBackground(server.infer, "m", value) for value in (1.0, POISON, 2.0)}
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 3, "three are queued")
        orders.open()
        assert first.result().output("y") == [0.0]
        assert asked[1.0].result().output("y") == [2.0]
        assert asked[2.0].result().output("y") == [4.0]
        poisoned = asked[POISON].result()
        assert (poisoned.status, poisoned.error) == (
            500, "model 'm': the worker process died twice while it ran this request"
        )  # fmt: skip
        assert [call["rows"] for call in orders.calls()[:2]] == [1, 3]


@pytest.mark.thorough
def test_no_retry_where_the_model_forbids_it(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(
        config(tmp_path, model("m", orders, retry_on_worker_death=False))
    ).until_ended() as server:
        orders.die("SIGKILL")
        answer = server.infer("m", 1.0)
        assert (answer.status, answer.error) == (
            503, "model 'm': the worker process died while it ran this request"
        )  # fmt: skip
        assert len(orders.calls()) == 1
        server.wait_model_ready("m")
        assert server.infer("m", 1.0).output("y") == [2.0]


@pytest.mark.thorough
@pytest.mark.parametrize(("read_only", "status", "calls"), [(False, 503, 1), (True, 200, 2)])
def test_a_body_that_lies_in_the_arena_is_retried_only_if_nobody_could_write_to_it(
    tmp_path: Path, orders: Orders, read_only: bool, status: int, calls: int
) -> None:
    with OperatedServer(
        config(tmp_path, model("m", orders, read_only_inputs=read_only))
    ).until_ended() as server:
        orders.die("SIGKILL")
        assert server.infer("m", 7.0, width=LARGE).status == status
        assert [call["first"] for call in orders.calls()] == [7.0] * calls
        assert server.metric("gpuserve_arena_blocks", model="m") == 0


@pytest.mark.thorough
def test_one_that_dies_again_and_again_waits_longer_each_time(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        for death in range(3):
            os.kill(server.workers[0], signal.SIGKILL)
            server.wait_log("died (signal SIGKILL)", death + 1)
            server.wait_model_ready("m")
        deaths = [one["msg"] for one in server.messages() if one["msg"].startswith("died")]
        assert [one.rsplit("again ", 1)[1] for one in deaths] == ["at once", "in 1.0 s", "in 2.0 s"]


@pytest.mark.thorough
def test_a_model_that_will_not_load_again_refuses_at_once_and_leaves_others_alone(
    tmp_path: Path, orders: Orders
) -> None:
    well = Orders(tmp_path / "well")
    sick = model("sick", orders, "load_once")
    with OperatedServer(config(tmp_path, sick, model("well", well))).until_ended() as server:
        (well_worker,) = [pid for pid in server.workers if server.infer("well", 1.0).output("pid") == [pid]]
        (sick_worker,) = [pid for pid in server.workers if pid != well_worker]
        os.kill(sick_worker, signal.SIGKILL)
        waiting = InBackground(server.infer, "sick", 1.0)
        # 0, 1, 2, 4 s of back-off; with 8 s to the next start nobody is left waiting any more.
        refused = waiting.result()
        assert (refused.status, refused.error) == (
            503,
            "model 'sick' has no live instance: its last one died",
        )
        started = time.monotonic()
        assert server.infer("sick", 1.0).status == 503
        measured(f"refused by a crash-looping model after {(time.monotonic() - started) * 1e3:.1f} ms")
        assert time.monotonic() - started < 4  # it did not wait for the next start
        starts = [one for one in server.messages() if one.get("model") == "sick" and one["msg"] == "loading"]
        assert len(starts) <= 7
        assert server.infer("well", 1.0).output("pid") == [well_worker]
        # A new front is told of it as well.
        os.kill(server.front, signal.SIGKILL)
        wait_until(lambda: server.status("/v2/models/well/ready") == 200, "the new front serves")
        assert server.infer("sick", 1.0).status == 503


@pytest.mark.thorough
def test_a_stopped_worker_goes_on_when_it_is_continued(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders))).until_ended() as server:
        (worker,) = server.workers
        os.kill(worker, signal.SIGSTOP)
        asked = InBackground(server.infer, "m", 4.0)
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it is at the worker")
        assert orders.calls() == []
        os.kill(worker, signal.SIGCONT)
        assert asked.result().output("pid") == [worker]


# ---- a client whose requests kill workers, beside one whose do not -------------------------------


MORTAL = Path(__file__).resolve().parents[1] / "models" / "mortal.py"
GOOD = 1.0
#: The addresses of the two clients.
GOOD_CLIENT, POISON_CLIENT = "127.0.0.1", "127.0.0.2"
TIMEOUT_S = 60.0


def one_instance(folder: Path) -> OperatedServer:
    model = {
        "name": "m",
        "callable": f"{MORTAL}:Mortal",
        "kwargs": {"directory": str(folder)},
        "inputs": [{"name": "x", "dtype": "float32", "shape": [1]}],
        "outputs": [
            {"name": "y", "dtype": "float32", "shape": [1]},
            {"name": "calls", "dtype": "int64", "shape": [1]},
            {"name": "pid", "dtype": "int64", "shape": [1]},
        ],
        "max_batch_size": 8,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps({"server": {"host": "127.0.0.1", "lame_duck_s": 0}, "models": [model]}))
    return OperatedServer(path)


def asked(operated: OperatedServer, client: str, value: float) -> int:
    """The status of the answer to a request from this address."""
    connection = http.client.HTTPConnection(
        operated.addresses["HTTP"], timeout=TIMEOUT_S, source_address=(client, 0)
    )
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    with closing(connection):
        connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_others_wait_for_no_back_off_that_a_suspect_causes(tmp_path: Path) -> None:
    with one_instance(tmp_path).until_ended() as operated:
        assert asked(operated, POISON_CLIENT, POISON) == 500  # two workers die
        assert asked(operated, GOOD_CLIENT, GOOD) == 200
        for _ in range(2):  # the restart back-off would be 4 s, and then 16 s, with requests refused
            poisoned = InBackground(asked, operated, POISON_CLIENT, POISON)
            slowest_s = 0.0
            while poisoned.is_alive:
                begun = time.monotonic()
                assert asked(operated, GOOD_CLIENT, GOOD) == 200
                slowest_s = max(slowest_s, time.monotonic() - begun)
            assert poisoned.result() == 500
            assert slowest_s < 3.5
            assert asked(operated, GOOD_CLIENT, GOOD) == 200
        assert operated.metric("gpuserve_worker_restarts_total", model="m") == 4
        operated.wait_log("isolated the requests of client 127.0.0.2")
