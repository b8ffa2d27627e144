"""``machine.json``: the GPUs of the simulated machine and what is wrong with them. Tests write it, at any
time; the stand-ins read it again when it has changed. Knows neither CUDA nor NVML.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

#: The environment variable that names the machine's directory.
VARIABLE: Final = "CUDA_STAND_IN"
_FILE: Final = "machine.json"
_XIDS: Final = "xids.jsonl"
_MPS_FAULT: Final = "mps-fault"
#: The folder of all memory of devices.
MEMORY: Final = "memory"
#: The end of the name of a file that belongs to whoever holds it.
HELD: Final = ".held"


@dataclass(frozen=True)
class Mig:
    """A MIG instance of a GPU."""

    uuid: str
    memory: int = 4 << 30
    gpu_instance: int = 1
    compute_instance: int = 0


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what NVML tells of it. Memory in bytes; ``speed`` orders CUDA's default device order."""

    uuid: str
    name: str = "NVIDIA Stand-in"
    memory: int = 8 << 30
    #: What each process that uses the GPU has of it before it asks for any.
    context_memory: int = 512 << 20
    pci_bus_id: str = "00000000:17:00.0"
    #: The host's node that it is closest to; None: the machine does not tell.
    numa_node: int | None = 0
    #: Where the GPU's memory is a node itself, as on Grace.
    own_numa_node: int | None = None
    #: Of the host, close to it.
    cpus: tuple[int, ...] = tuple(sorted(os.sched_getaffinity(0)))
    speed: int = 0
    compute_capability: tuple[int, int] = (9, 0)
    #: With MIG on there is at least one.
    mig: tuple[Mig, ...] = ()
    mig_capable: bool = True
    #: Whether CUDA tells that it has virtual memory management, and handles of it that are descriptors.
    virtual_memory: bool = True
    #: Of processes that are not simulated.
    foreign_memory: int = 0
    #: Of these, as NVML lists them.
    foreign_pids: tuple[int, ...] = ()
    lost: bool = False
    #: What CUDA's calls of processes that use the GPU give once it is lost.
    lost_status: int = 719
    temperature: int = 41
    power_mw: int = 120_000
    power_limit_mw: int = 700_000
    energy_mj: int = 1_000_000
    #: 0: any process may use it; 2: none.
    compute_mode: int = 0
    #: Why its clocks are lower than they could be: bits.
    clocks_event_reasons: int = 0
    #: What the driver wants done before it is used again; 0: nothing.
    recovery_action: int = 0
    utilization: int = 0
    memory_utilization: int = 0
    ecc: bool = True
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    #: Corrected, uncorrected, pending, failed.
    remapped_rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    retired_pages_pending: int = 0
    #: Function of NVML -> code with which it fails for this GPU alone.
    nvml_failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The whole machine. Times in seconds."""

    gpus: tuple[Gpu, ...]
    #: None: no driver is loaded.
    driver_version: str | None = "580.65.06"
    cuda_version: int = 13000
    #: False: the driver came without NVML's library.
    nvml: bool = True
    #: False: these packages are not installed.
    cupy: bool = True
    nvidia_ml_py: bool = True
    #: A status with which CUDA fails to initialise in every new process; 0: it does not.
    broken: int = 0
    peer_access: bool = True
    #: Whether NVML gives the host's process ids, which processes in a container do not know.
    in_container: bool = False
    #: Sets of GPUs, by UUID, that NVLink connects.
    nvlinks: tuple[tuple[str, ...], ...] = ()
    #: Function of the runtime or of NVML -> status with which all of its calls fail.
    failures: Mapping[str, int] = field(default_factory=dict)
    #: How long every call of NVML takes.
    nvml_hang_s: float = 0.0
    #: Each operation starts a random time after it was queued, up to this one.
    launch_delay_s: float = 0.0003
    #: How long a kernel takes.
    kernel_s: float = 0.0
    #: So many operations of a process wait for the GPU; a call that queues another blocks.
    launch_queue: int = 1024
    #: Whether all processes are clients of an MPS server: they compute on a GPU together, not in turns, and
    #: the fault of one ends all that use its GPU.
    mps: bool = False
    #: Whether another library shares the runtime, and takes the last error of a thread for one of its kernel.
    shared_runtime: bool = False
    #: 0: copies take no time.
    copy_bytes_per_s: float = 0.0
    #: How fast host memory is page-locked, and let go again; 0: at once.
    page_lock_bytes_per_s: float = 0.0
    #: How long it takes to open memory of another process, and to close it.
    ipc_open_s: float = 0.0
    #: Whether whoever opens memory of another process, or closes it, waits until this is no more so.
    handles_held: bool = False
    #: How long it takes to allocate memory of the device, and to free it.
    malloc_s: float = 0.0
    #: How long it takes to compile a kernel, which a process does when it first launches it.
    compile_s: float = 0.0
    #: How long a thread that sleeps until an event comes takes to wake up then.
    wake_s: float = 0.0
    #: Whether CUDA's compiler and cuBLAS are looked for, as ``cuda.pathfinder`` does; False: they are there.
    libraries_looked_up: bool = False
    #: Whether processes that use a GPU have a file in /dev/shm, which stays when they are killed.
    files_in_shm: bool = False
    seed: int = 0


def write(directory: Path, machine: Machine) -> None:
    """Put the machine into the directory, whole at once."""
    partial = directory / f".{_FILE}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(machine)))
    partial.replace(directory / _FILE)


def read(directory: Path) -> Machine:
    """The machine as it was written last."""
    raw = json.loads((directory / _FILE).read_text())
    return Machine(gpus=tuple(_gpu(one) for one in raw.pop("gpus")), **raw)


def _gpu(raw: dict[str, Any]) -> Gpu:
    mig = tuple(Mig(**one) for one in raw.pop("mig"))
    return Gpu(mig=mig, **{key: tuple(one) if isinstance(one, list) else one for key, one in raw.items()})


class MachineView:
    """The machine in a directory, read again when it has changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: tuple[int, int] | None = None
        self._machine = Machine(())

    @property
    def now(self) -> Machine:
        """The machine at this moment."""
        found = os.stat(self.directory / _FILE)
        version = (found.st_mtime_ns, found.st_ino)
        if version != self._seen:
            self._machine, self._seen = read(self.directory), version
        return self._machine

    def gpu(self, uuid: str) -> Gpu:
        """The GPU of that UUID, or of the MIG instance of that UUID; one that was removed is lost."""
        for gpu in self.now.gpus:
            if uuid == gpu.uuid or any(uuid == one.uuid for one in gpu.mig):
                return gpu
        return Gpu(uuid, lost=True)


