"""The admin API of a running server: what operators ask of it over HTTP, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi import check_openapi
from repositories import Client, clients_are_closed, entry, write
from serving import GPUSERVE, JSON_LOG, Addresses, answered, serving

from gpuserve.front.protocols.openapi.openapi_document import template

__all__ = ["clients_are_closed"]  # it is for every test here
PATHS = [path.replace("{model_name}", "m") for path in template("admin.json")["paths"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The config file and the addresses of a server of "m" and "other"."""
    path = tmp_path_factory.mktemp("admin") / "config.yaml"
    models = entry("m", 1.0), entry("other", 2.0), entry("later", 3.0)
    settings = {"model_control": "explicit", "load_at_start": ["m", "other"]}
    write(path, *models, host="127.0.0.1", admin_api=True, **settings)
    with serving(GPUSERVE, "serve", str(path), *JSON_LOG) as addresses:
        yield path, addresses


@pytest.fixture
def addresses(server: tuple[Path, Addresses]) -> Addresses:
    return server[1]


def post(address: str, path: str, document: Any = None) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    body = None if document is None else json.dumps(document).encode()
    status, headers, answer = answered(address, "POST", f"/v2/admin/{path}", body)
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(answer)


def status_of(address: str) -> Any:
    status, _, body = answered(address, "GET", "/v2/admin/status")
    assert status == 200, body
    return json.loads(body)


def instances(address: str, model: str) -> list[dict[str, Any]]:
    return next(one["instances"] for one in status_of(address)["models"] if one["name"] == model)


def is_ready(address: str) -> bool:
    return answered(address, "GET", "/v2/health/ready")[0] == 200


# ---- what is asked ------------------------------------------------------------------------------


def test_the_status(addresses: Addresses) -> None:
    told = status_of(addresses.http)
    assert told["server"]["state"] == "SERVING"
    assert told["server"]["addresses"]["http"].endswith(addresses.http.rpartition(":")[2])
    assert {one["name"] for one in told["models"]} >= {"m", "other"}
    (worker,) = instances(addresses.http, "m")
    assert worker["pid"] == Client("http", addresses.http).infer("m").pid


def test_models_are_unloaded_and_loaded(addresses: Addresses) -> None:
    client = Client("http", addresses.http)
    assert post(addresses.http, "models/other/unload")[0] == 200
    assert not client.asked.is_model_ready("other")
    assert post(addresses.http, "models/other/unload") == (400, {"error": "model 'other' is not loaded"})
    assert post(addresses.http, "models/other/load", {})[0] == 200
    assert client.infer("other").tag == 2.0
    again = post(addresses.http, "models/other/load")
    assert again == (200, {"text": "model 'other' is loaded already"})


def test_a_model_is_loaded_anew(server: tuple[Path, Addresses]) -> None:
    _, addresses = server
    client = Client("http", addresses.http)
    before = client.infer("m").pid
    assert post(addresses.http, "models/m/reload")[0] == 200
    assert client.infer("m").pid != before


def test_a_model_is_scaled(addresses: Addresses) -> None:
    status, result = post(addresses.http, "models/m/scale", {"instances": 3})
    assert (status, result["models"]) == (200, {"m": {"before": 1, "after": 3}})
    assert len(instances(addresses.http, "m")) == 3
    status, result = post(addresses.http, "models/m/scale", {"instances": 1})
    assert (status, result["models"]) == (200, {"m": {"before": 3, "after": 1}})
    assert len(instances(addresses.http, "m")) == 1


def test_the_config_is_read_anew(server: tuple[Path, Addresses]) -> None:
    path, addresses = server
    status, result = post(addresses.http, "reload")
    assert (status, result["reloaded"], result["failed"]) == (200, [], [])
    good = path.read_text()
    path.write_text("models: 5")
    try:
        status, result = post(addresses.http, "reload")
    finally:
        path.write_text(good)
    assert (status, next(iter(result))) == (400, "error")
    assert Client("http", addresses.http).infer("m").tag == 1.0


@pytest.mark.parametrize("times", [1, 2])
def test_a_drain_is_over_while_its_own_request_waits_and_can_be_undone(
    addresses: Addresses, times: int
) -> None:
    for _ in range(times):
        status, result = post(addresses.http, "drain", {"timeout_s": 20})
        assert (status, result["unfinished"]) == (200, 0)
        assert not is_ready(addresses.http)
    assert Client("http", addresses.http).infer("m").tag == 1.0  # all that comes is served
    assert post(addresses.http, "drain", {"undo": True})[0] == 200
    assert is_ready(addresses.http)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["load", "unload", "reload", "scale"])
def test_a_model_that_there_is_not(addresses: Addresses, verb: str) -> None:
    body = {"instances": 2} if verb == "scale" else None
    status, told = post(addresses.http, f"models/othr/{verb}", body)
    assert status == 404
    assert "'othr'" in told["error"]
    assert "'other'" in told["error"]
    for name in ("%00", "..%2F..%2Fetc", "m" * 5000, "%ff", "a%0d%0ab"):
        status, told = post(addresses.http, f"models/{name}/{verb}", body)
        assert status == 404
        assert len(told["error"]) < 500


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("drain", b"{", "failed to parse the request JSON buffer"),
        ("drain", b'{"undo":true,"timeout_s":1}', "timeout_s"),
        ("models/m/scale", b'{"instances":0}', "'instances': expected an integer from 1"),
        ("models/m/load", b'{"parameters":{}}', "unknown member 'parameters'"),
        ("reload", b" " * 70_000, "the request body is over the limit of 65536 bytes"),
    ],
)
def test_bodies_that_cannot_be(addresses: Addresses, path: str, body: bytes, text: str) -> None:
    status, headers, answer = answered(addresses.http, "POST", f"/v2/admin/{path}", body)
    assert status == 400
    assert text in json.loads(answer)["error"]
    assert headers["Content-Type"] == "application/json"
    assert is_ready(addresses.http)
    assert len(instances(addresses.http, "m")) == 1


@pytest.mark.parametrize("path", PATHS)
def test_other_methods(addresses: Addresses, path: str) -> None:
    allowed = "GET" if path.endswith("/status") else "POST"
    for method in {"GET", "POST", "PUT", "DELETE"} - {allowed}:
        status, headers, _ = answered(addresses.http, method, path)
        assert (status, headers["Allow"]) == (405, allowed)


@pytest.mark.parametrize("path", PATHS)
def test_the_metrics_port_has_none_of_it(addresses: Addresses, path: str) -> None:
    for method in ("GET", "POST"):
        assert answered(addresses.metrics, method, path)[0] == 404


def test_it_is_described(addresses: Addresses) -> None:
    document = json.loads(answered(addresses.http, "GET", "/openapi.json")[2])
    check_openapi(document)
    assert "/v2/admin/models/{model_name}/scale" in document["paths"]


def test_it_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", entry("m"), host="127.0.0.1", remote_control=["admin"])
    with serving(GPUSERVE, "serve", str(path), *JSON_LOG) as addresses:
        nowhere = answered(addresses.http, "GET", "/v2/nowhere")
        for one in PATHS:
            for method in ("GET", "POST", "DELETE"):
                status, _, body = answered(addresses.http, method, one)
                assert (status, body) == (nowhere[0], nowhere[2])
        assert b"admin" not in answered(addresses.http, "GET", "/openapi.json")[2]


@pytest.mark.thorough
def test_the_flag_and_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "config.yaml", entry("m"), host="127.0.0.1")
    monkeypatch.setitem(os.environ, "GPUSERVE_SERVER__ADMIN_API", "true")
    with serving(GPUSERVE, "serve", str(path), *JSON_LOG) as addresses:
        assert status_of(addresses.http)["server"]["state"] == "SERVING"
