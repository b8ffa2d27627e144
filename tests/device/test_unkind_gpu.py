"""A server on a GPU that is as unkind as a real one: calls take their time, small allocations share what a
handle shows, CUDA and NVML answer with codes that nobody expects. Only the stand-in is so for certain.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_exporter import Exporter
from cuda_server import client_of, infer, infer_input, into, model, registered, serve, tensor
from gpu_machine import COSTS, GPU_0, GPU_1, GpuMachine, real_gpu
from processes import wait_ended, wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException
from watched_gpus import HELD_NBYTES, Watched, module_server, shared_machine, shared_server, watched

pytestmark = pytest.mark.thorough
__all__ = ["module_server", "shared_machine", "shared_server"]  # fixtures

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
DOUBLED = (ROWS * 2).tolist()
SMALL_NBYTES = 64
BLOCK_NBYTES = 2 << 20
NAMES = ("host", "device", "cast")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> GpuMachine:
    if real_gpu():
        pytest.skip("a real GPU cannot be changed by a test")
    return GpuMachine(tmp_path_factory.mktemp("gpus"), [GPU_0], **COSTS)


@pytest.fixture(scope="module")
def server(machine: GpuMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    on_device = [tensor("x", "FP32", -1, memory="gpu")]
    models = [
        model("host", "twice", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)]),
        model("device", "twice", on_device, [tensor("y", "FP32", -1)]),
        model("cast", "as_it_is", on_device, [tensor("y", "FP64", -1)]),
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
        machine.change(failures={}, libraries_looked_up=False)
        one.unregister_cuda_shared_memory()


def refusal(call: Any, *args: Any) -> tuple[str, str]:
    """Status and text of what a call is refused with."""
    with pytest.raises(InferenceServerException) as caught:
        call(*args)
    return caught.value.status(), caught.value.message()


# ---- handles --------------------------------------------------------------------------------


def test_regions_of_one_block_are_apart(client: Any, exporter: Exporter) -> None:
    first, second = exporter.make(SMALL_NBYTES), exporter.make(SMALL_NBYTES)
    first.put(ROWS.tobytes())
    given, wanted = [infer_input(client, ROWS, "FP32", "first")], [into(client, "second", ROWS.nbytes)]
    with registered(client, "second", second):
        with registered(client, "first", first):
            infer(client, "device", given, wanted)
            assert second.get(ROWS.nbytes) == (ROWS * 2).tobytes()
            assert first.get(SMALL_NBYTES) == ROWS.tobytes().ljust(SMALL_NBYTES, b"\0")
        infer(client, "device", [infer_input(client, ROWS, "FP32")], wanted)
        assert second.get(ROWS.nbytes) == (ROWS * 2).tobytes(), "it is open still"


def test_a_region_ends_where_its_block_does(client: Any, exporter: Exporter) -> None:
    _, second = exporter.make(SMALL_NBYTES), exporter.make(SMALL_NBYTES)
    status, text = refusal(client.register_cuda_shared_memory, "in", second.handle_base64, 0, BLOCK_NBYTES)
    assert status == "StatusCode.INVALID_ARGUMENT"
    found = re.search(r"expected at most (\d+) bytes, which its allocation has, got 2097152", text)
    assert found, text
    assert 0 < int(found[1]) < BLOCK_NBYTES


def test_small_memory_that_its_client_has_freed_is_read_without_harm(client: Any, exporter: Exporter) -> None:
    first, neighbour = exporter.make(SMALL_NBYTES), exporter.make(SMALL_NBYTES)
    first.free()
    with registered(client, "in", first), registered(client, "out", neighbour):
        answer = infer(client, "device", [infer_input(client, ROWS, "FP32", "in")])
        assert answer.as_numpy("y").shape == ROWS.shape, "whatever was there"
        infer(client, "device", [infer_input(client, ROWS, "FP32")], [into(client, "out", ROWS.nbytes)])
        assert neighbour.get(ROWS.nbytes) == (ROWS * 2).tobytes()


@pytest.mark.parametrize("code", [1, 46, 101, 201, 205, 400, 801, 999])
@pytest.mark.parametrize("call", ["ipcOpenMemHandle", "pointerGetAttributes"])
def test_no_code_of_cuda_for_a_handle_ends_a_worker(
    client: Any, machine: GpuMachine, exporter: Exporter, call: str, code: int
) -> None:
    memory = exporter.make(SMALL_NBYTES)
    memory.put(ROWS.tobytes())
    machine.change(failures={call: code})
    status, text = refusal(client.register_cuda_shared_memory, "in", memory.handle_base64, 0, SMALL_NBYTES)
    assert status == "StatusCode.INVALID_ARGUMENT", text
    assert text.count("\n") == 0
    assert all(client.is_model_ready(name) for name in NAMES)
    machine.change(failures={})
    with registered(client, "in", memory):
        answer = infer(client, "device", [infer_input(client, ROWS, "FP32", "in")])
    assert answer.as_numpy("y").tolist() == DOUBLED


# ---- without a compiler -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["device", "cast"])
def test_a_kernel_that_cannot_be_compiled_fails_its_request_and_says_why(
    client: Any, machine: GpuMachine, name: str
) -> None:
    """``device`` computes; of ``cast`` the worker does, to give its outputs the type that was declared."""
    machine.change(libraries_looked_up=True)
    given = [infer_input(client, ROWS, "FP32")]
    status, text = refusal(infer, client, name, given)
    assert status == "StatusCode.INTERNAL"
    assert text == (
        f'Model {name!r} needs a library of CUDA that is not there (Failure finding "libnvrtc.so"): '
        "expected gpuserve[cuda12] or gpuserve[cuda13] installed"
    )
    assert client.is_model_ready(name)
    machine.change(libraries_looked_up=False)
    factor = 2 if name == "device" else 1
    assert infer(client, name, given).as_numpy("y").tolist() == (ROWS * factor).tolist()


# ---- what a process leaves ----------------------------------------------------------------------


@contextlib.contextmanager
def one_worker(machine: GpuMachine, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with watched(machine, folder, patch, instances=[{"device": "cuda:0"}]).until_ended() as running:
        running.wait_watched()
        yield running


def test_a_worker_that_is_killed_leaves_what_is_the_drivers_alone(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's file stays, with or without us; nothing of ours does, and the GPU's memory comes back."""
    stand_in.change(files_in_shm=True)
    with one_worker(stand_in, tmp_path, monkeypatch) as server:
        (pid,) = server.workers
        left = Path(f"/dev/shm/cuda.shm.{os.getuid():x}.{pid:x}.1")
        assert left.exists()
        one_process = GPU_0.context_memory + HELD_NBYTES
        os.kill(pid, signal.SIGKILL)
        assert not wait_ended([pid], 5.0)
        server.wait_model_ready("m")
        assert server.infer("m", 1.0).output("y") == [2.0]
        used = lambda: server.metric("nv_gpu_memory_used_bytes")  # noqa: E731
        wait_until(lambda: used() == one_process, "what the dead one had is given back")
    names = {one.name for one in Path("/dev/shm").glob("cuda.shm.*") if one.name.split(".")[3] == f"{pid:x}"}
    left.unlink()
    assert names == {left.name}


