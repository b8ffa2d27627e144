"""What clients of a server see of faults on a GPU: a batch that is to blame, and nothing else."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_calls import infer_binary
from gpu_machine import GpuMachine, RealMachine
from operated import MODELS, InBackground, OperatedServer

pytestmark = pytest.mark.thorough

Machine = GpuMachine | RealMachine
POISON = 13.0
#: Of float32, so that a request is larger than what goes inside a message.
WIDE = 100_000


def model(name: str, attribute: str, size: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{MODELS}/pipelined.py:{attribute}",
        "array": "cupy",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}],
        "max_batch_size": size,
        "prefetch": 1,
        "instances": [{"device": "cuda:0"}],
        **more,
    }


@pytest.fixture
def server(
    gpu_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[OperatedServer]:
    """A server with the models of the test's mark."""
    gpu_machine.set_environment(monkeypatch)
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"models": request.param}))
    with OperatedServer(config) as started:
        yield started.wait_ready()


def asked(server: OperatedServer, name: str, value: float, width: int = 1) -> InBackground:
    """The status and the answer of a request of one row."""

    def call() -> tuple[int, Any]:
        with server.client() as client:
            return infer_binary(client, name, np.full((1, width), value))

    return InBackground(call)


@pytest.mark.parametrize(
    "server", [[model("hungry", "Hungry", 8, batching={"max_queue_delay_us": 200_000})]], indirect=True
)
def test_requests_that_do_not_fit_together_are_all_answered(server: OperatedServer) -> None:
    calls = [asked(server, "hungry", float(number)) for number in range(8)]
    assert [float(one.result()[1][0, 0]) for one in calls] == [number + 1.0 for number in range(8)]
    assert server.metric("gpuserve_oom_splits_total", model="hungry") == 1
    assert server.metric("gpuserve_worker_restarts_total", model="hungry") == 0
    server.wait_log("it is run in two halves")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "server", [[model("breaks", "breaks", 1)], [model("breaks", "breaks_later", 1)]], indirect=True
)
def test_a_batch_that_breaks_the_device_fails_and_the_others_are_answered(server: OperatedServer) -> None:
    values = [1.0, 2.0, 3.0, POISON, 4.0, 5.0, 6.0, 7.0]
    calls = {value: asked(server, "breaks", value) for value in values}
    answers = {value: call.result() for value, call in calls.items()}
    status, text = answers.pop(POISON)
    assert status == 500
    assert text.startswith("the device of instance 'cuda:0#0' of model 'breaks' failed while it ran this ")
    assert {value: float(answer[0, 0]) for value, (_, answer) in answers.items()} == {
        value: 2 * value for value in values if value != POISON
    }
    assert server.metric("gpuserve_worker_restarts_total", model="breaks") >= 1


@pytest.mark.parametrize("server", [[model("killed", "killed", 1)]], indirect=True)
@pytest.mark.parametrize("width", [1, WIDE])
def test_a_worker_that_is_killed_in_the_middle_loses_nothing(server: OperatedServer, width: int) -> None:
    values = [1.0, 2.0, 3.0, POISON, 4.0, 5.0, 6.0, 7.0]
    calls = [asked(server, "killed", value, width) for value in values]
    answers = [one.result() for one in calls]
    assert [(status, float(answer[0, -1])) for status, answer in answers] == [
        (200, 2 * one) for one in values
    ]
    assert server.metric("gpuserve_worker_restarts_total", model="killed") == 1


@pytest.mark.parametrize("server", [[model("waited_for", "waited_for", 1)]], indirect=True)
def test_a_front_that_dies_while_batches_are_under_way_is_followed_by_another(server: OperatedServer) -> None:
    calls = [asked(server, "waited_for", float(number)) for number in range(12)]
    workers = server.workers
    os.kill(server.front, signal.SIGKILL)
    for one in calls:
        with contextlib.suppress(OSError, http.client.HTTPException):  # its connection ended with the front
            one.result()
    server.wait_model_ready("waited_for")
    assert server.infer("waited_for", 5.0).output("y") == [10.0]
    assert server.workers == workers
