"""The clients that answer once, each of its kind, against real servers over both protocols."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from bound import FLOATS_IN_AND_OUT, InBackground, free_server
from client_server import PROTOCOLS, TIMEOUT_S, ClientServer, client_server, free_port, gate_of, unary_models

from gpuserve.client import (
    AsyncioModelClient,
    ClientClosedError,
    ClientInferenceServerError,
    ClientModelDoesntSupportBatchingError,
    ClientModelUnavailableError,
    ClientQueueFullError,
    ClientTimeoutError,
    ClientValueError,
    FuturesModelClient,
    ModelClient,
)
from gpuserve.client.client_config import DeviceKind, TensorSpec
from gpuserve.decorators import batch

ROW = np.array([1, 2, 3], np.float32)
ROWS = np.array([[1, 2], [3, 4]], np.float32)
ONE = np.array([1], np.int32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("client")
    with client_server(folder, unary_models(gate_of(folder))) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(server: ClientServer, protocol: str) -> str:
    return server.url(protocol)


class Waiting:
    """A client of any kind whose calls wait, and return or raise what comes of them."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._runner = asyncio.Runner()

    def __enter__(self) -> Waiting:
        is_aio = isinstance(self.client, AsyncioModelClient)
        self._wait(self.client.__aenter__() if is_aio else self.client.__enter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self.client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **how: self._wait(getattr(self.client, name)(*args, **how))

    def config(self) -> Any:
        found = self.client.model_config
        return self._wait(found() if callable(found) else found)

    def _wait(self, what: Any) -> Any:
        async def result(awaitable: Awaitable[Any]) -> Any:
            return await awaitable

        if isinstance(what, concurrent.futures.Future):
            return what.result(TIMEOUT_S)
        return self._runner.run(result(what)) if inspect.isawaitable(what) else what


@pytest.fixture(params=[ModelClient, FuturesModelClient, AsyncioModelClient])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def opened(kind: Any) -> Iterator[Callable[..., Any]]:
    """Opens clients of each kind, and closes them after the test."""
    with ExitStack() as stack:
        yield lambda *args, **how: stack.enter_context(Waiting(kind(*args, **how)))


# ---- clients of every kind: inference -----------------------------------------------------------


def test_a_sample_and_a_batch_by_position_and_by_name(opened: Any, url: str) -> None:
    client = opened(url, "echo")
    for sample in (client.infer_sample(ROW), client.infer_sample(x=ROW)):
        assert list(sample) == ["y"]
        np.testing.assert_array_equal(sample["y"], ROW)
    for rows in (client.infer_batch(ROWS), client.infer_batch(x=ROWS)):
        np.testing.assert_array_equal(rows["y"], ROWS)
        assert rows["y"].dtype == np.float32


def test_a_model_that_does_not_batch(opened: Any, url: str) -> None:
    client = opened(url, "flat")
    np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)
    with pytest.raises(ClientModelDoesntSupportBatchingError, match="flat doesn't support batching"):
        client.infer_batch(ROWS)


def test_parameters_reach_the_model_and_the_reserved_ones_the_server(opened: Any, url: str) -> None:
    given: dict[str, Any] = {"text": "t", "count": 7, "flag": True, "half": 0.5, "whole": 3.0}
    seen = str(sorted(given.items())).encode()
    given |= {"priority": 1, "timeout": 20_000_000}
    client = opened(url, "parameters")
    answer = client.infer_batch(
        np.ones((1, 1), np.float32), parameters=given, headers={"X-Any": 5, "H": True}
    )
    assert answer["seen"].tolist() == [[seen]]
    assert given["priority"] == 1


def test_a_model_that_takes_too_long(opened: Any, server: ClientServer, url: str) -> None:
    client = opened(url, "gate", inference_timeout_s=0.4)
    client.wait_for_model(TIMEOUT_S)
    with pytest.raises(ClientTimeoutError, match=r"Timeout occurred during inference.*Timeout: 0.4 s"):
        client.infer_sample(ONE)
    server.open_gate()


