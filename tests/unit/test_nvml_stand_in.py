"""The stand-in for nvidia-ml-py tells what the machine is, and fails as NVML does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GPU_0, GPU_1, Gpu, GpuMachine, Mig

PROGRAM = Path(__file__).parents[1] / "programs" / "nvml_facts.py"
TIMEOUT_S = 60.0
UNINITIALIZED, INVALID_ARGUMENT, NOT_FOUND, NO_DRIVER, TIMEOUT, NO_LIBRARY, LOST = 1, 2, 6, 9, 10, 12, 15


def start(machine: GpuMachine, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *args],
        env=os.environ | machine.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def seen(machine: GpuMachine, *args: str) -> dict[str, Any]:
    """What the program prints."""
    with start(machine, *args) as process:
        return ended(process)


def ended(process: subprocess.Popen[str], line: str = "") -> dict[str, Any]:
    """What the program prints last, once it was sent a line."""
    printed, _ = process.communicate(line, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture
def machine(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "gpus", [GPU_1, GPU_0])


def test_gpus_are_in_the_order_of_the_bus_and_say_what_they_are(machine: GpuMachine) -> None:
    machine.change_gpu(GPU_1.uuid, temperature=88, mig=(Mig("MIG-00000000-0000-4000-8000-0000000000b1"),))
    found = seen(machine, "inventory")
    assert (found["driver"], found["cuda"]) == ("580.65.06", 13000)
    assert [gpu["uuid"] for gpu in found["gpus"]] == [GPU_0.uuid, GPU_1.uuid]
    assert [gpu["temperature"] for gpu in found["gpus"]] == [41, 88]
    assert [gpu["mig"] for gpu in found["gpus"]] == [[], ["MIG-00000000-0000-4000-8000-0000000000b1"]]
    assert all(gpu[name] for gpu in found["gpus"] for name in ("sums up", "by uuid", "by bus", "cpus"))


def test_calls_that_cannot_be_answered_have_the_codes_of_nvml(machine: GpuMachine) -> None:
    assert seen(machine, "refusals") == {
        "before init": UNINITIALIZED,
        "init": 0,
        "index": INVALID_ARGUMENT,
        "uuid": NOT_FOUND,
        "class": True,
        "text": "Not Supported",
    }


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"driver_version": None}, NO_DRIVER),
        ({"nvml": False}, NO_LIBRARY),
        ({"failures": {"nvmlInit": 999}}, 999),
    ],
    ids=["no driver", "no library", "a call that fails"],
)
def test_a_machine_can_be_without_nvml(machine: GpuMachine, change: dict[str, Any], code: int) -> None:
    machine.change(**change)
    assert seen(machine, "refusals")["init"] == code


def test_the_packages_can_be_absent(machine: GpuMachine) -> None:
    machine.change(nvidia_ml_py=False, cupy=False)
    program = (
        "import importlib.util\ntry:\n import {0}\nexcept ModuleNotFoundError as error: print(error.name)"
    )
    for package in ("cupy", "pynvml"):
        command = [sys.executable, "-c", program.format(package)]
        printed = subprocess.check_output(command, env=os.environ | machine.environ, text=True)
        assert printed == f"{package}\n"


def test_an_xid_comes_to_who_waits_for_it(machine: GpuMachine) -> None:
    with start(machine, "xids") as process:
        assert process.stdout
        assert process.stdout.readline() == "waits\n"
        machine.queue_xid(GPU_1.uuid, 13)
        machine.queue_xid(GPU_0.uuid, 48)
        assert ended(process) == {"xid": 48, "uuid": GPU_0.uuid, "then": TIMEOUT}


def test_a_gpu_that_is_lost_says_so_in_all_calls(machine: GpuMachine) -> None:
    with start(machine, "lost") as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        machine.lose(GPU_0.uuid)
        assert ended(process, "lost\n") == {"before": 0, "xid": 79, "events": LOST, "after": LOST}


def test_calls_can_hang(machine: GpuMachine) -> None:
    machine.change(nvml_hang_s=0.05)
    before = time.monotonic()
    assert seen(machine, "refusals")["init"] == 0
    assert time.monotonic() - before >= 4 * 0.05


def test_the_fields_of_a_machine_come_back_as_they_were_written(tmp_path: Path) -> None:
    gpu = Gpu("GPU-1", mig=(Mig("MIG-1", memory=5),), remapped_rows=(1, 2, 3, 4), numa_node=None)
    machine = GpuMachine(tmp_path / "gpus", [gpu], failures={"malloc": 2}, kernel_s=0.5)
    assert machine.now.gpus == (gpu,)
    assert (machine.now.failures, machine.now.kernel_s) == ({"malloc": 2}, 0.5)
