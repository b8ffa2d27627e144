"""``AsyncioModelClient`` against real servers, over both protocols."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from client_server import PROTOCOLS, TIMEOUT_S, ClientServer, client_server, free_port, gate_of, unary_models

from gpuserve.client import (
    AsyncioModelClient,
    ClientClosedError,
    ClientInferenceServerError,
    ClientModelDoesntSupportBatchingError,
    ClientModelUnavailableError,
    ClientTimeoutError,
    ClientValueError,
    ModelClient,
)

ROW = np.array([1, 2, 3], np.float32)
ROWS = np.array([[1, 2], [3, 4]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("client")
    with client_server(folder, unary_models(gate_of(folder))) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def url(server: ClientServer, request: pytest.FixtureRequest) -> str:
    return server.url(request.param)


@pytest.mark.parametrize("lazy", [True, False])
async def test_a_sample_and_a_batch(url: str, lazy: bool) -> None:
    async with AsyncioModelClient(url, "echo", lazy_init=lazy) as client:
        assert (client.known_config is None) == lazy
        np.testing.assert_array_equal((await client.infer_sample(ROW))["y"], ROW)
        np.testing.assert_array_equal((await client.infer_batch(x=ROWS))["y"], ROWS)
        assert (await client.model_config).model_version == 3


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


async def test_from_existing_clients_of_either_kind(url: str) -> None:
    with ModelClient(url, "echo", access_token="t") as blocking:
        config = blocking.model_config
        async with AsyncioModelClient.from_existing_client(blocking) as client:
            assert await client.model_config is config
            assert client.settings == blocking.settings
            async with AsyncioModelClient.from_existing_client(client) as again:
                np.testing.assert_array_equal((await again.infer_sample(ROW))["y"], ROW)


async def test_waiting(url: str) -> None:
    async with AsyncioModelClient(url, "echo") as client:
        await client.wait_for_server(TIMEOUT_S)
        await client.wait_for_model(TIMEOUT_S)
    async with AsyncioModelClient(url, "nope", init_timeout_s=0.4) as client:
        begin = time.monotonic()
        with pytest.raises(ClientModelUnavailableError, match="nope/<latest>"):
            await client.infer_sample(ROW)
        assert 0.3 <= time.monotonic() - begin < TIMEOUT_S / 2
    with pytest.raises(ClientModelUnavailableError):
        await AsyncioModelClient(url, "nope", lazy_init=False, init_timeout_s=0.4).__aenter__()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_server_that_does_not_come(protocol: str) -> None:
    nowhere = f"{protocol}://127.0.0.1:{free_port()}"
    async with AsyncioModelClient(nowhere, "echo", init_timeout_s=0.3) as client:
        for call in (client.infer_sample(ROW), client.wait_for_server(0.2), client.model_config):
            with pytest.raises(ClientTimeoutError, match="Waiting for server to be ready timed out"):
                await call


async def test_what_goes_wrong(url: str) -> None:
    async with AsyncioModelClient(url, "echo") as client:
        with pytest.raises(ClientValueError, match="Input x is not a numpy array"):
            await client.infer_sample([1.0])
        with pytest.raises(ClientValueError, match="either by position or by name"):
            await client.infer_sample(ROW, x=ROW)
        with pytest.raises(ClientInferenceServerError, match="FP64"):
            await client.infer_sample(ROW.astype(np.float64))
    async with AsyncioModelClient(url, "flat") as client:
        with pytest.raises(ClientModelDoesntSupportBatchingError):
            await client.infer_batch(ROWS)
    async with AsyncioModelClient(url, "raises") as client:
        with pytest.raises(ClientInferenceServerError):
            await client.infer_sample(ROW)


async def test_a_model_that_takes_too_long(server: ClientServer, url: str) -> None:
    async with AsyncioModelClient(url, "gate", inference_timeout_s=0.4) as client:
        await client.wait_for_model(TIMEOUT_S)
        with pytest.raises(ClientTimeoutError, match=r"Timeout: 0\.4 s"):
            await client.infer_sample(np.array([1], np.int32))
        server.open_gate()


def test_parameters_and_headers(url: str) -> None:
    async def main() -> Any:
        async with AsyncioModelClient(url, "parameters") as client:
            row = np.ones(1, np.float32)
            return await client.infer_sample(row, parameters={"a": 1.5, "priority": 1}, headers={"H": True})

    assert asyncio.run(main())["seen"].tolist() == [b"[('a', 1.5)]"]


async def test_a_client_that_is_closed(url: str) -> None:
    client = AsyncioModelClient(url, "echo")
    await client.infer_sample(ROW)
    await client.close()
    await client.close()
    for call in (client.infer_sample(ROW), client.infer_batch(ROWS), client.wait_for_model(1)):
        with pytest.raises(ClientClosedError, match="AsyncioModelClient is closed"):
            await call


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
