"""What NVML says of GPUs in use, as plain values; the thread that asks hands them to the event loop. Nothing
is asked or judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: The bits of NVML's clocks event reasons that mean a GPU runs slower than it could, and our words for them.
SLOWDOWNS: Final[Mapping[int, str]] = {
    0x04: "power_cap",
    0x08: "hardware",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


class RemappedRows(NamedTuple):
    """Rows of the GPU's memory that were replaced by spare ones. ``pending``: some will be at the next reset;
    ``failed``: there was no spare row left.
    """

    corrected: int
    uncorrected: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The figures of one GPU at one time. None is what this GPU does not tell."""

    memory_total_nbytes: int | None = None
    memory_used_nbytes: int | None = None
    #: Part of the time that a kernel ran, 0 to 1.
    utilization: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    #: Since the driver was loaded.
    energy_j: float | None = None
    #: Errors of the memory since the driver was loaded.
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: RemappedRows | None = None
    retired_pages_pending: bool | None = None
    #: Words of ``SLOWDOWNS``.
    slowdowns: frozenset[str] | None = None
    #: Bytes on the GPU by the id of the process that has them.
    processes: Mapping[int, int] = field(default_factory=dict)


class GpuReport(NamedTuple):
    """What became of the questions about one GPU or MIG instance. ``device`` is "cuda:0" and so on,
    ``product`` what the maker calls it. ``fault`` says why it cannot be used; without a fault and without a
    ``reading`` NVML gave no answer.
    """

    uuid: str
    device: str
    product: str
    reading: GpuReading | None
    fault: str = ""


class NvmlRound(NamedTuple):
    """The answers of NVML to one round of questions about all GPUs."""

    gpus: tuple[GpuReport, ...]


class Xid(NamedTuple):
    """An error that the driver reported. ``uuids``: the GPU that it is about, or the MIG instances."""

    uuids: tuple[str, ...]
    number: int


class NvmlAbsence(NamedTuple):
    """There is no NVML on this machine; nothing else will be said."""

    reason: str


GpuNews = NvmlRound | Xid | NvmlAbsence
