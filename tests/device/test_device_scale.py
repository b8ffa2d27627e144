"""Models on GPUs that are scaled in place: new workers get their GPU, and one that is lost is waited for."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GPU_0, GPU_1, GpuMachine
from operated import MODELS, TIMEOUT_S, InBackground, OperatedServer, config
from processes import wait_until
from test_device_ensembles import Asked, models
from watched_gpus import Watched, server

from gpuserve.supervisor.control import operator_client

pytestmark = pytest.mark.thorough

__all__ = ["server"]  # a fixture


def scale(server: OperatedServer, count: int, name: str = "m") -> None:
    address, counts = server.addresses["HTTP"], {"counts": {name: count}}
    outcome = operator_client.ask(address, "scale", counts, lambda text: None, TIMEOUT_S)
    assert outcome.code == "", outcome.text
    assert outcome.result["models"][name]["after"] == count


def up(server: OperatedServer) -> set[str]:
    names = [f"cuda:{number}#{instance}" for number in range(2) for instance in range(2)]
    return {one for one in names if server.metric("gpuserve_worker_up", instance=one)}


def test_each_new_worker_sees_the_gpu_that_it_is_for(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = tmp_path / "views"
    views.mkdir()
    two_gpus.set_environment(monkeypatch)
    model = {
        "name": "m",
        "callable": f"{MODELS / 'device_view.py'}:View",
        "kwargs": {"directory": str(views)},
        "instances": [{"device": "cuda:*"}],
        "inputs": [{"name": "x", "dtype": "float32", "shape": [1]}],
        "outputs": [{"name": "seen", "dtype": "bytes", "shape": [1]}],
        "max_batch_size": 1,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"models": [model]}))
    with OperatedServer(file).until_ended() as server:
        scale(server, 2)
        seen: dict[str, Any] = {one.name: json.loads(one.read_text()) for one in views.iterdir()}
        assert {name: one["visible"] for name, one in seen.items()} == {
            "cuda:0#0": GPU_0.uuid, "cuda:0#1": GPU_0.uuid, "cuda:1#0": GPU_1.uuid, "cuda:1#1": GPU_1.uuid,
        }  # fmt: skip
        for number in range(2):
            assert seen[f"cuda:{number}#1"]["cpus"] == seen[f"cuda:{number}#0"]["cpus"]
            assert seen[f"cuda:{number}#1"]["preferred"] == seen[f"cuda:{number}#0"]["preferred"]
        scale(server, 1)
        assert server.workers == sorted(seen[f"cuda:{number}#0"]["pid"] for number in range(2))
        assert server.infer("m", 1.0).status == 200


def test_an_instance_for_a_lost_gpu_comes_when_that_is_back(server: Watched, two_gpus: GpuMachine) -> None:
    two_gpus.lose(GPU_0.uuid)
    wait_until(lambda: up(server) == {"cuda:1#0"}, "the worker of the lost GPU is gone")
    scale(server, 2)
    assert up(server) == {"cuda:1#0", "cuda:1#1"}
    two_gpus.change_gpu(GPU_0.uuid, lost=False)
    wait_until(lambda: len(up(server)) == 4, "all are there")
    two_gpus.lose(GPU_0.uuid)
    wait_until(lambda: len(up(server)) == 2, "the workers of the lost GPU are gone")
    scale(server, 1)
    assert up(server) == {"cuda:1#0"}
    two_gpus.change_gpu(GPU_0.uuid, lost=False)
    wait_until(lambda: up(server) == {"cuda:0#0", "cuda:1#0"}, "the one that is left is back")


def test_what_the_steps_of_an_ensemble_keep_on_a_gpu_is_read_before_its_worker_goes(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.set_environment(monkeypatch)
    names = ("doubled", "plus_one", "chain")
    entries = [one for one in models(tmp_path) if one["name"] in names]
    with Asked(config(tmp_path, *entries, host="127.0.0.1")) as server:
        server.wait_ready()
        server.wait_acquainted("chain", 1.0, 5.0)
        ended, answers = threading.Event(), list[float]()

        def ask_on() -> None:
            while not ended.is_set():
                answers.append(float(server.ask("chain", 1.0)[0, -1]))

        asking = [InBackground(ask_on) for _ in range(2)]
        for name, count in (("doubled", 2), ("plus_one", 2), ("doubled", 1), ("plus_one", 1)):
            scale(server, count, name)
            so_far = len(answers)
            wait_until(lambda: len(answers) > so_far + 10, "it goes on")  # noqa: B023
        ended.set()
        for one in asking:
            one.result()
        assert set(answers) == {5.0}
        server.wait_acquainted("chain", 1.0, 5.0)
        wait_until(server.is_idle, "nothing is kept")
        assert len(server.workers) == 2
        assert server.end() == 0
