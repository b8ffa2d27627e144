"""Whole answers of the HTTP endpoints, and the JSON bodies of the endpoints besides inference."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable, Unimplemented
from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.protocols.access.body_decoding import FREE_NBYTES, SLICE_NBYTES, Inflater, inflate
from gpuserve.front.protocols.access.endpoints import RouteError
from gpuserve.front.protocols.http.http_responses import (
    JSON_OK,
    UnsupportedCoding,
    compress_response,
    error_answer,
    error_body,
    forbidden_answer,
    json_answer,
    negotiate_coding,
    request_coding,
    route_error_answer,
)
from gpuserve.front.protocols.http.management_endpoints import parse_index_body
from gpuserve.front.requests.limits import InflationLimits

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


# ---- http encoding ---------------------------------------------------------------------------


COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}


def decompress(coding: str, body: bytes | memoryview, limit_nbytes: int) -> bytes:
    return inflate(body, coding, InflationLimits(limit_nbytes, 1 << 20))


def fed(inflater: Inflater, data: bytes, *, end: bool = False) -> bytes:
    return b"".join(one.data for one in inflater.slices(data, end=end))


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (None, "identity"),
        ("", "identity"),
        ("identity", "identity"),
        (" GZIP", "gzip"),
        ("deflate", "deflate"),
    ],
)
def test_request_coding(header: str | None, coding: str) -> None:
    assert request_coding(header) == coding


@pytest.mark.parametrize("header", ["br", "gzip, deflate", "zstd"])
def test_unknown_coding(header: str) -> None:
    with pytest.raises(Unimplemented, match=r"^Unsupported compression type$"):
        request_coding(header)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
class TestRequestBodies:
    def test_whole(self, coding: str) -> None:
        assert decompress(coding, memoryview(COMPRESS[coding](b"abc" * 100)), 300) == b"abc" * 100

    @given(body=st.binary(), cut=st.integers(0, 40))
    def test_in_chunks(self, coding: str, body: bytes, cut: int) -> None:
        packed = COMPRESS[coding](body)
        inflater = Inflater(coding, InflationLimits(len(body), 1 << 20))
        assert fed(inflater, packed[:cut]) + fed(inflater, packed[cut:], end=True) == body

    def test_a_bomb_stops_at_the_limit(self, coding: str) -> None:
        bomb = COMPRESS[coding](bytes(50_000_000))
        with pytest.raises(ResourceExhausted, match="maximum allowed input size of 1000 bytes"):
            decompress(coding, bomb, 1000)

    def test_truncated(self, coding: str) -> None:
        with pytest.raises(InvalidArgument, match=f"{coding} data of the request body is truncated"):
            decompress(coding, COMPRESS[coding](b"abc")[:-1], 100)

    def test_something_else(self, coding: str) -> None:
        with pytest.raises(InvalidArgument, match=f"it is not {coding} data"):
            decompress(coding, b"this is no such data", 100)

    def test_more_behind_the_end(self, coding: str) -> None:
        inflater = Inflater(coding, InflationLimits(100, 1 << 20))
        assert fed(inflater, COMPRESS[coding](b"abc")) == b"abc"
        with pytest.raises(InvalidArgument, match="goes on behind the end"):
            fed(inflater, b"x")

    @pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 65_536 + SLICE_NBYTES, 3_000_000])
    def test_slices_are_bounded_and_the_last_one_is_known(self, coding: str, nbytes: int) -> None:
        noise = bytes(range(256)) * 16 + bytes(nbytes)
        body = noise[-nbytes:] if nbytes else b""
        slices = list(
            Inflater(coding, InflationLimits(nbytes, 1 << 20)).slices(COMPRESS[coding](body), end=True)
        )
        assert b"".join(one.data for one in slices) == body
        assert max(len(one.data) for one in slices) <= SLICE_NBYTES
        assert [one.more for one in slices] == [True] * (len(slices) - 1) + [False]

    def test_what_grows_too_much_is_refused_once_it_is_large(self, coding: str) -> None:
        limits = InflationLimits(1 << 30, 500)
        assert len(inflate(COMPRESS[coding](bytes(FREE_NBYTES)), coding, limits)) == FREE_NBYTES
        with pytest.raises(ResourceExhausted, match="more than 500 times"):
            inflate(COMPRESS[coding](bytes(2 * FREE_NBYTES)), coding, limits)


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (None, "identity"),
        ("", "identity"),
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("br, gzip;q=0.5, deflate; q=0.8", "deflate"),
        ("gzip;q=0.5, identity;q=0.9", "identity"),
        ("gzip;q=0", "identity"),
        ("gzip;q=nonsense", "identity"),
        ("gzip;q=nan", "identity"),
        ("br;q=1.0, *;q=0.1", "identity"),
    ],
)
def test_negotiation(header: str | None, coding: str) -> None:
    assert negotiate_coding(header) == coding


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_response_bodies(coding: str) -> None:
    plain = AnswerHead(200, [(b"content-type", b"application/octet-stream"), (b"x", b"y")])
    head, pieces = compress_response(coding, plain, [b"abc", memoryview(b"defghi")])
    assert decompress(coding, b"".join(pieces), 9) == b"abcdefghi"
    assert (head.status, head.headers) == (
        200,
        (
            (b"content-type", b"application/octet-stream"),
            (b"x", b"y"),
            (b"content-encoding", coding.encode()),
            (b"vary", b"accept-encoding"),
        ),
    )
