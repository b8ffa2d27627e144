"""What a client may not do over HTTP/2 (RFC 9113): which error it is, and whether of the stream alone."""

from __future__ import annotations

import pytest
from http2_peer import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PING_FRAME,
    POST,
    PRIORITIZED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    Peer,
    data,
    frame,
    grow,
    reset,
    settings,
    u32,
)
from http2_scene import RecordingWay, Talk

from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.net.http2_control import BURST, PER_S, ControlFrames, FloodGuard
from gpuserve.front.net.http2_frames import ConnectionFailed
from gpuserve.front.net.http2_streams import StreamTable

BLOCK = Peer().encoder.encode(POST)
OPEN = frame(HEADERS, END_HEADERS, 1, BLOCK)
HALF_CLOSED = frame(HEADERS, END_HEADERS | END_STREAM, 1, BLOCK)
UNFINISHED = frame(HEADERS, 0, 1, BLOCK[:3])
BIG = 256 << 10


def code_alone(value: int | bytes) -> str:
    return str(value) if isinstance(value, int) else ""


def stated(sent: bytes, cut: bool) -> Talk:
    talk = Talk()
    talk.feed(sent, range(len(sent)) if cut else ())
    return talk


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("code", "sent"),
    [
        # frames of a wrong size
        (FRAME_SIZE_ERROR, frame(DATA, 0, 1, bytes(BIG + 1))[:9]),
        (FRAME_SIZE_ERROR, frame(99, 0, 1, bytes(BIG + 1))[:9]),
        # and those that would be kept until they are whole
        (ENHANCE_YOUR_CALM, frame(HEADERS, 0, 1, bytes(66_000))[:9]),
        (ENHANCE_YOUR_CALM, frame(SETTINGS, payload=bytes(66_000))[:60_000]),
        (ENHANCE_YOUR_CALM, OPEN + frame(DATA, PADDED, 1, bytes(66_000))[:9]),
        (FRAME_SIZE_ERROR, frame(PING, payload=bytes(7))),
        (FRAME_SIZE_ERROR, frame(SETTINGS, payload=bytes(5))),
        (FRAME_SIZE_ERROR, frame(SETTINGS, ACK, payload=bytes(6))),
        (FRAME_SIZE_ERROR, OPEN + frame(RST_STREAM, 0, 1, bytes(3))),
        (FRAME_SIZE_ERROR, OPEN + frame(WINDOW_UPDATE, 0, 1, bytes(5))),
        (FRAME_SIZE_ERROR, frame(WINDOW_UPDATE, 0, 0, bytes(3))),
        (FRAME_SIZE_ERROR, frame(GOAWAY, 0, 0, bytes(7))),
        (FRAME_SIZE_ERROR, frame(PRIORITY, 0, 3, bytes(4))),
        # frames on a stream where there is none, or the other way round
        (PROTOCOL_ERROR, frame(DATA, 0, 0, b"x")),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 0, BLOCK)),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 2, BLOCK)),
        (PROTOCOL_ERROR, frame(PRIORITY, 0, 0, bytes(5))),
        (PROTOCOL_ERROR, frame(RST_STREAM, 0, 0, bytes(4))),
        (PROTOCOL_ERROR, frame(SETTINGS, 0, 1)),
        (PROTOCOL_ERROR, frame(PING, 0, 1, bytes(8))),
        (PROTOCOL_ERROR, frame(GOAWAY, 0, 1, bytes(8))),
        (PROTOCOL_ERROR, frame(CONTINUATION, END_HEADERS, 0, BLOCK)),
        (PROTOCOL_ERROR, OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, u32(2) + BLOCK)),
        # streams that are not open yet
        (PROTOCOL_ERROR, data(1, b"x")),
        (PROTOCOL_ERROR, data(1, b"x", end=True)),
        (PROTOCOL_ERROR, OPEN + data(2, b"x")),
        (PROTOCOL_ERROR, reset(1)),
        (PROTOCOL_ERROR, OPEN + reset(2)),
        (PROTOCOL_ERROR, grow(1, 1)),
        (PROTOCOL_ERROR, frame(CONTINUATION, END_HEADERS, 1, BLOCK)),
        # streams that are closed
        (STREAM_CLOSED, frame(HEADERS, END_HEADERS, 5, BLOCK) + frame(HEADERS, END_HEADERS, 3, b"\x83")),
        (STREAM_CLOSED, OPEN + reset(1) + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x83")),
        # padding
        (PROTOCOL_ERROR, OPEN + frame(DATA, PADDED, 1, b"")),
        (PROTOCOL_ERROR, OPEN + frame(DATA, PADDED, 1, b"\x01")),
        (PROTOCOL_ERROR, OPEN + frame(DATA, PADDED, 1, b"\x05abcd")),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + BLOCK)),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS | PADDED, 1, b"")),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS | PRIORITIZED, 1, bytes(4))),
        # settings and windows
        (PROTOCOL_ERROR, settings({2: 2})),
        (FLOW_CONTROL_ERROR, settings({4: 1 << 31})),
        (PROTOCOL_ERROR, settings({5: 16383})),
        (PROTOCOL_ERROR, settings({5: 1 << 24})),
        (PROTOCOL_ERROR, settings([(5, 1), (5, 16384)])),
        (PROTOCOL_ERROR, grow(0, 0)),
        (FLOW_CONTROL_ERROR, grow(0, (1 << 31) - 1)),
        (FLOW_CONTROL_ERROR, OPEN + grow(1, (1 << 31) - 1 - 65535) + settings({4: 65536})),
        # header blocks
        (PROTOCOL_ERROR, UNFINISHED + PING_FRAME),
        (PROTOCOL_ERROR, UNFINISHED + frame(99)),
        (PROTOCOL_ERROR, UNFINISHED + data(1, b"x")),
        (PROTOCOL_ERROR, UNFINISHED + OPEN),
        (PROTOCOL_ERROR, UNFINISHED + frame(CONTINUATION, END_HEADERS, 3, BLOCK[3:])),
        (PROTOCOL_ERROR, OPEN + frame(CONTINUATION, END_HEADERS, 1, b"")),
        (COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, b"\x80")),
        (COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, BLOCK + b"\x40")),
        (COMPRESSION_ERROR, OPEN + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\xff\xff\x01")),
        (ENHANCE_YOUR_CALM, frame(HEADERS, END_HEADERS, 1, b"\x20" * 66_000)),
        (COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, b"\x82" * 10_000)),
        (ENHANCE_YOUR_CALM, UNFINISHED + frame(CONTINUATION, 0, 1, b"\x20" * 40_000) * 2),
    ],
    ids=code_alone,
)
def test_what_ends_the_connection(code: int, sent: bytes, cut: bool) -> None:
    if cut and len(sent) > 5000:
        pytest.skip("the same from fewer bytes")
    talk = stated(sent, cut)
    assert talk.is_over
    assert talk.peer.error == code
    assert all(sink.n_abandoned == 1 for sink in talk.sinks)
    assert not talk.http2.unanswered
    assert talk.feed(PING_FRAME) == []


