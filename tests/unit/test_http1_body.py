"""Bodies of HTTP/1 requests: however they are cut, the same bytes come out, and the same are left over."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.http1_messages import CHUNKED, RequestBody, RequestRefused, request_body


def read(body: RequestBody, data: bytes, cuts: list[int], views: bool = False) -> tuple[bytes, bytes]:
    """What is of the body, and what comes after it."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    arrived, left = b"", b""
    for start, end in itertools.pairwise(edges):
        piece = data[start:end]
        if body.ended:
            left += piece
            continue
        taken, rest = body.cut(memoryview(piece) if views else piece)
        arrived += taken
        left += rest
        assert body.ended or not rest
    return arrived, left


cuts = st.lists(st.integers(0, 400), max_size=8)


@given(st.binary(max_size=100), st.binary(max_size=20), cuts, st.booleans())
def test_a_body_with_a_length(sent: bytes, after: bytes, at: list[int], views: bool) -> None:
    body = request_body(len(sent))
    assert read(body, sent + after, at, views) == (sent, after)
    assert (body.ended, body.left_nbytes) == (True, 0)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.sampled_from([b"", b";a", b' ; a="b"']),
    st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC:\r\n"]),
    st.binary(max_size=20),
    cuts,
    st.booleans(),
)
def test_a_body_in_chunks(
    chunks: list[bytes], extension: bytes, trailers: bytes, after: bytes, at: list[int], views: bool
) -> None:
    sent = b"".join(b"%X%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    body = request_body(CHUNKED)
    assert read(body, sent + b"000\r\n" + trailers + b"\r\n" + after, at, views) == (b"".join(chunks), after)
    assert body.ended


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\nx",
        b"0x1\r\nx",
        b"1_0\r\n",
        b" 1\r\n",
        b"1 \r\nx",
        b"1\nx\r\n0\r\n\r\n",
        b"1\r\nxy\r\n",
        b"1\r\nx\n0\r\n\r\n",
        b"1\r\nx0\r\n\r\n",
        b"f" * 16 + b"\r\n",
        b"1;a\nb\r\n",
        b"1;\0\r\n",
        b"1;" + b"a" * 300 + b"\r\n",
        b"a" * 300,
        b"0\r\nA : b\r\n\r\n",
        b"0\r\n A: b\r\n\r\n",
        b"0\r\nA: b\nc\r\n\r\n",
        b"0\r\n" + b"A: " + b"b" * 20_000,
        b"0\r\n" + b"A: b\r\n" * 5_000,
    ],
)
def test_chunks_that_are_none(sent: bytes) -> None:
    for at in ([], list(range(min(len(sent), 400)))):
        with pytest.raises(RequestRefused):
            read(request_body(CHUNKED), sent, at)
