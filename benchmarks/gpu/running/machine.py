"""What the machine is: ``python -m benchmarks.gpu.running.machine`` prints it as one line of JSON, in a
process of its own, because a driver may hang. With ``warm`` it imports and computes what is cold on a fresh
machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import ROOT
from benchmarks.processes import cpu_name

_TIMEOUT_S: Final = 60.0
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
#: What the regions of the sections' clients take together, about.
_SHARED_NBYTES: Final = 4 * _GIB
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
#: What the sections use of others, by the name that is imported.
_LIBRARIES: Final = ("cupy", "torch", "pynvml", "numpy", "pytest", "hypothesis")
GPU: Final = "GPU"


class NoMachine(Exception):
    """It cannot be told what the machine is; the text says why."""


def describe(environment: Mapping[str, str]) -> dict[str, str]:
    """By what is told: GPU, driver, CUDA, libraries, CPU. "GPU" is missing where there is none. Raises
    NoMachine: the driver hangs, or the program broke.
    """
    command, env = [sys.executable, "-m", "benchmarks.gpu.running.machine"], {**os.environ, **environment}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise NoMachine(f"the NVIDIA driver did not answer in {_TIMEOUT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise NoMachine(f"the machine cannot be looked at: {error.stderr.strip()[-500:]}") from None
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def found() -> dict[str, str]:
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available_nbytes = int(fields["MemAvailable"].split()[0]) << 10
    shared, locked = os.statvfs("/dev/shm"), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free_nbytes = shared.f_bavail * shared.f_frsize
    small = ", which is small: regions of clients may not fit; mount -o remount,size=8G /dev/shm helps"
    cpus = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs usable"
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    return {
        **_gpus(),
        **_libraries(),
        "CPU": f"{cpu_name()}, {cpus}, {nodes} NUMA node{'s' * (nodes > 1)}",
        "memory": f"{_size(memory_nbytes)}, {_size(available_nbytes)} of it available",
        "huge pages": _first_line(_HUGE_PAGES / "enabled"),
        "huge pages of shared memory": _first_line(_HUGE_PAGES / "shmem_enabled"),
        "memory that a process may lock": "any"
        if locked == resource.RLIM_INFINITY
        else f"{locked >> 10} KiB",
        "files that a process may open": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "/dev/shm": f"{_size(free_nbytes)} free{small if free_nbytes < _SHARED_NBYTES else ''}",
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "gpuserve": _version(),
    }


def _gpus() -> dict[str, str]:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # NVML's own errors have no common base without the module
        return {"NVML": f"none: {error}"}
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return {}
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    sizes = [(one, _size(nvml.nvmlDeviceGetMemoryInfo(one).total)) for one in handles]
    return {
        GPU: ", ".join(f"{_text(nvml.nvmlDeviceGetName(one))} ({size})" for one, size in sizes),
        "PCIe": ", ".join(_link(nvml, handle) for handle in handles),
        "modes": ", ".join(_modes(nvml, handle) for handle in handles),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "kernel module": _first_line(Path("/proc/driver/nvidia/version")),
        "CUDA of the driver": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def _link(nvml: Any, handle: Any) -> str:
    """The bus: what it is now, idle or not, and what it can be."""
    try:
        now = nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        most = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except (nvml.NVMLError, AttributeError) as error:
        return f"not told: {error}"
    return "generation {} x {} of at most {} x {}".format(*now, *most)


def _modes(nvml: Any, handle: Any) -> str:
    """What of the card's settings changes figures."""
    told = []
    for name in ("PersistenceMode", "EccMode", "MigMode", "ComputeMode"):
        try:
            now = getattr(nvml, f"nvmlDeviceGet{name}")(handle)
        except (nvml.NVMLError, AttributeError) as error:
            told.append(f"{name} not told ({error})")
        else:
            told.append(f"{name} {now[0] if isinstance(now, list | tuple) else now}")
    return ", ".join(told)


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.0f} GiB" if nbytes >= 10 * _GIB else f"{nbytes / _MIB:.0f} MiB"


def _version() -> str:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return f"{version} ({told})" if told else str(version)


def _first_line(file: Path) -> str:
    try:
        return file.read_text().partition("\n")[0]
    except OSError as error:
        return f"not told: {error.strerror}"


def _text(value: str | bytes) -> str:
    """Older bindings of NVML answer bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _libraries() -> dict[str, str]:
    """By the packages that have the modules; looking is enough, nothing of a GPU is opened."""
    packages = importlib.metadata.packages_distributions()
    found = {}
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            owners = dict.fromkeys(packages.get(name, ()))
            versions = [f"{owner} {importlib.metadata.version(owner)}" for owner in owners]
            found[name] = ", ".join(versions) or "without a version"
    return found


_COLD: Final = ("numpy", "grpc", "cupy", "torch")


def warmed(environment: Mapping[str, str], timeout_s: float) -> str:
    """Read what is cold on a fresh machine, so that no section pays for that: the first import of each large
    library, and its first kernel. Return the seconds of each, and what did not come in time.
    """
    began_at = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.running.machine", "warm"]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, timeout=timeout_s, check=False
        )
        output, rest = done.stdout, [f"then status {done.returncode}"] if done.returncode else []
    except subprocess.TimeoutExpired as error:
        output, rest = error.stdout or b"", [f"no more in {timeout_s:.0f} s"]
    lines = [f"{name} {told}" for name, told in map(json.loads, output.splitlines())]
    return f"{time.monotonic() - began_at:.1f} s in all: {', '.join(lines + rest)}"


def _warm() -> None:
    """Print a line of JSON for each thing that is cold on a fresh machine, as it is there."""
    for name in _COLD:
        _tell(name, importlib.import_module, name)
        if name in _KERNELS and name in sys.modules:
            _tell(f"first kernel of {name}", _KERNELS[name], sys.modules[name])


def _of_cupy(cupy: Any) -> None:
    (cupy.zeros(4, cupy.float32) * 2).get()


def _of_torch(torch: Any) -> None:
    """A product of matrices brings cuBLAS, too."""
    if not torch.cuda.is_available():
        raise ImportError("torch sees no GPU")
    one = torch.ones(64, 64, device="cuda")
    (one @ one).sum().item()


_KERNELS: Final[dict[str, Callable[[Any], None]]] = {"cupy": _of_cupy, "torch": _of_torch}


def _tell(name: str, call: Callable[..., object], *args: object) -> None:
    began_at = time.monotonic()
    try:
        call(*args)
    except Exception as error:  # what is not there is told by the sections that need it
        told = f"failed ({error})"
    else:
        told = f"{time.monotonic() - began_at:.1f} s"
    print(json.dumps([name, told]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["warm"]:
        _warm()
    else:
        print(json.dumps(found()))
