"""Threads of instances, and placement of a worker on the CPUs beside its GPU, in child processes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from gpuserve.model.placement import cores_of_instances, n_threads, overloads
from gpuserve.model.spec import InstanceSpec
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
    return json.loads(subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60))


def test_ranges_and_every_thread_moves_to_the_cpus_that_it_may_use() -> None:
    first = min(os.sched_getaffinity(0))
    refused, threads, policies = placed((first, 8191), -1)
    assert (refused, threads, policies) == ([], [[first]] * 2, ["default"])
    assert ranges((8, 0, 1, 2, 10, 11)) == "0-2,8,10-11"
    assert ranges(()) == ""


def test_cpus_that_it_may_not_use_are_told_and_nothing_changes() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    (refused,), threads, _ = placed((8190, 8191), -1)
    text = "the worker may use none of the CPUs that are next to its GPU (8190-8191), and stays on"
    assert refused == f"{text} {ranges(allowed)}"
    assert threads == [allowed] * 2


def test_a_node_that_is_not_there_and_a_machine_of_another_kind_are_told() -> None:
    (refused,), _, policies = placed((), 63)
    assert refused.startswith("the worker cannot prefer the memory of its GPU's NUMA node 63: ")
    assert policies == ["default"]
    (refused,), _, _ = placed((), 0, first="__import__('platform').machine = lambda: 'riscv64'")
    assert refused == "the worker cannot choose the memory of NUMA node 0 on a machine of this kind"


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


# ---- the threads of instances ----


def instances(*each: dict[str, Any]) -> list[InstanceSpec]:
    return [InstanceSpec(f"{number}", "cpu", {}, **one) for number, one in enumerate(each)]


@pytest.mark.parametrize(
    ("processors", "ingress", "left"),
    [(1.5, 1, 1.5), (2.0, 4, 2.0), (8.0, 1, 7.0), (16.0, 4, 14.0), (64.0, 4, 59.0)],
)
def test_the_front_has_cores_of_its_own_on_large_machines(
    processors: float, ingress: int, left: float
) -> None:
    assert cores_of_instances(processors, ingress) == left


@pytest.mark.parametrize(
    ("each", "cores", "threads"),
    [
        ([{}], 2.0, [2]),
        ([{}] * 4, 2.0, [1] * 4),
        ([{}] * 3, 8.0, [2] * 3),
        ([{}], 0.5, [1]),
        ([{"threads": 4}, {}, {}], 8.0, [4, 2, 2]),
        ([{"threads": 9}, {}], 8.0, [9, 1]),
        ([{"cpus": (0, 1, 2)}, {}], 8.0, [3, 5]),
        ([{"cpus": (0, 1, 2, 3)}] * 2 + [{"cpus": (4,)}], 8.0, [2, 2, 1]),
    ],
)
def test_shares(
    each: list[dict[str, Any]], cores: float, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = instances(*each)
    assert [n_threads(one, made, cores) for one in made] == threads
    assert any(overloads(made, cores, 1)) is (sum(threads) > max(cores, len(each)))


@pytest.mark.parametrize(("ingress", "processors", "warned"), [(1, 0.5, 0), (2, 2.0, 0), (4, 2.0, 1)])
def test_more_ingress_processes_than_cores_are_warned_of(
    ingress: int, processors: float, warned: int
) -> None:
    found = list(overloads(instances({"threads": 1}), processors, ingress))
    assert len(found) == warned
    assert all("4 ingress processes have 2 cores" in one for one in found)
