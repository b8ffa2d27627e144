"""/generate and /generate_stream of a real server, asked the way curl would."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_file import served
from serving import Addresses

TIMEOUT_S = 15.0
MODELS = Path(__file__).resolve().parents[1] / "models"


def entry(name: str, dtype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    tensor = {"dtype": dtype, "shape": shape}
    return {
        "name": name,
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "max_batch_size": 4,
        **more,
    }


def stream(name: str, **more: Any) -> dict[str, Any]:
    return entry(name, "int32", [-1], callable=f"{MODELS}/streams.py:{name}", **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, closed_at: Path) -> Iterator[Addresses]:
    names = ("count", "fails_half_way", "endless")
    models = [stream(name, decoupled=True) for name in names]
    models += [stream("awaited")]
    models += [entry("echo", "bytes", [-1], callable=f"{MODELS}/v2_models.py:echo")]
    models += [entry("square", "float32", [2, -1], callable=f"{MODELS}/v2_models.py:echo")]
    with served(tmp_path_factory.mktemp("generate"), models) as addresses:
        yield addresses


def post(server: Addresses, path: str, body: Any, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection(server.http, timeout=TIMEOUT_S)
    try:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/{path}", text, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["content-type"], answer.read().decode()
    finally:
        connection.close()


def events(text: str) -> list[Any]:
    assert text == "" or text.endswith("\n\n")
    return [json.loads(one.removeprefix("data: ")) for one in text.split("\n\n")[:-1]]


def test_one_response_as_a_plain_object(server: Addresses) -> None:
    status, kind, text = post(server, "echo/generate", {"x": "hello", "id": "7", "temperature": 0.5})
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == {"model_name": "echo", "model_version": "1", "id": "7", "y": "hello"}


def test_many_elements_are_a_list_and_shapes_are_made_to_fit(server: Addresses) -> None:
    assert json.loads(post(server, "echo/generate", {"x": ["a", "b"]})[2])["y"] == ["a", "b"]
    assert json.loads(post(server, "square/generate", {"x": [1, 2, 3, 4]})[2])["y"] == [1, 2, 3, 4]
    status, _, text = post(server, "square/generate", {"x": [1, 2, 3]})
    assert status == 400
    assert "can not convert input 'x' to tensor with proper shape" in text


def test_inputs_may_stand_in_parameters(server: Addresses) -> None:
    assert json.loads(post(server, "echo/generate", {"parameters": {"x": "in"}})[2])["y"] == "in"
    assert post(server, "echo/generate", {"parameters": 5})[0] == 400
    twice = {"x": "a", "parameters": {"x": "b"}}
    assert "input 'x' already exists in request" in post(server, "echo/generate", twice)[2]
    twice = {"z": "a", "x": "a", "parameters": {"z": "b"}}
    assert "'z' is given twice, at the top and in 'parameters'" in post(server, "echo/generate", twice)[2]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[1]", "must be a JSON object"),
        (b"{", "failed to parse the request JSON buffer"),
        (b'{"x": {"a": 1}}', "must hold strings"),
        (
            b'{"x": "a", "other": [1]}',
            "parameter 'other' has invalid type. It should be either 'int', 'bool', or",
        ),
        (b'{"x": "a", "x": "b"}', "input 'x' already exists in request"),
        (b'{"x": "a", "z": 1, "z": 2}', 'key "z" is given twice in one object'),
        (b'{"other": 1}', "missing required input(s) ['x']"),
    ],
)
def test_a_wrong_body_is_refused(server: Addresses, body: bytes, text: str) -> None:
    for path in ("generate", "generate_stream"):
        status, kind, answer = post(server, f"echo/{path}", body)
        assert (status, kind) == (400, "application/json")
        assert text in json.loads(answer)["error"]


def test_a_coding_is_refused(server: Addresses) -> None:
    status, _, text = post(server, "echo/generate", {"x": "a"}, **{"Content-Encoding": "gzip"})
    assert status == 400
    assert "only 'identity' is supported" in text


def test_unknown_models_are_not_found(server: Addresses) -> None:
    assert post(server, "nothing/generate", {})[0] == 404
    assert post(server, "nothing/generate_stream", {})[0] == 404


def test_a_stream_of_events(server: Addresses) -> None:
    status, kind, text = post(server, "count/generate_stream", {"x": 3})
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert [one["y"] for one in events(text)] == [0, 1, 2]


def test_a_stream_may_be_empty(server: Addresses) -> None:
    status, kind, text = post(server, "count/generate_stream", {"x": 0})
    assert (status, kind, text) == (200, "text/event-stream; charset=utf-8", "")


def test_a_model_with_one_response_streams_it(server: Addresses) -> None:
    assert [one["y"] for one in events(post(server, "awaited/generate_stream", {"x": 1})[2])] == [8]


def test_generate_wants_exactly_one_response(server: Addresses) -> None:
    assert json.loads(post(server, "count/generate", {"x": 1})[2])["y"] == 0
    for wanted in (0, 2):
        status, _, text = post(server, "count/generate", {"x": wanted})
        assert status == 500
        assert "generate expects model to produce exactly 1 response" in text


def test_an_error_after_responses_is_an_event(server: Addresses) -> None:
    status, _, text = post(server, "fails_half_way/generate_stream", {"x": 1})
    *responses, error = events(text)
    assert status == 200
    assert [one["y"] for one in responses] == [0, 1, 2]
    assert error == {"error": "no more words"}


def test_a_client_that_leaves_ends_the_generator(server: Addresses, closed_at: Path) -> None:
    closed_at.unlink(missing_ok=True)
    connection = http.client.HTTPConnection(server.http, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/endless/generate_stream", json.dumps({"x": 1}))
    answer = connection.getresponse()
    assert answer.read(6) == b"data: "
    answer.close()
    connection.close()
    started = time.monotonic()
    while not closed_at.exists():
        assert time.monotonic() - started < TIMEOUT_S