@pytest.mark.parametrize(
    ("inputs", "named", "text"),
    [
        ((), {}, "Provide input data"),
        ((ROW,), {"x": ROW}, "either by position or by name"),
        ((ROW, ROW), {}, "has 1 inputs, 2 were given"),
        (([1.0, 2.0],), {}, "Input x is not a numpy array. Got <class 'list'> instead"),
        ((ROW.astype(complex),), {}, "dtype complex"),
        ((np.array(["a"]),), {}, "Unicode inputs are not supported"),
        ((np.array(["a"], dtype=object),), {}, "encoded strings"),
        ((ROW,), {"parameters": [("a", 1)]}, "parameters"),
        ((ROW,), {"parameters": {1: "a"}}, "parameters"),
        ((ROW,), {"parameters": {"a": [1.5]}}, "parameters"),
        ((ROW,), {"parameters": {"a": None}}, "parameters"),
        ((ROW,), {"headers": [("a", 1)]}, "headers"),
        ((ROW,), {"headers": {1: "a"}}, "headers"),
        ((ROW,), {"headers": {"a": [1.5]}}, "headers"),
        ((ROW,), {"headers": {"a": None}}, "headers"),
    ],
)
def test_wrong_arguments(opened: Any, url: str, inputs: Any, named: Any, text: str) -> None:
    client = opened(url, "echo")
    with pytest.raises(ClientValueError, match=text):
        client.infer_sample(*inputs, **named)
    np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)


def test_what_the_server_refuses(opened: Any, url: str) -> None:
    client, failing = opened(url, "echo"), opened(url, "raises")
    for call, text in [
        (lambda: client.infer_sample(nope=ROW), "nope"),
        (lambda: client.infer_sample(ROW.astype(np.float64)), "FP64"),
        (lambda: client.infer_batch(np.ones((65, 1), np.float32)), "64"),
        (lambda: failing.infer_sample(ROW), "spoiled"),
    ]:
        with pytest.raises(ClientInferenceServerError, match=text) as raised:
            call()
        assert raised.value.message.startswith("Error occurred during inference request. Message: ")


# ---- clients of every kind: their life ----------------------------------------------------------


def test_a_version(opened: Any, url: str) -> None:
    client = opened(url, "echo", "3")
    assert client.config().model_version == 3
    np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)
    with pytest.raises(ClientModelUnavailableError, match="echo/2"):
        opened(url, "echo", "2", init_timeout_s=0.4).infer_sample(ROW)


def test_from_existing_clients_of_either_kind(kind: Any, url: str) -> None:
    settings: dict[str, Any] = {"init_timeout_s": 7, "inference_timeout_s": 8, "access_token": "t"}
    with ModelClient(url, "echo", "3", **settings) as blocking:
        early = Waiting(kind.from_existing_client(blocking))
        config = blocking.model_config
        with early, Waiting(kind.from_existing_client(blocking)) as late:
            assert late.config() is config
            assert early.config() == config
            with Waiting(kind.from_existing_client(late.client)) as again:
                assert again.client.settings == early.client.settings == blocking.settings
                for one in (early, late, again):
                    np.testing.assert_array_equal(one.infer_sample(ROW)["y"], ROW)


def test_waiting_for_what_is_there(kind: Any, opened: Any, url: str) -> None:
    client = opened(url, "echo")
    client.wait_for_model(TIMEOUT_S)
    if kind is not FuturesModelClient:
        client.wait_for_server(TIMEOUT_S)
        assert client.client.known_config is None


@pytest.mark.parametrize(
    "call", [lambda client: client.infer_sample(ROW), lambda client: client.wait_for_model(0.4)]
)
def test_a_model_that_does_not_come(opened: Any, url: str, call: Any) -> None:
    client = opened(url, "nope", init_timeout_s=0.4)
    begin = time.monotonic()
    with pytest.raises(ClientModelUnavailableError, match="nope/<latest> is unavailable") as raised:
        call(client)
    assert 0.3 <= time.monotonic() - begin < TIMEOUT_S / 2
    assert isinstance(raised.value, ClientTimeoutError)
    assert raised.value.message == str(raised.value)


def test_a_server_that_does_not_come(kind: Any, opened: Any, protocol: str) -> None:
    client = opened(f"{protocol}://127.0.0.1:{free_port()}", "echo", init_timeout_s=0.3)
    of_server = client.wait_for_model if kind is FuturesModelClient else client.wait_for_server
    for wait in (lambda: of_server(0.2), lambda: client.infer_sample(ROW), client.config):
        with pytest.raises(ClientTimeoutError, match="Waiting for server to be ready timed") as raised:
            wait()
        assert not isinstance(raised.value, ClientModelUnavailableError)


def test_a_client_that_is_closed(kind: Any, opened: Any, url: str) -> None:
    client = opened(url, "echo")
    client.infer_sample(ROW)
    client.close()
    client.close()
    calls = [
        lambda: client.infer_sample(ROW),
        lambda: client.infer_batch(ROWS),
        lambda: client.wait_for_model(1),
    ]
    if kind is ModelClient:
        calls += [lambda: client.wait_for_server(1), client.load_model, client.unload_model]
    for call in calls:
        with pytest.raises(ClientClosedError, match=f"{kind.__name__} is (already )?closed"):
            call()


