"""Device memory of one GPU where there are two: requests run where it is, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cuda_exporter import Exporter
from cuda_server import client_of, infer, infer_input, into, model, registered, serve, tensor, texts
from gpu_machine import GPU_0, GPU_1, GpuMachine, real_gpu
from serving import Addresses
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.thorough

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> GpuMachine:
    if real_gpu():
        pytest.skip("whether a real machine has two GPUs is not known")
    return GpuMachine(tmp_path_factory.mktemp("gpus"), [GPU_0, GPU_1], peer_access=False)


@pytest.fixture(scope="module")
def server(machine: GpuMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    gpu = [tensor("x", "FP32", -1, memory="gpu")]
    y = [tensor("y", "FP32", -1)]
    seen = [*y, tensor("pid", "INT64", 1)]
    models = [
        model("everywhere", "process", gpu, seen, "cuda:*"),
        model("mixed", "process", [tensor("x", "FP32", -1)], seen),
        model("only_0", "twice", gpu, y, "cuda:0"),
        model("only_1", "twice", gpu, y, "cuda:1"),
        model("on_cpu", "twice", [tensor("x", "FP32", -1)], y, "cpu"),
    ]
    models[1]["instances"] = [{"device": "cpu"}, {"device": "cuda:1"}]
    steps = [
        {"model": "only_0", "inputs": {"x": "x"}, "outputs": {"y": "between"}},
        {"model": "only_1", "inputs": {"x": "between"}, "outputs": {"y": "y"}},
    ]
    chain = {"inputs": [tensor("x", "FP32", -1)], "outputs": y, "max_batch_size": 8}
    models.append({"name": "chain", **chain, "ensemble": {"steps": steps}})
    with serve(machine, tmp_path_factory.mktemp("server"), models) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[Any]:
    with client_of("grpc", server) as one:
        yield one
        one.unregister_cuda_shared_memory()


@pytest.fixture(scope="module")
def exporter(machine: GpuMachine) -> Iterator[Exporter]:
    with Exporter(machine.environ) as one:
        yield one


@pytest.mark.parametrize("name", ["everywhere", "mixed"])
def test_requests_run_on_the_device_of_their_region(
    server: Addresses, client: Any, exporter: Exporter, name: str
) -> None:
    memories = [exporter.make(64, device) for device in (0, 1)]
    for number, memory in enumerate(memories):
        memory.put((ROWS + number).tobytes())

    def ask(number: int) -> tuple[int, Any]:
        with client_of("grpc", server) as one:
            answer = infer(one, name, [infer_input(one, ROWS, "FP32", str(number))])
            return int(answer.as_numpy("pid")[0, 0]), answer.as_numpy("y").tolist()

    devices = (0, 1) if name == "everywhere" else (1,)
    with registered(client, "0", memories[0]), registered(client, "1", memories[1], device=1):
        assert texts(client) == {"0": (0, 64), "1": (1, 64)}
        pids: dict[int, set[int]] = {}
        with ThreadPoolExecutor(6) as pool:
            numbers = [devices[number % len(devices)] for number in range(24)]
            for number, (pid, y) in zip(numbers, pool.map(ask, numbers), strict=True):
                assert y == ((ROWS + number) * 2).tolist()
                pids.setdefault(number, set()).add(pid)
    assert all(len(found) == 1 for found in pids.values())
    assert len(set.union(*pids.values())) == len(devices)


def test_an_output_names_the_device_as_well_as_an_input(client: Any, exporter: Exporter) -> None:
    out = exporter.make(64, 1)
    with registered(client, "out", out, device=1):
        for _ in range(4):
            given = [infer_input(client, ROWS, "FP32")]
            infer(client, "everywhere", given, [into(client, "out", 32)])
            assert out.get(32) == (ROWS * 2).tobytes()
            out.put(bytes(32))


def test_a_model_that_is_not_there_says_where_it_is(client: Any, exporter: Exporter) -> None:
    with registered(client, "in", exporter.make(64, 1), device=1):
        given = [infer_input(client, ROWS, "FP32", "in")]
        for name, devices in (("only_0", "cuda:0"), ("on_cpu", "cpu")):
            with pytest.raises(InferenceServerException) as caught:
                infer(client, name, given)
            assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert caught.value.message() == (
                f"the request names shared memory of cuda:1, but model '{name}' runs on {devices}: expected "
                "regions of such a device, or of system memory"
            )
        assert infer(client, "only_1", given).as_numpy("y").tolist() == np.zeros((2, 4)).tolist()


def test_regions_of_both_devices_are_no_request(client: Any, exporter: Exporter) -> None:
    with (
        registered(client, "in", exporter.make(64, 0)),
        registered(client, "out", exporter.make(64, 1), device=1),
        pytest.raises(InferenceServerException, match="names shared memory of cuda:0 and cuda:1"),
    ):
        infer(client, "everywhere", [infer_input(client, ROWS, "FP32", "in")], [into(client, "out", 32)])


def test_each_step_of_an_ensemble_has_regions_of_its_own_device(client: Any, exporter: Exporter) -> None:
    memory, out = exporter.make(64, 0), exporter.make(64, 1)
    memory.put(ROWS.tobytes())
    given, wanted = [infer_input(client, ROWS, "FP32", "in")], [into(client, "out", 32)]
    with registered(client, "in", memory), registered(client, "out", out, device=1):
        infer(client, "chain", given, wanted)
        assert out.get(32) == (ROWS * 4).tobytes()
        with pytest.raises(
            InferenceServerException, match="names shared memory of cuda:1, but model 'only_0'"
        ):
            infer(client, "chain", [infer_input(client, ROWS, "FP32", "out")], wanted)


def test_the_memory_of_another_device_cannot_be_registered(client: Any, exporter: Exporter) -> None:
    for device, other in ((0, 1), (1, 0)):
        memory = exporter.make(64, device)
        with pytest.raises(InferenceServerException) as caught:
            client.register_cuda_shared_memory("bad", memory.handle_base64, other, 64)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert "failed to register CUDA shared memory region: 'bad'" in caught.value.message()
        with registered(client, "good", memory, device=device):
            assert texts(client) == {"good": (device, 64)}
