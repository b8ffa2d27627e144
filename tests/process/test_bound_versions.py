"""Versions of the models of a program, and their loading and unloading by clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from exploring import variants
from repositories import Client, Traffic, clients_are_closed
from tritonclient.utils import InferenceServerException

from gpuserve import ModelConfig, Server, Tensor
from gpuserve.core.errors import BindError, ConfigError, StartupError
from gpuserve.decorators import batch

__all__ = ["clients_are_closed"]  # it is for every test here

X = [Tensor(name="x", dtype="float32", shape=(-1,))]
OUT = [Tensor(name=one, dtype=dtype, shape=(1,)) for one, dtype in (("tag", "float32"), ("pid", "int64"))]
OUT.append(Tensor(name="sum", dtype="float32", shape=(1,)))


def tagged(tag: float) -> Any:
    @batch
    def infer(x: Any) -> Any:
        rows = (len(x), 1)
        return {
            "tag": np.full(rows, tag, np.float32),
            "pid": np.full(rows, os.getpid()),
            "sum": x.sum(1, keepdims=True),
        }

    return infer


class Unloadable:
    def __init__(self) -> None:
        raise RuntimeError("no weights here")

    def __call__(self, requests: list[Any]) -> list[Any]:
        return requests


def bind(server: Server, name: str, tag: float, version: int = 1, **more: Any) -> None:
    server.bind(name, tagged(tag), X, OUT, version, ModelConfig(max_batch_size=4), **more)


def of(server: Server) -> Client:
    return Client("http", server.addresses["http"].removeprefix("http://"))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(http_port=0, grpc_port=0, metrics_port=0, model_control="explicit") as one:
        yield one


@pytest.mark.thorough
def test_versions_of_a_program(server: Server) -> None:
    bind(server, "m", 2.0, 2)
    bind(server, "m", 1.0, 1)
    server.run()
    control = of(server)
    assert control.versions("m") == ["1", "2"]
    assert [control.infer("m", version).tag for version in ("", "1", "2")] == [2.0, 1.0, 2.0]
    with Traffic(of(server), "m") as traffic:
        bind(server, "m", 10.0, 10)
        traffic.wait_for(10.0)
    assert traffic.errors == []
    assert control.versions("m") == ["1", "2", "10"]
    with pytest.raises(BindError, match="Cannot add model with the same name twice"):
        bind(server, "M", 0.0, 3)


def test_a_model_that_is_bound_again_is_replaced(server: Server) -> None:
    bind(server, "m", 0.5)
    bind(server, "m", 1.0)
    server.run()
    control = of(server)
    assert control.infer("m").tag == 1.0
    with Traffic(of(server), "m") as traffic:
        bind(server, "m", 2.0)
        traffic.wait_for(2.0)
    assert traffic.errors == []
    with pytest.raises(StartupError, match="no weights here"):
        server.bind("m", Unloadable, X, OUT)
    assert control.infer("m").tag == 2.0
    server.stop()
    server.run()
    assert of(server).infer("m").tag == 2.0


def test_a_model_that_is_unbound_is_gone(server: Server) -> None:
    bind(server, "m", 1.0)
    bind(server, "m", 2.0, 2)
    bind(server, "other", 3.0)
    server.run()
    control = of(server)
    server.unbind("m")
    assert (control.states("m"), control.infer("other").tag) == ({}, 3.0)
    with pytest.raises(BindError, match=r"no model 'm' is bound, expected one of \['other'\]"):
        server.unbind("m")
    bind(server, "m", 4.0)
    assert (control.infer("m").tag, control.states("m")) == (4.0, {"1": "READY"})


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", variants("thread", "process"))
def test_bound_models_are_unloaded_and_loaded(server: Server, isolation: str) -> None:
    bind(server, "m", 1.0, isolation=isolation)
    server.run()
    control = of(server)
    control.asked.unload_model("m")
    assert (control.states("m"), control.asked.is_model_ready("m")) == ({"1": "UNAVAILABLE"}, False)
    control.asked.load_model("m", config='{"max_batch_size": "2"}')
    assert (control.infer("m").tag, control.max_batch_size("m")) == (1.0, 2)
    bind(server, "later", 3.0)
    control.asked.load_model("later")
    assert control.infer("later").tag == 3.0


@pytest.mark.thorough
def test_a_bound_version_that_cannot_be_loaded(server: Server) -> None:
    bind(server, "m", 1.0)
    server.run()

    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("there are no weights")

        def __call__(self, requests: Any) -> Any:
            return requests

    with pytest.raises(StartupError, match="there are no weights"):
        server.bind("m", Broken, X, OUT, 2)
    control = of(server)
    assert (control.versions("m"), control.states("m")) == (["1"], {"1": "READY"})
    bind(server, "m", 2.0, 2)
    assert control.infer("m").tag == 2.0


@pytest.mark.thorough
def test_models_of_attached_programs_are_theirs(server: Server) -> None:
    server.run()
    with Server.attach(server.addresses["http"], timeout_s=5.0) as attached:
        bind(attached, "theirs", 5.0)  # type: ignore[arg-type]
        control = of(server)
        for call, does in ((control.asked.load_model, "loads"), (control.asked.unload_model, "unloads")):
            with pytest.raises(InferenceServerException) as raised:
                call("theirs")
            assert raised.value.message() == (
                f"model 'theirs' is served by an attached program, and only that program {does} its models"
            )
        assert control.infer("theirs").tag == 5.0
        assert control.states("theirs") == {"1": "READY"}
        with pytest.raises(BindError, match="an attached program serves one version of a name"):
            bind(attached, "theirs", 6.0, 2)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_only_some_models_are_loaded_at_the_start() -> None:
    settings = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "model_control": "explicit"}
    with Server(**settings, load_at_start=("a",)) as server:
        bind(server, "a", 1.0)
        bind(server, "b", 2.0)
        server.run()
        control = of(server)
        assert control.index() == [("a", "1", "READY", ""), ("b", "", "", "")]
        control.asked.load_model("b")
        assert control.infer("b").tag == 2.0


def test_settings_that_cannot_be() -> None:
    with pytest.raises(
        ConfigError, match="model_control must be one of 'none', 'explicit' or 'poll', got 'yes'"
    ):
        Server(model_control="yes")
    with pytest.raises(ConfigError, match="model_control='poll' follows the files of a server's models"):
        Server(model_control="poll")
    with pytest.raises(ConfigError, match="load_at_start needs model_control='explicit'"):
        Server(load_at_start=("a",))
