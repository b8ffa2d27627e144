"""Floods over HTTP/2, and clients that do not read what they asked for.

A flood here costs several times a burst, because patience comes back with the time that a busy machine takes.
"""

from __future__ import annotations

import pytest
from http2_peer import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING_FRAME,
    POST,
    PRIORITY,
    SETTINGS,
    Peer,
    data,
    frame,
    reset,
    settings,
)
from http2_scene import RecordingWay, Talk

from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.net.http2_control import BURST, PER_S, ControlFrames, FloodGuard
from gpuserve.front.net.http2_frames import ConnectionFailed
from gpuserve.front.net.http2_streams import StreamTable

BLOCK = Peer().encoder.encode(POST)
UNFINISHED = frame(HEADERS, 0, 1, BLOCK[:3])


@pytest.mark.parametrize(
    "sent",
    [
        frame(HEADERS, END_HEADERS, 1, BLOCK) + data(1, b"") * 30_000,
        frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, PADDED, 1, b"\x00") * 30_000,
        frame(99) * 30_000,
        frame(PRIORITY, 0, 3, bytes(5)) * 30_000,
        settings() * 30_000,
        frame(SETTINGS, ACK) * 30_000,
        frame(GOAWAY, 0, 0, bytes(8)) * 30_000,
        UNFINISHED + frame(CONTINUATION, 0, 1, b"\x20") * 30_000,
        UNFINISHED + frame(CONTINUATION, 0, 1, b"") * 30_000,
    ],
)
def test_floods_of_useless_frames(sent: bytes) -> None:
    talk = Talk()
    talk.feed(sent)
    assert talk.peer.error == ENHANCE_YOUR_CALM


def test_rapid_resets() -> None:
    talk = Talk()
    rounds = (talk.peer.headers(2 * n + 1) + reset(2 * n + 1) for n in range(3 * BURST))
    talk.feed(b"".join(rounds))
    assert talk.peer.error == ENHANCE_YOUR_CALM
    assert BURST <= len(talk.sinks) < 3 * BURST
    assert all(sink.n_abandoned == 1 for sink in talk.sinks)


def test_cancels_of_an_honest_client() -> None:
    talk = Talk()
    for n in range(200):
        talk.feed(talk.peer.request(2 * n + 1, b"body") + reset(2 * n + 1))
    assert not talk.is_over


def test_patience_comes_back_with_time() -> None:
    now = 0.0
    patience = FloodGuard(lambda: now)
    patience.spend(BURST)
    with pytest.raises(ConnectionFailed):
        patience.spend()
    now = 1.0
    for _ in range(int(PER_S) - 1):
        patience.spend()
    with pytest.raises(ConnectionFailed):
        patience.spend()


def test_a_window_that_changes_costs_by_the_streams_that_are_there() -> None:
    talk = Talk()
    talk.feed(b"".join(talk.peer.headers(2 * n + 1) for n in range(4000)))
    talk.feed(b"".join(talk.peer.resize(70_000 + n % 2) for n in range(120)))
    assert talk.peer.error == ENHANCE_YOUR_CALM
    talk = Talk()
    talk.feed(b"".join(talk.peer.headers(2 * n + 1) for n in range(4000)))
    talk.feed(settings([(4, 70_000 + n % 2) for n in range(10_000)]))
    assert not talk.is_over


def test_a_ping_costs_a_part_of_a_reset() -> None:
    """Some clients measure by a PING for each round trip while they read."""
    way, patience = RecordingWay(), FloodGuard(lambda: 0.0)
    control = ControlFrames(StreamTable(way), patience)
    patience.spend(BURST - 10)
    for _ in range(16 * 10):
        control.on_ping(0, 0, b"12345678")
    with pytest.raises(ConnectionFailed):
        control.on_ping(0, 0, b"12345678")


def test_a_body_that_is_not_wanted_costs_by_its_frames() -> None:
    """Whoever sends it may not have heard of it yet, and has frames of a proper size."""
    talk = Talk(lambda sink, end: None if end else sink.exchange.start(413, (), end=True))
    talk.feed(talk.peer.headers(1) + data(1, b"first"))
    talk.feed(data(1, bytes(16384)) * 256)
    assert not talk.is_over
    talk.feed(data(1, b".") * 200_000)
    assert talk.peer.error == ENHANCE_YOUR_CALM


