"""Placement of a worker on the CPUs beside its GPU, in child processes: a placement cannot be undone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from gpuserve_worker.execution.lifecycle import ranges

PROGRAM = """
import json, os, sys, threading
from gpuserve_worker.execution import lifecycle as placement
go, done = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (go.set(), done.wait()))
thread.start()
go.wait()
{first}
refused = placement.bind_near_gpu({cpus}, {node})
threads = [sorted(os.sched_getaffinity(int(one))) for one in os.listdir("/proc/self/task")]
with open("/proc/self/numa_maps") as file:
    policies = sorted({{line.split()[1] for line in file}})
done.set()
thread.join()
print(json.dumps([refused, threads, policies]))
"""


def placed(cpus: object, node: int, first: str = "") -> Any:
    """What is refused, the CPUs of each thread, and the memory policies of its mappings."""
    program = PROGRAM.format(cpus=cpus, node=node, first=first)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_every_thread_moves_to_the_cpus_that_it_may_use() -> None:
    first = min(os.sched_getaffinity(0))
    refused, threads, policies = placed((first, 8191), -1)
    assert (refused, threads, policies) == ([], [[first]] * 2, ["default"])


def test_cpus_that_it_may_not_use_are_told_and_nothing_changes() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    (refused,), threads, _ = placed((8190, 8191), -1)
    assert refused == (
        "the worker may use none of the CPUs that are next to its GPU (8190-8191), and stays on "
        f"{ranges(allowed)}"
    )
    assert threads == [allowed] * 2


def test_memory_of_the_node_is_preferred() -> None:
    refused, _, policies = placed((), 0)
    if refused:
        pytest.skip(f"not in this container: {refused}")
    assert policies == ["prefer:0"]


#: Has the kernel refuse a system call with EPERM, as the default profiles of container runtimes do.
FORBIDDING = """
import ctypes, struct
rules = (0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in rules))
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(program)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, filters) == 0
"""


#: The places of two workers beside a GPU of node 1.
PLACING = """
import logging
logging.basicConfig(level=logging.INFO)
from gpuserve.devices.inventory import visible_devices
from gpuserve.devices.machine import Gpu
from gpuserve.devices.placement import placement_on
devices = visible_devices([Gpu(0, "GPU-a", numa_node=1, cpus=(4, 5))], None)
for _ in range(2):
    placement = placement_on(devices, numa_affinity=True)
    print(placement.numa_node, placement.cpus)
"""


@pytest.mark.parametrize("is_forbidden", [False, True])
def test_memory_policies_that_seccomp_forbids_are_told_once_with_the_remedy(is_forbidden: bool) -> None:
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    program = (FORBIDDING.format(number=number) if is_forbidden else "") + PLACING
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    if not is_forbidden and "seccomp" in done.stderr:
        pytest.skip("this container forbids memory policies")
    assert done.stdout == 2 * f"{-1 if is_forbidden else 1} (4, 5)\n", done.stderr
    remedy = "a container needs the capability SYS_NICE, or a seccomp profile that allows set_mempolicy"
    assert done.stderr.count(remedy) == is_forbidden


def test_a_node_that_is_not_there_is_told() -> None:
    (refused,), _, policies = placed((), 63)
    assert refused.startswith("the worker cannot prefer the memory of its GPU's NUMA node 63: ")
    assert policies == ["default"]


def test_a_machine_of_another_kind() -> None:
    (refused,), _, _ = placed((), 0, first="__import__('platform').machine = lambda: 'riscv64'")
    assert refused == "the worker cannot choose the memory of NUMA node 0 on a machine of this kind"


def test_ranges() -> None:
    assert ranges((8, 0, 1, 2, 10, 11)) == "0-2,8,10-11"
    assert ranges(()) == ""
