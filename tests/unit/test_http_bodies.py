"""The JSON bodies of the endpoints besides inference."""

from __future__ import annotations

import json

import pytest

from gpuserve.errors import InvalidArgument
from gpuserve.front.endpoint.http_bodies import (
    error_body,
    json_headers,
    live_body,
    model_metadata_body,
    parse_repository_index,
    ready_body,
    repository_index_body,
    server_metadata_body,
)
from gpuserve.front.endpoint.v2 import IndexEntry
from gpuserve_worker.tensor import TensorSpec


def test_written_forms() -> None:
    assert live_body(True) == b'{"live":true}'
    assert ready_body(False) == b'{"ready":false}'
    assert error_body('no "x"') == b'{"error":"no \\"x\\""}'
    assert server_metadata_body("triton", "1", ["a"]) == b'{"name":"triton","version":"1","extensions":["a"]}'
    assert model_metadata_body(
        "m", ["1"], "python", [TensorSpec("x", "FP32", (-1, 4))], [TensorSpec("y", "BYTES", (1,), False)]
    ) == (
        b'{"name":"m","versions":["1"],"platform":"python",'
        b'"inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}],'
        b'"outputs":[{"name":"y","datatype":"BYTES","shape":[1]}]}'
    )


def test_any_error_text_can_be_written() -> None:
    text = "half a pair \ud800 and a NUL \0"
    assert json.loads(error_body(text)) == {"error": text}


def test_index_leaves_out_what_is_empty() -> None:
    entries = [
        IndexEntry("a", "1", "READY"),
        IndexEntry("b", "1", "UNAVAILABLE", "unloaded"),
        IndexEntry("c"),
    ]
    assert json.loads(repository_index_body(entries)) == [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "c"},
    ]
    assert repository_index_body([]) == b"[]"


def test_headers() -> None:
    assert json_headers(b"[]") == [(b"content-type", b"application/json"), (b"content-length", b"2")]


@pytest.mark.parametrize(
    ("body", "ready"),
    [(b"", False), (b" \n", False), (b"{}", False), (b'{"ready":true}', True), (b'{"ready":false}', False)],
)
def test_index_request(body: bytes, ready: bool) -> None:
    assert parse_repository_index(body) is ready


@pytest.mark.parametrize(
    "value", [b"1", b'"true"', b"null", b"[true]", b"[" * 250_000 + b"]" * 250_000, b"[" * 250_000]
)
def test_index_request_that_asks_for_nonsense(value: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_repository_index(b'{"ready":' + value + b"}")
    assert str(caught.value) == "Invalid value for 'ready': expected a boolean"


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b"\xff"])
def test_index_request_that_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="JSON"):
        parse_repository_index(body)
