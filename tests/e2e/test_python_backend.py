"""A ``model.py`` of Triton's Python backend behind this server, asked by Triton's own clients."""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from operated import OperatedServer
from processes import wait_until
from python_backend import MODELS, TIMEOUT_S, entry, said, stream, tensor
from tritonclient.utils import InferenceServerException

NUMBERS = {"input": [said("X", "FP32", -1)], "output": [said("Y", "FP32", -1)]}
FACTS = {"input": [said("X", "FP32", -1)], "output": [said("FACTS", "STRING", 1)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("python_backend")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[OperatedServer]:
    config = folder / "config.yaml"
    decoupled = {"model_transaction_policy": {"decoupled": True}}
    told = {"parameters": {"file": {"string_value": str(folder / "told")}}}
    models = [entry("echo"), entry("facts", config=FACTS), entry("repeat"), entry("sends", config=NUMBERS)]
    models += [entry("patient", config={**NUMBERS, **told}), entry("waits", config=NUMBERS)]
    models += [
        entry("again", config=NUMBERS),
        entry("again_decoupled", MODELS / "again", {**NUMBERS, **decoupled}),
    ]
    models += [
        entry("words"),
        entry("relay", max_batch_size=2, batching={"max_queue_delay_us": 10_000_000}),
    ]
    config.write_text(json.dumps({"models": models}))
    with OperatedServer(config) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: OperatedServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.addresses["gRPC"]) as made:
        yield made


def facts(client: grpcclient.InferenceServerClient, **more: Any) -> dict[str, Any]:
    result = client.infer("facts", [tensor("X", "FP32", [1.0, 2.0])], **more)
    told: dict[str, Any] = json.loads(result.as_numpy("FACTS")[0])
    return told


def test_each_request_has_its_own_rows_and_gets_its_own_response(
    client: grpcclient.InferenceServerClient,
) -> None:
    def ask(number: int) -> None:
        rows = np.full((1 + number % 3, 2), number, np.float32)
        texts = np.array([[f"é{number}".encode()]] * len(rows), np.object_)
        result = client.infer("echo", [tensor("IN", "FP32", rows), tensor("TEXT", "BYTES", texts)])
        assert result.as_numpy("OUT").tolist() == rows.tolist()
        assert result.as_numpy("TEXT_OUT").tolist() == texts.tolist()
        assert result.get_response().parameters["together"].int64_param >= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(48)))


def test_an_optional_input_that_was_not_sent_is_none(client: grpcclient.InferenceServerClient) -> None:
    result = client.infer("echo", [tensor("IN", "FP32", [[1.0]])])
    assert [one.name for one in result.get_response().outputs] == ["OUT"]


def test_the_model_is_initialized_with_what_triton_documents(
    client: grpcclient.InferenceServerClient,
) -> None:
    args = facts(client)["args"]
    assert json.loads(args.pop("model_config"))["output"] == [said("FACTS", "STRING", 1)]
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "facts_0",
        "model_instance_device_id": "0",
        "model_repository": str(MODELS / "facts"),
        "model_version": "1",
        "model_name": "facts",
    }


def test_a_request_says_what_its_client_said(client: grpcclient.InferenceServerClient) -> None:
    output = [grpcclient.InferRequestedOutput("FACTS")]
    told = facts(client, request_id="r1", timeout=5_000_000, parameters={"lang": "é"}, outputs=output)
    del told["args"]
    assert told == {
        "model_dir": str(MODELS / "facts" / "1"),
        "request_id": "r1",
        "correlation_id": 0,
        "flags": 0,
        "timeout": 5_000_000,
        "parameters": {"lang": "é"},
        "requested": ["FACTS"],
        "inputs": [["X", 11, [2], True]],
        "is_cancelled": False,
        "trace": None,
    }


def test_a_request_that_says_nothing_has_what_triton_has_then(
    client: grpcclient.InferenceServerClient,
) -> None:
    told = facts(client)
    assert (told["request_id"], told["timeout"], told["parameters"]) == ("", 0, {})
    assert told["requested"] == ["FACTS"]


def test_a_sequence_is_told_by_its_id_and_its_flags(client: grpcclient.InferenceServerClient) -> None:
    number = facts(client, sequence_id=7, sequence_start=True)
    text = facts(client, sequence_id="seven", sequence_start=True, sequence_end=True)
    assert (number["correlation_id"], number["flags"]) == (7, 1)
    assert (text["correlation_id"], text["flags"]) == ("seven", 3)


