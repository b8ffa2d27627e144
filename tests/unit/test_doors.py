"""The doors under ASGI servers that do what the specification allows and ours do not do."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gpuserve.front.endpoint.asgi import Application, Doors
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.grpc_asgi import GrpcDoor
from gpuserve.front.endpoint.http import HttpDoor
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.scheduler.driver import ModelDriver
from gpuserve.spec import InstanceSpec, ModelSpec
from gpuserve_worker.tensor import TensorSpec

SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (-1,)),),
    (TensorSpec("y", "FP32", (-1,)),),
    8,
    (InstanceSpec("cpu#0", "cpu", {}),),
)


def scope(**fields: Any) -> dict[str, Any]:
    base = {"type": "http", "method": "POST", "path": "/v2", "http_version": "2", "headers": []}
    return {**base, "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "extensions": {}, **fields}


class Gone(OSError):
    """What a server's ``send()`` raises once the client has left."""


async def _call(asked: dict[str, Any], body: list[bytes], sent: list[dict[str, Any]], gone: bool) -> None:
    service = InferenceService("test")
    service.add_model(ModelDriver(SPEC, 1 << 20, ModelMetrics("m", "1", dict)))
    watch = DisconnectWatch()
    http = HttpDoor(service, watch, 1 << 20)
    doors: Application = Doors(GrpcDoor(service, watch, 1 << 20), http, http.metrics_only, None)
    rest = [{"type": "http.request", "body": one, "more_body": True} for one in body] or [{}]
    rest[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return rest.pop(0) if rest else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if gone:
            raise Gone
        sent.append(message)

    try:
        await doors(asked, receive, send)
    finally:
        for driver in service.models():
            driver.close()


def call(asked: dict[str, Any], *body: bytes, gone: bool = False) -> list[dict[str, Any]]:
    """What the application sends."""
    sent: list[dict[str, Any]] = []
    asyncio.run(_call(asked, list(body), sent, gone))
    return sent


def error(sent: list[dict[str, Any]]) -> tuple[int, str]:
    """(status, text) of a failed HTTP request."""
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]


@pytest.mark.parametrize(
    ("path", "name"), [("/v2/models/%6d/infer", "%6d"), ("/v2/models/a%2fb/infer", "a%2fb")]
)
def test_a_path_is_decoded_once_where_the_server_did_it(path: str, name: str) -> None:
    assert error(call(scope(path=path), b"{}")) == (404, f"Request for unknown model: '{name}' is not found")


def test_a_length_of_thousands_of_digits_is_no_length() -> None:
    headers = [(b"content-length", b"9" * 5000)]
    status, _ = error(call(scope(path="/v2/models/m/infer", headers=headers), b"{", b"]"))
    assert status == 400


@pytest.mark.parametrize(
    "asked",
    [
        scope(method="GET"),
        scope(path="/nope"),
        scope(path="/v2/models/m/infer"),
        scope(path="/inference.GRPCInferenceService/ModelInfer"),
        scope(
            path="/inference.GRPCInferenceService/ServerLive",
            headers=[(b"content-type", b"application/grpc")],
            extensions={"http.response.trailers": {}},
        ),
        scope(
            path="/grpc.health.v1.Health/Watch",
            headers=[(b"content-type", b"application/grpc")],
            extensions={"http.response.trailers": {}},
        ),
    ],
)
def test_a_client_that_left_before_its_answer_is_no_defect(
    asked: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert call(asked, b"\0\0\0\0\0", gone=True) == []
    assert caplog.records == []


def test_a_call_over_a_connection_without_trailers_is_told_why() -> None:
    (start, _) = call(scope(path="/inference.GRPCInferenceService/ModelInfer"), b"\0\0\0\0\0")
    headers = dict(start["headers"])
    assert headers[b"grpc-status"] == b"3"
    assert b"'te: trailers'" in headers[b"grpc-message"]


def test_a_websocket_is_closed_before_it_is_accepted() -> None:
    assert call(scope(type="websocket")) == [{"type": "websocket.close"}]
