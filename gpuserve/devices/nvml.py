"""The GPUs by NVML, the driver's own library for such questions, through ``nvidia-ml-py``. No CUDA.

Every call may hang with the driver: the caller sees to that. A GPU that does not answer hides no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from gpuserve.devices import driver_files
from gpuserve.devices.machine import EXCLUSIVE, PROHIBITED, Driver, Gpu, Machine, MigInstance

#: NVML_COMPUTEMODE_… by number.
_COMPUTE_MODES: Final = ("default", "exclusive thread", PROHIBITED, EXCLUSIVE)
_MIG_ON: Final = 1
_SCOPE_NODE: Final = 0
#: Bits of the sets that NVML fills, in words of 64: room for 4096 CPUs and as many NUMA nodes.
_SET_WORDS: Final = 64
_WORD_BITS: Final = 64


def machine_by_nvml(nvml: Any, root: Path) -> Machine:
    """What NVML tells. ``nvml`` is the module ``pynvml``; ``/sys`` below ``root`` has what NVML does not say.

    Raises:
        pynvml.NVMLError: NVML cannot be used at all.
    """
    nvml.nvmlInit()
    try:
        driver = Driver(
            _text(nvml.nvmlSystemGetDriverVersion()), _cuda_version(nvml.nvmlSystemGetCudaDriverVersion())
        )
        silent: list[str] = []
        gpus = tuple(_gpus(nvml, root, silent))
        return Machine(driver, gpus, ", ".join(silent))
    finally:
        nvml.nvmlShutdown()


def _gpus(nvml: Any, root: Path, silent: list[str]) -> Iterator[Gpu]:
    """Those that answer; what is to be said of the others goes into ``silent``."""
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            yield _gpu(nvml, root, number)
        except nvml.NVMLError as error:
            silent.append(f"GPU {number} does not answer ({error})")


def _gpu(nvml: Any, root: Path, number: int) -> Gpu:
    gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    ask = _Optional(nvml.NVMLError)
    bus_id = ask(lambda: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId), "")
    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu), None)
    in_mig_mode = ask(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0] == _MIG_ON, False)
    nodes = _members(ask(lambda: nvml.nvmlDeviceGetMemoryAffinity(gpu, _SET_WORDS, _SCOPE_NODE), ()))
    cpus = _members(ask(lambda: nvml.nvmlDeviceGetCpuAffinity(gpu, _SET_WORDS), ()))
    return Gpu(
        number,
        _text(nvml.nvmlDeviceGetUUID(gpu)),
        ask(lambda: _text(nvml.nvmlDeviceGetName(gpu)), ""),
        bus_id,
        memory and int(memory.total),
        memory and int(memory.free),
        nodes[0] if len(nodes) == 1 else driver_files.numa_node(root, bus_id),
        cpus or driver_files.local_cpus(root, bus_id),
        ask(lambda: _COMPUTE_MODES[nvml.nvmlDeviceGetComputeMode(gpu)], ""),
        in_mig_mode,
        tuple(_mig_instances(nvml, gpu, ask)) if in_mig_mode else (),
    )


def _mig_instances(nvml: Any, gpu: Any, ask: _Optional) -> Iterator[MigInstance]:
    for number in range(ask(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)), 0)):
        try:
            one = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
            uuid = _text(nvml.nvmlDeviceGetUUID(one))
        except nvml.NVMLError:  # no instance has this number
            continue
        memory = ask(functools.partial(nvml.nvmlDeviceGetMemoryInfo, one), None)
        yield MigInstance(uuid, memory and int(memory.total), memory and int(memory.free))


class _Optional:
    """Asks what not every GPU, driver or version of the module can tell."""

    def __init__(self, nvml_error: type[Exception]) -> None:
        self._unknown = (nvml_error, AttributeError, IndexError)

    def __call__(self, question: Callable[[], Any], unknown: Any) -> Any:
        try:
            return question()
        except self._unknown:
            return unknown


def _members(words: Iterable[int]) -> tuple[int, ...]:
    """The numbers in a set of NVML's, which is 64 bits a word."""
    return tuple(
        place * _WORD_BITS + bit
        for place, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if int(word) >> bit & 1
    )


def _cuda_version(number: int) -> str:
    """13010 as "13.1"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(given: str | bytes) -> str:
    """Some versions of the module give bytes."""
    return given.decode() if isinstance(given, bytes) else given
