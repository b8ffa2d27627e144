"""Requests over HTTP/1: however their bytes are cut, the same are asked, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from http1_talk import CHUNKED, GET, OK, Talk, answer_ok, post
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.http1_messages import HEAD_NBYTES, LINE_NBYTES
from gpuserve.front.net.http1_protocol import BUFFERED_NBYTES, UNCONSUMED_NBYTES

# ---- requests in ----------------------------------------------------------------------------


def test_a_small_request() -> None:
    talk = Talk(answer_ok).feed(post(b"abc"))
    assert (talk.sinks[0].body, talk.sinks[0].ended, talk.sinks[0].abandoned) == (b"abc", True, 0)
    assert (talk.way.sent, talk.way.n_writes, talk.http1.unanswered) == (OK, 1, ())


def test_a_request_without_a_body() -> None:
    talk = Talk().feed(GET)
    assert (talk.sinks[0].body, talk.sinks[0].ended, len(talk.http1.unanswered)) == (b"", True, 1)


def test_empty_lines_before_a_request() -> None:
    talk = Talk(answer_ok).feed(b"\r\n\r\n" + GET + b"\r" + b"\n" + GET, range(100))
    assert talk.way.sent == OK * 2


requests = st.one_of(
    st.just((GET, b"")),
    st.binary(max_size=50).map(lambda body: (post(body), body)),
    st.binary(min_size=1, max_size=50).map(
        lambda body: (CHUNKED + b"%x\r\n%b\r\n0\r\nT: x\r\n\r\n" % (len(body), body), body)
    ),
)


@given(st.lists(requests, max_size=5), st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_any_cut_gives_the_same_requests(
    sent: list[tuple[bytes, bytes]], cuts: list[int], at_once: bool
) -> None:
    talk = Talk(answer_ok if at_once else None).feed(b"".join(text for text, _ in sent), cuts)
    for position in range(0 if at_once else len(sent)):
        assert len(talk.sinks) == position + 1
        assert talk.sinks[position].ended
        answer_ok(talk.sinks[position].exchange)
    assert [sink.body for sink in talk.sinks] == [body for _, body in sent]
    assert all(sink.ended and not sink.abandoned for sink in talk.sinks)
    assert talk.way.sent == OK * len(sent)
    assert not talk.http1.unanswered


@given(st.lists(st.integers(0, 300_000), max_size=6), st.booleans())
def test_large_bodies_come_whole_however_they_are_cut(cuts: list[int], in_chunks: bool) -> None:
    body = bytes(range(256)) * 1000
    sent = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if in_chunks else post(body)
    talk = Talk(answer_ok).feed(sent + GET, cuts)
    assert [sink.body for sink in talk.sinks] == [body, b""]
    assert talk.way.sent == OK * 2


def test_many_requests_at_once_do_not_nest() -> None:
    talk = Talk(answer_ok).feed(GET * 5000)
    assert talk.way.sent == OK * 5000


def test_many_requests_that_wait_do_not_nest() -> None:
    talk = Talk().feed(GET * 2000)
    talk._answer = answer_ok
    answer_ok(talk.exchange)
    assert len(talk.sinks) == 2000


def test_reading_pauses_while_too_much_waits() -> None:
    talk = Talk().feed(GET)
    talk.feed(GET * (BUFFERED_NBYTES // len(GET)))
    assert talk.way.reading
    talk.feed(GET * 2)
    assert not talk.way.reading
    answer_ok(talk.exchange)
    answer_ok(talk.exchange)
    assert talk.way.reading


def test_no_request_is_taken_from_who_reads_no_answer() -> None:
    talk = Talk(answer_ok).feed(GET)
    talk.way.full = True
    talk.feed(GET * 3)
    assert len(talk.sinks) == 1
    talk.way.full = False
    talk.http1.drained()
    assert len(talk.sinks) == 4


def test_reading_pauses_while_a_body_is_not_used_up() -> None:
    talk = Talk().feed(post(bytes(4 * UNCONSUMED_NBYTES))[: UNCONSUMED_NBYTES + 1000])
    assert not talk.way.reading
    talk.exchange.consumed(UNCONSUMED_NBYTES)
    assert talk.way.reading


def test_who_waits_to_be_told_is_told() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    talk = Talk(answer_ok).feed(head)
    assert talk.way.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert talk.feed(b"ab").way.sent.endswith(b"\r\n\r\n" + OK)
    assert Talk(answer_ok).feed(head + b"ab").way.sent == OK
    assert Talk(answer_ok).feed(head + b"a").feed(b"b").way.sent == OK


# ---- what is no request ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\0\1\2\3 garbage\r\n\r\n", 400),
        (b"\x16\x03\x01", 400),
        (b"\rGET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /" + b"a" * 200_000, 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200_000, 431),
    ],
)
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 20_000, 100_000)])
def test_what_is_no_request_is_answered_once(sent: bytes, status: int, cuts: Sequence[int]) -> None:
    talk = Talk().feed(sent, cuts).feed(GET)
    assert talk.status == status
    assert b"connection: close\r\n" in talk.way.sent
    assert talk.error
    assert (talk.way.said, talk.sinks, talk.way.n_writes) == (["end"], [], 1)


def test_a_body_that_breaks_the_protocol() -> None:
    talk = Talk().feed(CHUNKED + b"3\r\nabc\r\nz\r\n")
    assert (talk.status, talk.sinks[0].abandoned, talk.way.said) == (400, 1, ["end"])
    answer_ok(talk.exchange)  # too late
    assert talk.way.n_writes == 1


def test_a_body_that_breaks_the_protocol_when_its_answer_has_begun() -> None:
    talk = Talk().feed(CHUNKED)
    talk.exchange.start(200, [])
    talk.exchange.send(b"a")
    talk.feed(b"z\r\n")
    assert (talk.sinks[0].abandoned, talk.way.said) == (1, ["close"])


# ---- http1 slow heads ------------------------------------------------------------------------


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
    assert (len(talk.sinks), talk.way.sent) == (3, OK * 3)


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
    assert (talk.status, talk.way.said) == (status, ["end"])
    assert not talk.sinks