def test_responses_are_sent_from_threads_after_execute_has_returned(server: OperatedServer) -> None:
    def ask(count: int) -> list[int]:
        responses = list(stream(server.addresses["gRPC"], "repeat", tensor("COUNT", "INT32", [count])))
        assert all(error is None for _, error in responses)
        assert responses[-1][0].as_numpy("INDEX") is None
        return [int(result.as_numpy("INDEX")[0]) for result, _ in responses[:-1]]

    with ThreadPoolExecutor(4) as pool:
        for count, came in zip([0, 1, 300, 20], pool.map(ask, [0, 1, 300, 20]), strict=True):
            assert came == list(range(count))


@pytest.mark.parametrize("values", [[3.0, 1.0], [-3.0, 1.0]], ids=["at once", "from a thread"])
def test_a_model_that_is_not_decoupled_may_send_its_response(
    client: grpcclient.InferenceServerClient, values: list[float]
) -> None:
    result = client.infer("sends", [tensor("X", "FP32", values)])
    assert result.as_numpy("Y").tolist() == [-one for one in values]


def test_a_response_that_was_sent_as_the_last_says_so(server: OperatedServer) -> None:
    came = list(stream(server.addresses["gRPC"], "words", tensor("TEXT", "BYTES", [b"one two three"])))
    assert [error for _, error in came] == [None] * 3
    assert [result.as_numpy("WORD")[0] for result, _ in came] == [b"one", b"two", b"three"]


def test_a_request_ends_before_others_of_its_batch(server: OperatedServer) -> None:
    came: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.addresses["gRPC"]) as client:
        client.start_stream(lambda result, error: came.put(error or result.get_response()))

        def ask(*names: str) -> None:  # a full batch, which waits for nothing
            for name in names:
                client.async_stream_infer(
                    "relay",
                    [tensor("NAME", "BYTES", [[name.encode()]])],
                    request_id=name,
                    enable_empty_final_response=True,
                )

        ask("waits", "ends")
        first = came.get(timeout=TIMEOUT_S)
        assert (first.id, first.parameters["triton_final_response"].bool_param) == ("ends", True)
        ask("ends too", "so does this")
        others = [came.get(timeout=TIMEOUT_S) for _ in range(3)]
        assert {one.id for one in others} == {"waits", "ends too", "so does this"}
        assert all(one.parameters["triton_final_response"].bool_param for one in others)


def test_a_request_can_see_that_its_client_has_gone(server: OperatedServer, folder: Path) -> None:
    def told() -> str:
        return (folder / "told").read_text() if (folder / "told").exists() else ""

    with grpcclient.InferenceServerClient(server.addresses["gRPC"]) as client:
        call = client.async_infer("patient", [tensor("X", "FP32", [1.0])], lambda result, error: None)
        wait_until(lambda: told() == "runs", "the model runs")
        call.cancel()
        wait_until(lambda: told() == "cancelled", "the model was told")
        assert client.infer("patient", [tensor("X", "FP32", [-1.0])]).as_numpy("Y").tolist() == [-1.0]


@pytest.mark.parametrize("model", ["again", "again_decoupled"])
def test_a_rescheduled_request_comes_again(server: OperatedServer, model: str) -> None:
    address, three = server.addresses["gRPC"], tensor("X", "FP32", [3.0])
    if model == "again":
        with grpcclient.InferenceServerClient(address) as client:
            came = client.infer(model, [three], request_id="r").as_numpy("Y").tolist()
    else:
        ((result, _),) = stream(address, model, three, request_id="r")
        came = result.as_numpy("Y").tolist()
    assert came == [3.0]


def test_a_coroutine_returns_responses_or_raises(client: grpcclient.InferenceServerClient) -> None:
    assert client.infer("waits", [tensor("X", "FP32", [4.0])]).as_numpy("Y").tolist() == [2.0]
    with pytest.raises(InferenceServerException, match="there is no root of what is negative"):
        client.infer("waits", [tensor("X", "FP32", [-4.0])])
    assert client.infer("waits", [tensor("X", "FP32", [9.0])]).as_numpy("Y").tolist() == [3.0]


def test_finalize_is_called_at_the_end(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"models": [entry("repeat")]}))
    with OperatedServer(config).until_killed() as server:
        list(stream(server.addresses["gRPC"], "repeat", tensor("COUNT", "INT32", [3])))
        assert server.end(signal.SIGINT) == 0
        server.wait_log("finalized after 1 requests")
