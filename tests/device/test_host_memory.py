"""The host's memory for the copies of a device: locked in the background, unlocked after its own copies."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from cuda_server import model, tensor
from gpu_machine import GpuMachine, RealMachine
from operated import MODELS, InBackground, config
from processes import finished, wait_until
from test_device_inputs import on_gpu
from watched_gpus import QUICKLY, Watched
from worker_process import floats, output

from gpuserve_worker.memory.segments import SEGMENT_NBYTES

Machine = GpuMachine | RealMachine
PROGRAM = Path(__file__).parent.parent / "programs" / "host_memory.py"
MIB = 1 << 20


def look_at(machine: Machine, name: str) -> Any:
    environ = {**os.environ, **machine.environ}
    command = [sys.executable, PROGRAM, name]
    ran = finished(command, env=environ)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_memory_is_used_before_it_is_locked_and_locked_in_its_turn(shared_gpu_machine: Machine) -> None:
    assert look_at(shared_gpu_machine, "in_the_background") == {
        "before": [False, False],
        "there": True,
        "after": [True, True],
        "then": [False, False],
        "unmapped": True,
    }


def test_what_is_given_up_before_its_turn_is_never_locked(shared_gpu_machine: Machine) -> None:
    found = look_at(shared_gpu_machine, "given_up_before_its_turn")
    assert found == {"unmapped": True, "locked": False}


def test_nobody_waits_for_cuda_to_give_memory_up(shared_gpu_machine: Machine) -> None:
    found = look_at(shared_gpu_machine, "given_up_meanwhile")
    assert found == {"unmapped at once": False, "locked": False}


def test_unlocking_waits_for_the_copies_that_use_the_memory_and_for_no_others(stand_in: GpuMachine) -> None:
    stand_in.change(kernel_s=1.0)
    found = look_at(stand_in, "waits_for_its_copies_alone")
    assert found == {"beside": True, "after": True, "there": True}


def test_of_what_clients_lend_a_limit_is_locked(shared_gpu_machine: Machine) -> None:
    assert look_at(shared_gpu_machine, "lent_up_to_a_limit") == {
        "first": [True, True, False],
        "again": True,
        "locked": [False, True, True, True],
    }


def test_of_all_memory_a_limit_is_locked(shared_gpu_machine: Machine) -> None:
    assert look_at(shared_gpu_machine, "all_up_to_a_limit") == {
        "first": [True, False],
        "before": [True, True, False, False, 2],
        "after": True,
        "warned": 1,
    }


def doubled(address: str, row: Any) -> Any:
    x = tritonclient.http.InferInput("x", row.shape, "FP32")
    x.set_data_from_numpy(row)
    with contextlib.closing(tritonclient.http.InferenceServerClient(address)) as client:
        return client.infer("m", [x]).as_numpy("y")


def test_workers_of_a_gpu_divide_the_limit_and_copy_the_rest_unlocked(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two has room for the segment that is made ahead, and for one more."""
    stand_in.set_environment(monkeypatch)
    x, y = tensor("x", "float32", -1, memory="gpu"), tensor("y", "float32", -1)
    doubling = model("m", "", [x], [y], count=2, callable=f"{MODELS / 'limited.py'}:Wasteful")
    limit = 2 * 2 * SEGMENT_NBYTES
    with Watched(config(tmp_path, doubling, gpu_locked_nbytes=limit), *QUICKLY).until_ended() as server:
        for nbytes in (SEGMENT_NBYTES // 2, 2 * SEGMENT_NBYTES, SEGMENT_NBYTES, 3 * SEGMENT_NBYTES):
            row = np.arange(nbytes // 4, dtype=np.float32)[None]
            answers = [InBackground(doubled, server.addresses["HTTP"], row) for _ in range(2)]
            assert all(np.array_equal(one.result(), 2 * row) for one in answers)
        server.wait_log("are not page-locked, so copies to and from the device are slower: gpu_locked_nbytes")
        wait_until(lambda: server.metric("gpuserve_gpu_locked_host_bytes") > 0, "workers have reported")
        assert server.metric("gpuserve_gpu_locked_host_bytes") <= limit


def test_a_large_block_is_not_taken_by_who_needs_a_small_one(shared_gpu_machine: Machine) -> None:
    found = look_at(shared_gpu_machine, "blocks_of_their_size")
    assert found == {"sizes": [64 << 10, 64 << 10, 32 * MIB], "same": [True, True]}


def test_of_blocks_four_of_the_largest_are_kept(shared_gpu_machine: Machine) -> None:
    assert look_at(shared_gpu_machine, "surplus_blocks_are_unlocked") == {"kept": 4, "closed": 0}


def test_a_segment_is_there_before_anybody_asks(shared_gpu_machine: Machine) -> None:
    with on_gpu(shared_gpu_machine, "doubled") as worker:
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
        (bounds,) = [one.split()[0] for one in maps if "memfd:gpuserve" in one]
        start, end = (int(one, 16) for one in bounds.split("-"))
        assert end - start == SEGMENT_NBYTES
        assert output(worker, worker.run([floats("x", [1])])).tolist() == [[2]]
