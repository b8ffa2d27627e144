"""What a GPU gains by copies that run beside the callable: the same work with and without a batch ahead, by a
real server and clients that keep it busy.

The machine copies as long as it computes. Serially a batch takes its copy to the device, the callable and its
copy back one after the other; at best only the callable counts, which is twice as fast.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from device_calls import infer_binary
from gpu_machine import GpuMachine
from operated import MODELS, Client, OperatedServer
from test_device_inputs import device_model, in_segments
from worker_process import loaded, output

from benchmarks.gpu.served.timeline import Span, spans

KERNEL_S = 0.06
#: Large enough to be worth a message when its batch is computed.
ARRAY = np.ones((1, 1 << 19), np.float32)
BATCHES = 24
CLIENTS = 4


def model(name: str, attribute: str, prefetch: int) -> dict[str, object]:
    return {
        "name": name,
        "callable": f"{MODELS}/pipelined.py:{attribute}",
        "array": "cupy",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}],
        "max_batch_size": 1,
        "prefetch": prefetch,
        "instances": [{"device": "cuda:0"}],
    }


def throughput(address: str, name: str) -> float:
    """Batches a second, with enough clients that one is always waiting."""

    def run() -> None:
        with Client(address) as client:
            for _ in range(BATCHES // CLIENTS):
                infer_binary(client, name, ARRAY)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return BATCHES / (time.perf_counter() - began)


@pytest.mark.thorough  # it takes times, which other tests beside it spoil
def test_copies_overlap_the_callable(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.set_environment(monkeypatch)
    config = tmp_path / "config.yaml"
    names = [("serial", "waited_for", 0), ("ahead", "waited_for", 1), ("started", "started", 1)]
    names += [("input", "passed_on", 1)]
    config.write_text(json.dumps({"models": [model(*one) for one in names]}))
    with OperatedServer(config).until_killed() as server:
        address = server.addresses["HTTP"]
        with Client(address) as client:  # memory is made, pages are locked
            for name, *_ in names:
                status, answer = infer_binary(client, name, ARRAY)
                assert (status, answer.sum()) == (200, (1 if name == "input" else 2) * ARRAY.size)
        stand_in.change(kernel_s=KERNEL_S, copy_bytes_per_s=2 * ARRAY.nbytes / KERNEL_S, launch_delay_s=0.0)
        rates = {name: throughput(address, name) for name, *_ in names}
    # The copies take what they should, and not too much is lost besides.
    assert rates["serial"] * 2 * KERNEL_S > 0.6, rates
    for name in ("ahead", "started", "input"):
        assert rates[name] >= 1.6 * rates["serial"], rates


def timeline(machine: GpuMachine, folder: Path, path: str) -> list[Span]:
    """Copies and calls of six batches that come together. A kernel takes as long as a copy."""
    array = np.ones((1, 1 << 17), np.float32)  # a larger one is told of before it is answered
    environ = machine.environ | {"GPUSERVE_CUDA_TIMELINE": str(folder / "lines")}
    with loaded(device_model(path), environ=environ) as worker:
        tensor = in_segments(worker, array)
        worker.run([tensor])
        machine.change(kernel_s=0.03, copy_bytes_per_s=array.nbytes / 0.03, launch_delay_s=0.0)
        for number in range(2, 8):
            worker.start([tensor], batch_id=number)
        for _ in range(2, 8):
            assert np.array_equal(output(worker, worker.answer()), array)
        machine.change(kernel_s=0.0, copy_bytes_per_s=0.0)
        worker.run([tensor], batch_id=8)  # what is over is written when the next copy begins
    (lines,) = folder.glob("lines.*")
    return spans(lines.read_text().splitlines())


@pytest.mark.parametrize("path", ["passed_on", "passed_on_by_request"])
def test_an_answer_that_is_the_input_is_copied_while_the_next_call_runs(
    stand_in: GpuMachine, tmp_path: Path, path: str
) -> None:
    found = timeline(stand_in, tmp_path, path)
    calls, copies = ([one for one in found if one.kind == kind][1:7] for kind in ("call", "d2h"))
    beside = [
        copy.end_ns - call.start_ns for copy, call in zip(copies[:-1], calls[1:], strict=True)
    ]  # the answer to a call, and the next call
    assert sum(one > 15e6 for one in beside) >= 4, (calls, copies)
