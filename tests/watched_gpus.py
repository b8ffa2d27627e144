"""A server that watches the GPUs of a machine, and the fixtures of the tests of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GPU_0, GPU_1, GpuMachine, real_gpu
from operated import MODELS, OperatedServer, config
from processes import wait_until

#: Rounds are short here, so that little has to be waited for.
QUICKLY = ("--gpu-health-interval-s", "0.1")
HELD_NBYTES = 10 << 20


def model(**keys: Any) -> dict[str, Any]:
    return {
        "name": "m",
        "callable": f"{MODELS / 'holds_memory.py'}:HoldsMemory",
        "kwargs": {"nbytes": HELD_NBYTES},
        "instances": [{"device": "cuda:*"}],
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [
            {"name": "y", "dtype": "float32", "shape": [-1]},
            {"name": "pid", "dtype": "int64", "shape": [1]},
        ],
        "max_batch_size": 8,
        **keys,
    }


class Watched(OperatedServer):
    """A server with a model on every GPU of the machine."""

    def get(self, path: str) -> dict[str, Any]:
        with self.client() as client:
            found: dict[str, Any] = json.loads(client.get(path).body)
        return found

    def gpu(self, uuid: str) -> dict[str, Any]:
        return next(one for one in self.get("/v2/gpus")["gpus"] if one["uuid"] == uuid)

    def state(self, uuid: str) -> str:
        return str(self.gpu(uuid)["state"])

    def up(self) -> set[str]:
        return {one for one in ("cuda:0#0", "cuda:1#0") if self.metric("gpuserve_worker_up", instance=one)}

    def wait_watched(self) -> None:
        wait_until(lambda: self.get("/v2/gpus")["gpus"], "the GPUs were read")

    def wait_state(self, uuid: str, state: str) -> float:
        return wait_until(lambda: self.state(uuid) == state, f"{uuid} is {state}")

    def said(self) -> list[tuple[str, str]]:
        return [(one["level"], one["msg"]) for one in self.messages()]


def watched(
    machine: GpuMachine, directory: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, **keys: Any
) -> Watched:
    machine.set_environment(monkeypatch)
    return Watched(config(directory, model(**keys)), *QUICKLY, *flags)


@pytest.fixture
def server(two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A server whose machine does not come back to what it was."""
    with watched(two_gpus, tmp_path, monkeypatch).until_ended() as running:
        running.wait_watched()
        yield running


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory: pytest.TempPathFactory) -> GpuMachine:
    if real_gpu():
        pytest.skip("a real GPU cannot be changed by a test")
    return GpuMachine(tmp_path_factory.mktemp("gpus"), [GPU_0, GPU_1])


@pytest.fixture(scope="module")
def module_server(shared_machine: GpuMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with (
        pytest.MonkeyPatch.context() as patch,
        watched(shared_machine, tmp_path_factory.mktemp("config"), patch).until_ended() as running,
    ):
        running.wait_watched()
        yield running


@pytest.fixture
def shared_server(module_server: Watched, shared_machine: GpuMachine) -> Iterator[Watched]:
    """A server that every test leaves with both GPUs healthy."""
    yield module_server
    shared_machine.change(gpus=(GPU_0, GPU_1))
    wait_until(lambda: len(module_server.up()) == 2, "both workers are up")
    for uuid in shared_machine.uuids:
        module_server.wait_state(uuid, "HEALTHY")
