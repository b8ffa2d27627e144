"""Forty models at once: all come up and answer, and a worker costs little more than Python and numpy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from operated import OperatedServer
from processes import cpu_s, measured

MODELS = 40
#: A worker's CPU seconds are those of ``import numpy`` in a bare interpreter times this, at most. It was 1.12
#: when this was written.
MOST = 1.6
MODEL_FILE = """\
import numpy as np
from gpuserve.decorators import batch


@batch
def double(x):
    return {"y": np.multiply(x, 2)}
"""


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bare_s() -> float:
    """What ``import numpy`` takes without BLAS's threads, which a worker has sleep as well."""
    environment = os.environ | {"OPENBLAS_THREAD_TIMEOUT": "20"}
    before = children_cpu_s()
    for _ in range(6):
        subprocess.run([sys.executable, "-c", "import numpy"], env=environment, check=True)
    return (children_cpu_s() - before) / 6


@pytest.mark.thorough
def test_forty_models_are_ready_and_answer_and_their_workers_cost_little_beside_numpy(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL_FILE)
    tensors = {"inputs": [{"name": "x", "dtype": "float32", "shape": [1]}]}
    tensors["outputs"] = [{"name": "y", "dtype": "float32", "shape": [1]}]
    names = [f"m{number}" for number in range(MODELS)]
    models = [{"name": one, "callable": "model.py:double", "max_batch_size": 8, **tensors} for one in names]
    (tmp_path / "config.yaml").write_text(json.dumps({"models": models}))
    before = bare_s()
    with OperatedServer(tmp_path / "config.yaml").until_killed() as server:
        spent_s = [cpu_s(pid) for pid in server.workers]
        answers = [server.infer(name, float(number)).output("y") for number, name in enumerate(names)]
    bare = (before + bare_s()) / 2
    each_s = sum(spent_s) / len(spent_s)
    measured(
        f"a worker: {each_s:.3f} s of CPU, {each_s / bare:.2f} times that of import numpy ({bare:.3f} s)"
    )
    assert answers == [[2.0 * number] for number in range(MODELS)]
    assert len(spent_s) == MODELS
    assert each_s <= MOST * bare
