"""A model gets more instances, or fewer, while it is served: under load, and while processes die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from commands import ask, row
from exploring import variants
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from processes import wait_until
from steady_load import SteadyLoad

from gpuserve.supervisor.control.operator_protocol import VerbOutcome

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def scaled(server: OperatedServer, **counts: int) -> VerbOutcome:
    """What becomes of ``scale`` at a server."""
    return ask(server.addresses["HTTP"], "scale", counts=counts)


def well(outcome: VerbOutcome) -> Any:
    assert outcome.code == "", outcome.text
    return outcome.result


def loaded(server: OperatedServer) -> AbstractContextManager[SteadyLoad]:
    return SteadyLoad([server.addresses["HTTP"]], [server.addresses["gRPC"]])


def count_of(server: OperatedServer, name: str = "m") -> int:
    """How many instances the model's configuration says that it has."""
    with server.client() as client:
        groups = json.loads(client.get(f"/v2/models/{name}/config").body)["instance_group"]
    return sum(int(one["count"]) for one in groups)


def test_no_request_is_lost_by_scaling(tmp_path: Path, orders: Orders) -> None:
    settings = {"host": "127.0.0.1", "min_ready_instances": 4}
    with OperatedServer(config(tmp_path, model("m", orders), **settings)).until_ended() as server:
        (first,) = server.workers
        with loaded(server) as load:
            before = 1
            for count in (3, 1, 2, 4, 2, 1):
                assert well(scaled(server, m=count)) == {"models": {"m": {"before": before, "after": count}}}
                assert len(server.workers) == count_of(server) == count
                assert server.metric("gpuserve_worker_up", model="m") == count
                assert server.status("/v2/health/ready") == 200
                load.wait_answers(60)
                before = count
        assert load.lost() == {}
        assert server.workers == [first]
        assert server.metric("gpuserve_requests_success_total", model="m") >= load.n_answered()
        assert server.metric("gpuserve_worker_restarts_total", model="m") == 0
        assert len({call["pid"] for call in orders.calls()}) > 4  # all have had their part
    assert not [one for one in server.messages() if one["level"] in ("WARNING", "ERROR")]


def started(folder: Path, *models: dict[str, Any], **settings: Any) -> OperatedServer:
    return OperatedServer(config(folder, *models, host="127.0.0.1", **settings))


def on(count: int) -> dict[str, Any]:
    return {"instances": [{"device": "cpu", "count": count}]}


def one_by_one_on(count: int) -> dict[str, Any]:
    """Each instance runs one request at a time."""
    return {**on(count), "max_batch_size": 1}


@pytest.mark.thorough
def test_a_worker_that_cannot_be_loaded_leaves_the_model_as_it_was(tmp_path: Path, orders: Orders) -> None:
    for number in range(2):
        (orders.directory / f"token{number}").touch()
    entry = model("m", orders, "load_while_there_are_tokens")
    with started(tmp_path, entry).until_ended() as server:
        first = server.workers
        with loaded(server) as load:
            outcome = scaled(server, m=4)
            assert outcome.code == "INTERNAL"
            assert "model 'm' stays as it was: instance cpu#" in outcome.text
            assert "there are no tokens" in outcome.text
            assert outcome.result == {"models": {"m": {"before": 1, "after": 1}}}
            assert server.workers == first
            assert count_of(server) == 1
            for number in range(2):
                (orders.directory / f"token{number}").touch()
            well(scaled(server, m=3))
            load.wait_answers(60)
        assert load.lost() == {}
        assert len(server.workers) == 3


