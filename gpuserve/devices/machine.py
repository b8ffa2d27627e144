"""The NVIDIA GPUs of a machine and their readings as plain values, and by the driver's files in ``/proc``."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


class GpuLink(enum.IntEnum):
    """The way between the memories of two GPUs, the fastest first. ``HOST``: only through host memory."""

    SAME = 0
    NVLINK = 1
    PCIE = 2
    HOST = 3


class GpuLinks(NamedTuple):
    """The pairs of GPUs, by "cuda:0" and so on, that reach each other without host memory."""

    links: Mapping[frozenset[str], GpuLink]


class NvmlMissingEvent(NamedTuple):
    """The absence of NVML on this machine, the last of the news."""

    reason: str


GpuMonitorEvent = NvmlRound | GpuLinks | Xid | NvmlMissingEvent


# ---- from the driver's files ----------------------------------------------------------------------


_DRIVER_LIST: Final = "proc/driver/nvidia/gpus"
_DRIVER_VERSION: Final = "proc/driver/nvidia/version"
_PCI: Final = "sys/bus/pci/devices"
_NODE = re.compile(r"nvidia(\d+)")
#: Device files of a single GPU behind another driver interface: WSL, and integrated GPUs.
_SINGLE_GPU_NODES: Final = ("dev/dxg", "dev/nvhost-gpu")
_UUID = re.compile(r"GPU-[0-9a-f-]+")
_NVIDIA: Final = "0x10de"
#: PCI class 03: display controllers, which include 3D controllers.
_DISPLAY_CLASS: Final = "0x03"


def machine_by_files(root: Path, shortage: str) -> Machine:
    """Return the machine according to the driver's files; ``shortage`` says why NVML was not used."""
    gpus = _gpus(root)
    has_driver = bool(gpus) or (root / _DRIVER_VERSION).exists() or (root / "dev/nvidiactl").exists()
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _text(root / _DRIVER_VERSION).partition("\n")[0])
    driver = NvidiaDriver(found[0] if found else "") if has_driver else None
    idle = () if has_driver else tuple(_pci_gpus(root))
    return Machine(driver, gpus, shortage, idle)


def numa_node(root: Path, bus_id: str) -> int:
    """Return the NUMA node next to a PCI device; -1 if all nodes are alike, or the node is unknown."""
    text = _text(root / _PCI / _kernel_bus_id(bus_id) / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def local_cpus(root: Path, bus_id: str) -> tuple[int, ...]:
    return cpu_list(_text(root / _PCI / _kernel_bus_id(bus_id) / "local_cpulist"))


def cpu_list(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text) is None:
        return ()
    bounds = (part.split("-") for part in text.split(","))
    return tuple(cpu for part in bounds for cpu in range(int(part[0]), int(part[-1]) + 1))


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """Return the GPUs that a process can open: a container may lack device files of listed GPUs."""
    listed = [_listed(root, bus_id) for bus_id in sorted(_names_in(root / _DRIVER_LIST))]
    nodes = {int(found[1]) for name in _names_in(root / "dev") if (found := _NODE.fullmatch(name))}
    present = [gpu for gpu, minor in listed if not nodes or minor in nodes]
    if nodes and not present:
        present = [Gpu(0) for _ in nodes]
    if not present and any((root / node).exists() for node in _SINGLE_GPU_NODES):
        present = [Gpu(0)]
    numbered = []
    for number, gpu in enumerate(present):
        node, cpus = numa_node(root, gpu.bus_id), local_cpus(root, gpu.bus_id)
        numbered.append(Gpu(number, gpu.uuid, gpu.name, gpu.bus_id, numa_node=node, cpus=cpus))
    return tuple(numbered)


def _listed(root: Path, bus_id: str) -> tuple[Gpu, int]:
    """Return a GPU of the driver's list, and the number in the name of its device file (-1: unknown)."""
    lines = _text(root / _DRIVER_LIST / bus_id / "information").splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor", "")
    known = uuid if _UUID.fullmatch(uuid) else ""  # question marks until the GPU is first used
    return Gpu(0, known, facts.get("Model", ""), bus_id), int(minor) if minor.isdecimal() else -1


def _pci_gpus(root: Path) -> list[str]:
    return [
        address
        for address in sorted(_names_in(root / _PCI))
        if _text(root / _PCI / address / "vendor") == _NVIDIA
        and _text(root / _PCI / address / "class").startswith(_DISPLAY_CLASS)
    ]


def _kernel_bus_id(bus_id: str) -> str:
    """Return NVML's bus id, with eight capital digits of the domain, in the kernel's form of four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