def test_settings_cost_by_what_is_in_them() -> None:
    talk = Talk()
    talk.feed(settings([(99, 0)] * 40_000) * 8)
    assert talk.peer.error == ENHANCE_YOUR_CALM


def _answered(n_streams: int) -> Talk:
    """So many answers wait for a window."""
    answer = AnswerHead(200, (), [(b"grpc-status", b"0")])
    talk = Talk(lambda sink, end: sink.exchange.answer(answer, (bytes(5000),), 5000), peer=Peer(0))
    talk.feed(b"".join(talk.peer.request(2 * n + 1) for n in range(n_streams)))
    return talk


def test_an_answer_that_is_taken_a_byte_at_a_time() -> None:
    talk = _answered(2)
    talk.feed(b"".join(talk.peer.grow(1, 1) for _ in range(3000)))
    assert not talk.is_over
    assert len(talk.peer.response(1).body) == 3000
    talk.feed(b"".join(talk.peer.grow(0, 1) + talk.peer.grow(1, 1) for _ in range(2000)))
    assert talk.peer.error == ENHANCE_YOUR_CALM


def test_answers_that_are_all_taken_a_byte_at_a_time() -> None:
    """One change for all streams is no more to a client than that, and much for a server."""
    talk = _answered(4000)
    talk.feed(b"".join(talk.peer.resize(n) for n in range(1, 4)))
    assert not talk.is_over
    talk.feed(b"".join(talk.peer.resize(n) for n in range(4, 60)))
    assert talk.peer.error == ENHANCE_YOUR_CALM


def test_small_answers_that_are_taken_whole_cost_nothing() -> None:
    """Some clients grow a window for whatever they have read, small as it is."""
    talk = Talk(lambda sink, end: sink.exchange.answer(AnswerHead(200, ()), (b"body",), 4))
    for n in range(BURST + 10):
        talk.feed(talk.peer.request(2 * n + 1) + talk.peer.grow(0, 4))
    assert not talk.is_over


def test_a_client_that_does_not_read_is_not_read() -> None:
    """Until then it may ask for more, slow as it is; and nothing is lost."""
    talk = Talk(way=RecordingWay(1000))
    talk.feed(settings() * 100 + PING_FRAME * 20)
    assert talk.way.full
    assert talk.way.reading
    talk.feed(PING_FRAME * 200)
    assert not talk.way.reading
    assert not talk.is_over
    talk.peer.read(talk.way.take(2000))
    assert not talk.way.reading
    talk.peer.read(talk.way.take())
    assert talk.way.reading
    assert talk.peer.n_acks == 101
    assert len(talk.peer.pongs) == 220


def test_refusals_that_are_not_read_are_bounded() -> None:
    refuse = [(b"grpc-status", b"5"), (b"grpc-message", b"x" * 100)]
    talk = Talk(lambda sink, end: sink.exchange.start(200, refuse, end=True), way=RecordingWay(1000))
    for n in range(10_000):
        if talk.way.reading:
            talk.feed(talk.peer.request(2 * n + 1))
    assert talk.way.unsent_nbytes < 100_000
    talk.way.take()
    assert talk.way.reading


def test_long_heads_of_requests_whose_bodies_do_not_come() -> None:
    """They share a budget over all connections, which is empty after these."""
    block = Peer().encoder.encode([(*one, True) for one in POST]) + b"\0\x01a\x7f\xe1\xd3\x03" + b"v" * 60_000
    talks = [Talk() for _ in range(20)]
    for talk in talks:
        talk.way.admission = talks[0].way.admission
    for talk in talks:
        for n in range(60):
            if talk.way.reading:
                talk.feed(frame(HEADERS, END_HEADERS, 2 * n + 1, block))
    assert (talks[0].way.reading, talks[-1].way.reading) == (True, False)
    assert 60 << 20 < sum(len(one.http2.unanswered) for one in talks) * 60_000 < 66 << 20
    talks[-1].http2.check(1.0)
    assert not talks[-1].way.reading
    talks[0].http2.lost()
    talks[-1].http2.check(2.0)
    assert talks[-1].way.reading
    for talk in talks[1:]:
        talk.http2.lost()
    assert talks[0].way.admission.heads_nbytes == 0
