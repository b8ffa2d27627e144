"""Limits of the memory that an instance takes of its GPU (``gpu_memory_nbytes``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_server import model as served
from cuda_server import tensor
from gpu_machine import GPU_0, GpuMachine
from operated import MODELS, config
from processes import wait_until
from watched_gpus import QUICKLY, Watched
from worker_process import WorkerProcess, floats, loaded, model, output

from gpuserve_worker.protocol import wire

MIB = 1 << 20
LIMIT = 32 * MIB


def test_a_model_that_takes_more_is_not_loaded(stand_in: GpuMachine) -> None:
    holds = {"kwargs": {"nbytes": LIMIT + 1}, "device": "cuda:0"}
    init = model("holds_memory.py:HoldsMemory", gpu_memory_nbytes=LIMIT, **holds)
    with WorkerProcess(init, environ=stand_in.environ) as worker:
        failure = worker.load_failure()
    assert "HoldsMemory raised OutOfMemoryError" in failure.text
    assert f"gpu_memory_nbytes limits this instance to {LIMIT} bytes on its GPU" in failure.text
    with loaded(init._replace(gpu_memory_nbytes=0), environ=stand_in.environ):
        pass


@pytest.mark.parametrize("nbytes", [4, LIMIT])
def test_a_batch_for_which_the_limit_leaves_no_memory_is_refused(stand_in: GpuMachine, nbytes: int) -> None:
    """Neither the callable's arrays nor the server's copy of the inputs may exceed the limit."""
    given = {"device": "cuda:0", "array": "cupy", "inputs": (("x", "FP32", (-1,), False, "gpu"),)}
    init = model("limited.py:Wasteful", gpu_memory_nbytes=LIMIT, **given)
    with loaded(init, environ=stand_in.environ) as worker:
        rows = np.full((1, nbytes // 4), -1.0, np.float32)
        failed = worker.run([worker.in_arena("x", "FP32", rows.shape, rows.tobytes())])
        assert isinstance(failed, wire.Failed)
        failure = wire.WireFailure(*failed.failure)
        assert failure.code == "RESOURCE_EXHAUSTED"
        assert f"whose instances have {LIMIT} bytes each (gpu_memory_nbytes)" in failure.text
        assert output(worker, worker.run([floats("x", [1.0])], batch_id=2)).tolist() == [[2.0]]


TORCH = """
import types
class Tensor: pass
def _limit(fraction, device): cuda.fractions[device] = fraction
cuda = types.SimpleNamespace(
    fractions={}, device_count=lambda: 1, set_per_process_memory_fraction=_limit,
    get_device_properties=lambda number: types.SimpleNamespace(total_memory=8 << 30),
    is_initialized=lambda: False,
)
"""


def test_torch_is_limited_when_the_callable_imports_it(stand_in: GpuMachine, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    environ = {**stand_in.environ}
    environ["PYTHONPATH"] = f"{tmp_path}:{environ['PYTHONPATH']}"
    init = model("limited.py:LimitOfTorch", device="cuda:0", gpu_memory_nbytes=2 << 30)
    with loaded(init, environ=environ) as worker:
        assert output(worker, worker.run([floats("x", [0.0])])).tolist() == [[0.25]]


@pytest.mark.thorough
def test_memory_past_the_limited_allocators_is_reported(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.set_environment(monkeypatch)
    given = served("m", "unused", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)])
    given |= {"callable": f"{MODELS / 'limited.py'}:Beside", "kwargs": {"nbytes": 1 << 30}}
    with Watched(config(tmp_path, {**given, "gpu_memory_nbytes": LIMIT}), *QUICKLY).until_ended() as server:
        taken = GPU_0.context_memory + (1 << 30)
        server.wait_log(f"has {taken} bytes on its GPU, and gpu_memory_nbytes is {LIMIT}")
        wait_until(lambda: server.infer("m", 1.0).output("y") == [2.0], "the model is served")


def test_device_memory_of_a_burst_goes_back_when_no_batch_needs_it(stand_in: GpuMachine) -> None:
    given = {"device": "cuda:0", "array": "cupy", "inputs": (("x", "FP32", (-1,), False, "gpu"),)}
    with loaded(model("on_device.py:row_sums", **given), environ=stand_in.environ) as worker:
        rows = np.ones((1, LIMIT // 4), np.float32)
        large = worker.in_arena("x", "FP32", rows.shape, rows.tobytes())
        assert output(worker, worker.run([large])).tolist() == [[LIMIT / 4]]

        held = []

        def is_free() -> bool:
            """Ask the worker to shrink, and run a small batch."""
            worker.link.send(wire.Shrink())
            worker.start([floats("x", [1.0])], batch_id=len(held) + 2)
            held.append(0)
            while (message := worker.link.receive()) is not None:
                if isinstance(message[0], wire.DeviceMemory):
                    held[-1] = message[0].nbytes
                elif isinstance(message[0], wire.Done):
                    break
            return 0 < held[-1] < MIB

        wait_until(is_free, "the buffers of the large batch are freed")
        assert output(worker, worker.run([large], batch_id=1000)).tolist() == [[LIMIT / 4]]
