"""One server with many small models, for the tests of the protocol. Each transport has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from config_file import models, write_config
from grpc._cython import cygrpc
from serving import GPUSERVE, Addresses, serving

#: Where what is tried is done by the transport itself, and not by the service behind both of them.
_OF_THE_TRANSPORT = frozenset(
    {
        "test_client_decoupled.py",
        "test_health_services.py",
        "test_reflection.py",
        "test_streams.py",
        "test_streams_end.py",
        "test_v2_access_table.py",
        "test_v2_bad_input.py",
        "test_v2_connections.py",
        "test_v2_hostile.py",
        "test_v2_inference.py",
        "test_v2_tls.py",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the thorough run what a transport beside our own does not do itself; grpc.aio serves the gRPC
    port only.
    """
    for item in items:
        parameters = getattr(item, "callspec", None)
        values = [one for one in parameters.params.values() if isinstance(one, str)] if parameters else []
        of_transport = item.path.name in _OF_THE_TRANSPORT
        if ("grpcio" in values and ("http" in values or not of_transport)) or (
            "h2corn" in values and not of_transport
        ):
            item.add_marker(pytest.mark.thorough)


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


@pytest.fixture(scope="module", params=["native", "grpcio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """The models of ``models()``, over each transport."""
    folder = tmp_path_factory.mktemp("server")
    config = write_config(folder, models(), host="127.0.0.1", transport=request.param)
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses
