"""Device memory as tritonclient's own library makes it, and as the load generator does."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_server import model, serve, tensor
from gpu_machine import GpuMachine, RealMachine, real_gpu
from processes import finished
from serving import GPUSERVE, Addresses

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "cuda_shared_memory.py"


def has_cuda_bindings() -> bool:
    """Whether there is what tritonclient imports; ``cuda`` is there with any package of that name space."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        real_gpu() and not has_cuda_bindings(), reason="tritonclient needs cuda-python for it"
    ),
]


@pytest.fixture(scope="module")
def server(
    shared_gpu_machine: GpuMachine | RealMachine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Addresses]:
    x, y = [tensor("x", "FP32", -1, memory="gpu")], [tensor("y", "FP32", -1)]
    with serve(shared_gpu_machine, tmp_path_factory.mktemp("server"), [model("twice", "twice", x, y)]) as one:
        yield one


def run(machine: GpuMachine | RealMachine, *command: str) -> str:
    done = finished(command, env={**os.environ, **machine.environ})
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_regions_that_tritonclient_makes(
    server: Addresses, shared_gpu_machine: GpuMachine | RealMachine, protocol: str
) -> None:
    address = server.grpc if protocol == "grpc" else server.http
    printed = run(shared_gpu_machine, sys.executable, str(PROGRAM), protocol, address, "twice")
    assert json.loads(printed) == (np.arange(8, dtype=np.float32).reshape(2, 4) * 2).tolist()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_load_generator_uses_device_memory(
    server: Addresses, shared_gpu_machine: GpuMachine | RealMachine, protocol: str
) -> None:
    address = server.grpc if protocol == "grpc" else server.http
    command = [GPUSERVE, "bench", "twice", "--url", address, "--protocol", protocol, "--shape", "x:4096"]
    command += ["--shared-memory", "cuda", "--concurrency", "2", "--duration", "0.5", "--warmup", "0.1"]
    printed = run(shared_gpu_machine, *command)
    assert "shared memory cuda" in printed
    assert "2 in flight" in printed
