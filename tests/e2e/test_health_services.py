"""The services of ``grpc.health.v1``, on both ports of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from config_file import model, served, tensor
from serving import Addresses

TIMEOUT_S = 15.0
SERVICES = ["", "readiness", "liveness", "startup", "model/echo", "inference.GRPCInferenceService"]
UNKNOWN = ["nope", "model/nope", "model/", "model", "echo", "Readiness", "../model/echo"]
SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x03"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    echo = model("echo", "echo", [tensor("x", "UINT8", -1)], [tensor("y", "UINT8", -1)], 4)
    folder: Path = tmp_path_factory.mktemp("health")
    with served(folder, [echo]) as addresses:
        yield addresses


@pytest.fixture(params=["grpc", "http"])
def channel(request: pytest.FixtureRequest, server: Addresses) -> Iterator[Any]:
    """Either port answers gRPC."""
    with grpc.insecure_channel(getattr(server, request.param)) as opened:
        yield opened


def request(service: str) -> bytes:
    return b"\x0a" + bytes([len(service)]) + service.encode()


def check(channel: Any, service: str) -> Any:
    return channel.unary_unary("/grpc.health.v1.Health/Check")(request(service), timeout=TIMEOUT_S)


def first_seen(channel: Any, service: str) -> Any:
    changes = channel.unary_stream("/grpc.health.v1.Health/Watch")(request(service), timeout=TIMEOUT_S)
    try:
        return next(changes)
    finally:
        changes.cancel()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_checked_and_watched(channel: Any, service: str) -> None:
    assert check(channel, service) == SERVING
    assert first_seen(channel, service) == SERVING


@pytest.mark.parametrize("service", UNKNOWN)
def test_one_that_does_not_exist(channel: Any, service: str) -> None:
    with pytest.raises(grpc.RpcError, match="no service") as raised:
        check(channel, service)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert first_seen(channel, service) == SERVICE_UNKNOWN


def test_an_empty_request_is_about_the_server(channel: Any) -> None:
    empty = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=TIMEOUT_S)
    assert empty == SERVING
