"""Models without inputs or outputs, over both protocols, from a file and from ``bind``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bound
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import served, tensor
from models import no_tensors
from serving import Addresses

from gpuserve import ModelConfig, Tensor

FILE = Path(no_tensors.__file__)
CLIENTS: dict[str, Any] = {"grpc": tritonclient.grpc, "http": tritonclient.http}
Y = tensor("y", "INT64", 2)
X = tensor("x", "FP32", 3)
MODELS: dict[str, tuple[list[Any], list[Any], int]] = {
    "answers": ([], [Y], 4),
    "answers_batch": ([], [Y], 1),
    "answers_alone": ([], [Y], 0),
    "takes": ([X], [], 4),
    "takes_batch": ([X], [], 4),
}


def entry(name: str, attribute: str, inputs: list[Any], outputs: list[Any], size: int) -> dict[str, Any]:
    tensors = {"inputs": inputs, "outputs": outputs}
    return {"name": name, "callable": f"{FILE}:{attribute}", "max_batch_size": size, **tensors}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    entries = [entry(name, name, *declared) for name, declared in MODELS.items()]
    entries.append(entry("nothing", "takes", [], [], 4))
    folder = tmp_path_factory.mktemp("server")
    with served(folder, entries) as addresses:
        yield addresses


@pytest.fixture(params=CLIENTS)
def infer(request: pytest.FixtureRequest, server: Addresses) -> Iterator[Callable[..., Any]]:
    kind = CLIENTS[request.param]
    with kind.InferenceServerClient(server.grpc if request.param == "grpc" else server.http) as client:
        yield functools.partial(ask, kind, client)


def ask(kind: Any, client: Any, model: str, x: Any = None, **parameters: Any) -> Any:
    inputs = []
    if x is not None:
        inputs.append(kind.InferInput("x", list(x.shape), "FP32"))
        inputs[0].set_data_from_numpy(x)
    return client.infer(model, inputs, parameters=parameters)


def test_a_model_without_inputs_has_its_parameters(infer: Callable[..., Any]) -> None:
    assert infer("answers", n=5).as_numpy("y").tolist() == [[5, 0]]


def test_a_model_without_inputs_under_batch(infer: Callable[..., Any]) -> None:
    assert infer("answers_batch").as_numpy("y").tolist() == [[7, 7]]


def test_a_model_without_inputs_that_does_not_batch(infer: Callable[..., Any]) -> None:
    assert infer("answers_alone", n=3).as_numpy("y").tolist() == [3, 1]


@pytest.mark.parametrize("model", ["takes", "takes_batch"])
def test_a_model_without_outputs(infer: Callable[..., Any], model: str) -> None:
    answer = infer(model, np.zeros((2, 3), np.float32))
    assert answer.as_numpy("y") is None


def test_a_model_without_tensors(infer: Callable[..., Any]) -> None:
    assert infer("nothing").as_numpy("y") is None


def test_the_same_by_bind() -> None:
    y, x = Tensor((2,), np.int64, "y"), Tensor((3,), np.float32, "x")
    with bound.free_server() as server:
        server.bind("answers", no_tensors.answers, [], [y])
        server.bind("alone", no_tensors.answers_alone, [], [y], config=ModelConfig(batching=False))
        server.bind("takes", no_tensors.takes_batch, [x], [])
        server.bind("nothing", no_tensors.takes, [], [], strict=True)
        server.run()
        assert bound.infer(server, "answers", {"n": 2})["y"].tolist() == [[2, 0]]
        assert bound.infer(server, "alone", {"n": 2})["y"].tolist() == [2, 1]
        assert bound.infer(server, "takes", x=np.zeros((1, 3), np.float32)) == {}
        assert bound.infer(server, "nothing") == {}