@pytest.mark.thorough
def test_what_runs_is_finished_before_its_worker_ends(tmp_path: Path, orders: Orders) -> None:
    with started(tmp_path, model("m", orders, **one_by_one_on(3))).until_ended() as server:
        workers = server.workers
        orders.shut()
        running = [InBackground(server.infer, "m", 1.0) for _ in range(3)]
        orders.wait_calls(3)
        scaling = InBackground(scaled, server, m=1)
        wait_until(lambda: count_of(server) == 1, "the model has one instance")
        queued = [InBackground(server.infer, "m", 2.0) for _ in range(4)]
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 4, "they wait for it")
        assert server.workers == workers
        assert server.metric("gpuserve_worker_up", model="m") == 3
        assert server.status("/v2/models/m/ready") == 200
        assert sorted(one["state"] for one in row(server.addresses["HTTP"], "m")["instances"]) == [
            "LEAVING",
            "LEAVING",
            "READY",
        ]
        orders.open()
        well(scaling.result())
        assert {one.result().output("pid")[0] for one in running} == set(workers)
        (left,) = server.workers
        assert {one.result().output("pid")[0] for one in queued} == {left}
        assert server.metric("gpuserve_worker_up", model="m") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("retries", variants(True, False))
def test_what_does_not_finish_in_time(tmp_path: Path, orders: Orders, retries: bool) -> None:
    entry = model("m", orders, retry_on_worker_death=retries, **one_by_one_on(2))
    with started(tmp_path, entry, drain_timeout_s=0.3).until_ended() as server:
        orders.shut()
        running = [InBackground(server.infer, "m", 1.0) for _ in range(2)]
        orders.wait_calls(2)
        scaling = InBackground(scaled, server, m=1)
        if retries:
            wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 1, "it waits again")
            orders.open()
            assert [one.result().status for one in running] == [200, 200]
        else:
            wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "one is refused")
            orders.open()
            answers = {one.result().status: one.result() for one in running}
            assert "model 'm' was scaled down" in answers[503].error
            assert answers[200].output("y") == [2.0]
        well(scaling.result())
        assert len(server.workers) == 1


@pytest.mark.thorough
def test_a_worker_that_dies_on_its_way_out_is_not_started_again(tmp_path: Path, orders: Orders) -> None:
    with started(tmp_path, model("m", orders, **one_by_one_on(2))).until_ended() as server:
        orders.shut()
        running = [InBackground(server.infer, "m", 1.0) for _ in range(2)]
        orders.wait_calls(2)
        scaling = InBackground(scaled, server, m=1)
        wait_until(lambda: count_of(server) == 1, "the model has one instance")
        leaving = instance_pids(server)["cpu#1"]
        os.kill(leaving, signal.SIGKILL)
        well(scaling.result())
        orders.open()
        assert [one.result().status for one in running] == [200, 200]
        assert len(server.workers) == 1
        assert leaving not in server.workers


def instance_pids(server: OperatedServer) -> dict[str, int]:
    """The worker of each instance."""
    return {one["name"]: one["pid"] for one in row(server.addresses["HTTP"], "m")["instances"]}


@pytest.mark.thorough
def test_a_front_that_dies_while_a_model_grows(tmp_path: Path, orders: Orders) -> None:
    with started(tmp_path, model("m", orders, "load_slowly"), min_ready_instances=3).until_ended() as server:
        first = server.workers
        orders.shut()
        scaling = InBackground(scaled, server, m=3)
        wait_until(lambda: len(server.workers) == 3, "they load")
        assert count_of(server) == 1
        assert server.status("/v2/health/ready") == 200, "those that are not there yet do not count"
        server.replace_front()
        assert count_of(server) == 1
        orders.open()
        well(scaling.result())
        assert count_of(server) == 3
        assert set(first) <= set(server.workers)
        assert server.metric("gpuserve_worker_up", model="m") == 3


@pytest.mark.thorough
def test_a_front_that_dies_while_a_model_shrinks(tmp_path: Path, orders: Orders) -> None:
    with started(tmp_path, model("m", orders, **one_by_one_on(3))).until_ended() as server:
        orders.shut()
        running = [InBackground(status_of, server) for _ in range(3)]
        orders.wait_calls(3)
        scaling = InBackground(scaled, server, m=1)
        wait_until(lambda: count_of(server) == 1, "the model has one instance")
        server.replace_front()
        orders.open()
        well(scaling.result())
        assert [one.result() for one in running] == [0, 0, 0]  # its connections went with the front
        assert len(server.workers) == count_of(server) == 1
        assert server.infer("m", 4.0).output("y") == [8.0]


