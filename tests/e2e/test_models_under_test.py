"""``TestClient``: a test in this process sees what a client of a real server sees."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve.testing import ModelCallError, TestClient, WrongCall

MODELS = """
import asyncio

import numpy as np

from gpuserve import ModelCallError, Response, current_model
from gpuserve.decorators import batch
from gpuserve.typed import Float32, batch as typed


@typed(max_batch_size=4)
def double(x: Float32) -> Float32:
    return 2 * x


def fails(requests):
    raise ValueError("no luck with /srv/secret/weights.bin\\nsecond line")


def refuses(requests):
    answers = []
    for one in requests:
        if one["x"][0, 0] < 0:
            answers.append(ModelCallError("RESOURCE_EXHAUSTED", "below 0"))
        else:
            answers.append(Response({"y": one["x"]}, {"rows": len(one["x"])}))
    return answers


async def wrong(requests):
    await asyncio.sleep(0)
    return [{"y": one["x"].astype("complex64")} for one in requests]


async def count(requests):
    for number in range(3):
        await asyncio.sleep(0)
        yield [{"y": one["x"] + number} for one in requests]
    raise KeyError("the end")


@batch
def shout(text):
    return {"loud": np.char.upper(text.astype(bytes)).astype(object)}


@batch
def asks(x):
    return {"y": current_model().infer("double", {"x": x})["OUTPUT_1"] + 1}
"""


def config(name: str) -> str:
    x = "inputs: [{name: x, dtype: float32, shape: [-1]}]"
    y = "outputs: [{name: y, dtype: float32, shape: [-1]}]"
    plain = "".join(
        f'  - {{name: {one}, callable: "{name}.py:{one}", {x}, {y}, max_batch_size: 4}}\n'
        for one in ("fails", "refuses", "wrong", "asks")
    )
    return f"""
server: {{grpc_port: 1, access_token: secret, restricted_endpoints: [inference]}}
models:
{plain}
  - {{name: double, callable: "{name}.py:double"}}
  - {{name: count, callable: "{name}.py:count", {x}, {y}, decoupled: true}}
  - name: shout
    callable: {name}.py:shout
    inputs: [{{name: text, dtype: bytes, shape: [1]}}]
    outputs: [{{name: loud, dtype: bytes, shape: [1]}}]
    max_batch_size: 2
  - name: twice
    {x}
    outputs: [{{name: z, dtype: float32, shape: [-1]}}]
    max_batch_size: 4
    ensemble:
      steps:
        - {{model: asks, inputs: {{x: x}}, outputs: {{y: w}}}}
        - {{model: refuses, inputs: {{x: w}}, outputs: {{y: z}}}}
"""


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, TestClient]]:
    """A config file's models in this process, and the same in workers."""
    folder = tmp_path_factory.mktemp("parity")
    # pytest-xdist may set the fixture up twice in a process, and a file's module stays in the process.
    name = f"{folder.name}_models"
    (folder / f"{name}.py").write_text(MODELS)
    path = folder / "config.yaml"
    path.write_text(config(name))
    with TestClient(path) as local, TestClient(str(path), workers=True) as served:
        served.infer("double", x=[[1.0]])  # what is opened at the first use stays for the tests of this file
        outcome(lambda: local.infer("wrong", x=[[1.0]]))
        next(local.stream("count", x=[1.0]))
        yield local, served


def outcome(ask: Any) -> Any:
    """The outputs as lists, or what a client is told instead."""
    try:
        answer = ask()
    except ModelCallError as error:
        return error.code.value, str(error)
    responses = [answer] if isinstance(answer, dict) else list(answer)
    return [({name: one.tolist() for name, one in each.items()}, each.parameters) for each in responses]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("double", {"x": [[1.0, 2.0]]}),
        ("double", {"x": np.ones((5, 1), np.float32)}),
        ("double", {"x": np.ones((1, 1))}),
        ("double", {"y": [[1.0]]}),
        ("double", {}),
        ("double", {"x": [[1.0]], "requested_outputs": ["z"]}),
        ("fails", {"x": [[1.0]]}),
        ("refuses", {"x": [[1.0], [2.0]], "parameters": {"key": "value"}}),
        ("refuses", {"x": [[-1.0]]}),
        ("wrong", {"x": [[1.0]]}),
        ("count", {"x": [1.0]}),
        ("shout", {"text": [["a"], ["é"]]}),
        ("shout", {"text": np.array([[b"a"]], object), "request_id": "7"}),
        ("asks", {"x": [[1.0, 2.0]]}),
        ("twice", {"x": [[1.0, 2.0]]}),
        ("twice", {"x": [[-9.0]]}),
        ("nobody", {"x": [[1.0]]}),
        ("double", {"x": [[1.0]], "version": 1}),
    ],
)
def test_an_answer_or_an_error_is_the_same_in_this_process_and_in_workers(
    clients: tuple[TestClient, TestClient], model: str, inputs: Any
) -> None:
    local, served = (outcome(lambda one=one: one.infer(model, **inputs)) for one in clients)
    assert local == served


def test_the_cause_of_an_error_is_what_the_callable_raised(clients: tuple[TestClient, TestClient]) -> None:
    with pytest.raises(ModelCallError, match=r"no luck with weights\.bin") as raised:
        clients[0].infer("fails", x=[[1.0]])
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.code.value == "INTERNAL"


def test_a_stream_comes_step_by_step_up_to_its_error(clients: tuple[TestClient, TestClient]) -> None:
    for client in clients:
        responses = client.stream("count", x=[1.0])
        assert [next(responses)["y"].tolist() for _ in range(3)] == [[1], [2], [3]]
        with pytest.raises(ModelCallError, match="the end"):
            next(responses)
        begun = client.stream("count", x=[1.0])
        assert next(begun)["y"].tolist() == [1]
        begun.close()
        assert [one["OUTPUT_1"].tolist() for one in client.stream("double", x=[[1.0]])] == [[[2.0]]]


def test_several_requests_at_once(clients: tuple[TestClient, TestClient]) -> None:
    for client in clients:
        answers = client.infer_batch("double", [{"x": [[1.0]]}, {"x": [[2.0], [3.0]]}])
        assert [one["OUTPUT_1"].tolist() for one in answers] == [[[2]], [[4], [6]]]
        assert client.infer_batch("double", []) == []


def test_a_server_of_a_test_is_on_ports_of_this_machine_alone(
    clients: tuple[TestClient, TestClient],
) -> None:
    local, served = clients
    assert local.addresses == {}
    assert set(served.addresses) == {"http", "grpc", "metrics"}
    assert all("127.0.0.1:" in one for one in served.addresses.values())
    with urllib.request.urlopen(f"{served.addresses['http']}/v2/health/ready") as answer:
        assert answer.status == 200


@pytest.mark.thorough
def test_callables_are_sent_to_workers_with_what_they_are_made_with(tmp_path: Path) -> None:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, requests: Any) -> Any:
            return [{"y": self.factor * one["x"]} for one in requests]

    tensors = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [-1]}],
    }
    with TestClient({"a": Scale, "b": Scale}, workers=True, kwargs={"factor": 3}, **tensors) as client:
        assert client.models == ("a", "b")
        assert client.infer("b", x=[2.0])["y"].tolist() == [6]
        with pytest.raises(WrongCall, match="several models: name one of a, b"):
            client.infer(x=[2.0])
    with pytest.raises(RuntimeError, match="not loaded"):
        client.infer("b", x=[2.0])