# ---- ModelClient --------------------------------------------------------------------------------


def test_arrays_that_are_no_plain_memory(url: str) -> None:
    strided, read_only = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2], ROWS.copy()
    read_only.flags.writeable = False
    with ModelClient(url, "echo") as client:
        for rows in (strided, strided.T, read_only, np.empty((2, 0), np.float32)):
            np.testing.assert_array_equal(client.infer_batch(rows)["y"], rows)


@pytest.mark.parametrize(
    "rows",
    [
        np.array([[b"a", b""], [b"\xff\x00", b"long" * 1000]], dtype=object),
        np.array([[b"ab", b"c"]], dtype="S2"),
        np.empty((3, 0), dtype=object),
        np.empty((1, 0), dtype="S4"),
    ],
)
def test_byte_strings_and_none_of_them(url: str, rows: Any) -> None:
    with ModelClient(url, "text") as client:
        answer = client.infer_batch(rows)["y"]
    assert answer.shape == rows.shape
    assert answer.tolist() == rows.astype(object).tolist()


def test_optional_inputs_may_be_left_out(url: str) -> None:
    one = np.array([[1.0]], np.float32)
    with ModelClient(url, "optional") as client:
        assert client.infer_batch(one)["given"].tolist() == [[b"a"]]
        assert client.infer_batch(one, one)["sum"].tolist() == [[2.0]]
        assert client.infer_batch(b=one, a=one)["given"].tolist() == [[b"a,b"]]


def test_the_time_a_request_may_take(server: ClientServer, url: str) -> None:
    with ModelClient(url, "gate") as client:
        with pytest.raises(ClientTimeoutError, match="Timeout occurred during inference request"):
            client.infer_sample(np.array([1], np.int32), parameters={"timeout": 100_000})
        server.open_gate()


def test_the_configuration(url: str) -> None:
    with ModelClient(url, "optional") as client:
        config = client.model_config
        assert client.model_config is config
    assert (config.model_name, config.model_version, config.backend) == ("optional", 1, "python")
    assert (config.batching, config.max_batch_size, config.decoupled) == (True, 8, False)
    assert config.inputs == [TensorSpec("a", (1,), np.float32), TensorSpec("b", (1,), np.float32, True)]
    assert config.outputs == [TensorSpec("sum", (1,), np.float32), TensorSpec("given", (1,), np.bytes_)]
    assert config.batcher is not None
    assert config.batcher.preferred_batch_size == [8]
    assert config.instance_group == {DeviceKind.KIND_CPU: 1}
    assert config.response_cache is not None
    assert not config.response_cache.enable


def test_a_configuration_that_is_given_is_not_asked_for(url: str, protocol: str) -> None:
    with ModelClient(url, "echo") as client:
        config = client.model_config
    nowhere = f"{protocol}://127.0.0.1:{free_port()}"
    with ModelClient(nowhere, "echo", model_config=config, ensure_model_is_ready=False) as client:
        assert client.model_config is config
        assert client.is_batching_supported
    with ModelClient(url, "echo", model_config=config, ensure_model_is_ready=False) as client:
        np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)


def test_initialisation_that_is_not_lazy(url: str) -> None:
    with ModelClient(url, "echo", lazy_init=False, init_timeout_s=TIMEOUT_S) as client:
        assert client.known_config is not None
    with pytest.raises(ClientModelUnavailableError):
        ModelClient(url, "nope", lazy_init=False, init_timeout_s=0.4)


def test_the_library_and_a_client_of_it(url: str, protocol: str) -> None:
    with ModelClient(url, "echo") as client:
        assert client.get_lib().__name__ == f"tritonclient.{protocol}"
        with client.create_client_from_url(url, network_timeout_s=5) as made:
            assert made.is_server_live()


