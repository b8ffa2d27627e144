"""Sequences from the client's side, over both protocols: state, places, ends and refusals."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from bound import InBackground
from config_file import model, served, tensor
from processes import wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException

from gpuserve.client import ModelClient

CALLABLES = Path(__file__).resolve().parents[1] / "models" / "sequenced.py"
X = [tensor("x", "INT32", 1)]
SUMS = [tensor(name, "INT32", 1) for name in ("y", "pid", "kept", "dropped")]
TOLD = [tensor("flags", "FP32", 3), tensor("id", "BYTES", 1), tensor("rows", "INT32", 1)]
CONTROLS = [
    {"name": "START", "kind": "start"},
    {"name": "END", "kind": "end", "dtype": "float32", "false_true": [-1, 2]},
    {"name": "READY", "kind": "ready", "dtype": "bool", "false_true": [False, True]},
    {"name": "ID", "kind": "corrid", "dtype": "bytes"},
]


def sequenced(name: str, size: int, count: int, attribute: str = "Sums", **sequence: Any) -> dict[str, Any]:
    made = model(name, "", X, TOLD if attribute == "told" else SUMS, size)
    rules = {"max_sequence_idle_us": 60_000_000, **sequence}
    return {
        **made,
        "callable": f"{CALLABLES}:{attribute}",
        "instances": [{"count": count}],
        "sequence_batching": rules,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    entries = [
        sequenced("direct", 4, 2),
        sequenced("oldest", 4, 2, strategy="oldest"),
        sequenced("single", 0, 1),
        sequenced("hasty", 4, 1, max_sequence_idle_us=50_000),
        sequenced("mortal", 4, 1),
        sequenced("told", 4, 1, "told", controls=CONTROLS),
    ]
    with served(tmp_path_factory.mktemp("server"), entries) as addresses:
        yield addresses


class Client:
    """A tritonclient of either protocol that sends one number at a time."""

    def __init__(self, server: Addresses, protocol: str) -> None:
        self.module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        self.address = server.http if protocol == "http" else server.grpc
        self.triton = self.module.InferenceServerClient(self.address)

    def tensors(self, value: int, *, rows: int = 1, batching: bool = True) -> list[Any]:
        shape = [rows, 1] if batching else [1]
        sent = self.module.InferInput("x", shape, "INT32")
        sent.set_data_from_numpy(np.full(shape, value, np.int32))
        return [sent]

    def in_background(self, *args: Any) -> InBackground:
        """A question in a thread, which needs a connection of its own."""
        return InBackground(self._ask_alone, *args)

    def _ask_alone(self, *args: Any) -> Any:
        other = copy.copy(self)
        with self.module.InferenceServerClient(self.address) as other.triton:
            return other.ask(*args)

    def ask(self, name: str, value: int, correlation_id: Any, flags: str = "", **more: Any) -> Any:
        rows = more.pop("rows", 1)
        return self.triton.infer(
            name,
            self.tensors(value, rows=rows, batching=name != "single"),
            sequence_id=correlation_id,
            sequence_start="s" in flags,
            sequence_end="e" in flags,
            **more,
        )

    def total(self, name: str, value: int, correlation_id: Any, flags: str = "") -> int:
        return int(self.ask(name, value, correlation_id, flags).as_numpy("y").item())


@pytest.fixture(params=["http", "grpc"])
def client(server: Addresses, request: pytest.FixtureRequest) -> Iterator[Client]:
    made = Client(server, request.param)
    yield made
    made.triton.close()


def refused(call: Callable[..., Any], *args: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as raised:
        call(*args, **more)
    return str(raised.value.status()).removeprefix("StatusCode."), str(raised.value.message())


@pytest.mark.parametrize("name", ["direct", "oldest", "single"])
@pytest.mark.parametrize("correlation_id", [1001, "one"])
def test_a_sequence_adds_up(client: Client, name: str, correlation_id: int | str) -> None:
    asked = [(0, "s"), (4, ""), (2, ""), (0, ""), (1, "e")]
    assert [client.total(name, value, correlation_id, flags) for value, flags in asked] == [0, 4, 6, 6, 7]


def test_sequences_interleave_and_keep_their_instance(client: Client) -> None:
    names = [f"s{number}" for number in range(6)]
    places: dict[str, int] = {}
    for turn in range(4):
        flags = {0: "s", 3: "e"}.get(turn, "")
        asked = {one: client.in_background("direct", turn, one, flags) for one in names}
        for one in names:
            answer = asked[one].result()
            pid = answer.as_numpy("pid").item()
            assert places.setdefault(one, pid) == pid
            assert answer.as_numpy("y").item() == sum(range(turn + 1))
    assert len(set(places.values())) == 2


def test_more_sequences_than_seats_wait_for_one(client: Client) -> None:
    names = [f"w{number}" for number in range(12)]
    first = {one: client.in_background("oldest", 1, one, "s") for one in names}
    ended = 0
    while ended < len(names):  # eight at most are seated, and only those are answered
        wait_until(lambda: any(not one.thread.is_alive() for one in first.values()), "one has a seat")
        for name in [one for one in names if one in first and not first[one].thread.is_alive()]:
            assert first.pop(name).result().as_numpy("y").item() == 1
            assert client.total("oldest", 2, name, "e") == 3
            ended += 1


def test_a_stream_carries_many_sequences(server: Addresses) -> None:
    made = Client(server, "grpc")
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    made.triton.start_stream(lambda result, error: answers.put((result, error)))
    values = [11, 7, 5, 3, 2, 0, 1]
    for position, value in enumerate(values):
        for correlation_id, sign in ((1007, 1), ("text", -1)):
            made.triton.async_stream_infer(
                "direct",
                made.tensors(sign * value),
                request_id=f"{correlation_id}_{position}",
                sequence_id=correlation_id,
                sequence_start=position == 0,
                sequence_end=position == len(values) - 1,
            )
    seen: dict[str, list[int]] = {"1007": [], "text": []}
    for _ in range(2 * len(values)):
        result, error = answers.get(timeout=30)
        assert error is None
        seen[result.get_response().id.partition("_")[0]].append(int(result.as_numpy("y").item()))
    made.triton.stop_stream()
    made.triton.close()
    assert seen["1007"] == list(np.cumsum(values))
    assert seen["text"] == list(-np.cumsum(values))


def test_a_start_begins_anew(client: Client) -> None:
    assert client.total("direct", 5, "anew", "s") == 5
    assert client.total("direct", 3, "anew", "s") == 3
    assert client.total("direct", 1, "anew", "e") == 4


def test_what_is_refused(client: Client) -> None:
    bad = "400" if client.module is tritonclient.http else "INVALID_ARGUMENT"
    assert refused(client.ask, "direct", 1, 0) == (
        bad,
        "inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
    )
    assert refused(client.ask, "direct", 1, 99) == (
        bad,
        "inference request for sequence 99 to model 'direct' must specify the START flag on the first "
        "request of the sequence",
    )
    code, text = refused(client.ask, "direct", 1, 99, "s", rows=2)
    assert code == bad
    assert text.startswith(
        "inference request to model 'direct' must specify batch-size 1 due to requirements of "
        "sequence batcher"
    )
    assert refused(client.ask, "told", 1, 99, "s") == (
        bad,
        "sequence batching control 'ID' data-type is 'UINT64', but model 'told' expects 'BYTES'",
    )


def test_an_idle_sequence_is_dropped_and_the_callable_told(client: Client) -> None:
    before = client.ask("hasty", 0, "fresh", "se").as_numpy("dropped").item()
    assert client.total("hasty", 1, "idle", "s") == 1
    wait_until(
        lambda: client.ask("hasty", 0, "fresh", "se").as_numpy("dropped").item() > before, "it is told"
    )
    assert client.ask("hasty", 0, "fresh", "se").as_numpy("kept").item() == 0
    _, text = refused(client.ask, "hasty", 1, "idle")
    assert "must specify the START flag" in text


def test_a_sequence_ends_with_its_worker(client: Client) -> None:
    unavailable = "503" if client.module is tritonclient.http else "UNAVAILABLE"
    assert client.total("mortal", 1, "dead", "s") == 1
    code, text = refused(client.ask, "mortal", -13, "dead")
    assert (code, text) == (
        unavailable,
        "sequence dead of model 'mortal' has ended: the worker process that ran it died",
    )
    wait_until(lambda: client.triton.is_model_ready("mortal"), "there is another worker")
    code, text = refused(client.ask, "mortal", 1, "dead")
    assert (code, "was lost with its instance" in text) == (unavailable, True)
    assert client.total("mortal", 2, "dead", "se") == 2


def test_the_callable_is_told_by_inputs_and_rows_are_kept(client: Client) -> None:
    first, second = f"{client.module.__name__}.a", f"{client.module.__name__}.b"
    flags = {"s": [1.0, -1.0, 1.0], "": [0.0, -1.0, 1.0], "e": [0.0, 2.0, 1.0]}
    for name, rows in ((first, 1), (second, 2)):
        answer = client.ask("told", 0, name, "s")
        assert answer.as_numpy("flags").tolist() == [flags["s"]]
        assert answer.as_numpy("id").tolist() == [[name.encode()]]
        assert answer.as_numpy("rows").item() == rows
    answer = client.ask("told", 0, second)
    assert (answer.as_numpy("flags").tolist(), answer.as_numpy("rows").item()) == ([flags[""]], 2)
    assert client.ask("told", 0, first, "e").as_numpy("flags").tolist() == [flags["e"]]
    assert client.ask("told", 0, second, "e").as_numpy("rows").item() == 2


def test_our_own_client_sends_sequences(server: Addresses) -> None:
    for url in (f"http://{server.http}", f"grpc://{server.grpc}"):
        with ModelClient(url, "direct") as ours:
            x = np.array([3], np.int32)
            start = ours.infer_sample(x, parameters={"sequence_id": "own", "sequence_start": True})
            end = ours.infer_sample(x, parameters={"sequence_id": "own", "sequence_end": True})
            assert (start["y"].item(), end["y"].item()) == (3, 6)


def test_the_configuration_says_so(client: Client) -> None:
    more = {} if client.module is tritonclient.http else {"as_json": True}
    config = client.triton.get_model_config("told", **more)
    config = config.get("config", config)
    assert "direct" in config["sequence_batching"]
    assert [one["name"] for one in config["sequence_batching"]["control_input"]] == [
        "START",
        "END",
        "READY",
        "ID",
    ]
    assert [one["name"] for one in config["input"]] == ["x"]
