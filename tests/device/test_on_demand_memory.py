"""Models on demand within a budget of memory on each GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commands import status
from gpu_machine import GPU_0, GpuMachine
from operated import config
from processes import wait_until
from watched_gpus import HELD_NBYTES, QUICKLY, Watched, model

from gpuserve.supervisor.models.on_demand import GIVE_WAY_S

#: The driver counts the CUDA context of a process as well.
TAKEN_NBYTES = GPU_0.context_memory + HELD_NBYTES


def test_models_go_for_others_on_their_own_gpu(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in two_gpus.environ.items():
        monkeypatch.setenv(name, value)
    placed = {"a": "cuda:0", "b": "cuda:0", "c": "cuda:0", "elsewhere": "cuda:1", "host": "cpu"}
    models = [
        model(name=name, on_demand=True, instances=[{"device": device}]) for name, device in placed.items()
    ]
    file = config(tmp_path, *models, memory={"cuda": int(2.5 * TAKEN_NBYTES)})
    with Watched(file, *QUICKLY) as server:
        server.wait_ready()
        for name in ("elsewhere", "host", "a", "b", "a", "c"):
            if name == "c":
                asked_at = time.monotonic()
                wait_until(lambda at=asked_at: time.monotonic() - at > GIVE_WAY_S, "no model counts as used")
                assert server.infer("a", 1.0).output("y") == [2.0]
            assert server.infer(name, 1.0).output("y") == [2.0]
            wait_until(
                lambda name=name: (
                    placed[name] == "cpu"
                    or server.metric("gpuserve_resident_memory_bytes", model=name, device=placed[name])
                    == TAKEN_NBYTES
                ),
                "the memory is measured",
            )
        document = status(server.addresses["HTTP"])
        assert {one["name"]: one["residence"] for one in document["models"]} == {
            **dict.fromkeys(("elsewhere", "host", "a", "c"), "RESIDENT"),
            "b": "COLD",
        }
        assert document["memory"]["cuda:0"]["nbytes"] == 2 * TAKEN_NBYTES
        assert document["memory"]["cuda:1"]["nbytes"] == TAKEN_NBYTES
        assert server.end() == 0


def test_a_model_over_several_gpus_counts_on_each(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in two_gpus.environ.items():
        monkeypatch.setenv(name, value)
    wide = model(name="wide", on_demand=True, instances=[{"device": ["cuda:0", "cuda:1"]}])
    models = [wide, model(name="a", on_demand=True, instances=[{"device": "cuda:0"}])]
    file = config(tmp_path, *models, memory={"cuda": int(1.5 * TAKEN_NBYTES)})
    with Watched(file, *QUICKLY) as server:
        server.wait_ready()
        assert server.infer("wide", 1.0).output("y") == [2.0]

        def taken() -> list[int]:
            memory = status(server.addresses["HTTP"])["memory"]
            return [memory[device]["nbytes"] for device in ("cuda:0", "cuda:1")]

        wait_until(lambda: min(taken()) >= TAKEN_NBYTES // 2, "the memory is measured")
        assert taken()[0] == taken()[1]
        assert server.infer("a", 1.0).output("y") == [2.0]
        assert server.end() == 0
