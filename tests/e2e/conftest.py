"""One server with many small models, for the tests of the protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
from config_file import models, write_config
from grpc._cython import cygrpc
from serving import GPUSERVE, Addresses, serving


@pytest.fixture(autouse=True, scope="session")
def _grpc_aio() -> Iterator[None]:
    """Keeps grpc.aio's poller for the whole run: it goes with its last channel, whenever that is collected,
    and its sockets would be counted against whichever test runs then.
    """

    async def start() -> None:  # it asks for an event loop, whichever
        cygrpc.init_grpc_aio()

    asyncio.run(start())
    yield
    cygrpc.shutdown_grpc_aio()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """The models of ``models()``; where the module has ``SERVED``, those, as each is a process to start."""
    folder = tmp_path_factory.mktemp("server")
    config = write_config(folder, models(*getattr(request.module, "SERVED", ())), host="127.0.0.1")
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    """A client of the server over gRPC."""
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def closed_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that a callable of ``streams.py`` makes when its generator is closed."""
    path = tmp_path_factory.mktemp("closed") / "at"
    os.environ["CLOSED_AT"] = str(path)
    yield path
    del os.environ["CLOSED_AT"]
