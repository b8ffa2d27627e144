"""What there is of NVIDIA GPUs on a machine, as ``nvml.py`` and ``driver_files.py`` read it. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Compute modes: no process may use the GPU, or one at a time.
PROHIBITED: Final = "prohibited"
EXCLUSIVE: Final = "exclusive process"


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A part of a GPU in MIG mode, which CUDA takes for a GPU. None stands for a size that is not known."""

    uuid: str
    memory_nbytes: int | None = None
    free_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. ``number`` is its place on the PCI bus, as in ``nvidia-smi``; "" and None are not known.
    ``cpus`` and ``numa_node`` are those that the GPU is next to (-1: all are alike). Of a GPU in MIG mode
    only its instances ``mig`` can be used, of which there may be none.
    """

    number: int
    uuid: str = ""
    name: str = ""
    bus_id: str = ""
    memory_nbytes: int | None = None
    free_nbytes: int | None = None
    numa_node: int = -1
    cpus: tuple[int, ...] = ()
    compute_mode: str = ""
    in_mig_mode: bool = False
    mig: tuple[MigInstance, ...] = ()

    @property
    def label(self) -> str:
        return self.uuid or f"GPU {self.number}"


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """The NVIDIA driver, and the newest CUDA that it can serve; "" is not known."""

    version: str = ""
    cuda_version: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found on a machine. ``driver`` None: there is none. ``shortage`` says what stood in the way of
    finding more, as a clause, "" for nothing. ``idle_gpus`` are the PCI addresses of GPUs that no driver
    serves.
    """

    driver: NvidiaDriver | None = None
    gpus: tuple[Gpu, ...] = ()
    shortage: str = ""
    idle_gpus: tuple[str, ...] = ()