def test_a_gpu_that_others_fill_keeps_a_worker_from_its_start_and_no_longer(
    stand_in: GpuMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process does not even get a context there."""
    with one_worker(stand_in, tmp_path, monkeypatch) as server:
        (pid,) = server.workers
        stand_in.change_gpu(GPU_0.uuid, foreign_memory=GPU_0.memory)
        os.kill(pid, signal.SIGKILL)
        server.wait_log("out of memory")
        assert server.status("/v2/models/m/ready") != 200
        assert server.state(GPU_0.uuid) == "HEALTHY", "a GPU that is full is not lost"
        stand_in.change_gpu(GPU_0.uuid, foreign_memory=0)
        server.wait_model_ready("m")
        assert server.infer("m", 1.0).output("y") == [2.0]


# ---- codes of NVML ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "code", "state"),
    [
        ("nvmlDeviceGetMemoryInfo", 999, "SUSPECT"),
        ("nvmlDeviceGetMemoryInfo", 3, "HEALTHY"),
        ("nvmlDeviceGetMemoryInfo", 15, "LOST"),
        ("nvmlDeviceGetRemappedRows", 999, "HEALTHY"),
        ("nvmlDeviceGetRemappedRows", 27, "HEALTHY"),
        ("nvmlDeviceGetTemperature", 15, "LOST"),
        ("nvmlDeviceGetFieldValues", 16, "LOST"),
    ],
)
def test_a_code_of_nvml_for_one_gpu_is_about_that_one_alone(
    shared_server: Watched, shared_machine: GpuMachine, question: str, code: int, state: str
) -> None:
    server, machine = shared_server, shared_machine
    machine.change_gpu(GPU_0.uuid, nvml_failures={question: code})
    # The reading that came after it, also where the state stays what it was.
    key = "memory_total_bytes" if question.endswith("MemoryInfo") else "remapped_rows"
    if state == "HEALTHY":
        wait_until(lambda: server.gpu(GPU_0.uuid)["reading"][key] is None, "the code was heard")
    server.wait_state(GPU_0.uuid, state)
    assert server.state(GPU_1.uuid) == "HEALTHY"
    machine.change_gpu(GPU_0.uuid, nvml_failures={})
    server.wait_state(GPU_0.uuid, "HEALTHY")
    wait_until(lambda: len(server.up()) == 2, "both workers are up")
    assert server.infer("m", 1.0).output("y") == [2.0]
