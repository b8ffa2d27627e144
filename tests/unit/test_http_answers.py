"""Whole answers of the HTTP endpoints, and the JSON bodies of the endpoints besides inference."""

from __future__ import annotations

import json

import pytest

from gpuserve.core.errors import InvalidArgument, NotFound, Unavailable
from gpuserve.front.protocols.access.endpoints import RouteError
from gpuserve.front.protocols.http.http_responses import (
    JSON_OK,
    UnsupportedCoding,
    error_answer,
    error_body,
    forbidden_answer,
    json_answer,
    route_error_answer,
)
from gpuserve.front.protocols.http.management_endpoints import parse_index_body

JSON = (b"content-type", b"application/json")


def test_written_forms() -> None:
    assert error_body('no "x"') == b'{"error":"no \\"x\\""}'
    assert json_answer([1, {"a": None}]) == (JSON_OK, b'[1,{"a":null}]')
    assert json_answer(b"written already") == (JSON_OK, b"written already")


def test_any_error_text_can_be_written() -> None:
    text = "half a pair \ud800 and a NUL \0"
    assert json.loads(error_body(text)) == {"error": text}


def test_errors() -> None:
    head, body = error_answer(NotFound("no model"), {"left": 3})
    assert (head.status, head.headers, body) == (404, (JSON,), b'{"error":"no model","left":3}')
    head, _ = error_answer(Unavailable("later"))
    assert (head.status, head.headers) == (503, (JSON, (b"retry-after", b"1")))
    head, _ = error_answer(UnsupportedCoding("what"))
    assert (head.status, head.headers) == (501, (JSON, (b"accept-encoding", b"gzip, deflate")))
    head, body = route_error_answer(RouteError(405, "Method Not Allowed", "GET"))
    assert (head.status, head.headers) == (405, (JSON, (b"allow", b"GET")))
    assert forbidden_answer(Unavailable("no token")).head.status == 403


@pytest.mark.parametrize(
    ("body", "ready"),
    [(b"", False), (b" \n", False), (b"{}", False), (b'{"ready":true}', True), (b'{"ready":null}', False)],
)
def test_index_request(body: bytes, ready: bool) -> None:
    assert parse_index_body(body) is ready


@pytest.mark.parametrize(
    "value", [b"1", b'"true"', b"[true]", b"[" * 250_000 + b"]" * 250_000, b"[" * 250_000]
)
def test_index_request_that_asks_for_nonsense(value: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_index_body(b'{"ready":' + value + b"}")
    assert str(caught.value) == "Invalid value for 'ready': expected a boolean"


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b"\xff"])
def test_index_request_that_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="JSON"):
        parse_index_body(body)
