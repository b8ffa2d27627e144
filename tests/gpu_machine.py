"""GPUs for tests: a machine of the stand-in for CUDA's libraries (``cuda_stand_in``), or the real one.

A server or worker process that has ``environ`` in its environment imports the stand-ins for cupy and pynvml
and sees the GPUs of the machine; the test changes the machine while the processes run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from cuda_stand_in.cuda_simulation import machine as simulated
from cuda_stand_in.cuda_simulation.machine import VARIABLE, Gpu, Machine, Mig

__all__ = [
    "COSTS",
    "GPU_0",
    "GPU_1",
    "MPS_PROGRAM",
    "REAL",
    "Gpu",
    "GpuMachine",
    "Machine",
    "Mig",
    "RealMachine",
    "real_gpu",
]

#: Set to 1: the tests use the GPU of this machine and the libraries that are installed.
REAL: Final = "GPUSERVE_TEST_REAL_GPU"
#: Set to 1: all calls of the stand-in cost what they do on a GPU, about, where a test says nothing else.
WITH_COSTS: Final = f"{VARIABLE}_COSTS"
#: What they cost there: fields of ``Machine``.
COSTS: Final = {"page_lock_bytes_per_s": 1.5e9, "ipc_open_s": 0.0005, "malloc_s": 0.0002}
_STAND_IN: Final = Path(__file__).parent / "cuda_stand_in"
#: Stands in for the program of CUDA's MPS.
MPS_PROGRAM: Final = _STAND_IN / "mps" / "nvidia-cuda-mps-control"

GPU_0: Final = Gpu("GPU-00000000-0000-4000-8000-00000000000a", pci_bus_id="00000000:17:00.0")
GPU_1: Final = Gpu("GPU-00000000-0000-4000-8000-00000000000b", pci_bus_id="00000000:65:00.0")


def real_gpu() -> bool:
    """Whether the tests are to use a real GPU."""
    return os.environ.get(REAL) == "1"


class GpuMachine:
    """A machine of the stand-in, in a directory of its own."""

    def __init__(self, directory: Path, gpus: Sequence[Gpu] = (GPU_0,), **machine: Any) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        costs = COSTS if os.environ.get(WITH_COSTS) == "1" else {}
        simulated.write(directory, Machine(tuple(gpus), **{**costs, **machine}))

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs in its environment to see the machine."""
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(_STAND_IN), *([before] if before else [])])
        return {"PYTHONPATH": path, VARIABLE: str(self._directory)}

    def set_environment(self, patch: pytest.MonkeyPatch) -> None:
        """Have the processes that this one starts see the machine."""
        for name, value in self.environ.items():
            patch.setenv(name, value)

    @property
    def now(self) -> Machine:
        """The machine as it is."""
        return simulated.read(self._directory)

    @property
    def uuids(self) -> list[str]:
        """Of the GPUs."""
        return [gpu.uuid for gpu in self.now.gpus]

    def change(self, **values: Any) -> None:
        """Change the machine; the fields are those of ``Machine``."""
        simulated.write(self._directory, dataclasses.replace(self.now, **values))

    def change_gpu(self, uuid: str, **values: Any) -> None:
        """Change a GPU; the fields are those of ``Gpu``."""
        gpus = [dataclasses.replace(gpu, **values) if gpu.uuid == uuid else gpu for gpu in self.now.gpus]
        self.change(gpus=tuple(gpus))

    def slow(self, **values: Any) -> None:
        """Have copies and kernels take a time, by fields of ``Machine``; on a real GPU they take theirs."""
        self.change(**values)

    def lose(self, uuid: str) -> None:
        """The GPU falls off the bus: NVML says so, and processes that use it fail."""
        self.queue_xid(uuid, 79)
        self.change_gpu(uuid, lost=True)

    def shared_nbytes(self, uuid: str) -> list[int]:
        """The sizes of all memory of a GPU that has left a process as a descriptor, and is there still."""
        return simulated.held(self._directory, uuid)

    def spoil_shared(self, uuid: str) -> None:
        """Such memory is not what it was, as after a reset of the GPU: nobody can map it any more."""
        simulated.spoil_held(self._directory, uuid)

    def queue_xid(self, uuid: str, xid: int) -> None:
        """An Xid that the driver reports."""
        simulated.queue_xid(self._directory, uuid, xid)


class RealMachine:
    """The machine that the tests run on. Changes nothing."""

    environ: Final[dict[str, str]] = {}

    def set_environment(self, patch: pytest.MonkeyPatch) -> None:
        """There is nothing to set."""

    @property
    def uuids(self) -> list[str]:
        """Of the GPUs."""
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]

    def slow(self, **values: Any) -> None:
        """Do nothing."""
