"""The stand-in for CUDA is unkind where a GPU is: what holds of a GPU only by luck does not hold of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GPU_0, GpuMachine

pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parents[1] / "programs" / "cuda_unkindness.py"
TIMEOUT_S = 60.0
SHM = Path("/dev/shm")
BLOCK_NBYTES = 2 << 20
POISON = 255


@pytest.fixture
def machine(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "gpus")


@contextmanager
def started(machine: GpuMachine, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The program, with its input open."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *args],
        env=os.environ | machine.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def seen(machine: GpuMachine, *args: str) -> dict[str, Any]:
    """What the program prints."""
    with started(machine, *args) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(printed)
    return found


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def free(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    assert line(process) == "freed\n"


def test_small_allocations_share_a_block_that_a_handle_of_each_shows(machine: GpuMachine) -> None:
    with started(machine, "shares") as process:
        handles = line(process).split()
        assert len(set(handles)) == 3
        first, second, own = seen(machine, "opens", *handles)["found"]
        assert first == [1, 0, BLOCK_NBYTES]
        assert second == [2, 512, BLOCK_NBYTES], "its range is the block, in which it does not come first"
        assert own == [3, 0, 2 * BLOCK_NBYTES]
        free(process, 0)
        assert seen(machine, "opens", handles[0])["found"][0][1:] == [0, BLOCK_NBYTES], "its neighbour lives"
        free(process, 1)
        free(process, 2)
        assert seen(machine, "opens", *handles)["found"] == [205, 205, 205]


def test_a_block_is_open_until_its_last_place_is_closed(machine: GpuMachine) -> None:
    with started(machine, "shares") as process:
        first, second, _ = line(process).split()
        assert seen(machine, "closes", first, second) == {
            "closed": 0,
            "again": 1,
            "beside": 2,
            "then": 0,
            "after": 1,
        }


def test_memory_that_nobody_has_written_to_is_not_zero(machine: GpuMachine) -> None:
    assert seen(machine, "unwritten") == {
        "small": [POISON],
        "array": True,
        "ends": [[POISON], [POISON]],
        "host": [POISON],
    }


def test_the_pool_of_cupy_keeps_what_was_freed_and_cuts_it(machine: GpuMachine) -> None:
    mib = 1 << 20
    assert seen(machine, "pool") == {
        "cut": [0, mib],
        "handles": 1,
        "kept": 6 * mib,
        "taken": 8 * mib,
        "while in use": 6 * mib,
        "joined": 1,
        "after": 0,
    }


def test_calls_cost_time_and_cupy_keeps_the_interpreters_lock_in_some(machine: GpuMachine) -> None:
    machine.change(page_lock_bytes_per_s=1 << 30, ipc_open_s=0.05)
    with started(machine, "shares") as process:
        found = seen(machine, "costs", line(process).split()[0])
    took_s, stopped_s = found["page-lock"]
    assert took_s > 0.06
    assert stopped_s < took_s / 2, "other threads run while pages are locked"
    took_s, stopped_s = found["open"]
    assert min(took_s, stopped_s) > 0.045, "no other thread runs while a handle is opened"
    took_s, stopped_s = found["record beside unlock"]
    assert min(took_s, stopped_s) > 0.04, "nor while an event waits for the driver to unlock pages"


@pytest.mark.parametrize("what", ["event", "stream"])
def test_the_use_of_what_is_destroyed_ends_the_process(machine: GpuMachine, what: str) -> None:
    with started(machine, f"destroyed_{what}") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGABRT
    assert f"undefined behaviour: the {what} " in errors
    assert f"in destroyed_{what}" in errors, "it is told who did it"


def test_libraries_count_where_cuda_pathfinder_looks_for_them(machine: GpuMachine) -> None:
    machine.change(libraries_looked_up=True)
    missing = "cuda.pathfinder.DynamicLibNotFoundError"
    assert seen(machine, "compiles") == {"copied": [0.0] * 4, "kernel": missing, "product": missing}


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_leaves_a_file_only_where_it_is_killed(machine: GpuMachine, killed: bool) -> None:
    machine.change(files_in_shm=True)
    with started(machine, "traces") as process:
        found = json.loads(line(process))
        assert found["nodes"] == ["nvidia-uvm", "nvidia0", "nvidiactl"]
        (name,) = found["shm"]
        if killed:
            process.kill()
        process.communicate(timeout=TIMEOUT_S)
    assert (SHM / name).exists() == killed
    (SHM / name).unlink(missing_ok=True)


def test_a_gpu_that_is_full_takes_no_further_process(machine: GpuMachine) -> None:
    machine.change_gpu(GPU_0.uuid, foreign_memory=GPU_0.memory - GPU_0.context_memory // 2)
    with started(machine, "unwritten") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "Out of memory" in errors
