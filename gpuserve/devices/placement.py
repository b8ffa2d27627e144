"""The placement of a worker process (GPU, CPUs and memory), and the processors that this process may use."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuserve.devices.names import BY_BUS, ORDER_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from gpuserve.devices.inventory import VisibleDevice

logger = logging.getLogger(__name__)

#: Number of the system call ``get_mempolicy`` by machine; the C library has no wrapper.
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}

#: Files of the control group in a container, v2 and v1: CPU time in microseconds, and the period.
_V2_QUOTA: Final = "sys/fs/cgroup/cpu.max"
_V1_QUOTA: Final = ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us")

#: Sets the threads of OpenMP, PyTorch, ``gpuserve.backends``, and of libraries whose own variable is not set.
THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a worker process.

    Attributes:
        gpu_uuids: The UUIDs of its GPUs or MIG instances, without unknown ones.
        visible: The value of ``CUDA_VISIBLE_DEVICES`` in the process, "" to leave the variable unchanged.
        cpus: The CPUs of the process; empty: all.
        numa_nodes: The NUMA node of the process, or empty.
    """

    gpu_uuids: tuple[str, ...] = ()
    visible: str = ""
    cpus: tuple[int, ...] = ()
    numa_nodes: tuple[int, ...] = ()

    @property
    def numa_node(self) -> int:
        return self.numa_nodes[0] if self.numa_nodes else -1

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the process has besides those of its parent.

        CUDA numbers GPUs by speed unless told otherwise; a number in ``visible`` counts GPUs in the order of
        the PCI bus.
        """
        return {VARIABLE: self.visible, ORDER_VARIABLE: BY_BUS} if self.visible else {}


ANYWHERE: Final = Placement()


def placement_on(devices: Sequence[VisibleDevice], *, numa_affinity: bool) -> Placement:
    """Return the placement on one or more devices; with ``numa_affinity`` next to them."""
    uuids = tuple(one.uuid for one in devices if one.uuid)
    visible = ",".join(one.entry for one in devices)
    if not numa_affinity:
        return Placement(uuids, visible)
    gpus = [one.gpu for one in devices]
    cpus = sorted({cpu for gpu in gpus for cpu in gpu.cpus}) if all(gpu.cpus for gpu in gpus) else ()
    nodes = {gpu.numa_node for gpu in gpus}
    is_one_node = len(nodes) == 1 and min(nodes) >= 0 and _may_choose_memory()
    return Placement(uuids, visible, tuple(cpus), tuple(nodes) if is_one_node else ())


@functools.cache
def _may_choose_memory() -> bool:
    """Return whether workers may prefer the memory of a NUMA node, and log once if they may not. The default
    seccomp profiles of container runtimes forbid all calls of memory policies together.
    """
    import ctypes  # most servers have no GPU
    import platform

    number = _GET_MEMPOLICY.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(ctypes.c_long(number), *5 * (ctypes.c_void_p(),)) == 0:
        return True
    if ctypes.get_errno() != errno.EPERM:
        return True
    logger.info(
        "workers cannot prefer the memory of their GPU's NUMA node: a container needs the capability "
        "SYS_NICE, or a seccomp profile that allows set_mempolicy"
    )
    return False


def n_processors(root: str = "") -> float:
    """Return the number of processors for this process, or its container's quota if that is lower."""
    quota = _words_of(f"{root}/{_V2_QUOTA}") or [
        *_words_of(f"{root}/{_V1_QUOTA[0]}"),
        *_words_of(f"{root}/{_V1_QUOTA[1]}"),
    ]
    allowed = float(len(os.sched_getaffinity(0)))
    if len(quota) != len(_V1_QUOTA) or not quota[0].isdigit():  # no quota: "max" in v2, -1 in v1
        return allowed
    return min(allowed, int(quota[0]) / int(quota[1]))


def threads_of_environment() -> int:
    """Return the number of threads that ``OMP_NUM_THREADS`` sets for numerical libraries, or 0."""
    outermost = os.environ.get(THREADS_VARIABLE, "").partition(",")[0].strip()  # a list is for nested regions
    return int(outermost) if outermost.isdecimal() else 0


def _words_of(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []
