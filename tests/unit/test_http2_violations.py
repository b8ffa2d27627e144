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
from http2_scene import Talk

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
    talk = stated(
        frame(HEADERS, END_HEADERS, 1, longer("3")) + data(1, b"ab") + data(1, b"c", end=True), False
    )
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
