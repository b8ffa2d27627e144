"""CUDA does what the device plane takes for granted. On the stand-in this says that it stands in rightly; on
a real GPU, that the stand-in was made after the right thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GpuMachine, RealMachine

PROGRAM = Path(__file__).parents[1] / "programs" / "cuda_facts.py"
TIMEOUT_S = 60.0
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
#: What CUDA says of a handle that is none, by its version.
NO_HANDLE = {INVALID_VALUE, 101, 201, 205, INVALID_HANDLE, 999}


@pytest.fixture(scope="module")
def machine(shared_gpu_machine: GpuMachine | RealMachine) -> GpuMachine | RealMachine:
    return shared_gpu_machine


def facts(machine: GpuMachine | RealMachine, *args: str) -> dict[str, Any]:
    """What the program prints, in a process of its own."""
    command = [sys.executable, str(PROGRAM), *args]
    ended = subprocess.run(
        command, env=os.environ | machine.environ, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@contextmanager
def exporter(machine: GpuMachine | RealMachine) -> Iterator[subprocess.Popen[str]]:
    """A process that exports memory; it fills it with what it is sent."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(PROGRAM), "export"],
        env=os.environ | machine.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """What it prints next."""
    assert process.stdout
    return process.stdout.readline()


def test_copies_of_what_is_no_memory_are_refused_and_nothing_else_is_lost(machine: Any) -> None:
    refused = ("past the end", "freed", "no device memory")
    assert facts(machine, "bad_copies") == dict.fromkeys(refused, INVALID_VALUE) | {"good": 0}


def test_an_illegal_address_stays_until_the_process_ends(machine: Any) -> None:
    assert facts(machine, "illegal_address") == {"synchronise": 700, "allocate": 700, "ask": 700}
    assert facts(machine, "bad_copies")["good"] == 0  # the next process has none of it


def test_host_memory_is_page_locked_once(machine: Any) -> None:
    found = facts(machine, "page_locking")
    assert found == {
        "first": 0,
        "again": 712,
        "type": 1,
        "unregister": 0,
        "once more": 713,
        "type then": 0,
    }


def test_too_much_memory_is_refused_and_nothing_else_is_lost(machine: Any) -> None:
    assert facts(machine, "out_of_memory") == {"runtime": OUT_OF_MEMORY, "cupy": True, "then": 0}


def test_handles_of_the_process_itself_and_of_nothing_are_refused(machine: Any) -> None:
    found = facts(machine, "own_handles")
    assert found.pop("garbage") in NO_HANDLE
    assert found == {
        "own memory": INVALID_CONTEXT,
        "pool": INVALID_VALUE,
        "plain event": INVALID_HANDLE,
        "handle": 64,
    }


def test_the_driver_tells_of_the_allocation_around_an_address(machine: Any) -> None:
    found = facts(machine, "address_range")
    assert found.pop("unknown") != 0
    assert found == {"status": 0, "base": True, "nbytes": 8 << 20, "device": 0, "type": 2}


def test_events_and_streams_end(machine: Any) -> None:
    assert facts(machine, "events") == {
        "never recorded": True,
        "recorded": 0,
        "in order": True,
        "without timing": INVALID_HANDLE,
        "destroyed stream": True,
    }


def test_arrays_compute_on_the_device_and_come_to_the_host_only_when_told(machine: Any) -> None:
    found = facts(machine, "arrays")
    rows = [[100.0] * 4, [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    assert found["arithmetic"] == [[(one * 2 - 1) / 4 for one in row] for row in rows]
    products = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in rows] for x in rows]
    assert found["matmul"] == products
    assert (found["sum"], found["mean"]) == (460.0, [100.0, 5.5, 9.5])
    assert found["slices"] == [[4.0, 6.0], [8.0, 10.0]]
    assert found["joined"] == [4, 4]
    assert found["device"] == [2, 0]
    assert (found["by numpy"], found["interface"], found["cast"]) == (True, True, "int8")
    assert (found["implicit"], found["mixed"]) == ("TypeError", "TypeError")


def test_memory_and_events_go_from_process_to_process(machine: Any) -> None:
    with exporter(machine) as process:
        assert process.stdin
        memory, event = line(process).split()
        process.stdin.write("7\n")
        process.stdin.flush()
        assert line(process) == "recorded\n"
        found = facts(machine, "take_over", memory, event)
    assert found["values"] == [7]
    assert found["same address"], "what is open is opened once more at the same address"
    assert found["interior"] == INVALID_VALUE
    assert found["closed"] == [0, 0, INVALID_VALUE]
    assert found["after"] == INVALID_VALUE


def test_the_memory_of_a_process_that_has_ended_cannot_be_opened(machine: Any) -> None:
    with exporter(machine) as process:
        memory, _ = line(process).split()
        assert facts(machine, "open_memory", memory) == {"status": 0}
    assert facts(machine, "open_memory", memory)["status"] in NO_HANDLE
