"""What HTTP/2 lets a client send: its windows, and that they come back whatever becomes of a request."""

from __future__ import annotations

import pytest
from http2_peer import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    HEADERS,
    PADDED,
    data,
    frame,
    reset,
)
from http2_scene import Talk
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net import http2_protocol as protocol
from gpuserve.front.net import http2_streams as http2_stream
from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.net.http2_protocol import CONNECTION_WINDOW
from gpuserve.front.net.http2_streams import RECEIVE_WINDOW

OK = AnswerHead(200, (), [(b"grpc-status", b"0")])


def test_a_stream_may_send_its_window_and_no_more() -> None:
    talk = Talk(consume=False)
    part = data(1, bytes(256 << 10))
    talk.feed(talk.peer.headers(1) + part * (RECEIVE_WINDOW // (256 << 10)))
    assert talk.peer.responses == {}
    talk.feed(data(1, b"x") + talk.peer.headers(3))
    assert talk.peer.responses[1].reset == FLOW_CONTROL_ERROR
    assert talk.sinks[0].n_abandoned == 1
    assert not talk.is_over


def test_frames_that_arrive_together_may_fill_the_window_and_no_more() -> None:
    """They are taken as one part: what the first of them has used up does not count twice."""
    talk = Talk(consume=False)
    part = data(1, bytes(4 << 10))
    talk.feed(talk.peer.headers(1) + part * (RECEIVE_WINDOW // (4 << 10) - 5))
    talk.feed(part * 5)
    assert talk.peer.responses == {}
    again = Talk(consume=False)
    again.feed(again.peer.headers(1) + part * (RECEIVE_WINDOW // (4 << 10) - 5))
    again.feed(part * 6)
    assert again.peer.responses[1].reset == FLOW_CONTROL_ERROR
    assert len(again.sinks[0].body) == RECEIVE_WINDOW


def test_what_is_used_up_may_be_sent_again() -> None:
    talk = Talk(consume=False)
    part = data(1, bytes(256 << 10))
    talk.feed(talk.peer.headers(1) + part * 16)
    stream = talk.sinks[0].exchange
    stream.consumed(RECEIVE_WINDOW // 2)
    talk.read()
    assert talk.peer.send_windows == {1: RECEIVE_WINDOW // 2}
    talk.feed(part * 8)
    assert stream.state is http2_stream.State.OPEN
    stream.consumed(1 << 40)
    talk.read()
    assert talk.peer.send_windows == {1: RECEIVE_WINDOW // 2 + RECEIVE_WINDOW}


def test_padding_may_be_sent_again_on_its_stream_too() -> None:
    talk = Talk()
    padded = frame(DATA, PADDED, 1, bytes([200]) + b"a" + bytes(200))
    talk.feed(talk.peer.headers(1))
    n_sent = RECEIVE_WINDOW // 2 // 202 + 1
    talk.feed(padded * n_sent)
    assert talk.peer.send_windows[1] >= RECEIVE_WINDOW // 2
    assert talk.sinks[0].body == b"a" * n_sent


def test_a_connection_may_send_its_window_and_no_more() -> None:
    talk = Talk(consume=False)
    part = bytes(256 << 10)
    ids = range(1, 2 * CONNECTION_WINDOW // RECEIVE_WINDOW, 2)
    talk.feed(b"".join(talk.peer.headers(n) + data(n, part) * 16 for n in ids))
    assert not talk.is_over
    talk.feed(talk.peer.headers(ids[-1] + 2) + data(ids[-1] + 2, b"x"))
    assert talk.peer.error == FLOW_CONTROL_ERROR
    assert all(sink.n_abandoned == 1 for sink in talk.sinks)


ENDINGS = st.sampled_from(
    ["whole", "reset", "early", "failed", "wrong length", "over", "refused", "trailers"]
)


@given(
    st.lists(st.tuples(ENDINGS, st.integers(0, 3000), st.booleans(), st.booleans()), min_size=40, max_size=60)
)
def test_the_connection_s_window_comes_back_whatever_becomes_of_requests(
    requests: list[tuple[str, int, bool, bool]],
) -> None:
    """Windows small enough to be used up many times: a byte that leaks each time would end it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (protocol, http2_stream):
            patch.setattr(module, "CONNECTION_WINDOW", 128 << 10)
        patch.setattr(http2_stream, "RECEIVE_WINDOW", 4096)
        talk = Talk(consume=False)
        talk.peer.send_window = 128 << 10
        for n, (ending, nbytes, padded, used) in enumerate(requests):
            n_sent = _one_request(talk, 2 * n + 1, ending, nbytes, padded, used)
            talk.peer.send_window -= n_sent
            assert talk.peer.send_window > 0
        talk.feed(b"")
        assert not talk.is_over
        assert not talk.http2.unanswered
        assert talk.peer.send_window > 64 << 10


def _one_request(talk: Talk, stream_id: int, ending: str, nbytes: int, padded: bool, used: bool) -> int:
    """Send it and let it end; how many bytes count for the window."""
    more = [("content-length", str(nbytes + 1))] if ending == "wrong length" else []
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/"), *more]
    talk.feed(talk.peer.headers(stream_id, fields))
    sink = talk.sink(stream_id)
    stream = sink.exchange
    end = ending in ("whole", "wrong length")
    if ending == "early":
        stream.start(200, [], end=True)
    payload = b"\x05" + bytes(nbytes) + bytes(5) if padded else bytes(nbytes)
    flags = (END_STREAM if end else 0) | (PADDED if padded else 0)
    talk.feed(frame(DATA, flags, stream_id, payload), [12, 700])
    n_sent = len(payload)
    if used:
        stream.consumed(nbytes // 2)
    match ending:
        case "whole" | "trailers":
            if ending == "trailers":
                talk.feed(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, b""))
            assert sink.ended
            stream.answer(OK, (b"x",), 1)
            stream.consumed(nbytes)
        case "reset" | "refused":
            talk.feed(reset(stream_id, CANCEL))
        case "failed":
            stream.reset()
            talk.feed(data(stream_id, b"late"))
            n_sent += 4
        case "over":
            talk.feed(data(stream_id, bytes(4096)) * 2)
            n_sent += 8192
            stream.reset()
    talk.read()
    return n_sent
