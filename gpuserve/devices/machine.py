"""The NVIDIA GPUs of a machine and their readings as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Compute modes: no process may use the GPU, or only one at a time.
PROHIBITED: Final = "prohibited"
EXCLUSIVE: Final = "exclusive process"


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A part of a GPU in MIG mode, which CUDA treats as a GPU. None stands for an unknown size."""

    uuid: str
    memory_nbytes: int | None = None
    free_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. ``number`` is its position on the PCI bus, as in ``nvidia-smi``; "" and None stand for unknown
    values. ``cpus`` and ``numa_node`` are next to the GPU (-1: all nodes are alike). Of a GPU in MIG mode
    only the instances in ``mig`` can be used; there may be none.
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
    """The NVIDIA driver, and the newest CUDA version that it supports; "" is unknown."""

    version: str = ""
    cuda_version: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a machine. ``driver`` None: there is none. ``shortage`` is a clause that says why less was
    found than there may be, or "". ``idle_gpus`` are the PCI addresses of GPUs without a driver.
    """

    driver: NvidiaDriver | None = None
    gpus: tuple[Gpu, ...] = ()
    shortage: str = ""
    idle_gpus: tuple[str, ...] = ()


#: Bits of NVML's clocks event reasons that mean that a GPU is slowed down, with our names.
SLOWDOWNS: Final[Mapping[int, str]] = {
    0x04: "power_cap", 0x08: "hardware", 0x20: "thermal", 0x40: "hardware_thermal", 0x80: "power_brake",
}  # fmt: skip


class RemappedRows(NamedTuple):
    """Replaced rows of GPU memory. ``pending`` until the next reset; ``failed``: no spare row was left."""

    corrected: int
    uncorrected: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The figures of one GPU at one time. None stands for a figure that this GPU does not report."""

    memory_total_nbytes: int | None = None
    memory_used_nbytes: int | None = None
    #: Fraction of the time in which a kernel ran, 0 to 1.
    utilization: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    #: Energy since the driver was loaded.
    energy_j: float | None = None
    #: Memory errors since the driver was loaded.
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: RemappedRows | None = None
    retired_pages_pending: bool | None = None
    #: Names in ``SLOWDOWNS``.
    slowdowns: frozenset[str] | None = None
    #: GPU memory in bytes by process id.
    processes: Mapping[int, int] = field(default_factory=dict)


class GpuReport(NamedTuple):
    """The result of the questions about one GPU or MIG instance. ``device`` is "cuda:0" and so on,
    ``product`` the maker's name. ``fault`` says why the GPU cannot be used. Without a fault and without a
    ``reading`` NVML did not respond.
    """

    uuid: str
    device: str
    product: str
    reading: GpuReading | None
    fault: str = ""


class NvmlRound(NamedTuple):
    """The responses of NVML to one round of questions about all GPUs."""

    gpus: tuple[GpuReport, ...]


class Xid(NamedTuple):
    """An error that the driver reported. ``uuids`` are the GPU that it concerns, or the MIG instances."""

    uuids: tuple[str, ...]
    number: int


class NvmlMissingEvent(NamedTuple):
    """The absence of NVML on this machine, the last of the news."""

    reason: str


GpuMonitorEvent = NvmlRound | Xid | NvmlMissingEvent