def test_a_server_that_accepts_and_says_nothing(protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"{protocol}://127.0.0.1:{listener.getsockname()[1]}"
        begin = time.monotonic()
        with ModelClient(address, "echo", init_timeout_s=0.5) as client, pytest.raises(ClientTimeoutError):
            client.infer_sample(ROW)
        assert time.monotonic() - begin < TIMEOUT_S / 2


def test_a_server_and_a_model_that_come_later(protocol: str) -> None:
    @batch
    def plus_one(INPUT_1: Any) -> Any:
        return [INPUT_1 + 1]

    port = free_port()

    def ask() -> Any:
        with ModelClient(f"{protocol}://127.0.0.1:{port}", "late", init_timeout_s=TIMEOUT_S) as client:
            return client.infer_sample(ROW)

    answer = InBackground(ask)
    with free_server(**{f"{protocol}_port": port}) as server:
        server.run()
        server.bind("late", plus_one, **FLOATS_IN_AND_OUT)
        assert answer.result()["OUTPUT_1"].tolist() == [2, 3, 4]


def test_text_that_is_not_encoded_is_a_runtime_error_too(url: str) -> None:
    with ModelClient(url, "text") as client:
        for array in (np.array(["ä"]), np.array([b"a", "b"], dtype=object)):
            with pytest.raises(RuntimeError, match=r"(?i)encode"):
                client.infer_sample(array)


def test_a_server_that_went_away(protocol: str) -> None:
    with free_server() as server:
        server.bind("m", lambda requests: requests, **FLOATS_IN_AND_OUT)
        server.run()
        address = server.addresses[protocol].removeprefix("http://")
        with ModelClient(f"{protocol}://{address}", "m") as client:
            client.wait_for_model(TIMEOUT_S)
            assert client.is_batching_supported
            server.stop()
            with pytest.raises((ClientTimeoutError, ClientInferenceServerError)):
                client.infer_sample(ROW)


def test_loading_is_refused_by_a_server_that_does_not_do_it(url: str) -> None:
    with ModelClient(url, "echo") as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(ClientInferenceServerError):
                call()


# ---- FuturesModelClient -------------------------------------------------------------------------


def test_many_at_once_from_many_threads(url: str) -> None:
    with FuturesModelClient(url, "echo", max_workers=4, max_queue_size=None) as client:
        futures = [client.infer_sample(np.full(2, number, np.float32)) for number in range(100)]
        assert not concurrent.futures.wait(futures, TIMEOUT_S).not_done
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
        wrong = client.infer_sample(ROW, x=ROW)
        with pytest.raises(ClientValueError):
            wrong.result(TIMEOUT_S)


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


@pytest.mark.parametrize("name", ["max_workers", "max_queue_size"])
@pytest.mark.parametrize("limit", [0, -1])
def test_limits(name: str, limit: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        FuturesModelClient("localhost", "m", **{name: limit})


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "gpuserve-client"]


# ---- AsyncioModelClient -------------------------------------------------------------------------


async def test_many_at_once(url: str) -> None:
    async with AsyncioModelClient(url, "echo") as client:
        rows = [np.full(4, number, np.float32) for number in range(200)]
        answers = await asyncio.gather(*map(client.infer_sample, rows))
        for row, answer in zip(rows, answers, strict=True):
            np.testing.assert_array_equal(answer["y"], row)


@pytest.mark.parametrize("how", [{}, {"lazy_init": False}, {"ensure_model_is_ready": False}])
async def test_the_model_is_asked_about_once(how: dict[str, Any]) -> None:
    async with CountingServer() as server, AsyncioModelClient(server.url, "m", **how) as client:
        for _ in range(3):
            await asyncio.gather(*(client.infer_sample(ROW) for _ in range(4)))
        paths = {path.rpartition("/")[2]: server.paths.count(path) for path in server.paths}
    ready = {} if "ensure_model_is_ready" in how else {"ready": 1}
    assert paths == {**ready, "config": 1, "infer": 12}


def test_the_constructor_needs_no_event_loop(url: str) -> None:
    client = AsyncioModelClient(url, "echo")

    async def main() -> Any:
        async with client:
            return await client.infer_sample(ROW)

    np.testing.assert_array_equal(asyncio.run(main())["y"], ROW)


async def test_asyncio_initialisation_that_is_not_lazy(url: str) -> None:
    async with AsyncioModelClient(url, "echo", lazy_init=False) as client:
        assert client.known_config is not None
    with pytest.raises(ClientModelUnavailableError):
        await AsyncioModelClient(url, "nope", lazy_init=False, init_timeout_s=0.4).__aenter__()


class CountingServer:
    """An HTTP server of one model "m" that remembers what it was asked."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __aenter__(self) -> CountingServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := (await reader.readline()).decode():
            length = 0
            while (header := await reader.readline()) != b"\r\n":
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            await reader.readexactly(length)
            path = request.split()[1]
            self.paths.append(path)
            body = json.dumps(_DOCUMENTS.get(path.rpartition("/")[2], {})).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()


_FLOATS = {"data_type": "TYPE_FP32", "dims": ["-1"]}


_DOCUMENTS = {
    "config": {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "x", **_FLOATS}],
        "output": [{"name": "y", **_FLOATS}],
    },
    "infer": {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]},
}
