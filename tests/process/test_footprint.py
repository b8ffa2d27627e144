"""What a server takes that has answered a hundred requests on each protocol, and what each process loads."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from operated import OperatedServer
from processes import cpu_s, measured

MODEL_FILE = """\
from gpuserve.decorators import batch


@batch
def echo(x):
    return {"y": x}
"""
CONFIG = """\
models:
  - name: echo
    callable: model.py:echo
    inputs: [{name: x, dtype: float32, shape: [-1]}]
    outputs: [{name: y, dtype: float32, shape: [-1]}]
    max_batch_size: 8
"""
REQUESTS = 100
#: The limits of the project, in MB of 1e6 bytes.
SERVER_MB, WORKER_MB = 110, 45
#: Libraries that a process must not carry, as they show among the mapped files.
NOT_IN_SUPERVISOR = ("_multiarray_umath", "_asyncio", "uvloop", "cygrpc", "google/_upb")
NOT_IN_FRONT = ("cygrpc", "_ml_dtypes")
NOT_IN_WORKER = (*NOT_IN_FRONT, "_asyncio", "uvloop", "google/_upb", "_ssl")


def mapped(pid: int, names: tuple[str, ...]) -> list[str]:
    """Those of the names that are in a file which the process maps."""
    text = Path(f"/proc/{pid}/maps").read_text()
    return [name for name in names if name in text]


def resident_mb(pid: int) -> float:
    line = next(one for one in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if "Rss:" in one)
    return int(line.split()[1]) * 1024 / 1e6


def infer(client: grpc_client.InferenceServerClient | http_client.InferenceServerClient) -> None:
    module = grpc_client if isinstance(client, grpc_client.InferenceServerClient) else http_client
    array = np.arange(16, dtype=np.float32)[None]
    tensor = module.InferInput("x", array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    for _ in range(REQUESTS):
        assert np.array_equal(client.infer("echo", [tensor]).as_numpy("y"), array)
    client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    folder = tmp_path_factory.mktemp("footprint")
    (folder / "model.py").write_text(MODEL_FILE)
    (folder / "config.yaml").write_text(CONFIG)
    with OperatedServer(folder / "config.yaml").until_killed() as started:
        infer(grpc_client.InferenceServerClient(started.addresses["gRPC"]))
        infer(http_client.InferenceServerClient(started.addresses["HTTP"]))
        yield started


def test_supervisor_and_front_fit_into_110_mb(server: OperatedServer) -> None:
    supervisor, front = resident_mb(server.process.pid), resident_mb(server.front)
    measured(f"RSS: supervisor {supervisor:.1f} MB, front {front:.1f} MB")
    assert supervisor + front <= SERVER_MB


def test_a_worker_with_numpy_only_fits_into_45_mb(server: OperatedServer) -> None:
    (worker,) = server.workers
    measured(f"RSS: worker {resident_mb(worker):.1f} MB")
    assert resident_mb(worker) <= WORKER_MB


def test_a_process_loads_only_what_it_uses(server: OperatedServer) -> None:
    (worker,) = server.workers
    assert mapped(server.front, ("_multiarray_umath", "uvloop")) != [], "the names are those of mapped files"
    assert mapped(server.process.pid, NOT_IN_SUPERVISOR) == []
    assert mapped(server.front, NOT_IN_FRONT) == []
    assert mapped(worker, NOT_IN_WORKER) == []


# ---- forty models --------------------------------------------------------------------------------


N_MODELS = 40
#: A worker's CPU seconds are those of ``import numpy`` in a bare interpreter times this, at most. It was 1.12
#: when this was written.
MOST = 1.6
DOUBLE = """\
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
    (tmp_path / "model.py").write_text(DOUBLE)
    tensors = {"inputs": [{"name": "x", "dtype": "float32", "shape": [1]}]}
    tensors["outputs"] = [{"name": "y", "dtype": "float32", "shape": [1]}]
    names = [f"m{number}" for number in range(N_MODELS)]
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
    assert answers == [[2.0 * number] for number in range(N_MODELS)]
    assert len(spent_s) == N_MODELS
    assert each_s <= MOST * bare
