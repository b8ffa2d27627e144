"""Request heads that arrive in very small parts: parsed like whole ones, at a cost bounded by their size."""

from __future__ import annotations

import time

import pytest
from http1_talk import GET, OK, Talk, answer_ok

from gpuserve.front.net.http1_messages import HEAD_NBYTES, LINE_NBYTES

LONG_HEAD = GET[:-2] + b"".join(b"f%d: %b\r\n" % (n, b"v" * 1000) for n in range(50)) + b"\r\n"


def dripped(data: bytes, begun: bytes = b"") -> Talk:
    talk = Talk(answer_ok).feed(begun)
    for position in range(len(data)):
        if talk.way.said:
            break
        talk.feed(data[position : position + 1])
    return talk


def test_a_long_head_byte_by_byte_is_not_read_again_and_again() -> None:
    began_at = time.process_time()
    talk = dripped(LONG_HEAD)
    assert time.process_time() - began_at < 2.0  # a look at all of it for each byte takes ten
    assert [one.exchange.head.headers[-1][0] for one in talk.sinks] == [b"f49"]


def test_requests_that_follow_one_another_byte_by_byte() -> None:
    talk = dripped(GET + b"\r\n" + LONG_HEAD + GET)
    assert len(talk.sinks) == 3
    assert talk.way.sent == OK * 3


@pytest.mark.parametrize(
    ("begun", "sent", "status"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x", b"\nA: b\r\n", 400, id="half an end of a line"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r", b"\n\nA: b\r\n", 400, id="half an empty line"),
        pytest.param(b"GET /" + b"a" * (LINE_NBYTES - 10), b"a" * 20, 414, id="a long line"),
        pytest.param(
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * ((HEAD_NBYTES - 20) // 6),
            b"a: b\r\n" * 9,
            431,
            id="a long head",
        ),
    ],
)
def test_what_cannot_become_a_request_is_refused_at_once(begun: bytes, sent: bytes, status: int) -> None:
    talk = dripped(sent, begun)
    assert talk.status == status
    assert talk.way.said == ["end"]
    assert not talk.sinks
