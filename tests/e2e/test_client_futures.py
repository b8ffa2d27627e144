"""``FuturesModelClient`` against real servers, over both protocols."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait

import numpy as np
import pytest
from client_server import PROTOCOLS, TIMEOUT_S, ClientServer, client_server, free_port, gate_of, unary_models

from gpuserve.client import (
    ClientClosedError,
    ClientModelUnavailableError,
    ClientQueueFullError,
    ClientTimeoutError,
    ClientValueError,
    FuturesModelClient,
    ModelClient,
)

ROW = np.array([1, 2, 3], np.float32)
ROWS = np.array([[1, 2], [3, 4]], np.float32)
ONE = np.array([1], np.int32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("client")
    with client_server(folder, unary_models(gate_of(folder))) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def url(server: ClientServer, request: pytest.FixtureRequest) -> str:
    return server.url(request.param)


def test_everything_is_a_future(url: str) -> None:
    with FuturesModelClient(url, "echo") as client:
        client.wait_for_model(TIMEOUT_S).result()
        sample, rows, config = client.infer_sample(ROW), client.infer_batch(x=ROWS), client.model_config()
        np.testing.assert_array_equal(sample.result(TIMEOUT_S)["y"], ROW)
        np.testing.assert_array_equal(rows.result(TIMEOUT_S)["y"], ROWS)
        assert config.result(TIMEOUT_S).model_name == "echo"


def test_parameters_of_all_types(url: str) -> None:
    given = {"count": 7, "flag": True, "half": 0.5, "text": "t"}
    with FuturesModelClient(url, "parameters") as client:
        answer = client.infer_sample(ROW, parameters=given).result(TIMEOUT_S)
    assert answer["seen"].tolist() == [str(sorted(given.items())).encode()]


def test_many_at_once_from_many_threads(url: str) -> None:
    with FuturesModelClient(url, "echo", max_workers=4, max_queue_size=None) as client:
        futures = [client.infer_sample(np.full(2, number, np.float32)) for number in range(100)]
        assert not wait(futures, TIMEOUT_S).not_done
        assert [int(one.result()["y"][0]) for one in futures] == list(range(100))


def test_threads_come_as_needed_and_go(url: str) -> None:
    with FuturesModelClient(url, "echo", max_workers=8) as client:
        for _ in range(5):
            client.infer_sample(ROW).result(TIMEOUT_S)
        assert 1 <= len(_threads()) <= 5
    assert not _threads()


def test_a_full_queue(server: ClientServer, url: str) -> None:
    with FuturesModelClient(url, "gate", max_workers=1, max_queue_size=1, non_blocking=True) as client:
        client.wait_for_model(TIMEOUT_S).result()
        running, waiting = client.infer_sample(ONE), client.infer_sample(ONE)
        with pytest.raises(ClientQueueFullError, match="Queue is full"):
            client.infer_sample(ONE)
        server.open_gate(2)
        assert [one.result(TIMEOUT_S)["seen"].tolist() for one in (running, waiting)] == [[b""]] * 2


def test_a_full_queue_that_gets_room(server: ClientServer, url: str) -> None:
    with FuturesModelClient(url, "gate", max_workers=1, max_queue_size=1) as client:
        client.wait_for_model(TIMEOUT_S).result()
        futures = [client.infer_sample(ONE), client.infer_sample(ONE)]
        server.open_gate(3)
        futures.append(client.infer_sample(ONE))
        assert [one.result(TIMEOUT_S)["seen"].tolist() for one in futures] == [[b""]] * 3


def test_what_goes_wrong_is_in_the_future(url: str) -> None:
    with FuturesModelClient(url, "echo") as client:
        with pytest.raises(ClientValueError):
            client.infer_sample(ROW, x=ROW).result(TIMEOUT_S)
        np.testing.assert_array_equal(client.infer_sample(ROW).result(TIMEOUT_S)["y"], ROW)
    with FuturesModelClient(url, "nope", init_timeout_s=0.4) as client:
        with pytest.raises(ClientModelUnavailableError):
            client.infer_sample(ROW).result(TIMEOUT_S)
        with pytest.raises(ClientModelUnavailableError):
            client.wait_for_model(0.4).result(TIMEOUT_S)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_does_not_come(protocol: str) -> None:
    nowhere = f"{protocol}://127.0.0.1:{free_port()}"
    with (
        FuturesModelClient(nowhere, "echo", init_timeout_s=0.2) as client,
        pytest.raises(ClientTimeoutError, match="Waiting for server"),
    ):
        client.model_config().result(TIMEOUT_S)


def test_closing_finishes_what_was_asked(server: ClientServer, url: str) -> None:
    client = FuturesModelClient(url, "gate", max_workers=1)
    futures = [client.infer_sample(ONE) for _ in range(3)]
    client.close(wait=False)
    with pytest.raises(ClientClosedError, match="FuturesModelClient is already closed"):
        client.infer_sample(ONE)
    server.open_gate(3)
    client.close()
    assert [one.done() for one in futures] == [True] * 3
    assert [one.result()["seen"].tolist() for one in futures] == [[b""]] * 3


def test_a_future_that_is_cancelled_is_not_asked(server: ClientServer, url: str) -> None:
    with FuturesModelClient(url, "gate", max_workers=1) as client:
        running, waiting = client.infer_sample(ONE), client.infer_sample(np.array([77], np.int32))
        assert waiting.cancel()
        server.open_gate()
        running.result(TIMEOUT_S)
        seen = client.infer_sample(np.array([0], np.int32)).result(TIMEOUT_S)["seen"][0]
    assert b"77" not in seen.split(b",")


def test_from_existing_clients_of_either_kind(url: str) -> None:
    with ModelClient(url, "echo", access_token="t") as blocking:
        config = blocking.model_config
        with FuturesModelClient.from_existing_client(blocking) as client:
            assert client.model_config().result(TIMEOUT_S) is config
            assert client.settings == blocking.settings
            with FuturesModelClient.from_existing_client(client) as again:
                np.testing.assert_array_equal(again.infer_sample(ROW).result(TIMEOUT_S)["y"], ROW)


@pytest.mark.parametrize("name", ["max_workers", "max_queue_size"])
@pytest.mark.parametrize("limit", [0, -1])
def test_limits(name: str, limit: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        FuturesModelClient("localhost", "m", **{name: limit})


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "gpuserve-client"]
