"""What a server takes that has answered a hundred requests on each protocol, and what each process loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from operated import OperatedServer
from processes import measured

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
