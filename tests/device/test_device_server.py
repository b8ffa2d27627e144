"""Models on a GPU behind a real server, asked by a real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from gpu_machine import GpuMachine, RealMachine
from serving import GPUSERVE, JSON_LOG, serving

MODELS = Path(__file__).parent.parent / "models"
GPU = [{"device": "cuda:0"}]
X = {"name": "x", "dtype": "FP32", "shape": [-1], "memory": "gpu"}
Y = {"name": "y", "dtype": "FP32", "shape": [-1]}


def model(name: str, attribute: str, **more: Any) -> dict[str, Any]:
    given = {
        "name": name,
        "callable": f"on_device.py:{attribute}",
        "inputs": [X],
        "outputs": [Y],
        "max_batch_size": 8,
        "instances": GPU,
    }
    return given | more


@pytest.fixture(scope="module")
def address(
    shared_gpu_machine: GpuMachine | RealMachine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "on_device.py").write_text((MODELS / "on_device.py").read_text())
    entries = [
        model("doubled", "doubled"),
        model("numpy_doubled", "numpy_doubled", inputs=[X | {"memory": "cpu"}], array="numpy"),
        model("waits", "waits", array="cupy", inputs=[{k: v for k, v in X.items() if k != "memory"}]),
        model("asks", "asks_doubled"),
        model("merged", "in_place", batching={"max_queue_delay_us": 50_000, "preferred_batch_sizes": [4]}),
    ]
    config = folder / "config.yaml"
    config.write_text(json.dumps({"server": {"host": "127.0.0.1"}, "models": entries}))
    with pytest.MonkeyPatch.context() as patched:
        shared_gpu_machine.set_environment(patched)
        with serving(GPUSERVE, "serve", str(config), *JSON_LOG) as addresses:
            yield addresses.grpc


@pytest.fixture
def client(address: str) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(address) as asked:
        yield asked


def given(array: Any) -> list[Any]:
    one = grpcclient.InferInput("x", list(array.shape), "FP32")
    one.set_data_from_numpy(array)
    return [one]


@pytest.mark.parametrize("name", ["doubled", "numpy_doubled", "waits"])
@pytest.mark.parametrize("width", [3, 300_000])
def test_answers_of_models_on_a_gpu(client: grpcclient.InferenceServerClient, name: str, width: int) -> None:
    array = np.random.default_rng(0).random((2, width), np.float32)
    for _ in range(3):
        assert np.array_equal(client.infer(name, given(array)).as_numpy("y"), array * 2)


def test_a_model_on_a_gpu_asks_another(client: grpcclient.InferenceServerClient) -> None:
    array = np.random.default_rng(0).random((1, 100_000), np.float32)
    assert np.array_equal(client.infer("asks", given(array)).as_numpy("y"), (array + 1) * 2)


def test_requests_that_are_merged(client: grpcclient.InferenceServerClient) -> None:
    arrays = [np.random.default_rng(number).random((1, 100_000), np.float32) for number in range(4)]
    with ThreadPoolExecutor(len(arrays)) as pool:
        answers = list(pool.map(lambda array: client.infer("merged", given(array)), arrays))
    for answer, array in zip(answers, arrays, strict=True):
        # Each request is told apart by its place in its batch.
        difference = np.unique(np.round(answer.as_numpy("y") - array, 3))
        assert len(difference) == 1
        assert difference[0] in {0, 1, 2, 3}


def test_the_time_on_the_device_is_in_the_statistics(client: grpcclient.InferenceServerClient) -> None:
    client.infer("doubled", given(np.ones((1, 3), np.float32)))
    statistics = client.get_inference_statistics("doubled").model_stats[0].inference_stats
    assert statistics.compute_infer.ns > 0
    assert statistics.compute_input.count == statistics.compute_infer.count > 0
