"""Instances of several ranks, each with a GPU of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import status
from gpu_machine import GPU_0, GPU_1, GpuMachine
from operated import MODELS, config
from processes import wait_until
from watched_gpus import QUICKLY, Watched, model


def test_each_rank_has_the_batch_on_its_own_gpu(
    two_gpus: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.set_environment(monkeypatch)
    tensor = {"dtype": "float32", "shape": [-1]}
    ranked = model(
        callable=f"{MODELS / 'ranked_on_device.py'}:RankedOnDevice",
        kwargs={"directory": str(tmp_path)},
        inputs=[{"name": "x", "memory": "gpu", **tensor}],
        outputs=[{"name": "y", **tensor}],
        instances=[{"device": ["cuda:1", "cuda:0"], "ranks": 2}],
    )
    with Watched(config(tmp_path, ranked), *QUICKLY).until_ended() as server:

        def visited() -> list[str]:
            return [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]

        visible = f"{GPU_1.uuid},{GPU_0.uuid}"
        for value in (1.0, 2.0, 3.0):
            assert server.infer("m", value).output("y") == [2 * value]
        assert visited() == [f"cuda:0 0 {visible}", f"cuda:1 1 {visible}"]
        (row,) = status(server.addresses["HTTP"])["models"][0]["instances"]
        assert (row["device"], row["ranks"]) == ("cuda:1+cuda:0", 2)
        for device in ("cuda:0", "cuda:1"):
            wait_until(
                lambda device=device: server.metric("gpuserve_model_gpu_memory_bytes", device=device) > 0,
                "the memory of both processes is that of the model",
            )
        os.kill(row["pids"][1], signal.SIGKILL)
        server.wait_log("died (rank 1: signal SIGKILL)")
        assert server.infer("m", 4.0).output("y") == [8.0]
        two_gpus.lose(GPU_0.uuid)
        wait_until(
            lambda: server.status("/v2/models/m/ready") != 200, "the instance is lost with its second GPU"
        )
