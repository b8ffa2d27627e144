"""The stand-in for CUDA's libraries shows the mistakes that a GPU shows only sometimes: a test that passes on
it has waited for what it has to wait for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cuda_stand_in.cuda_simulation.visible import visible
from gpu_machine import GPU_0, GPU_1, Gpu, GpuMachine, Machine, Mig

PROGRAM = Path(__file__).parents[1] / "programs" / "cuda_hazards.py"
TIMEOUT_S = 60.0
OLD, NEW, NEWER = 1, 2, 3
#: A copy of the program's takes 20 ms, as a kernel does.
STEP_S = 0.02
SLOW = {"copy_bytes_per_s": (1 << 20) / STEP_S, "kernel_s": STEP_S}


def start(machine: GpuMachine, *args: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *args],
        env=os.environ | machine.environ | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def seen(machine: GpuMachine, *args: str, **environ: str) -> dict[str, Any]:
    """What the program prints."""
    with start(machine, *args, **environ) as process:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture
def slow(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "gpus", **SLOW)


@pytest.fixture
def machine(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "gpus")


def test_a_stream_that_waits_for_no_event_reads_old_data(slow: GpuMachine) -> None:
    found = seen(slow, "no_event")
    assert OLD in found["without"]
    assert found["with"] == [NEWER]


def test_a_page_locked_source_is_read_when_the_copy_is_executed(slow: GpuMachine) -> None:
    found = seen(slow, "reused_source")
    assert NEWER in found["page-locked"]
    assert found["pageable"] == [NEW]


def test_a_page_locked_target_has_old_data_until_it_is_waited_for(slow: GpuMachine) -> None:
    assert seen(slow, "early_read") == {"page-locked": [OLD], "pageable": [NEW]}


def test_the_default_stream_and_non_blocking_ones_do_not_wait_for_each_other(slow: GpuMachine) -> None:
    assert seen(slow, "default_stream") == {
        "waits for blocking": True,
        "holds up blocking": True,
        "waits for non-blocking": False,
        "holds up non-blocking": False,
    }


def test_copies_in_both_directions_and_kernels_overlap(slow: GpuMachine) -> None:
    shares = []
    while not shares or min(shares) >= 0.8:
        assert len(shares) < 5, f"of the time after each other: {shares}"
        found = seen(slow, "overlap")
        # Nine steps after each other, or five when no engine waits without need and nobody else works.
        assert found["serial"] >= 9 * STEP_S
        assert found["pipeline"] >= 5 * STEP_S
        shares.append(found["pipeline"] / found["serial"])


def test_memory_is_given_back_when_nothing_is_queued_any_more(slow: GpuMachine) -> None:
    assert seen(slow, "freed_in_use") == {"before": False, "after": True, "status": 0}


def test_page_locked_memory_that_is_gone_does_not_end_the_process(slow: GpuMachine) -> None:
    assert seen(slow, "unmapped_source") == {"status": 0}


def test_host_code_runs_in_the_order_of_its_stream(slow: GpuMachine) -> None:
    assert seen(slow, "host_code") == {"seen": [[5, [NEW]], 800]}


def test_a_call_blocks_while_the_queue_is_full_and_may_keep_the_interpreters_lock(slow: GpuMachine) -> None:
    slow.change(launch_queue=4)
    found = seen(slow, "full_queue", "9")
    assert found["queued_s"] > 3 * STEP_S
    assert found["without_a_turn_s"] > 0.004


def test_a_large_copy_from_pageable_memory_starts_after_what_is_queued(slow: GpuMachine) -> None:
    found = seen(slow, "pageable")
    assert found["large_s"] > STEP_S / 2 > found["small_s"]


def test_what_is_asked_too_early_is_the_last_error_of_the_runtime(slow: GpuMachine) -> None:
    assert seen(slow, "last_error") == {"driver": [600, 0], "runtime": [600, 0]}
    slow.change(shared_runtime=True)
    assert seen(slow, "last_error") == {"driver": [600, 0], "runtime": [600, 600]}


def compute(machine: GpuMachine, count: int) -> float:
    """The seconds of the slowest of so many processes, each with five kernels."""
    with ExitStack() as stack:
        processes = [stack.enter_context(start(machine, "computes", "5")) for _ in range(count)]
        assert [one.stdout and one.stdout.readline() for one in processes] == ["ready\n"] * count
        for one in processes:
            assert one.stdin
            one.stdin.write("\n")
            one.stdin.flush()
        return max(json.loads(one.communicate(timeout=TIMEOUT_S)[0])["took_s"] for one in processes)


@pytest.mark.thorough
@pytest.mark.parametrize("mps", [False, True])
def test_processes_compute_in_turns_unless_they_are_clients_of_mps(slow: GpuMachine, mps: bool) -> None:
    slow.change(mps=mps)
    alone_s, together_s = compute(slow, 1), compute(slow, 2)
    assert (together_s > 1.6 * alone_s) is not mps


@pytest.mark.thorough
def test_memory_is_counted_over_all_processes_and_comes_back_with_their_end(machine: GpuMachine) -> None:
    total, held, each = GPU_0.memory, 100 << 20, GPU_0.context_memory
    with start(machine, "hold", str(held)) as process:
        assert process.stdout
        assert process.stdout.readline() == "holds\n"
        assert seen(machine, "memory") == {"free": total - held - 2 * each}
        process.kill()
    assert seen(machine, "memory") == {"free": total - each}


def test_a_lost_gpu_fails_in_processes_that_use_it_and_is_not_seen_by_new_ones(machine: GpuMachine) -> None:
    with start(machine, "hold", "4096") as process:
        assert process.stdout
        assert process.stdout.readline() == "holds\n"
        machine.lose(GPU_0.uuid)
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert json.loads(printed) == {"held": True, "status": 719}
    assert seen(machine, "devices") == {"status": 100}


@pytest.mark.parametrize(
    ("change", "status"),
    [({"driver_version": None}, 35), ({"broken": 999}, 999), ({"failures": {"getDeviceCount": 3}}, 3)],
    ids=["no driver", "broken", "a call that fails"],
)
def test_a_machine_can_be_without_cuda(machine: GpuMachine, change: dict[str, Any], status: int) -> None:
    machine.change(**change)
    assert seen(machine, "devices") == {"status": status}


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, ["GPU-aa", "GPU-ab"]), ("0,1", ["GPU-aa", "GPU-ab"]), ("1,0", ["GPU-ab", "GPU-aa"]),
        ("GPU-ab", ["GPU-ab"]), ("GPU-a", []), ("1,7,0", ["GPU-ab"]), ("0,0", ["GPU-aa"]), ("", []),
        ("-1", []),
    ],
)  # fmt: skip
def test_a_process_sees_what_is_listed(listed: str | None, expected: list[str]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [device.uuid for device in visible(Machine((Gpu("GPU-aa"), Gpu("GPU-ab"))), environ)] == expected


@pytest.mark.parametrize("listed", ["MIG-2", "MIG-2,MIG-1,0", "MIG-2,1"])
def test_a_process_sees_one_mig_instance_and_then_nothing_else(listed: str) -> None:
    gpu = Gpu(GPU_1.uuid, mig=(Mig("MIG-1"), Mig("MIG-2", memory=5)))
    (device,) = visible(Machine((GPU_0, gpu)), {"CUDA_VISIBLE_DEVICES": listed})
    assert (device.uuid, device.gpu_uuid, device.memory) == ("MIG-2", gpu.uuid, 5)


def test_the_default_order_is_by_speed_unless_the_bus_is_asked_for(tmp_path: Path) -> None:
    fast = Gpu(GPU_1.uuid, pci_bus_id=GPU_1.pci_bus_id, speed=1)
    machine = GpuMachine(tmp_path / "gpus", [GPU_0, fast])
    assert seen(machine, "devices") == {"seen": ["0000:65:00.0", "0000:17:00.0"]}
    in_order = seen(machine, "devices", CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="0")
    assert in_order == {"seen": ["0000:17:00.0"]}
