"""``/openapi.json`` and ``/docs`` of a running server, and whether what they say is so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from config_file import model, models, served, tensor, write_config
from openapi import check_openapi
from serving import GPUSERVE, Addresses, answered, serving

TIMEOUT_S = 15.0
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """Its name and those of an input and an output are markup."""
    wide = model("wide", "echo", [tensor("x", "UINT8", 500)], [tensor("y", "UINT8", 500)], 4)
    named = model("named", "echo_list", [tensor(HOSTILE, "INT8", 2)], [tensor(f"{HOSTILE}2", "INT8", 2)])
    config = write_config(
        tmp_path_factory.mktemp("s"), [*models(), wide, named], host="127.0.0.1", name=HOSTILE
    )
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


def description(server: Addresses) -> Any:
    return json.loads(answered(server.http, "GET", "/openapi.json")[2])


def test_the_description_is_valid_and_says_what_is_loaded(server: Addresses) -> None:
    status, headers, body = answered(server.http, "GET", "/openapi.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert headers["X-Content-Type-Options"] == "nosniff"
    document = json.loads(body)
    check_openapi(document)
    assert document["info"]["title"] == HOSTILE
    for one in models():
        assert f"/v2/models/{one['name']}/infer" in document["paths"]


#: What is answered as long as somebody reads it.
ENDLESS = {"/dashboard/live"}


def examples(document: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Every GET and every example: method, path, body and the content that the answer may have."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            complete = "example" in content and "x-left-out" not in content
            if "{" not in path and (method == "get" or complete) and path not in ENDLESS:
                answer = operation["responses"]["200"]
                if reference := answer.get("$ref"):
                    answer = document["components"]["responses"][reference.rpartition("/")[2]]
                yield method, path, content.get("example"), answer["content"]


def test_every_example_is_answered(server: Addresses) -> None:
    tried = set()
    for method, path, body, content in examples(description(server)):
        status, headers, answer = answered(server.http, method.upper(), path, body)
        assert status == 200, (path, answer)
        assert headers["Content-Type"].partition(";")[0] in content
        tried.add(path)
    assert {"/v2", "/metrics", "/v2/models/echo_BYTES/infer", "/v2/models/named/generate_stream"} <= tried


def test_an_example_comes_back_as_the_description_says(server: Addresses) -> None:
    post = description(server)["paths"]["/v2/models/echo_FP32/infer"]["post"]
    sent = post["requestBody"]["content"]["application/json"]["example"]
    _, _, body = answered(server.http, "POST", "/v2/models/echo_FP32/infer", sent)
    assert json.loads(body) == post["responses"]["200"]["content"]["application/json"]["example"]


def test_the_page_is_the_same_whatever_the_names_are(server: Addresses) -> None:
    status, headers, body = answered(server.http, "GET", "/docs")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert HOSTILE.encode() not in body
    assert b"named" not in body


def test_one_request_more_than_a_page_needs_is_refused(server: Addresses) -> None:
    for path in ("/openapi.json", "/docs", "/v2/health/live"):
        for method in ("POST", "HEAD", "OPTIONS", "DELETE"):
            status, headers, _ = answered(server.http, method, path)
            assert (status, headers["Allow"]) == (405, "GET"), (method, path)
        assert answered(server.http, "GET", f"{path}/")[0] == 404


def test_the_metrics_port_has_neither(server: Addresses) -> None:
    for path in ("/openapi.json", "/docs"):
        assert answered(server.metrics, "GET", path)[0] == 404


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v2/health/live", b'{"live":true}'),
        ("/v2/health/ready", b'{"ready":true}'),
        ("/v2/health/startup", b'{"started":true}'),
        ("/v2/models/wide/ready", b'{"ready":true}'),
    ],
)
def test_health_answers_have_a_body_only_for_clients_that_ask_for_json(
    server: Addresses, path: str, document: bytes
) -> None:
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "text/html, */*;q=0.8"}):
        status, headers, body = answered(server.http, "GET", path, **accept)
        assert (status, body) == (200, b"")
        assert (headers["Content-Length"], headers["Content-Type"]) == ("0", "text/plain")
    for wanted in ("application/json", "text/html, Application/JSON;q=0.9"):
        status, headers, body = answered(server.http, "GET", path, Accept=wanted)
        assert (status, headers["Content-Type"], body) == (200, "application/json", document)


def test_a_script_of_triton_reads_the_status_behind_an_empty_body(server: Addresses) -> None:
    for path in ("health/live", "health/ready", "models/wide/ready"):
        command = ["curl", "-s", "-w", "%{http_code}", f"http://{server.http}/v2/{path}"]
        assert subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True).stdout == b"200"


def test_restricted_metadata_closes_both(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"restricted_endpoints": ["metadata"], "access_token": "right"}
    echo = [one for one in models() if one["name"] == "echo_FP32"]
    with served(tmp_path_factory.mktemp("s"), echo, **settings) as closed:
        for path in ("/openapi.json", "/docs"):
            assert answered(closed.http, "GET", path)[0] == 403
            assert answered(closed.http, "GET", path, **{"triton-access-token": "right"})[0] == 200
