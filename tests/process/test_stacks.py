"""Asking a process for the stacks of its threads does not harm the process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest
from operated import MODELS, OperatedServer, config
from serving import GPUSERVE

from gpuserve_worker.protocol.stack_signals import STACKS_SIGNAL

#: With a handler in C, which reads frames while other threads change them, the first few killed the worker.
N_SIGNALS: Final = 3000


def test_a_worker_with_threads_of_numerical_libraries_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    tensor = {"dtype": "float32", "shape": [-1]}
    entry = {
        "name": "m",
        "callable": f"{MODELS / 'echo.py'}:batched",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "max_batch_size": 8,
    }
    with OperatedServer(config(tmp_path, entry)).until_killed() as server:
        (pid,) = server.workers
        os.kill(pid, STACKS_SIGNAL)
        assert server.infer("m", 1.0).output("y") == [1.0]
        assert server.metric("gpuserve_worker_restarts_total", model="m") == 0
        assert server.workers == [pid]


@pytest.mark.thorough
def test_a_worker_whose_threads_run_survives_being_asked_for_stacks(tmp_path: Path) -> None:
    tensor = {"dtype": "float32", "shape": [-1]}
    entry = {
        "name": "m",
        "callable": f"{MODELS / 'churning.py'}:Churning",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "max_batch_size": 8,
    }
    with OperatedServer(config(tmp_path, entry)).until_ended() as server:
        status = [GPUSERVE, "status", "--server", server.addresses["HTTP"], "--json", "--stacks"]
        found = json.loads(subprocess.run(status, capture_output=True, check=True, timeout=60).stdout)
        (model,) = found["models"]
        (instance,) = model["instances"]
        assert any("in _recurse" in stacks for stacks in found["stacks"]), found["stacks"]
        for _ in range(N_SIGNALS):
            os.kill(instance["pid"], STACKS_SIGNAL)
        assert server.infer("m", 1.0).output("y") == [1.0]
        assert server.metric("gpuserve_worker_restarts_total", model="m") == 0
