"""How busy the machine is, under Triton's names: its CPU and memory from ``/proc``, its GPUs from NVML where
``nvidia-ml-py`` is installed and there are any. CUDA is never touched: NVML reads counters of the driver.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.front.triton_metrics import Family, sample

logger = logging.getLogger(__name__)

_KIB: Final = 1024
#: The columns of the first line of /proc/stat that are no work: idle, and waiting for a disk.
_IDLE_COLUMNS: Final = (3, 4)
#: Those after it are parts of earlier ones.
_CPU_COLUMNS: Final = 8


class CpuTime(NamedTuple):
    """Ticks of all CPUs since the machine's start."""

    busy: int
    total: int


def cpu_time(stat: str) -> CpuTime:
    """The first line of ``/proc/stat``."""
    ticks = [int(one) for one in stat.split("\n", 1)[0].split()[1:][:_CPU_COLUMNS]]
    total = sum(ticks)
    return CpuTime(total - sum(ticks[column] for column in _IDLE_COLUMNS), total)


def utilization(before: CpuTime, now: CpuTime) -> float:
    """The part of the time between that the CPUs worked, 0 to 1."""
    ticks = now.total - before.total
    return (now.busy - before.busy) / ticks if ticks > 0 else 0.0


def memory_nbytes(meminfo: str) -> tuple[int, int]:
    """Total and used memory by ``/proc/meminfo``; what could be had without swapping is not used."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    total, available = (int(fields[key].split()[0]) * _KIB for key in ("MemTotal", "MemAvailable"))
    return total, total - available


class CpuMetrics:
    """The CPUs and the memory. ``proc`` is where the kernel tells of them."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = CpuTime(0, 0)

    def families(self) -> Iterator[Family]:
        """The metrics now; the utilization is that since the last time."""
        try:
            stat, meminfo = (self._proc / "stat").read_text(), (self._proc / "meminfo").read_text()
        except OSError:  # some sandboxes have neither
            return
        now = cpu_time(stat)
        busy, self._before = utilization(self._before, now), now
        total, used = memory_nbytes(meminfo)
        yield _gauge("nv_cpu_utilization", "Part of the CPUs' time that they worked, 0 to 1", busy)
        yield _gauge("nv_cpu_memory_total_bytes", "Memory of the machine in bytes", total)
        yield _gauge("nv_cpu_memory_used_bytes", "Memory in use in bytes", used)


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [sample(name, {}, value)])


#: name, kind, text, and how NVML is asked for a device's value.
_OF_GPU: Final[tuple[tuple[str, str, str, Callable[[Any, Any], float]], ...]] = (
    (
        "nv_gpu_utilization",
        "gauge",
        "Part of the time that the GPU worked, 0 to 1",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "nv_gpu_memory_total_bytes",
        "gauge",
        "Memory of the GPU in bytes",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    (
        "nv_gpu_memory_used_bytes",
        "gauge",
        "Memory of the GPU in use in bytes",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    (
        "nv_gpu_power_usage",
        "gauge",
        "Power that the GPU draws in watts",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    (
        "nv_gpu_power_limit",
        "gauge",
        "Power that the GPU may draw in watts",
        lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    ),
    (
        "nv_energy_consumption",
        "counter",
        "Energy that the GPU has used in joules, since its driver was loaded",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    ),
)


class GpuMetrics:
    """The GPUs. ``load`` gives the NVML module, or raises ImportError."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load
        self._nvml: Any = None
        #: (uuid, handle); None before the first time.
        self._gpus: list[tuple[str, Any]] | None = None

    async def families(self) -> list[Family]:
        """The metrics now. NVML may take milliseconds, so it is asked in a thread."""
        if self._gpus is not None and not self._gpus:
            return []
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Family]:
        if self._gpus is None:
            self._gpus = self._find()
        return [Family(name, kind, text, list(self._samples(name, ask))) for name, kind, text, ask in _OF_GPU]

    def _find(self) -> list[tuple[str, Any]]:
        try:
            nvml = self._load()
        except ImportError:
            return []
        try:
            nvml.nvmlInit()
            gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            found = [(_text(nvml.nvmlDeviceGetUUID(gpu)), gpu) for gpu in gpus]
        except nvml.NVMLError as error:
            logger.info("no metrics of GPUs: %s", error)
            return []
        self._nvml = nvml
        return found

    def _samples(self, name: str, ask: Callable[[Any, Any], float]) -> Iterator[str]:
        for uuid, gpu in self._gpus or ():
            try:
                value = ask(self._nvml, gpu)
            except self._nvml.NVMLError:  # this device does not tell
                continue
            yield sample(name, {"gpu_uuid": uuid}, value)


def _text(given: str | bytes) -> str:
    """Some versions of the module give bytes."""
    return given.decode() if isinstance(given, bytes) else given
