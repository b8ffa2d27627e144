"""The access token: all five clients send it with every call, the small ones included; and TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from client_server import PROTOCOLS, ClientServer, client_server, decoupled_models, gate_of, unary_models

from gpuserve.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    ClientError,
    ClientInferenceServerError,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from gpuserve.config.settings.values import ENDPOINT_GROUPS

TOKEN = "a-token"
ROW = np.array([1, 2], np.float32)
TWO = np.array([2], np.int32)
MODELS = ("echo", "count")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("client")
    every = unary_models(gate_of(folder)) + decoupled_models()
    models = [one for one in every if one["name"] in MODELS]
    restricted = {"restricted_endpoints": list(ENDPOINT_GROUPS), "access_token": TOKEN}
    with client_server(folder, models, **restricted) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def url(server: ClientServer, request: pytest.FixtureRequest) -> str:
    return server.url(request.param)


def ask(url: str, **how: Any) -> Any:
    with ModelClient(url, "echo", **how) as client:
        client.wait_for_server(5)
        return client.infer_sample(ROW, headers={"other": "header"})["y"]


def ask_futures(url: str, **how: Any) -> Any:
    with FuturesModelClient(url, "echo", **how) as client:
        return client.infer_sample(ROW).result()["y"]


def ask_aio(url: str, **how: Any) -> Any:
    async def main() -> Any:
        async with AsyncioModelClient(url, "echo", **how) as client:
            await client.wait_for_server(how.get("init_timeout_s", 5))
            return (await client.infer_sample(ROW))["y"]

    return asyncio.run(main())


def ask_decoupled(url: str, **how: Any) -> Any:
    with DecoupledModelClient(url, "count", **how) as client:
        return [one["y"].item() for one in client.infer_sample(TWO, headers={"other": "header"})]


def ask_decoupled_aio(url: str, **how: Any) -> Any:
    async def main() -> Any:
        async with AsyncioDecoupledModelClient(url, "count", **how) as client:
            return [one["y"].item() async for one in client.infer_sample(TWO)]

    return asyncio.run(main())


@pytest.mark.parametrize("asked", [ask, ask_futures, ask_aio])
def test_every_call_shows_the_token(url: str, asked: Any) -> None:
    np.testing.assert_array_equal(asked(url, access_token=TOKEN), ROW)


@pytest.mark.parametrize("asked", [ask_decoupled, ask_decoupled_aio])
def test_every_call_of_the_decoupled_clients_shows_it(server: ClientServer, asked: Any) -> None:
    assert asked(server.url("grpc"), access_token=TOKEN) == [0, 1]


@pytest.mark.parametrize("asked", [ask, ask_futures, ask_aio, ask_decoupled, ask_decoupled_aio])
@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_wrong_token_is_told_at_once_over_grpc(server: ClientServer, asked: Any, token: str | None) -> None:
    with pytest.raises(ClientInferenceServerError, match="is restricted, expecting header"):
        asked(server.url("grpc"), access_token=token, init_timeout_s=300)


@pytest.mark.parametrize("asked", [ask_futures, ask_aio])
def test_a_wrong_token_over_http(server: ClientServer, asked: Any) -> None:
    with pytest.raises(ClientError, match=r"is restricted, expecting header|timed out"):
        asked(server.url("http"), access_token="wrong", init_timeout_s=0.2)


def test_a_client_made_from_another_shows_the_token_too(url: str) -> None:
    with contextlib.ExitStack() as opened:
        first = opened.enter_context(ModelClient(url, "echo", access_token=TOKEN))
        second = opened.enter_context(ModelClient.from_existing_client(first))
        np.testing.assert_array_equal(second.infer_sample(ROW)["y"], ROW)
