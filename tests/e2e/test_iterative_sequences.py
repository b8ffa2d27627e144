"""Iterative sequences of a model.py behind a real server: rescheduled requests run beside new ones."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from processes import wait_until
from python_backend import MODELS, TIMEOUT_S, stream
from serving import GPUSERVE, JSON_LOG, Addresses, serving
from tritonclient.utils import InferenceServerException

from gpuserve.testing import run_triton_model

CONFIG = """backend: "python" max_batch_size: %d
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "count" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
ITERATIVE = "sequence_batching { iterative_sequence: true }"
DECOUPLED = "model_transaction_policy { decoupled: true }"
LONG = 100_000
MODEL_CONFIGS = {
    "whole": CONFIG % 4 + ITERATIVE,
    "streams": CONFIG % 4 + ITERATIVE + DECOUPLED,
    "single": CONFIG.replace("[ 2 ]", "[ 1, 2 ]") % 0 + ITERATIVE + DECOUPLED,
    "awaits": CONFIG % 4 + ITERATIVE + 'parameters { key: "AWAITS" value { string_value: "1" } }',
    "oldest": CONFIG % 2
    + DECOUPLED
    + "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 3 } }",
}


def write(repository: Path) -> Path:
    for name, config in MODEL_CONFIGS.items():
        shutil.copytree(MODELS / "steps", repository / name)
        (repository / name / "config.pbtxt").write_text(config)
    return repository


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    folder = write(tmp_path_factory.mktemp("repository"))
    with serving(GPUSERVE, "serve", str(folder), "--host", "127.0.0.1", *JSON_LOG) as addresses:
        yield addresses


def number(n: int, rows: int = 1, *, batches: bool = True) -> grpcclient.InferInput:
    shape = [rows, 1] if batches else [1]
    given = grpcclient.InferInput("n", shape, "INT32")
    given.set_data_from_numpy(np.full(shape, n, np.int32))
    return given


def counts(server: Addresses, model: str, n: int) -> list[list[int]]:
    """Return the responses of a request, each as the count and the size of its batch."""
    given = number(n, batches=model != "single")
    if model in {"whole", "awaits"}:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            return client.infer(model, [given], client_timeout=TIMEOUT_S).as_numpy("count").tolist()
    came = list(stream(server.grpc, model, given))
    assert [error for _, error in came] == [None] * len(came)
    return [result.as_numpy("count").ravel().tolist() for result, _ in came]


@pytest.mark.parametrize("model", ["whole", "awaits"])
def test_a_request_is_answered_after_its_last_iteration(server: Addresses, model: str) -> None:
    assert counts(server, model, 1) == [[1, 1]]
    assert counts(server, model, 500) == [[500, 1]]


@pytest.mark.parametrize("model", ["streams", "single", "oldest"])
def test_each_iteration_sends_a_response(server: Addresses, model: str) -> None:
    assert counts(server, model, 3) == [[1, 1], [2, 1], [3, 1]]


class LongRequests:
    """Requests on one stream that iterate until the stream is closed."""

    def __init__(self, server: Addresses, model: str, count: int) -> None:
        self._client = grpcclient.InferenceServerClient(server.grpc)
        came: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: came.put((result, error)))
        ids = {str(one) for one in range(count)}
        for one in ids:
            self._client.async_stream_infer(model, [number(LONG, batches=model != "single")], request_id=one)
        while ids:
            result, error = came.get(timeout=TIMEOUT_S)
            assert error is None
            ids.discard(result.get_response().id)

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


@pytest.mark.parametrize(("model", "size"), [("streams", 2), ("oldest", 2)])
def test_a_new_request_joins_the_batch_of_a_rescheduled_one(server: Addresses, model: str, size: int) -> None:
    long = LongRequests(server, model, 1)
    try:
        joined = [[1, size], [2, size], [3, size]]
        # The long request is paused, and so in no batch, while too many of its responses are unread.
        wait_until(lambda: counts(server, model, 3) == joined, "a request joins the long one")
    finally:
        long.close()


def test_a_batch_has_at_most_the_rows_of_the_configuration(server: Addresses) -> None:
    long = LongRequests(server, "oldest", 2)
    try:  # three candidates, in batches of two
        assert counts(server, "oldest", 2) == [[1, 1], [2, 1]]
    finally:
        long.close()


@pytest.mark.parametrize(("model", "slots"), [("single", 1), ("streams", 4)])
def test_a_cancelled_request_frees_its_slot(server: Addresses, model: str, slots: int) -> None:
    LongRequests(server, model, slots).close()
    assert counts(server, model, 2)[-1][0] == 2


@pytest.mark.parametrize("model", ["whole", "streams"])
def test_a_released_request_is_answered_later(server: Addresses, model: str) -> None:
    assert counts(server, model, 0) == [[1, 1]]


def test_a_new_request_joins_while_a_released_one_has_no_response(server: Addresses) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        released: queue.Queue[Any] = queue.Queue()
        client.async_infer("whole", [number(0)], lambda result, error: released.put((result, error)))
        assert counts(server, "whole", 5)[0][0] == 5
        result, error = released.get(timeout=TIMEOUT_S)
        assert error is None
        assert result.as_numpy("count")[0][0] == 1


@pytest.mark.parametrize("model", ["whole", "awaits"])
def test_an_exception_fails_the_requests_of_its_execution(server: Addresses, model: str) -> None:
    with pytest.raises(InferenceServerException, match="n is negative"):
        counts(server, model, -1)
    assert counts(server, model, 2) == [[2, 1]]


def test_a_test_steps_the_model_without_a_server(tmp_path: Path) -> None:
    folder = write(tmp_path) / "whole"
    found = run_triton_model(folder, [{"n": [[n]]} for n in (3, 1, 2)])
    # the count of each request, and the number of requests in its last batch
    assert [one["count"].tolist() for one in found] == [[[3, 1]], [[1, 3]], [[2, 2]]]


def test_a_request_has_one_row(server: Addresses) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="batch-size"):
            client.infer("whole", [number(2, rows=2)])
        assert client.get_model_config("whole").config.max_batch_size == 4