@pytest.mark.parametrize(
    "sent",
    [
        data(1, b"x"),
        HALF_CLOSED,
        PING_FRAME,
        frame(99),
        frame(CONTINUATION, END_HEADERS, 1, BLOCK),
        grow(0, 1),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_the_first_frame_is_settings(sent: bytes, cut: bool) -> None:
    talk = Talk(greet=False)
    talk.feed(sent, range(len(sent)) if cut else ())
    assert talk.peer.error == PROTOCOL_ERROR


def longer(n: str) -> bytes:
    return Peer().encoder.encode([*POST, ("content-length", n)])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("code", "sent"),
    [
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 1, Peer().encoder.encode(POST[1:]))),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 1, Peer().encoder.encode([*POST, ("Upper", "x")]))),
        (PROTOCOL_ERROR, OPEN + frame(HEADERS, END_HEADERS, 1, b"")),  # trailers without the end
        (PROTOCOL_ERROR, OPEN + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x83")),
        (PROTOCOL_ERROR, OPEN + grow(1, 0)),
        (FLOW_CONTROL_ERROR, OPEN + grow(1, (1 << 31) - 1)),
        (FRAME_SIZE_ERROR, OPEN + frame(PRIORITY, 0, 1, bytes(6))),
        (STREAM_CLOSED, HALF_CLOSED + data(1, b"x")),
        (STREAM_CLOSED, HALF_CLOSED + data(1, b"")),
        (STREAM_CLOSED, HALF_CLOSED + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"")),
        (STREAM_CLOSED, HALF_CLOSED + frame(HEADERS, END_HEADERS, 1, b"")),
        (STREAM_CLOSED, HALF_CLOSED + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x83\x86\x84")),
        (STREAM_CLOSED, OPEN + reset(1) + data(1, b"x")),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS | END_STREAM, 1, longer("1"))),
        (ENHANCE_YOUR_CALM, frame(HEADERS, END_HEADERS, 1, b"\x82" * 3000)),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 1, longer("3")) + data(1, b"ab", end=True)),
        (PROTOCOL_ERROR, frame(HEADERS, END_HEADERS, 1, longer("3")) + data(1, b"ab") + data(1, b"cd")),
        (
            PROTOCOL_ERROR,
            frame(HEADERS, END_HEADERS, 1, longer("3")) + frame(HEADERS, END_HEADERS | END_STREAM, 1, b""),
        ),
    ],
    ids=code_alone,
)
def test_what_ends_the_stream(code: int, sent: bytes, cut: bool) -> None:
    talk = stated(sent, cut)
    assert not talk.is_over
    assert talk.peer.responses[1].reset == code
    assert not talk.http2.unanswered
    assert sum(sink.n_abandoned for sink in talk.sinks) == len(talk.sinks)
    talk.feed(frame(HEADERS, END_HEADERS | END_STREAM, 7, b"\x83\x86\x84"))
    assert talk.sink(7).ended


