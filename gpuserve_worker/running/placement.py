"""Keeps a worker process beside its GPU: on the CPUs of the same NUMA node, with its memory from there. Done
before user code is imported, which may start threads of its own. A container may forbid either. The worker
then runs where it may: slower at most, so it is logged and no more.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final

#: ``set_mempolicy`` by machine; the C library has no wrapper for it.
_SYSCALL: Final = {"x86_64": 238, "aarch64": 237}
#: The node is tried first, and others where it is full.
_MPOL_PREFERRED: Final = 1
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def stay_beside_gpu(cpus: Collection[int], numa_node: int) -> list[str]:
    """Keep to the CPUs (empty: to no fewer than now) and prefer memory of the node (-1: any): what was
    refused.
    """
    refused = []
    if cpus:
        refused.append(_keep_to(cpus))
    if numa_node >= 0:
        refused.append(_prefer_memory_of(numa_node))
    return [one for one in refused if one]


def _keep_to(cpus: Collection[int]) -> str:
    """Move every thread that there is: those of numpy's libraries run already."""
    allowed = os.sched_getaffinity(0)
    chosen = allowed.intersection(cpus)
    if not chosen:
        return (
            f"the worker may use none of the CPUs that are next to its GPU ({ranges(cpus)}), and stays on "
            f"{ranges(allowed)}"
        )
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), chosen)
    except OSError as error:
        return f"the worker cannot keep to the CPUs that are next to its GPU: {error.strerror}"
    return ""


def _prefer_memory_of(numa_node: int) -> str:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return f"the worker cannot choose the memory of NUMA node {numa_node} on a machine of this kind"
    words = (ctypes.c_ulong * (numa_node // _WORD_BITS + 1))()
    words[numa_node // _WORD_BITS] = 1 << numa_node % _WORD_BITS
    # One bit more than there are: the kernel takes the last one off.
    bits = ctypes.c_ulong(len(words) * _WORD_BITS + 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), words, bits) != 0:
        why = os.strerror(ctypes.get_errno())
        return f"the worker cannot prefer the memory of its GPU's NUMA node {numa_node}: {why}"
    return ""


def ranges(cpus: Iterable[int]) -> str:
    """CPU numbers as text: (0, 1, 2, 8) becomes ``0-2,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
