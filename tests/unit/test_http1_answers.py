"""Responses over HTTP/1: how they are framed, and what becomes of the rest of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http1_talk import (
    CHUNKED,
    GET,
    OK,
    OK_ANSWER,
    OK_HEAD,
    OLD_GET,
    RecordingSink,
    Talk,
    answer_ok,
    early,
    passes,
    post,
)

from gpuserve.front.net.exchange import Exchange
from gpuserve.front.net.http1_protocol import DRAIN_NBYTES, JOINED_NBYTES, UNCONSUMED_NBYTES

# ---- answers --------------------------------------------------------------------------------


def test_answers_are_framed_by_their_length() -> None:
    talk = Talk().feed(GET + GET + GET + GET)
    talk.exchange.start(200, [(b"a", b"b"), (b"content-length", b"3")])
    talk.exchange.send(b"ab")
    talk.exchange.send(b"c", end=True)
    talk.exchange.start(404, [(b"connection", b"upgrade")])
    talk.exchange.send(b"abcd", end=True)
    talk.exchange.start(500, [], end=True)
    talk.exchange.start(799, [])
    talk.exchange.finish([(b"trailer", b"x")])
    assert talk.responses() == [
        (b"HTTP/1.1 200 OK\na: b\ncontent-length: 3", b"abc"),
        (b"HTTP/1.1 404 Not Found\ncontent-length: 4", b"abcd"),
        (b"HTTP/1.1 500 Internal Server Error\ncontent-length: 0", b""),
        (b"HTTP/1.1 799 \ncontent-length: 0", b""),
    ]
    assert b"\r\ndate: " in talk.way.raw


def test_an_answer_of_unknown_length_is_sent_in_chunks() -> None:
    talk = Talk().feed(GET)
    talk.exchange.start(200, [])
    assert talk.way.n_writes == 0
    for part in (b"ab", b"", b"c" * 17):
        talk.exchange.send(part)
    talk.exchange.finish()
    head, _, body = talk.way.sent.partition(b"\r\n\r\n")
    assert head.endswith(b"\r\ntransfer-encoding: chunked") or b"\r\ntransfer-encoding: chunked\r\n" in head
    assert body == b"2\r\nab\r\n11\r\n" + b"c" * 17 + b"\r\n0\r\n\r\n"
    assert not talk.http1.unanswered


def test_an_answer_of_unknown_length_to_1_0_ends_with_the_connection() -> None:
    talk = Talk().feed(OLD_GET.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"))
    talk.exchange.start(200, [])
    talk.exchange.send(b"ab")
    talk.exchange.send(b"c", end=True)
    head, _, body = talk.way.sent.partition(b"\r\n\r\n")
    assert (b"\r\nconnection: close" in head, b"chunked" in head) == (True, False)
    assert (body, talk.way.said) == (b"abc", ["close"])


@pytest.mark.parametrize(
    ("request_line", "fields", "connection", "said"),
    [
        (b"GET / HTTP/1.1", b"", b"", []),
        (b"GET / HTTP/1.1", b"Connection: close\r\n", b"connection: close\r\n", ["close"]),
        (b"GET / HTTP/1.0", b"", b"connection: close\r\n", ["close"]),
        (b"GET / HTTP/1.0", b"Connection: keep-alive\r\n", b"connection: keep-alive\r\n", []),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_an_answer_says_of_the_connection(
    request_line: bytes, fields: bytes, connection: bytes, said: list[str], whole: bool
) -> None:
    talk = Talk().feed(request_line + b"\r\nHost: x\r\n" + fields + b"\r\n")
    if whole:
        answer_ok(talk.exchange)
    else:
        talk.exchange.start(200, [(b"content-length", b"2")])
        talk.exchange.send(b"ok", end=True)
    head, _, body = talk.way.sent.partition(b"\r\n\r\n")
    assert (b"connection:" in head, body, talk.way.said) == (bool(connection), b"ok", said)
    assert connection in head + b"\r\n"


@pytest.mark.parametrize("status", [204, 304, 200])
def test_answers_without_a_body(status: int) -> None:
    method = b"HEAD" if status == 200 else b"GET"
    talk = Talk().feed(GET.replace(b"GET", method) + GET)
    talk.exchange.start(status, [(b"content-length", b"5")])
    talk.exchange.send(b"hello", end=True)
    answer_ok(talk.exchange)
    head, _, rest = talk.way.sent.partition(b"\r\n\r\n")
    assert (rest, b"content-length: 5" in head) == (OK, status != 204)
    assert Talk(answer_ok).feed(GET.replace(b"GET", b"HEAD")).way.sent == OK_HEAD


@pytest.mark.parametrize(("parts", "end"), [((b"abcd",), False), ((b"ab",), True), ((b"ab", b"cd"), True)])
def test_an_answer_that_is_not_as_long_as_it_said(parts: tuple[bytes, ...], end: bool) -> None:
    talk = Talk().feed(GET)
    talk.exchange.start(200, [(b"content-length", b"3")])
    for part in parts:
        talk.exchange.send(part, end=end and part is parts[-1])
    assert (talk.way.said, talk.sinks[0].abandoned, talk.http1.unanswered) == (["close"], 1, ())


def test_a_header_cannot_make_a_second_answer() -> None:
    talk = Talk().feed(GET)
    talk.exchange.start(200, [(b"a", b"b\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK")])
    with pytest.raises(ValueError, match="line's end"):
        talk.exchange.send(b"", end=True)
    assert talk.way.sent == b""


@pytest.mark.parametrize("nbytes", [2, JOINED_NBYTES + 1])
def test_memory_is_let_go_exactly_once(nbytes: int) -> None:
    released: list[int] = []
    pieces = (memoryview(bytes(nbytes // 2)), memoryview(bytes(nbytes // 2)))
    talk = Talk().feed(GET)
    talk.exchange.answer(OK_ANSWER, pieces, nbytes, lambda: released.append(1))
    large = nbytes > JOINED_NBYTES
    assert (len(released), len(talk.way.releases)) == (not large, large)
    talk.exchange.answer(OK_ANSWER, pieces, nbytes, lambda: released.append(2))  # there is one answer only
    assert released[not large :] == [2]
    assert talk.way.n_writes == 1
    gone = Talk().feed(GET)
    gone.http1.lost()
    gone.exchange.answer(OK_ANSWER, pieces, nbytes, lambda: released.append(3))  # nobody waits
    assert (released[-1], gone.way.sent) == (3, b"")


# ---- answers before the end of the request --------------------------------------------------


def test_the_rest_of_an_answered_request_goes_by() -> None:
    talk = early(100_000, b"x" * 1000).feed(b"x" * 99_000 + GET)
    answer_ok(talk.exchange)
    assert (talk.way.sent, len(talk.sinks), talk.way.said) == (OK * 2, 2, [])


class Hasty(Talk):
    """Answers each request before its body is received."""

    def accept(self, exchange: Exchange) -> RecordingSink:
        sink = super().accept(exchange)
        answer_ok(sink.exchange)
        return sink


def test_a_request_that_is_answered_before_it_was_taken() -> None:
    talk = Hasty().feed(post(b"abc") + GET + post(b"abc")[:-1]).feed(b"c" + GET)

    assert talk.way.sent == OK * 4
    assert [sink.abandoned for sink in talk.sinks] == [1] * 4


def test_too_much_of_an_answered_request_ends_the_connection() -> None:
    talk = early(DRAIN_NBYTES * 2, b"x")
    assert b"connection: close\r\n" in talk.way.sent
    assert talk.feed(b"x" * 1000 + GET).way.said == ["end"]


def test_too_many_chunks_of_an_answered_request_end_the_connection() -> None:
    talk = Talk().feed(CHUNKED)
    answer_ok(talk.exchange)
    part = b"fffff\r\n" + bytes(0xFFFFF) + b"\r\n"
    for _ in range(DRAIN_NBYTES // len(part) - 1):
        talk.feed(part)
    assert talk.way.said == []
    talk.feed(part * 2)
    assert talk.way.said == ["end"]


def test_who_was_not_told_to_send_its_body_need_not() -> None:
    talk = Hasty().feed(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")

    assert b"100 Continue" not in talk.way.sent
    assert b"connection: close\r\n" in talk.way.sent
    assert talk.way.said == ["end"]


# ---- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [GET, post(b"abc")[:-1], GET * 2])
def test_a_client_that_leaves(sent: bytes) -> None:
    talk = Talk().feed(sent)
    talk.http1.lost()
    assert [sink.abandoned for sink in talk.sinks] == [1]
    talk.exchange.start(200, [])
    talk.exchange.send(b"abc", end=True)
    assert (talk.way.sent, talk.http1.unanswered) == (b"", ())


def test_room_is_waited_for() -> None:
    async def run() -> tuple[bool, Any]:
        talk = Talk().feed(GET)
        await talk.exchange.room()
        talk.way.full = True
        waiting = asyncio.ensure_future(talk.exchange.room())
        await asyncio.sleep(0)
        waits = not waiting.done()
        talk.way.full = False
        talk.http1.drained()
        await waiting
        talk.way.full = True
        lost = asyncio.ensure_future(talk.exchange.room())
        await asyncio.sleep(0)
        talk.http1.lost()
        return waits, await asyncio.gather(lost, return_exceptions=True)

    waits, (outcome,) = asyncio.run(run())
    assert waits
    assert isinstance(outcome, ConnectionResetError)


def test_an_answer_that_is_broken_off() -> None:
    talk = Talk().feed(GET)
    talk.exchange.start(200, [])
    talk.exchange.send(b"abc")
    talk.exchange.reset()
    assert (talk.way.said, talk.sinks[0].abandoned) == (["close"], 1)
    assert not talk.way.sent.endswith(b"0\r\n\r\n")
    old = Talk().feed(OLD_GET)
    old.exchange.start(200, [])
    old.exchange.send(b"abc")
    old.exchange.reset()
    assert old.way.said == ["abort"]  # the end of the connection would be the end of the body


def test_shutting_down() -> None:
    idle = Talk(answer_ok).feed(GET)
    idle.http1.shut_down()
    assert idle.way.said == []  # a request may be on its way
    idle.http1.shut_down()
    assert idle.way.said == ["close"]
    working = Talk().feed(GET + GET)
    working.http1.shut_down()
    assert (working.way.said, len(working.http1.unanswered)) == ([], 1)
    answer_ok(working.exchange)
    assert b"connection: close\r\n" in working.way.sent
    assert (working.way.said, len(working.sinks)) == (["close"], 1)
    early_one = early(1000, b"x")
    early_one.http1.shut_down()
    assert early_one.way.said == ["end"]


def test_a_client_is_told_with_the_next_answer_that_begins() -> None:
    idle = Talk(answer_ok).feed(GET)
    idle.http1.announce()
    assert (idle.way.said, idle.http1.aware) == ([], False)
    idle.feed(GET)
    assert b"connection: close\r\n" in idle.way.sent
    assert (idle.way.said, idle.http1.aware) == (["close"], True)
    waiting = Talk().feed(GET)
    waiting.http1.announce()
    assert (waiting.way.said, waiting.http1.aware) == ([], True)
    answer_ok(waiting.exchange)
    assert b"connection: close\r\n" in waiting.way.sent
    assert waiting.way.said == ["close"]


def test_an_answer_that_has_begun_is_not_the_last_without_saying_so() -> None:
    talk = Talk().feed(GET)
    talk.exchange.start(200, [])
    talk.exchange.send(b"abc")
    talk.http1.announce()
    assert not talk.http1.aware
    talk.exchange.send(b"def", end=True)
    assert (talk.way.said, talk.http1.unanswered, talk.http1.aware) == ([], (), False)
    before = len(talk.way.sent)
    talk.feed(GET)
    answer_ok(talk.exchange)
    assert b"connection: close\r\n" in talk.way.sent[before:]
    assert talk.way.said == ["close"]


def test_a_request_that_was_on_its_way_at_the_end() -> None:
    talk = Talk(answer_ok).feed(GET)
    talk.http1.shut_down()
    before = len(talk.way.sent)
    talk.feed(GET)
    assert talk.way.sent[before:].startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in talk.way.sent[before:]
    talk.http1.shut_down()
    assert (talk.way.said, len(talk.sinks)) == (["close"], 2)


# ---- time -----------------------------------------------------------------------------------


def test_a_head_that_does_not_come() -> None:
    talk = passes(Talk().feed(GET[:-1]), 9)
    assert talk.way.sent == b""
    assert passes(talk, 2, 10).status == 408
    assert (talk.way.said, talk.way.late) == (["end", "close"], ["head"])


def test_a_head_that_trickles_in() -> None:
    talk = Talk().feed(b"GET / HTTP/1.1\r\nA: ")
    for now in range(12):
        talk.feed(b"a")
        talk.http1.check(float(now))
    assert (talk.status, talk.way.said) == (408, ["end", "close"])


def test_a_connection_that_idles() -> None:
    talk = passes(Talk(answer_ok), 300)
    assert talk.way.said == []
    talk.feed(GET)
    assert passes(talk, 300, 301).way.said == []
    assert passes(talk, 1, 602).way.said == ["close"]


def test_a_body_that_does_not_come() -> None:
    talk = passes(Talk().feed(post(b"abc")[:-2]), 19)
    assert talk.way.sent == b""
    assert passes(talk, 2, 20).status == 408
    assert (talk.sinks[0].abandoned, talk.way.said, talk.way.late) == (1, ["end", "close"], ["body"])


@pytest.mark.parametrize(("part_nbytes", "status"), [(499, 408), (501, None)])
def test_a_body_that_trickles_in(part_nbytes: int, status: int | None) -> None:
    talk = Talk().feed(post(bytes(100_000))[:-99_000])
    for now in range(60):
        talk.http1.check(float(now))
        if not talk.way.said:
            talk.feed(bytes(part_nbytes))
    assert (talk.status if talk.way.sent else None) == status


def test_a_body_that_we_do_not_take_may_take_long() -> None:
    talk = Talk().feed(post(bytes(2 * UNCONSUMED_NBYTES))[:-1])
    assert passes(talk, 300).way.sent == b""


def test_an_answer_may_take_long() -> None:
    assert passes(Talk().feed(GET), 1000).way.said == []


def test_a_client_that_does_not_read() -> None:
    talk = Talk(answer_ok).feed(GET)
    for now in range(200):  # slowly is not never
        talk.way.unsent_nbytes = 200 - now
        talk.http1.check(float(now))
    assert passes(talk, 59, 200).way.said == []
    talk.http1.check(260.0)
    assert talk.way.said == ["abort"]


def test_who_still_sends_to_nobody() -> None:
    silent = early(DRAIN_NBYTES * 2, b"x")
    assert passes(silent, 3).way.said == ["end", "close"]
    sending = early(DRAIN_NBYTES * 2, b"x")
    for now in range(32):
        sending.feed(b"x")
        sending.http1.check(float(now))
    assert sending.way.said == ["end", "close"]
    slow = passes(early(1000, b"x"), 31)
    assert slow.way.said == ["close"]