def test_a_head_over_the_limit_ends_no_other_stream_of_its_connection() -> None:
    talk = stated(OPEN, False)
    for number in range(3, 3 + 2 * 10, 2):
        talk.feed(frame(HEADERS, END_HEADERS, number, b"\x82" * 3000))
        assert talk.peer.responses[number].reset == ENHANCE_YOUR_CALM
    talk.feed(data(1, b"", end=True))
    assert talk.sinks[0].ended
    numbers = iter(range(101, 301, 2))
    while not talk.is_over:  # so many are an attack
        talk.feed(frame(HEADERS, END_HEADERS, next(numbers), b"\x82" * 3000))
    assert talk.peer.error == ENHANCE_YOUR_CALM


def test_the_length_that_was_said_may_be_right() -> None:
    sent = frame(HEADERS, END_HEADERS, 1, longer("3")) + data(1, b"ab") + data(1, b"c", end=True)
    talk = stated(sent, False)
    assert talk.sinks[0].ended


@pytest.mark.parametrize(
    "sent",
    [
        OPEN + reset(1) + reset(1) + grow(1, 0) + grow(1, 1 << 30),
        OPEN + frame(PRIORITY, 0, 1, bytes(5)) + frame(PRIORITY, 0, 9, bytes(5)),
        frame(GOAWAY, 0, 0, bytes(8) + b"debug") + OPEN,
        settings({99: 7, 2: 0, 3: 0, 6: 0}),
        frame(SETTINGS, ACK),
        frame(99, 0xFF, 0, bytes(BIG)),
        frame(99, 0xFF, 12, b""),
        OPEN + frame(DATA, PADDED, 1, b"\x03\0\0\0"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_what_is_passed_over(sent: bytes, cut: bool) -> None:
    talk = Talk()
    talk.feed(sent, range(0, len(sent), 1 if len(sent) < 5000 else 3000) if cut else ())
    assert not talk.is_over
    assert all(response.reset is None for response in talk.peer.responses.values())


# ---- http2 floods ----------------------------------------------------------------------------
# A flood here costs several times a burst, because patience comes back with the time that a busy machine
# takes.


@pytest.mark.parametrize(
    ("sent", "again"),
    [
        (OPEN, data(1, b"")),
        (OPEN, frame(DATA, PADDED, 1, b"\x00")),
        (b"", frame(99)),
        (b"", frame(PRIORITY, 0, 3, bytes(5))),
        (b"", settings()),
        (b"", frame(SETTINGS, ACK)),
        (b"", frame(GOAWAY, 0, 0, bytes(8))),
        (UNFINISHED, frame(CONTINUATION, 0, 1, b"\x20")),
        (UNFINISHED, frame(CONTINUATION, 0, 1, b"")),
    ],
)
def test_floods_of_useless_frames(sent: bytes, again: bytes) -> None:
    talk = Talk()
    talk.feed(sent + again * 30_000)
    assert talk.peer.error == ENHANCE_YOUR_CALM


def test_settings_cost_by_what_is_in_them() -> None:
    talk = Talk()
    talk.feed(settings([(99, 0)] * 40_000) * 8)
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
    assert (talk.peer.n_acks, len(talk.peer.pongs)) == (101, 220)


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
