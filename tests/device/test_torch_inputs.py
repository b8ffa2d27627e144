"""Inputs as torch tensors: on the CPU, on a real GPU, and on the stand-in, where they are tensors of the CPU
over its memory, with real DLPack capsules.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gpu_machine import GpuMachine, RealMachine
from test_device_inputs import NUMERIC
from worker_process import LARGE, floats, loaded, model, output, values

from gpuserve_worker.cuda.device.arrays import converted_tensor
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BF16, numpy_dtype

pytestmark = pytest.mark.thorough

Machine = GpuMachine | RealMachine
INPUT = ("x", "FP32", (-1,), False, "gpu")


@functools.cache
def torch_reaches_a_gpu() -> bool:
    """Asked in another process: torch keeps the descriptors of the devices that it looked at."""
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(asked, check=False).returncode == 0


def torch_model(machine: Machine, device: str, path: str, **changes: Any) -> wire.Init:
    pytest.importorskip("torch")
    if device != "cpu" and isinstance(machine, RealMachine) and not torch_reaches_a_gpu():
        pytest.skip("torch does not reach the GPU")
    return model(f"torch_inputs.py:{path}", device=device, array="torch", **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_type_of_number(shared_gpu_machine: Machine, device: str) -> None:
    types = (*NUMERIC, BF16)
    specs = tuple((one, one, (-1,), False, "gpu") for one in types)
    outputs = tuple(one[:3] for one in specs)
    arrays = {one: np.random.default_rng(1).integers(0, 2, (3, 5)).astype(numpy_dtype(one)) for one in types}
    init = torch_model(shared_gpu_machine, device, "unchanged", inputs=specs, outputs=outputs)
    with loaded(init, environ=shared_gpu_machine.environ) as worker:
        done = worker.run([wire.WireTensor(one, one, (3, 5), arrays[one].tobytes()) for one in types], (3,))
        assert isinstance(done, wire.Done), done
        assert done.outputs is not None
        for tensor in done.outputs:
            assert np.array_equal(values(worker, tensor, numpy_dtype(tensor[1])), arrays[tensor[0]])


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "uint8", "bool"])
def test_torch_makes_its_tensors_contiguous_and_casts_them(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.float64, requires_grad=True).reshape(3, 4).T
    found = converted_tensor(torch, tensor, np.dtype(dtype))
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), tensor.detach().numpy().astype(dtype))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_padded_batches_and_gradients(shared_gpu_machine: Machine, device: str) -> None:
    changes: dict[str, Any] = {"inputs": (INPUT,), "preferred_batch_sizes": (4,)}
    with loaded(
        torch_model(shared_gpu_machine, device, "doubled", **changes), environ=shared_gpu_machine.environ
    ) as worker:
        assert output(worker, worker.run([floats("x", [1], [2], [3])], (1, 2))).tolist() == [[2], [4], [6]]
        array = np.arange(LARGE // 4, dtype=np.float32).reshape(2, -1)
        tensor = worker.in_arena("x", "FP32", array.shape, array.tobytes())
        assert np.array_equal(output(worker, worker.run([tensor], (2,), batch_id=2)), array * 2)


def test_cupy_compiles_no_kernel_for_strided_tensors_of_another_type(shared_gpu_machine: Machine) -> None:
    outputs = (("y", "FP32", (-1,)), ("launched", "INT64", (1,)))
    init = torch_model(shared_gpu_machine, "cuda:0", "strided", inputs=(INPUT,), outputs=outputs)
    with loaded(init, environ=shared_gpu_machine.environ) as worker:
        for number in range(3):
            array = np.arange(4 * LARGE // 4, dtype=np.float32).reshape(4, -1) % 128 + number
            tensor = worker.in_arena("x", "FP32", array.shape, array.tobytes())
            done = worker.run([tensor], (4,), batch_id=number + 1)
            assert isinstance(done, wire.Done), done
            assert np.array_equal(values(worker, done.outputs[0]), array)
            assert not values(worker, done.outputs[1], np.dtype(np.int64)).any()
