"""Callables that load, unload and ask about models of their server, under the rules that hold for clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from config_file import tensor, write_config
from serving import GPUSERVE, Addresses, serving

MODELS = Path(__file__).resolve().parents[1] / "models" / "commanding.py"
TENSORS = {"inputs": [tensor("order", "BYTES", 1)], "outputs": [tensor("said", "BYTES", 1)]}


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "callable": f"{MODELS}:{name}", **TENSORS, **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    models = [
        entry("commanding"),
        entry("commanding_async"),
        entry("telling", sequence_batching={}),
        entry("target", callable=f"{MODELS}:telling"),
    ]
    settings = {"host": "127.0.0.1", "model_control": "explicit"}
    config = write_config(tmp_path_factory.mktemp("commands"), models, **settings)
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


def order(client: tritonclient.grpc.InferenceServerClient, told: str, verb: str, **more: Any) -> str:
    x = np.array([json.dumps({"verb": verb, **more}).encode()], dtype=object)
    tensor = tritonclient.grpc.InferInput("order", [1], "BYTES")
    tensor.set_data_from_numpy(x)
    return str(client.infer(told, [tensor], client_timeout=30).as_numpy("said")[0].decode())


@pytest.mark.parametrize("told", ["commanding", "commanding_async"])
def test_a_callable_unloads_and_loads_a_model(
    client: tritonclient.grpc.InferenceServerClient, told: str
) -> None:
    assert order(client, told, "ready", model="target") == "True"
    assert order(client, told, "ready", model="target", version=7) == "False"
    assert order(client, told, "ready", model="nope") == "False"
    assert order(client, told, "ready", model="target", version="x").startswith("INVALID_ARGUMENT")
    assert order(client, told, "unload", model="target") == "None"
    assert not client.is_model_ready("target")
    assert order(client, told, "ready", model="target") == "False"
    assert order(client, told, "load", model="target", config='{"max_batch_size": 4}') == "None"
    assert client.get_model_config("target").config.max_batch_size == 4
    assert order(client, told, "load", model="target") == "None"
    assert client.get_model_config("target").config.max_batch_size == 0


def test_what_cannot_be_is_told_to_who_asked(client: tritonclient.grpc.InferenceServerClient) -> None:
    assert "failed to load 'nope'" in order(client, "commanding", "load", model="nope")
    assert "Invalid config override" in order(client, "commanding", "load", model="target", config='{"a": 1}')
    assert order(client, "commanding", "load", model="../x").startswith("INVALID_ARGUMENT")
    assert order(client, "commanding", "load", model=3).startswith("INVALID_ARGUMENT: the name of a model")
    assert order(client, "commanding", "unload", model="nope") == "None"
    assert order(client, "commanding", "ready", model="target") == "True"


def test_a_model_that_unloads_itself_answers_first(client: tritonclient.grpc.InferenceServerClient) -> None:
    client.load_model("commanding_async")
    assert order(client, "commanding_async", "unload", model="commanding_async") == "None"
    while order(client, "commanding", "ready", model="commanding_async") == "True":
        pass
    client.load_model("commanding_async")


def test_a_call_is_part_of_a_sequence(client: tritonclient.grpc.InferenceServerClient) -> None:
    call = {"model": "telling", "sequence_start": True, "sequence_end": True}
    for sequence_id in (7, "seven"):
        said = order(client, "commanding", "call", request_id="r1", sequence_id=sequence_id, **call)
        assert json.loads(said) == [sequence_id, True, True]
    assert order(client, "commanding", "call", model="telling", sequence_id=-1).startswith("INVALID_ARGUMENT")
    assert json.loads(order(client, "commanding", "call", model="target")) is None
