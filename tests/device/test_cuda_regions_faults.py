"""Device memory of clients where CUDA refuses, or no worker can open it: each a clear error, and what comes
next is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_exporter import TIMEOUT_S, Exporter
from cuda_server import client_of, infer, infer_input, into, model, registered, serve, tensor, texts
from gpu_machine import GPU_0, GpuMachine, real_gpu
from processes import wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.thorough

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
INVALID_VALUE, LAUNCH_FAILURE = 1, 719
NAMES = ("host", "device")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> GpuMachine:
    if real_gpu():
        pytest.skip("a real GPU cannot be changed by a test")
    return GpuMachine(tmp_path_factory.mktemp("gpus"), [GPU_0])


@pytest.fixture(scope="module")
def server(machine: GpuMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    y = [tensor("y", "FP32", -1)]
    models = [
        model("host", "twice", [tensor("x", "FP32", -1)], y),
        model("device", "twice", [tensor("x", "FP32", -1, memory="gpu")], y),
    ]
    with serve(machine, tmp_path_factory.mktemp("server"), models) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def exporter(machine: GpuMachine) -> Iterator[Exporter]:
    with Exporter(machine.environ) as one:
        yield one


@pytest.fixture
def client(server: Addresses, machine: GpuMachine) -> Iterator[Any]:
    with client_of("grpc", server) as one:
        yield one
        machine.change(failures={})
        one.unregister_cuda_shared_memory()


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_that_cuda_refuses_fails_its_request_alone(
    client: Any, machine: GpuMachine, exporter: Exporter, name: str
) -> None:
    memory = exporter.make(64)
    memory.put(ROWS.tobytes())
    given = [infer_input(client, ROWS, "FP32", "in")]
    with registered(client, "in", memory):
        infer(client, name, given)
        machine.change(failures={"memcpyAsync": INVALID_VALUE})
        with pytest.raises(InferenceServerException) as caught:
            infer(client, name, given)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert "a region of CUDA memory could not be copied: " in caught.value.message()
        machine.change(failures={})
        assert infer(client, name, given).as_numpy("y").tolist() == (ROWS * 2).tolist()


def test_handles_that_cannot_be_closed_are_no_matter(
    client: Any, machine: GpuMachine, exporter: Exporter
) -> None:
    machine.change(failures={"ipcCloseMemHandle": INVALID_VALUE})
    with registered(client, "in", exporter.make(64)):
        pass
    assert texts(client) == {}
    machine.change(failures={})
    with registered(client, "in", exporter.make(64)):
        infer(client, "host", [infer_input(client, ROWS, "FP32", "in")])


def test_a_worker_whose_device_fails_over_a_handle_is_replaced(
    client: Any, machine: GpuMachine, exporter: Exporter
) -> None:
    memory = exporter.make(64)
    memory.put(ROWS.tobytes())
    machine.change(failures={"ipcOpenMemHandle": LAUNCH_FAILURE, "deviceSynchronize": LAUNCH_FAILURE})
    with pytest.raises(InferenceServerException) as caught:
        client.register_cuda_shared_memory("in", memory.handle_base64, 0, 64)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert "the worker that was to open the region died" in caught.value.message()
    machine.change(failures={})
    wait_until(
        lambda: all(client.is_model_ready(name) for name in NAMES), "the successor is there", TIMEOUT_S
    )
    with registered(client, "in", memory):
        for name in NAMES:
            answer = infer(client, name, [infer_input(client, ROWS, "FP32", "in")])
            assert answer.as_numpy("y").tolist() == (ROWS * 2).tolist()


def test_a_worker_that_dies_with_a_region_open_has_a_successor_that_opens_it(
    client: Any, machine: GpuMachine, exporter: Exporter
) -> None:
    memory, out = exporter.make(64), exporter.make(64)
    memory.put(ROWS.tobytes())
    given, wanted = [infer_input(client, ROWS, "FP32", "in")], [into(client, "out", 32)]
    with registered(client, "in", memory), registered(client, "out", out):
        infer(client, "device", given, wanted)
        waits = "eventQuery", "eventSynchronize", "deviceSynchronize"
        machine.change(failures=dict.fromkeys(waits, LAUNCH_FAILURE))
        with pytest.raises(InferenceServerException):
            infer(client, "device", given, wanted)
        machine.change(failures={})
        wait_until(lambda: client.is_model_ready("device"), "the successor is there", TIMEOUT_S)
        out.put(bytes(64))
        infer(client, "device", given, wanted)
        assert out.get(32) == (ROWS * 2).tobytes()


# ---- without a GPU ------------------------------------------------------------------------------


def test_a_server_without_a_gpu_refuses_and_forgets(
    machine: GpuMachine, exporter: Exporter, tmp_path: Path
) -> None:
    models = [model("host", "twice", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], "cpu")]
    memory = exporter.make(64)
    with serve(machine, tmp_path, models) as server:
        for protocol in ("grpc", "http"):
            with client_of(protocol, server) as client:
                with pytest.raises(InferenceServerException) as caught:
                    client.register_cuda_shared_memory("g", memory.handle_base64, 0, 64)
                assert caught.value.message() == (
                    "failed to register CUDA shared memory region: 'g', GPUs not supported: no instance runs "
                    "on a GPU"
                )
                assert texts(client) == {}
                client.unregister_cuda_shared_memory("g")
                client.unregister_cuda_shared_memory()
