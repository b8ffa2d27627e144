"""Ends of HTTP/1 connections: by the client, by the server, by a timeout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http1_talk import (
    GET,
    OLD_GET,
    Talk,
    answer_ok,
    early,
    passes,
    post,
)

from gpuserve.front.net.http1_protocol import DRAIN_NBYTES, UNCONSUMED_NBYTES

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
