"""Fixtures of the tests that need a GPU: without ``GPUSERVE_TEST_REAL_GPU=1`` they run on the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_machine import GPU_0, GPU_1, GpuMachine, RealMachine, real_gpu


@pytest.fixture
def gpu_machine(tmp_path: Path) -> GpuMachine | RealMachine:
    """A machine with one GPU, of which a test may change only how fast it is (``slow``)."""
    return RealMachine() if real_gpu() else GpuMachine(tmp_path / "gpus", [GPU_0])


@pytest.fixture(scope="module")
def shared_gpu_machine(tmp_path_factory: pytest.TempPathFactory) -> GpuMachine | RealMachine:
    """The same for all tests of a module, which leave it as it was."""
    return RealMachine() if real_gpu() else GpuMachine(tmp_path_factory.mktemp("gpus"), [GPU_0])


@pytest.fixture
def stand_in(tmp_path: Path) -> GpuMachine:
    """A machine of the stand-in with one GPU, for a test that changes it."""
    if real_gpu():
        pytest.skip("a real GPU cannot be changed by a test")
    return GpuMachine(tmp_path / "gpus", [GPU_0])


@pytest.fixture
def any_two_gpus(tmp_path: Path) -> GpuMachine | RealMachine:
    """A machine with two GPUs or more, which the test leaves as it is."""
    if not real_gpu():
        return GpuMachine(tmp_path / "gpus", [GPU_0, GPU_1])
    machine = RealMachine()
    if len(machine.uuids) < 2:
        pytest.skip("needs two GPUs")
    return machine


@pytest.fixture
def two_gpus(tmp_path: Path) -> GpuMachine:
    """A machine of the stand-in with two GPUs."""
    if real_gpu():
        pytest.skip("whether a real machine has two GPUs is not known")
    return GpuMachine(tmp_path / "gpus", [GPU_0, GPU_1])
