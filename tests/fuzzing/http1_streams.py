"""What comes on a connection of HTTP/1: the requests in it are those that ``h11`` finds."""

from __future__ import annotations

import re

import h11
from http1_talk import Talk, answer_ok
from hypothesis import strategies as st

from fuzzing.cuts import cuts_of
from gpuserve.front.net.http1_messages import remembered_head

_LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1", b"POST /v2?a=b HTTP/1.1", b"GET / HTTP/1.0", b"HEAD /a HTTP/1.1",
        b"PUT * HTTP/1.1",         b"OPTIONS * HTTP/1.1", b"GET http://a/b HTTP/1.1",
        b"get / HTTP/1.1", b"GET /\xff HTTP/1.1",
        b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET / HTTP/1.2", b"GET / HTTP/2.0", b"GET /a#b HTTP/1.1",
    ]
)  # fmt: skip
_FIELDS = st.sampled_from(
    [
        b"Host: x", b"Host: x", b"Host:x", b"Host: y", b"A: b", b"a:\tb ", b"A:", b"A: b\xff", b"A : b",
        b" A: b", b"A: b\rc", b"A: b\0", b"A b", b": b", b"Connection: close", b"Connection: keep-alive",
        b"Content-Length: 3", b"Content-Length: 3", b"Content-Length: 0", b"Content-Length: +3",
        b"Content-Length: 3, 3", b"Content-Length: 5", b"Content-Length: 03", b"Content-Length: -1",
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: Chunked", b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: identity", b"Expect: 100-continue", b"Upgrade: h2c", b"Cookie: a=b; c",
    ]
)  # fmt: skip
_BODIES = st.sampled_from(
    [
        b"", b"abc", b"abc", b"abcde", b"3\r\nabc\r\n0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n", b"0\r\n\r\n",
        b"03;a=b\r\nabc\r\n0\r\nT: x\r\n\r\n", b"3 \r\nabc\r\n0\r\n\r\n", b"3\nabc\r\n0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n", b"-3\r\nabc\r\n0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabc0\r\n\r\n",         b"3\r\nabc\r\n0\r\nContent-Length: 3\r\n\r\n",
        b"3\r\nabc\r\n0\r\n T: x\r\n\r\n",
    ]
)  # fmt: skip
_ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\n\r\n"])


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    """One request, or what somebody might take for one."""
    fields = draw(st.lists(_FIELDS, max_size=4))
    if draw(st.integers(0, 3)):
        fields.insert(0, b"Host: x")
    lines = [draw(_LINES), *fields]
    return b"".join(line + draw(_ENDS) for line in lines) + b"\r\n" + draw(_BODIES)


@st.composite
def _spoilt(draw: st.DrawFn) -> bytes:
    data = bytearray(b"".join(draw(st.lists(_requests(), min_size=1, max_size=3))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


INPUTS = st.one_of(_spoilt(), st.binary(max_size=100))


#: Before a request line (RFC 9112, 2.2).
_EMPTY_LINES = re.compile(rb"\A(?:\r\n)+")


def ours(data: bytes) -> list[tuple[str, bytes, bytes]]:
    """Method, target and body of each request that is whole."""
    talk = Talk(answer_ok, hurried=len(data) % 2 == 1).feed(data, cuts_of(data))
    whole = [sink for sink in talk.sinks if sink.ended]
    return [(one.exchange.head.method, one.exchange.head.target, one.body) for one in whole]


def theirs(data: bytes) -> tuple[list[tuple[str, bytes, bytes]], bool]:
    """The same, and whether what follows is none. Empty lines before a request are removed: h11 has none."""
    found: list[tuple[str, bytes, bytes]] = []
    while True:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(_EMPTY_LINES.sub(b"", data))
        try:
            request = connection.next_event()
            if not isinstance(request, h11.Request):
                return found, False
            body = b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            return found, True
        if not isinstance(event, h11.EndOfMessage):
            return found, False
        found.append((request.method.decode(), _origin_form(request.target), body))
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is h11.MUST_CLOSE:
            return found, False
        data = connection.trailing_data[0]


def _origin_form(target: bytes) -> bytes:
    """Return the path and query of a target, which may be an absolute URL."""
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in {b"http", b"https"}:
        return target
    path = rest[min(rest.find(mark) % (len(rest) + 1) for mark in (b"/", b"?")) :]
    return path if path.startswith(b"/") else b"/" + path


def check(data: bytes) -> None:
    """What is taken for a request is one elsewhere, and the same. Here more is refused. A head that is
    remembered_head is read as it was the first time.
    """
    remembered_head.cache_clear()
    read = ours(data)
    assert ours(data) == read
    expected, _ = theirs(data)
    assert read == expected[: len(read)]
