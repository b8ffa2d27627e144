"""What ``TestClient`` takes as its target, in this process."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_local_models import DECOUPLED, PLAIN, scaling, triton_model

from gpuserve import Server, Tensor
from gpuserve.config.problems import ConfigProblems
from gpuserve.core.errors import BindError, StartupError
from gpuserve.testing import ModelCallError, TestClient, WrongCall
from gpuserve.typed import Float32, batch

X = [Tensor(name="x", dtype=np.float32, shape=(-1,))]
Y = [Tensor(name="y", dtype=np.float32, shape=(-1,))]


@batch(max_batch_size=4)
def double(x: Float32) -> Float32:
    return 2 * x


def echo(requests: Any) -> Any:
    return [{"y": one["x"]} for one in requests]


def test_a_typed_function_and_one_with_tensors() -> None:
    with TestClient(double) as client:
        assert client.models == ("double",)
        assert client.infer(x=[[1.0]])["OUTPUT_1"].tolist() == [[2]]
    with TestClient(echo, inputs=X, outputs=Y) as client:
        assert client.infer("echo", x=[1.0])["y"].tolist() == [1]
    with TestClient(functools.partial(echo), **PLAIN) as client:
        assert client.infer("partial", {"x": [3.0]})["y"].tolist() == [3]


def test_what_is_bound_to_a_server() -> None:
    server = Server()
    server.bind("twice", double)
    server.bind("echo", echo, X, Y)
    with TestClient(server) as client:
        assert client.models == ("twice", "echo")
        assert client.infer("twice", x=[[4.0]])["OUTPUT_1"].tolist() == [[8]]


def test_a_repository_and_one_folder_of_it(tmp_path: Path) -> None:
    folder = scaling(tmp_path / "repository" / "scaling")
    triton_model(tmp_path / "repository" / "steps", DECOUPLED, "model_transaction_policy { decoupled: true }")
    with TestClient(tmp_path / "repository") as client:
        assert sorted(client.models) == ["scaling", "steps"]
        assert client.infer("scaling", x=[[1.0]])["y"].tolist() == [[3]]
        assert [one["y"].tolist() for one in client.stream("steps", x=[2.0])] == [[0], [1]]
        with pytest.raises(ModelCallError, match="decoupled") as raised:
            client.infer("steps", x=[2.0])
        assert raised.value.code.value == "UNIMPLEMENTED"
    with TestClient(folder) as client:
        assert client.models == ("scaling",)
        assert client.infer(x=[[1.0]])["y"].tolist() == [[3]]


def test_models_ask_each_other_and_what_answers_for_others(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    scaling(repository / "scaling", 2)
    scaling(repository / "other", 5)
    ask = {"parameters": {"ask": True}}
    with TestClient(repository) as client:
        assert client.infer("scaling", x=[[1.0]], **ask)["y"].tolist() == [[10]]
    instead = {"other": lambda inputs: {"y": inputs["x"] + 1}}
    with TestClient(repository / "scaling", others=instead) as client:
        assert client.infer("scaling", x=[[1.0]], **ask)["y"].tolist() == [[4]]
    with pytest.raises(WrongCall, match="others work in this process only"):
        TestClient(repository, others=instead, workers=True)


def test_a_python_file_of_one_callable(tmp_path: Path) -> None:
    (tmp_path / "only_one.py").write_text(
        "from gpuserve.typed import Float32, batch\n\n"
        "@batch\ndef triple(x: Float32) -> Float32:\n    return 3 * x\n"
    )
    with TestClient(tmp_path / "only_one.py") as client:
        assert client.infer("triple", x=[[1.0, 2.0]])["OUTPUT_1"].tolist() == [[3, 6]]


def test_inside_a_running_event_loop() -> None:
    async def awaits(requests: Any) -> Any:
        await asyncio.sleep(0)
        return echo(requests)

    async def counts(requests: Any) -> Any:
        for number in range(2):
            await asyncio.sleep(0)
            yield [{"y": one["x"] + number} for one in requests]

    async def test() -> list[Any]:
        with TestClient({"awaits": awaits, "counts": counts}, **PLAIN) as client:
            found = [client.infer("awaits", x=[1.0]), *client.stream("counts", x=[1.0])]
        return [one["y"].tolist() for one in found]

    assert asyncio.run(test()) == [[1], [1], [2]]


def test_what_cannot_be_served_is_told_before_or_at_the_load(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="the inputs and outputs of the callable 'echo' are not known"):
        TestClient(echo)
    with pytest.raises(WrongCall, match="max_batch_size: expected with a callable alone"):
        TestClient(tmp_path, max_batch_size=3)
    with pytest.raises(ConfigProblems, match="max_batch_size"):
        TestClient(triton_model(tmp_path / "bad", DECOUPLED, "max_batch_size: -2"))

    class Fails:
        def __init__(self) -> None:
            raise OSError("no weights")

        def __call__(self, requests: Any) -> Any: ...

    with pytest.raises(StartupError, match=r"model 'Fails' could not be loaded.*no weights") as raised:
        TestClient(Fails, **PLAIN).open()
    assert "raise OSError" in raised.value.__notes__[0]


@pytest.mark.thorough
def test_a_model_that_takes_tensors_of_torch_gets_them() -> None:
    torch: Any = pytest.importorskip("torch")

    def halved(requests: Any) -> Any:
        assert all(type(one["x"]) is torch.Tensor for one in requests)
        return [{"y": one["x"] / 2} for one in requests]

    with TestClient(halved, inputs=X, outputs=Y, array="torch") as client:
        assert client.infer(x=[3.0])["y"].tolist() == [1.5]