def view_from_environment() -> MachineView:
    """The machine that the environment names. Raises ImportError: it names none."""
    try:
        return MachineView(Path(os.environ[VARIABLE]))
    except KeyError:
        raise ImportError(f"the environment variable {VARIABLE} names no machine") from None


def require(package: str) -> None:
    """Raises ImportError: the machine has not that package installed."""
    machine = view_from_environment().now
    if not {"cupy": machine.cupy, "pynvml": machine.nvidia_ml_py}[package]:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)


def end_mps_clients(directory: Path, uuid: str) -> None:
    """A client faulted on a GPU."""
    (directory / f"{_MPS_FAULT}-{uuid}").touch()


def mps_fault_ns(directory: Path, uuid: str) -> int:
    """When a client last faulted on a GPU; 0: never."""
    try:
        return (directory / f"{_MPS_FAULT}-{uuid}").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def queue_xid(directory: Path, uuid: str, xid: int) -> None:
    """An Xid that the driver reports; whoever listens for the GPU's events gets it."""
    with (directory / _XIDS).open("a") as file:
        file.write(json.dumps({"gpu": uuid, "xid": xid}) + "\n")


def xids(directory: Path) -> list[tuple[str, int]]:
    """All that were reported: (GPU, Xid)."""
    try:
        lines = (directory / _XIDS).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(one["gpu"], one["xid"]) for one in map(json.loads, lines)]


def is_held(path: str | Path) -> bool:
    """Whether any process has a descriptor or a mapping of memory that exists as long as these do."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return not os.fstat(fd).st_size  # its maker is about to lock it
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def held(directory: Path, uuid: str) -> list[int]:
    """The sizes of such memory of a device."""
    found = (directory / MEMORY / uuid).glob(f"*{HELD}")
    return sorted(one.stat().st_size for one in found if is_held(one))


def spoil_held(directory: Path, uuid: str) -> None:
    """Take such memory of a device from its holders."""
    for one in (directory / MEMORY / uuid).glob(f"*{HELD}"):
        os.truncate(one, mmap.PAGESIZE)
