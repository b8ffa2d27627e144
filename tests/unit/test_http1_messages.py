"""Heads of HTTP/1 requests: what they say, and that what could be read in two ways is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.http1_messages import (
    CHUNKED,
    HEAD_NBYTES,
    LINE_NBYTES,
    MAX_FIELDS,
    RequestBody,
    RequestRefused,
    check_begun,
    parse_head,
    request_body,
)

HOST = b"Host: x\r\n"


def head(fields: bytes = HOST, line: bytes = b"POST /v2?a=b HTTP/1.1") -> bytes:
    return line + b"\r\n" + fields + b"\r\n"


def refusal(text: bytes) -> tuple[int, str]:
    with pytest.raises(RequestRefused) as raised:
        parse_head(text)
    return raised.value.status, str(raised.value)


def test_what_a_head_says() -> None:
    request = parse_head(head(HOST + b"Content-Length: 12\r\nX-Two:\t a  b \r\nEmpty:\r\nX-Two: \xe9\r\n"))
    said = request.head
    assert (said.method, said.target, said.path, said.query) == ("POST", b"/v2?a=b", "/v2", b"a=b")
    assert list(said.headers) == [
        (b"host", b"x"),
        (b"content-length", b"12"),
        (b"x-two", b"a  b"),
        (b"empty", b""),
        (b"x-two", b"\xe9"),
    ]
    assert (said.http_version, said.content_length) == ("1.1", 12)
    assert (request.body_nbytes, request.keep_alive, request.expects_continue) == (12, True, False)
    assert request.is_plain


def test_a_head_that_is_sent_again_is_not_read_again() -> None:
    text = head(HOST + b"X-Again: 1\r\n")
    assert parse_head(text) is parse_head(bytes(bytearray(text)))
    long = head(HOST + b"X-Long: " + b"a" * 4000 + b"\r\n")
    assert parse_head(long) is not parse_head(long)


@pytest.mark.parametrize(
    ("line", "fields", "keep_alive"),
    [
        (b"GET / HTTP/1.1", HOST, True),
        (b"GET / HTTP/1.1", HOST + b"Connection: x, Close\r\n", False),
        (b"GET / HTTP/1.1", HOST + b"Connection: keep-alive\r\nConnection: close\r\n", False),
        (b"GET / HTTP/1.7", HOST, True),
        (b"GET / HTTP/1.0", b"", False),
        (b"GET / HTTP/1.0", b"Connection: Keep-Alive\r\n", True),
        (b"GET / HTTP/1.0", b"Connection: keep-alive, close\r\n", False),
    ],
)
def test_whether_the_connection_goes_on(line: bytes, fields: bytes, keep_alive: bool) -> None:
    assert parse_head(head(fields, line)).keep_alive is keep_alive


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://a.example:80/v2?x", b"/v2?x", b"a.example:80"),
        (b"HTTPS://[::1]:80", b"/", b"[::1]:80"),
        (b"http://a?x", b"/?x", b"a"),
    ],
)
def test_a_whole_url_says_the_host(target: bytes, path: bytes, host: bytes) -> None:
    said = parse_head(head(HOST + b"A: b\r\n", b"GET " + target + b" HTTP/1.1")).head
    assert (said.target, list(said.headers)) == (path, [(b"host", host), (b"a", b"b")])


def test_options_of_the_server() -> None:
    assert parse_head(head(line=b"OPTIONS * HTTP/1.1")).head.target == b"*"


@pytest.mark.parametrize(
    ("fields", "nbytes", "told"),
    [
        (b"", 0, None),
        (b"Content-Length: 0\r\n", 0, 0),
        (b"Content-Length: 7\r\nContent-Length: 7\r\n", 7, 7),
        (b"Content-Length: 9223372036854775807\r\n", (1 << 63) - 1, (1 << 63) - 1),
        (b"Transfer-Encoding: Chunked\r\n", CHUNKED, None),
    ],
)
def test_how_a_body_is_framed(fields: bytes, nbytes: int, told: int | None) -> None:
    request = parse_head(head(HOST + fields))
    assert (request.body_nbytes, request.head.content_length) == (nbytes, told)


@pytest.mark.parametrize(
    ("fields", "line", "expects"),
    [
        (HOST + b"Expect: 100-Continue\r\nContent-Length: 1\r\n", b"POST / HTTP/1.1", True),
        (HOST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n", b"POST / HTTP/1.1", True),
        (HOST + b"Expect: 100-continue\r\n", b"POST / HTTP/1.1", False),
        (HOST + b"Expect: 100-continue\r\nContent-Length: 1\r\n", b"POST / HTTP/1.0", False),
    ],
)
def test_who_waits_to_be_told(fields: bytes, line: bytes, expects: bool) -> None:
    assert parse_head(head(fields, line)).expects_continue is expects


LENGTHS = [
    b"2, 2", b"+2", b"-2", b"0x2", b"2_0", b"\xb2", b"2 0", b"9223372036854775808", b"18446744073709551616",
    b"9" * 5000, b"2\r\nContent-Length: 3", b"2\r\nTransfer-Encoding: chunked",
]  # fmt: skip
OTHER_FIELDS = [
    b"Content-Length:", b"Content-Length : 2", b"Content-Length\t: 2", b" Content-Length: 2",
    b"Transfer-Encoding: chunked\r\nContent-Length: 2", b"A: b\r\n\tTransfer-Encoding: chunked",
    b"A: b\rTransfer-Encoding: chunked", b"A: b\nTransfer-Encoding: chunked", b"A: b\r\n c", b"A: b\0c",
    b"A: b\x7f", b"A\0: b", b"A\x0b: b", b": b", b"A", b"A(: b", b"\xc3\xa9: b", b"Host: x", b"Host: y",
]  # fmt: skip
SMUGGLING = [
    *(HOST + b"Content-Length: " + one + b"\r\n" for one in LENGTHS),
    *(HOST + one + b"\r\n" for one in OTHER_FIELDS),
    *(b"Host: x, y\r\n", b"Host: x/y\r\n", b"Host: a@b\r\n", b""),
]


@pytest.mark.parametrize("fields", SMUGGLING)
def test_fields_that_two_servers_read_in_two_ways(fields: bytes) -> None:
    status, text = refusal(head(fields))
    assert status == 400
    assert len(text) < 200
    assert text.isprintable()


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"chunked, chunked", b"identity", b"xchunked", b"", b"chunked;a=b"]
)
def test_transfer_codings_that_are_not_served(coding: bytes) -> None:
    assert refusal(head(HOST + b"Transfer-Encoding: " + coding + b"\r\n"))[0] == 501
    assert refusal(head(HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"))[0] == 501


MALFORMED_LINES = [
    b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b" GET / HTTP/1.1", b"GET\t/ HTTP/1.1", b"GET / http/1.1",
    b"GET / HTTP/1", b"GET / HTTP/1.10", b"GET /", b"GET /\xff HTTP/1.1", b"GET /\x7f HTTP/1.1",
    b"GET v2 HTTP/1.1", b"GET x:80 HTTP/1.1", b"GET ftp://x/ HTTP/1.1", b"GET http:///v2 HTTP/1.1",
    b"GET http://a@b/v2 HTTP/1.1", b"GET * HTTP/1.1", b"G(T / HTTP/1.1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *((line, 400) for line in MALFORMED_LINES),
        (b"CONNECT x:80 HTTP/1.1", 501),
        (b"G" * 33 + b" / HTTP/1.1", 501),
        (b"GET / HTTP/2.0", 505),
        (b"GET / HTTP/0.9", 505),
        (b"GET /" + b"a" * LINE_NBYTES + b" HTTP/1.1", 414),
    ],
)
def test_request_lines_that_are_refused(line: bytes, status: int) -> None:
    assert refusal(head(line=line))[0] == status


def test_chunks_in_a_request_of_1_0() -> None:
    assert refusal(head(b"Transfer-Encoding: chunked\r\n", b"POST / HTTP/1.0"))[0] == 400


def test_offers_of_other_protocols() -> None:
    upgrade = HOST + b"Connection: Upgrade\r\nUpgrade: "
    assert parse_head(head(upgrade + b"h2c\r\n")).keep_alive
    assert refusal(head(upgrade + b"WebSocket\r\n"))[0] == 403


def test_heads_over_the_limits() -> None:
    assert len(parse_head(head(HOST + b"a: b\r\n" * (MAX_FIELDS - 1))).head.headers) == MAX_FIELDS
    assert refusal(head(HOST + b"a: b\r\n" * MAX_FIELDS))[0] == 431
    assert refusal(head(HOST + b"A: " + b"a" * HEAD_NBYTES + b"\r\n"))[0] == 431


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"\x16\x03\x01\x02", 400),
        (b" GET", 400),
        (b"GET / HTTP/1.1\nHost: x", 400),
        (b"GET / HTTP/1.1\r\nHost: x\n", 400),
        (b"GET /" + b"a" * LINE_NBYTES, 414),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * HEAD_NBYTES, 431),
    ],
)
def test_what_cannot_become_a_head_is_refused_at_once(text: bytes, status: int) -> None:
    with pytest.raises(RequestRefused) as raised:
        check_begun(text)
    assert raised.value.status == status


def test_every_beginning_of_a_head_is_waited_for() -> None:
    text = head(HOST + b"A: b\r\n")
    for end in range(1, len(text)):
        check_begun(text[:end])
    assert parse_head(text).head.method == "POST"


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 5))
def test_whatever_comes_is_a_head_or_is_refused(raw: bytes, where: int, cut: int) -> None:
    good = head(HOST + b"Content-Length: 3\r\nA: b\r\n")
    text = good[:where] + raw.replace(b"\r\n\r\n", b"") + good[where + cut :]
    text = text.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        request = parse_head(text)
    except RequestRefused as error:
        said: tuple[int, str] | None = (error.status, str(error))
    else:
        said = None
        joined = b"".join(name + value for name, value in request.head.headers)
        assert not set(joined) & set(b"\r\n\0")
        assert request.body_nbytes >= CHUNKED
    assert said is None or (said[0] in {400, 414, 431, 501, 505} and said[1].isprintable())


def test_a_whole_url_does_not_make_up_for_the_host() -> None:
    for fields in (b"", HOST + HOST, b"Host: a b\r\n"):
        assert refusal(head(fields, b"GET http://a/v2 HTTP/1.1"))[0] == 400
    assert parse_head(head(b"", b"GET http://a/v2 HTTP/1.0")).head.headers == ((b"host", b"a"),)


# ---- http1 body ------------------------------------------------------------------------------


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
        b"\r\n", b"g\r\n", b"-1\r\n", b"+1\r\nx", b"0x1\r\nx", b"1_0\r\n", b" 1\r\n", b"1 \r\nx",
        b"1\nx\r\n0\r\n\r\n", b"1\r\nxy\r\n", b"1\r\nx\n0\r\n\r\n", b"1\r\nx0\r\n\r\n",
        b"f" * 16 + b"\r\n", b"1;a\nb\r\n", b"1;\0\r\n", b"1;" + b"a" * 300 + b"\r\n", b"a" * 300,
        b"0\r\nA : b\r\n\r\n", b"0\r\n A: b\r\n\r\n", b"0\r\nA: b\nc\r\n\r\n",
        b"0\r\n" + b"A: " + b"b" * 20_000, b"0\r\n" + b"A: b\r\n" * 5_000,
    ],
)  # fmt: skip
def test_chunks_that_are_none(sent: bytes) -> None:
    for at in ([], list(range(min(len(sent), 400)))):
        with pytest.raises(RequestRefused):
            read(request_body(CHUNKED), sent, at)
