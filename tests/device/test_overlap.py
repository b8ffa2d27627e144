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
    for name, value in stand_in.environ.items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "config.yaml"
    names = [("serial", "waited_for", 0), ("ahead", "waited_for", 1), ("started", "started", 1)]
    config.write_text(json.dumps({"models": [model(*one) for one in names]}))
    with OperatedServer(config) as server:
        server.wait_ready()
        address = server.addresses["HTTP"]
        with Client(address) as client:  # memory is made, pages are locked
            for name, *_ in names:
                status, answer = infer_binary(client, name, ARRAY)
                assert (status, answer.sum()) == (200, 2 * ARRAY.size)
        stand_in.change(kernel_s=KERNEL_S, copy_bytes_per_s=2 * ARRAY.nbytes / KERNEL_S, launch_delay_s=0.0)
        rates = {name: throughput(address, name) for name, *_ in names}
    # The copies take what they should, and not too much is lost besides.
    assert rates["serial"] * 2 * KERNEL_S > 0.6, rates
    for name in ("ahead", "started"):
        assert rates[name] >= 1.6 * rates["serial"], rates
