"""Calls of inference callables to other models of their server, on real servers."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from config_file import served
from processes import wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException

MODELS = Path(__file__).resolve().parents[1] / "models" / "asking.py"
LARGE = 1 << 18
UNARY = (
    "doubled",
    "picky",
    "asks",
    "keeps",
    "asks_in_threads",
    "asks_behind",
    "asks_async",
    "asks_blocking",
    "asks_stream",
    "asks_first_of_stream",
    "passes_on_failure",
    "slow",
    "fragile",
    "asks_fragile",
)


def entry(name: str, output: str = "y", dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{MODELS}:{name}",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": output, "dtype": dtype, "shape": [-1]}],
        "max_batch_size": 8,
        **more,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    models = [entry(name) for name in UNARY]
    models += [entry(name, "said", "bytes") for name in ("tells_codes", "impatient")]
    models += [entry(name, decoupled=True) for name in ("count", "passes_stream")]
    with served(tmp_path_factory.mktemp("calls"), models) as addresses:
        yield addresses


def ask(client: tritonclient.grpc.InferenceServerClient, model: str, x: Any, output: str = "y") -> Any:
    tensor = tritonclient.grpc.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return client.infer(model, [tensor], client_timeout=20).as_numpy(output)


def row(*values: float) -> Any:
    return np.array([values], np.float32)


@pytest.mark.parametrize("model", ["asks", "asks_async", "asks_blocking"])
@pytest.mark.parametrize("width", [1, LARGE], ids=["in the message", "in the arenas"])
def test_a_callable_asks_another_model(
    client: tritonclient.grpc.InferenceServerClient, model: str, width: int
) -> None:
    for number in range(20):
        x = np.full((2, width), number, np.float32)
        np.testing.assert_array_equal(ask(client, model, x), x * 2 + 1)


def test_an_answer_stays_while_it_is_kept(client: tritonclient.grpc.InferenceServerClient) -> None:
    for number in range(8):
        x = np.full((1, LARGE), number, np.float32)
        np.testing.assert_array_equal(ask(client, "keeps", x), x * 2)


def test_any_thread_may_ask(client: tritonclient.grpc.InferenceServerClient) -> None:
    x = np.arange(LARGE, dtype=np.float32).reshape(1, -1)
    expected = sum((x + n) * 2 for n in range(32))
    np.testing.assert_array_equal(ask(client, "asks_in_threads", x), expected)


def test_a_thread_may_ask_after_its_callable_returned(
    client: tritonclient.grpc.InferenceServerClient,
) -> None:
    assert ask(client, "asks_behind", row(3)).tolist() == [[0]]
    assert ask(client, "asks_behind", row(3)).tolist() == [[300]]


def test_a_stream_is_asked_for(client: tritonclient.grpc.InferenceServerClient) -> None:
    assert ask(client, "asks_stream", row(1000)).tolist() == [[499500]]


def test_a_stream_of_a_stream(server: Addresses) -> None:
    heard: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: heard.append(error or result.as_numpy("y").item()))
        tensor = tritonclient.grpc.InferInput("x", (1, 1), "FP32")
        tensor.set_data_from_numpy(row(200))
        client.async_stream_infer("passes_stream", [tensor])
        wait_until(lambda: len(heard) == 200, "200 responses")
        client.stop_stream()
    assert heard == [10.0 * number for number in range(200)]


def test_a_stream_may_be_left(client: tritonclient.grpc.InferenceServerClient) -> None:
    for _ in range(3):
        assert ask(client, "asks_first_of_stream", row(0)).tolist() == [[0]]
    # Who was left does not go on for the million that nobody takes: it answers others.
    assert ask(client, "asks_stream", row(10)).tolist() == [[45]]


def test_a_failure_is_passed_on_as_it_is(client: tritonclient.grpc.InferenceServerClient) -> None:
    assert ask(client, "passes_on_failure", row(1)).tolist() == [[1]]
    with pytest.raises(InferenceServerException, match="no negative numbers") as raised:
        ask(client, "passes_on_failure", row(-1))
    assert raised.value.status() == "StatusCode.INTERNAL"


def test_a_call_that_cannot_be_answered_says_why(client: tritonclient.grpc.InferenceServerClient) -> None:
    said = [one.decode() for one in ask(client, "tells_codes", row(1), "said")[0]]
    assert said[0] == "NOT_FOUND: Request for unknown model: 'nobody' is not found"
    assert said[1].startswith("INVALID_ARGUMENT:")
    assert "unexpected inference input 'z'" in said[1]
    assert said[2].startswith("INVALID_ARGUMENT: input 'x' of a call to model 'doubled':")


def test_a_call_has_a_limit_of_its_own(client: tritonclient.grpc.InferenceServerClient) -> None:
    assert ask(client, "impatient", row(1), "said").tolist() == [[b"DEADLINE_EXCEEDED"]]


def test_who_is_asked_may_die(client: tritonclient.grpc.InferenceServerClient) -> None:
    assert ask(client, "asks_fragile", row(1)).tolist() == [[1]]
    with pytest.raises(InferenceServerException, match="model 'fragile': the worker process died"):
        ask(client, "asks_fragile", row(13))
    wait_until(lambda: client.is_model_ready("fragile"), "a new worker")
    assert ask(client, "asks_fragile", row(2)).tolist() == [[2]]


def test_no_memory_is_left_behind(server: Addresses, client: tritonclient.grpc.InferenceServerClient) -> None:
    ask(client, "asks", np.ones((1, LARGE), np.float32))

    def blocks() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        counted = [line.rpartition(" ") for line in lines if line.startswith("gpuserve_arena_blocks{")]
        return {name: float(value) for name, _, value in counted if float(value)}

    wait_until(lambda: not blocks(), "every block is free")
    assert blocks() == {}