def status_of(server: OperatedServer) -> int:
    try:
        return server.infer("m", 1.0).status
    except OSError:
        return 0


@pytest.mark.thorough
def test_a_server_that_scales_up_is_ready_all_the_time(tmp_path: Path, orders: Orders) -> None:
    with (
        started(tmp_path, model("m", orders), min_ready_instances=4) as server,
        grpc.insecure_channel(server.wait_ready().addresses["gRPC"]) as channel,
    ):
        said: list[bytes] = []

        def watch() -> None:
            with contextlib.suppress(grpc.RpcError):  # so the server's end is told
                said.extend(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=TIMEOUT_S))

        watching = InBackground(watch)
        wait_until(lambda: said, "it is watched")
        for count in (4, 1, 4, 1, 4):
            well(scaled(server, m=count))
        assert server.end() == 0
        watching.result()
        assert said == [SERVING, NOT_SERVING]


@pytest.mark.thorough
def test_a_front_that_hears_late_of_an_instance_that_left_and_came_back(
    tmp_path: Path, orders: Orders
) -> None:
    with started(
        tmp_path, model("m", orders, **one_by_one_on(2)), drain_timeout_s=0.1
    ).until_ended() as server:
        os.kill(server.front, signal.SIGSTOP)
        try:
            well(scaled(server, m=1))
            well(scaled(server, m=2))
        finally:
            os.kill(server.front, signal.SIGCONT)
        orders.shut()
        running = [InBackground(server.infer, "m", 1.0) for _ in range(2)]
        assert {call["pid"] for call in orders.wait_calls(2)} == set(server.workers)
        orders.open()
        assert [one.result().status for one in running] == [200, 200]


@pytest.mark.thorough
def test_one_that_is_down_goes_before_one_that_serves(tmp_path: Path, orders: Orders) -> None:
    with started(tmp_path, model("m", orders, "load_slowly", **on(2))).until_ended() as server:
        pids = instance_pids(server)
        orders.shut()
        os.kill(pids["cpu#0"], signal.SIGKILL)
        wait_until(lambda: server.metric("gpuserve_worker_up", model="m") == 1, "one is down")
        well(scaled(server, m=1))
        assert instance_pids(server) == {"cpu#1": pids["cpu#1"]}
        assert server.status("/v2/health/ready") == 200
        orders.open()
        assert server.infer("m", 4.0).output("y") == [8.0]
        well(scaled(server, m=2))
        assert set(instance_pids(server)) == {"cpu#0", "cpu#1"}


@pytest.mark.thorough
def test_a_model_that_is_being_loaded_is_scaled_after_that(tmp_path: Path, orders: Orders) -> None:
    entry = model("m", orders, "load_slowly")
    with started(tmp_path, entry, model_control="explicit", load_at_start=[]).until_ended() as server:
        orders.shut()
        loading = InBackground(ask, server.addresses["HTTP"], "load", model="m")
        wait_until(lambda: server.workers, "it loads")
        scaling = InBackground(scaled, server, m=2)
        orders.open()
        well(loading.result())
        assert well(scaling.result())["models"]["m"]["after"] == 2


@pytest.mark.thorough
def test_what_is_told_of_the_numbers_is_of_what_serves(tmp_path: Path, orders: Orders) -> None:
    with started(tmp_path, model("m", orders)).until_ended() as server:
        well(scaled(server, m=3))
        asked = orders.hold(server)
        well(ask(server.addresses["HTTP"], "reload", model="m"))
        # The three of before still have something to finish.
        assert well(scaled(server, m=2)) == {"models": {"m": {"before": 1, "after": 2}}}
        orders.open()
        assert asked.result().status == 200
