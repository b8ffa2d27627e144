"""What a server says of itself and its models: health, metadata, repository index, metrics."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import grpc
import pytest
import tritonclient.grpc
import tritonclient.http
from prometheus_client.parser import text_string_to_metric_families
from serving import Addresses, answered
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from gpuserve import __version__

SERVED = ("echo_FP32", "flat_FP32", "optional")
#: In Triton's order.
EXTENSIONS = [
    *("classification", "sequence", "model_repository", "model_repository(unload_dependents)"),
    *("schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory"),
    *("binary_tensor_data", "parameters", "statistics", "trace", "logging"),
]
CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}


def client(server: Addresses, protocol: str) -> Any:
    return CLIENTS[protocol].InferenceServerClient(server.grpc if protocol == "grpc" else server.http)


def get(address: str, path: str, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(f"http://{address}{path}", body, timeout=10) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("protocol", CLIENTS)
def test_health_and_metadata(server: Addresses, protocol: str) -> None:
    with client(server, protocol) as asked:
        assert asked.is_server_live()
        assert asked.is_server_ready()
        assert asked.is_model_ready("echo_FP32")
        assert asked.is_model_ready("echo_FP32", "1")
        assert not asked.is_model_ready("nope")
        found = asked.get_server_metadata() if protocol == "http" else asked.get_server_metadata(as_json=True)
        assert found == {"name": "gpuserve", "version": __version__, "extensions": EXTENSIONS}


def test_the_models_have_a_list(server: Addresses) -> None:
    status, _, body = answered(server.http, "GET", "/v2/models")
    assert (status, "echo_FP32" in json.loads(body)["models"]) == (200, True)


@pytest.mark.parametrize(
    ("path", "status"), [("echo_FP32/versions/1", 200), ("echo_FP32/versions/2", 404), ("nope", 404)]
)
def test_whether_a_model_is_ready_by_path(server: Addresses, path: str, status: int) -> None:
    assert answered(server.http, "GET", f"/v2/models/{path}/ready")[0] == status


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v2/models/echo_FP32/nope", 404, None),
        ("GET", "/v2/models/echo_FP32/versions/x", 404, None),
        ("POST", "/v2", 405, "GET"),
        ("DELETE", "/v2/models/echo_FP32", 405, "GET"),
        ("GET", "/v2/repository/index", 405, "POST"),
    ],
)
def test_paths_and_methods_that_are_not_served(
    server: Addresses, method: str, path: str, status: int, allowed: str | None
) -> None:
    got, headers, body = answered(server.http, method, path)
    assert (got, headers["Allow"], headers["Content-Type"]) == (status, allowed, "application/json")
    assert list(json.loads(body)) == ["error"]


def test_model_metadata(server: Addresses) -> None:
    expected = {
        "name": "optional",
        "versions": ["1"],
        "platform": "python",
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [-1, 1]},
            {"name": "b", "datatype": "FP32", "shape": [-1, 1]},
        ],
        "outputs": [
            {"name": "sum", "datatype": "FP32", "shape": [-1, 1]},
            {"name": "given", "datatype": "BYTES", "shape": [-1, 1]},
        ],
    }
    assert (
        get(server.http, "/v2/models/optional")
        == get(server.http, "/v2/models/optional/versions/1")
        == expected
    )
    with client(server, "grpc") as asked:
        found = asked.get_model_metadata("optional", as_json=True)
    assert found["inputs"][1] == {"name": "b", "datatype": "FP32", "shape": ["-1", "1"]}
    assert get(server.http, "/v2/models/flat_FP32")["inputs"][0]["shape"] == []


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize(("name", "version"), [("nope", ""), ("echo_FP32", "2")])
@pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config"])
def test_a_model_that_does_not_exist_is_not_described(
    server: Addresses, protocol: str, method: str, name: str, version: str
) -> None:
    with (
        client(server, protocol) as asked,
        pytest.raises(InferenceServerException, match="unknown model") as raised,
    ):
        getattr(asked, method)(name, version)
    assert raised.value.status() in {"404", "StatusCode.NOT_FOUND"}


def test_the_repository_index(server: Addresses) -> None:
    names = sorted(SERVED)
    for body in (b"", b'{"ready": true}'):
        index = get(server.http, "/v2/repository/index", body)
        assert [one["name"] for one in index] == names
        assert {(one["version"], one["state"], one["reason"]) for one in index} == {("1", "READY", "")}
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for ready in (False, True):
            index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=ready)).models
            assert [(one.name, one.version, one.state) for one in index] == [(n, "1", "READY") for n in names]
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(server.http, "/v2/repository/index", b'{"ready": ' + b"[" * 250_000)
    with raised.value as answer:
        assert json.loads(answer.read()) == {"error": "Invalid value for 'ready': expected a boolean"}


def test_the_metrics_page_parses_and_the_metrics_port_has_nothing_else(server: Addresses) -> None:
    address = server.metrics.removeprefix("http://").removesuffix("/metrics")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        families = {one.name: one for one in text_string_to_metric_families(page.read().decode())}
    up = families["gpuserve_worker_up"].samples
    assert {sample.labels["model"] for sample in up} == set(SERVED)
    assert {sample.value for sample in up} == {1.0}
    assert answered(address, "GET", "/v2/health/ready")[::2] == (200, b"")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(address, "/v2/models/echo_FP32")


def test_model_config(server: Addresses) -> None:
    path = "/v2/models/optional"
    config = get(server.http, f"{path}/config")
    assert config == get(server.http, f"{path}/versions/1/config")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("optional", "python", 8)
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [
        ("a", "TYPE_FP32", [1]),
        ("b", "TYPE_FP32", [1]),
    ]
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    with client(server, "http") as asked:
        assert asked.get_model_config("optional") == config
    with client(server, "grpc") as asked:
        found = asked.get_model_config("optional", "1").config
    assert (found.name, found.max_batch_size, found.input[1].optional) == ("optional", 8, True)
    assert found.instance_group[0].count == config["instance_group"][0]["count"] == 1
