"""A callable that is not back within ``execution_timeout_s``: who is told what, and its worker replaced."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hanging_scene import LIMIT_S, entry
from operated import LARGE, MODELS, Answer, InBackground, OperatedServer, config
from processes import finished, wait_until
from repositories import Client, clients_are_closed, write
from repositories import entry as tagged
from serving import GPUSERVE
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from gpuserve.supervisor.control.operator_client import ControlName, running

__all__ = ["clients_are_closed"]  # it is for every test here

HANGS, HANGS_IN_THE_FIRST_PROCESS = -1.0, -2.0
#: The most that a hang is to be caught after its limit.
CAUGHT_S = 10.0


def refusal(model: str) -> str:
    return (
        f"model '{model}': the callable of instance cpu#0 was not back within execution_timeout_s, "
        f"{LIMIT_S:g} s, and was ended"
    )


def hung(server: OperatedServer, model: str, *values: float) -> Answer:
    """Ask for what hangs, and see that it is answered in time."""
    began_at = time.monotonic()
    answer: Answer = server.infer(model, *values or (HANGS,))
    took_s = time.monotonic() - began_at
    assert LIMIT_S <= took_s < LIMIT_S + CAUGHT_S
    return answer


def stacks(server: OperatedServer, model: str) -> str:
    """The stacks that the log has of an instance of a model."""
    wait_until(lambda: any("not back after" in line and f'"{model}"' in line for line in server.log), "told")
    return next(line for line in server.log if "not back after" in line and f'"{model}"' in line)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    mark = tmp_path_factory.mktemp("mark") / "mark"
    entries = [
        entry("c", "in_c"),
        entry("await", "Awaiting", kwargs={"mark": str(mark)}, concurrency=4),
        entry("steps", "steps", decoupled=True),
    ]
    with OperatedServer(config(tmp_path_factory.mktemp("config"), *entries)).until_ended() as server:
        yield server


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    entries = [
        entry("blocked", "in_c_with_all_signals_blocked"),
        entry("replaced", "in_c_with_the_handler_replaced"),
        entry("two", "in_c", instances=[{"device": "cpu", "count": 2}]),
        entry("steps_async", "steps_async", decoupled=True),
    ]
    with OperatedServer(config(tmp_path_factory.mktemp("config"), *entries)).until_ended() as server:
        yield server


def test_who_hangs_is_told_and_the_worker_is_replaced(server: OperatedServer) -> None:
    before = server.infer("c", 1.0).output("pid")
    answer = hung(server, "c")
    assert (answer.status, answer.error) == (504, refusal("c"))
    server.wait_model_ready("c")
    answer = server.infer("c", 1.0)
    assert answer.output("y") == [2.0]
    assert answer.output("pid") != before
    said = stacks(server, "c")
    assert "execution_timeout_s is 0.5 s: the worker is killed and replaced" in said
    assert "Main thread" in said
    assert "in sleep_in_c" in said
    assert server.metric("gpuserve_execution_timeouts_total", model="c") == 1
    assert server.metric("gpuserve_worker_restarts_total", model="c") == 1


def test_others_that_an_instance_runs_beside_a_call_that_hangs_run_once_more(server: OperatedServer) -> None:
    first = InBackground(server.infer, "await", HANGS)
    wait_until(lambda: server.metric("gpuserve_running_requests", model="await") == 1, "it hangs")
    began_at = time.monotonic()
    while time.monotonic() < began_at + LIMIT_S / 3:  # others are answered meanwhile
        assert server.infer("await", 1.0).output("y") == [2.0]
    beside = InBackground(server.infer, "await", HANGS_IN_THE_FIRST_PROCESS)
    answer = first.result()
    assert (answer.status, answer.error) == (504, refusal("await"))
    assert beside.result().output("y") == [2 * HANGS_IN_THE_FIRST_PROCESS]
    assert server.metric("gpuserve_execution_timeouts_total", model="await") == 1
    assert "run_forever" in stacks(server, "await")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "shown"), [("blocked", "in sleep_in_c"), ("replaced", "no stacks of")])
def test_a_callable_cannot_keep_its_worker_from_being_killed(
    more: OperatedServer, name: str, shown: str
) -> None:
    answer = hung(more, name)
    assert (answer.status, answer.error) == (504, refusal(name))
    assert shown in stacks(more, name)
    more.wait_model_ready(name)
    assert more.infer(name, 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_all_of_the_batch_that_hangs_are_told_and_nothing_runs_twice(more: OperatedServer) -> None:
    answer = hung(more, "two", 1.0, HANGS)
    assert (answer.status, "was not back within" in answer.error) == (504, True)
    more.wait_model_ready("two")
    assert more.infer("two", HANGS, width=LARGE).status == 504
    wait_until(lambda: more.metric("gpuserve_arena_blocks", model="two") == 0, "what it read is free")
    assert more.infer("two", 1.0).output("y") == [2.0]
    assert more.metric("gpuserve_execution_timeouts_total", model="two") == 2


def test_the_limit_is_for_each_response_of_a_stream(server: OperatedServer) -> None:
    check_stream(server, "steps", 3)  # 0.4 s in all, and 0.2 s each


@pytest.mark.thorough
def test_the_limit_is_for_each_response_of_an_async_stream(more: OperatedServer) -> None:
    check_stream(more, "steps_async", 2)


def check_stream(server: OperatedServer, name: str, n_responses: int) -> None:
    with grpc.InferenceServerClient(server.addresses["gRPC"]) as client:
        told: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: told.put(error or result.as_numpy("y")))
        ask_stream(client, name, 1.0)
        assert [told.get(timeout=20).item() for _ in range(n_responses)] == [2.0] * n_responses
        began_at = time.monotonic()
        ask_stream(client, name, HANGS)
        assert told.get(timeout=20).item() == 2 * HANGS
        assert refusal(name) in str(told.get(timeout=20))
        assert time.monotonic() - began_at < 0.2 + LIMIT_S + CAUGHT_S
    server.wait_model_ready(name)


def ask_stream(client: grpc.InferenceServerClient, model: str, value: float) -> None:
    tensor = grpc.InferInput("x", (1, 1), "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
    client.async_stream_infer(model, [tensor])


@pytest.mark.thorough
def test_a_load_that_hangs_is_told_of_and_ended_with_its_stacks(tmp_path: Path) -> None:
    path = config(tmp_path, entry("m", "LoadsForever"), load_timeout_s=3)
    with OperatedServer(path) as server:
        server.wait_log("not loaded within 3 s (load_timeout_s)")
        assert server.process.wait(20) == 3
        slow = next(line for line in server.log if "in sleep_in_c; it is ended after" in line)
        assert f"s, at {MODELS / 'hanging.py'}:" in slow
        late = next(line for line in server.log if "(load_timeout_s)" in line and "not loaded" in line)
        assert "Main thread" in late
        assert "in sleep_in_c" in late


@pytest.mark.thorough
def test_status_shows_where_every_process_stands_also_while_a_model_loads(tmp_path: Path) -> None:
    entries = [entry("m", "in_c", execution_timeout_s=0), entry("loads", "LoadsForever")]
    with OperatedServer(config(tmp_path, *entries), "--model-control", "explicit") as server:
        name = f"localhost:{wait_port(server)}"
        wait_until(lambda: "in sleep_in_c" in status_of(name), "it loads, and shows where it stands")
        front, *workers = json.loads(status_of(name, "--json"))["stacks"]
        assert front.startswith(f"front, process {server.front}:\nMain thread ")
        assert "gpuserve/front/process/__main__.py" in front
        heads = [one.splitlines()[0] for one in workers]
        assert sorted(heads) == [
            f"model {model}, instance cpu#0, process {pid}:" for model, pid in sorted(pids(name))
        ]
        server.end(signal.SIGKILL)


def wait_port(server: OperatedServer) -> int:
    """A port of a server that is not ready."""
    wait_until(lambda: bool(names_of(server.pid)), "it listens")
    return names_of(server.pid)[0].port


def names_of(pid: int) -> list[ControlName]:
    return next((names for (_, process), names in running().items() if process == pid), [])


def pids(server: str) -> list[tuple[str, int]]:
    found = json.loads(status_of(server, "--json"))["models"]
    return [(model["name"], one["pid"]) for model in found for one in model["instances"]]


def status_of(server: str, *flags: str) -> str:
    command = [GPUSERVE, "status", "--stacks", "--server", server, *flags]
    return finished(command).stdout


# ---- without a timeout ---------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_waits_behind_a_hung_call_is_answered_by_the_model_that_is_loaded_anew(tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    os.mkfifo(run)
    write(config, tagged("m", 1.0, run_fifo=str(run)), host="127.0.0.1", drain_timeout_s=2)
    with OperatedServer(config).until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        hung = InBackground(client.infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it hangs")
        widths = (2, 2, 1 << 17)
        waiting = [InBackground(client.infer, "m", width=width) for width in widths]
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == len(widths), "they wait")
        (before,) = server.workers
        write(config, tagged("m", 2.0), host="127.0.0.1", drain_timeout_s=2)
        client.asked.load_model("m")
        loaded_at = time.monotonic()
        assert [one.result().tag for one in waiting] == [2.0] * len(widths)
        assert time.monotonic() - loaded_at < 2  # the drain time of the call that hangs
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            hung.result()
        wait_until(lambda: before not in server.workers, "the process that hung is gone")


@pytest.mark.thorough
def test_a_model_whose_callable_hangs_is_loaded_anew_beside_it(tmp_path: Path) -> None:
    """Its request is told when the drain time is over, and the process is ended although it never answers."""
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    os.mkfifo(run)
    write(config, tagged("m", 1.0, run_fifo=str(run)), host="127.0.0.1", drain_timeout_s=0.5)
    with OperatedServer(config).until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        hung = InBackground(client.infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it hangs")
        before = server.workers
        write(config, tagged("m", 2.0), host="127.0.0.1", drain_timeout_s=0.5)
        client.asked.load_model("m")
        assert client.infer("m").tag == 2.0
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            hung.result()
        wait_until(lambda: not set(before) & set(server.workers), "the process that hung is gone")
        assert client.infer("m").tag == 2.0
