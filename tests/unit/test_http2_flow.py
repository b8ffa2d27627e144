"""What HTTP/2 sends: within the client's windows, by turns; memory is given back once in every ending."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from h2.settings import SettingCodes
from http2_peer import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    HEADERS,
    PADDED,
    PREFACE,
    Peer,
    data,
    frame,
    grow,
    reset,
)
from http2_scene import BodyReceiver, RecordingWay, Talk
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net import http2_protocol as protocol
from gpuserve.front.net import http2_streams as http2_stream
from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.net.http2_protocol import CONNECTION_WINDOW
from gpuserve.front.net.http2_streams import RECEIVE_WINDOW, UNSENT_NBYTES

OK = AnswerHead(200, (), [(b"grpc-status", b"0")])
MIB = 1 << 20


class Released:
    """How often memory was given back, by stream."""

    def __init__(self, way: RecordingWay | None = None) -> None:
        self._way = way
        self.times: dict[int, int] = {}

    def answer(self, sink: BodyReceiver, nbytes: int) -> None:
        """A response of so many bytes."""
        stream = sink.exchange
        self.times[stream.id] = 0
        pieces = (bytes(nbytes // 2), bytes(nbytes - nbytes // 2))

        def release() -> None:
            self.times[stream.id] += 1
            if self._way is not None:
                assert not any(self._way.still_sends(one) for one in pieces if one)

        stream.answer(OK, pieces, nbytes, release)


# ---- responses ------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 40), st.sampled_from([16384, 16385, 65535, 65536, 200_000, 3 * MIB]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), SIZES),
        st.tuples(st.just("answer"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(0, 500_000)),
        st.tuples(st.just("grow stream"), st.integers(0, 9), st.integers(1, 300_000)),
        st.tuples(st.just("grow"), st.integers(1, 300_000)),
        st.tuples(st.just("resize"), st.sampled_from([0, 1, 20_000, 65535, 1 << 20])),
        st.tuples(st.just("fail"), st.integers(0, 9)),
    ),
    max_size=40,
)


class Scene:
    """Requests sent, answered, cancelled and acknowledged in any order. The peer judges every frame."""

    def __init__(self, limit_nbytes: int) -> None:
        self.talk = Talk(peer=Peer(), way=RecordingWay(limit_nbytes))
        self.released = Released(self.talk.way)
        self.sizes: list[int] = []
        self.answered: set[int] = set()
        self.given_up: set[int] = set()

    def step(self, step: tuple[Any, ...]) -> None:
        talk = self.talk
        self.take(None)  # what a client says next is of what it has read
        match step:
            case "ask", nbytes:
                talk.feed(talk.peer.request(2 * len(self.sizes) + 1))
                self.sizes.append(nbytes)
            case "answer", n if n < len(self.sizes) and n not in self.answered:
                self.answered.add(n)
                self.released.answer(talk.sinks[n], self.sizes[n])
            case "reset", n if n < len(self.sizes):
                self.given_up.add(n)
                talk.feed(reset(2 * n + 1))
            case "fail", n if n < len(self.sizes):
                self.given_up.add(n)
                talk.sinks[n].exchange.reset()
            case "take", nbytes:
                self.take(nbytes)
            case "grow stream", n, nbytes if n < len(self.sizes):
                talk.feed(talk.peer.grow(2 * n + 1, nbytes))
            case "grow", nbytes:
                talk.feed(talk.peer.grow(0, nbytes))
            case "resize", nbytes:
                talk.feed(talk.peer.resize(nbytes))

    def take(self, nbytes: int | None) -> None:
        self.talk.peer.read(self.talk.way.take(nbytes))
        while nbytes is None and self.talk.way.unsent_nbytes:
            self.talk.peer.read(self.talk.way.take())

    def pay(self) -> None:
        """Read, and pay for, whatever is left."""
        talk = self.talk
        self.take(None)
        for n in set(range(len(self.sizes))) - self.answered:
            self.step(("answer", n))
        talk.feed(talk.peer.grow(0, 64 * MIB) + talk.peer.resize(8 * MIB))
        self.take(None)


@given(STEPS, st.sampled_from([10, 70_000, 1 << 30]))
def test_responses_stay_in_windows_and_come_whole(steps: list[tuple[Any, ...]], limit_nbytes: int) -> None:
    scene = Scene(limit_nbytes)
    for step in steps:
        scene.step(step)
    scene.pay()
    for n, nbytes in enumerate(scene.sizes):
        if n not in scene.given_up:
            response = scene.talk.peer.responses[2 * n + 1]
            assert response.ended
            assert len(response.body) == nbytes
    assert not scene.talk.http2.unanswered
    assert scene.talk.way.reading
    assert set(scene.released.times.values()) <= {1}


@given(STEPS)
def test_a_connection_that_is_lost_gives_everything_back(steps: list[tuple[Any, ...]]) -> None:
    scene = Scene(1000)
    for step in steps:
        scene.step(step)
    scene.talk.way.lose()
    scene.talk.http2.lost()
    scene.talk.way.let_go()
    assert set(scene.released.times.values()) <= {1}
    assert all(sink.n_abandoned <= 1 for sink in scene.talk.sinks)


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 30_000)), min_size=1, max_size=8), st.data()
)
def test_another_client_reads_the_same(requests: list[tuple[int, int]], chance: st.DataObject) -> None:
    """The state machine of h2 finds no fault, with small windows and the dynamic table."""
    client = h2.connection.H2Connection(h2.config.H2Configuration())
    client.initiate_connection()
    window, table = (chance.draw(st.sampled_from(few)) for few in ([100, 16384, 1 << 20], [0, 100, 4096]))
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.HEADER_TABLE_SIZE: table})
    talk = Talk(lambda sink, end: end and released.answer(sink, sizes[sink.exchange.id]), greet=False)
    released, sizes, bodies, ended = Released(), {}, {}, set()

    def exchange() -> None:
        while True:
            talk.http2.feed(client.data_to_send().removeprefix(PREFACE))
            received = talk.way.take()
            if not received:
                return
            for event in client.receive_data(received):
                if isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
                    client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    ended.add(event.stream_id)

    exchange()
    for answered_nbytes, asked_nbytes in requests:
        stream_id = client.get_next_available_stream_id()
        # A client may take so many parts of less than a KiB before it is left.
        sizes[stream_id] = min(answered_nbytes, 200 * window)
        client.send_headers(
            stream_id, [(":method", "POST"), (":scheme", "http"), (":path", f"/{stream_id}"), ("host", "h")]
        )
        for at in range(0, asked_nbytes, 16384):
            client.send_data(stream_id, bytes(min(16384, asked_nbytes - at)), pad_length=at % 7 or None)
        client.end_stream(stream_id)
        if chance.draw(st.booleans()):
            exchange()
    exchange()
    assert ended == set(sizes)
    assert {stream_id: len(bodies.get(stream_id, b"")) for stream_id in sizes} == sizes
    assert set(released.times.values()) == {1}
    assert [len(sink.body) for sink in talk.sinks] == [nbytes for _, nbytes in requests]


@pytest.mark.parametrize("tail_nbytes", [1, 40, 1024, 5000])
def test_memory_is_kept_until_the_last_uncopied_byte_is_sent(tail_nbytes: int) -> None:
    """The rest of an answer that the window held back is small and copied; what was sent before it is not."""
    talk = Talk(way=RecordingWay(1 << 30))
    released = Released(talk.way)
    talk.feed(talk.peer.request(1))
    released.answer(talk.sinks[0], 65535 + tail_nbytes)
    talk.feed(talk.peer.grow(0, MIB) + talk.peer.grow(1, MIB))  # as far as the client has read by then
    assert talk.way.unsent_nbytes > 65535 + tail_nbytes
    assert released.times == {1: 0}
    talk.peer.read(talk.way.take())
    talk.way.let_go()
    assert released.times == {1: 1}
    assert len(talk.peer.responses[1].body) == 65535 + tail_nbytes


def test_a_window_may_fall_below_zero() -> None:
    released = Released()
    talk = Talk(lambda sink, end: released.answer(sink, 100_000))
    talk.feed(talk.peer.request(1))
    response = talk.peer.responses[1]
    assert len(response.body) == 65535
    talk.feed(talk.peer.grow(0, MIB) + talk.peer.resize(1000))
    assert response.window == 1000 - 65535
    talk.feed(talk.peer.grow(1, 65535 - 1000))
    assert len(response.body) == 65535
    talk.feed(talk.peer.grow(1, 1))
    assert len(response.body) == 65536
    talk.feed(talk.peer.resize(MIB))
    assert len(response.body) == 100_000
    assert response.ended


def test_streams_take_turns() -> None:
    """One that is large does not hold up those behind it, however slowly the client reads."""
    released = Released()
    way = RecordingWay(1000)
    talk = Talk(lambda sink, end: released.answer(sink, 8 * MIB), peer=Peer(64 * MIB, 1 << 20), way=way)
    way.take()
    talk.feed(talk.peer.grow(0, 64 * MIB))
    talk.feed(b"".join(talk.peer.request(stream_id) for stream_id in (1, 3, 5)))
    turns = []
    while way.unsent_nbytes:
        frames = talk.peer.read(way.take())
        turns += [{one.stream_id for one in frames if one.kind == DATA}]
    assert [max(turn) for turn in turns if turn] == [1, *[1, 3, 5] * 7, 3, 5]
    assert set(released.times.values()) == {1}


def test_an_end_waits_for_no_window() -> None:
    """A response without a body, while another has used up the connection's window."""

    def answer(sink: BodyReceiver, end: bool) -> None:
        sink.exchange.start(200, [])
        sink.exchange.send(bytes(sink.exchange.id % 2 and 100_000 if sink.exchange.id == 1 else 0))
        sink.exchange.finish([(b"x", b"y")])

    talk = Talk(answer)
    talk.feed(talk.peer.request(1) + talk.peer.request(3))
    assert talk.peer.window == 0
    assert not talk.peer.responses[1].ended
    assert talk.peer.responses[3].ended


def test_windows_of_streams_that_cannot_move_are_not_walked() -> None:
    """Thousands of responses held up by their own windows cost nothing when the connection's grows."""
    released = Released()
    talk = Talk(lambda sink, end: released.answer(sink, 1000), peer=Peer(0))
    talk.feed(b"".join(talk.peer.request(2 * n + 1) for n in range(4000)))
    updates = grow(0, 1024) * 20_000
    talk.peer.window += 1024 * 20_000
    began = time.process_time()
    talk.feed(updates)
    assert time.process_time() - began < 1.5  # each walk would take a tenth of a millisecond at least
    talk.feed(talk.peer.grow(0, 4000 * 1000) + talk.peer.resize(1000))
    assert all(response.ended for response in talk.peer.responses.values())


async def test_room_waits_until_little_is_unsent() -> None:
    talk = Talk()
    talk.feed(talk.peer.request(1) + talk.peer.request(3))
    first, second = (sink.exchange for sink in talk.sinks)
    first.start(200, [])
    first.send(bytes(UNSENT_NBYTES + 65535 + 1))
    await second.room()
    waiting = asyncio.ensure_future(first.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    talk.feed(talk.peer.grow(0, 10) + talk.peer.grow(1, 10))
    await waiting
    first.send(bytes(UNSENT_NBYTES))
    waiting = asyncio.ensure_future(first.room())
    await asyncio.sleep(0)
    talk.feed(reset(1))
    with pytest.raises(ConnectionResetError):
        await waiting
    with pytest.raises(ConnectionResetError):
        await first.room()


@pytest.mark.parametrize("nbytes", [10, 20_000, MIB])
@pytest.mark.parametrize("limit_nbytes", [None, 1000])
def test_an_answer_after_its_stream_gives_its_memory_back(nbytes: int, limit_nbytes: int | None) -> None:
    released = Released()
    talk = Talk(way=RecordingWay(limit_nbytes))
    talk.way.take()
    talk.feed(talk.peer.request(1) + reset(1))
    released.answer(talk.sinks[0], nbytes)
    assert released.times == {1: 1}
    assert talk.way.unsent_nbytes == 0


def test_memory_is_kept_while_a_reset_stream_is_on_its_way() -> None:
    released = Released()
    talk = Talk(lambda sink, end: released.answer(sink, MIB), way=RecordingWay(1000))
    talk.way.take()
    talk.feed(talk.peer.request(1))
    assert talk.way.unsent_nbytes > 65535
    talk.feed(reset(1))
    for nbytes, times in ((0, 0), (1000, 0), (None, 1)):
        talk.way.take(nbytes)
        assert released.times == {1: times}


# ---- http2 windows ---------------------------------------------------------------------------


def test_a_stream_may_send_its_window_and_no_more() -> None:
    talk = Talk(consume=False)
    part = data(1, bytes(256 << 10))
    talk.feed(talk.peer.headers(1) + part * (RECEIVE_WINDOW // (256 << 10)))
    assert talk.peer.responses == {}
    talk.feed(data(1, b"x") + talk.peer.headers(3))
    assert (talk.peer.responses[1].reset, talk.sinks[0].n_abandoned) == (FLOW_CONTROL_ERROR, 1)
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
def test_the_connection_s_window_comes_back_after_any_requests(
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


# ---- http2 tables ----------------------------------------------------------------------------


TRAILERS = [(b"grpc-status", b"0")]
TYPED_OK = AnswerHead(200, [(b"content-type", b"application/grpc")], TRAILERS)


def blocks(talk: Talk) -> list[bytes]:
    return [one.payload for one in talk.read() if one.kind == HEADERS]


def asked(talk: Talk, *stream_ids: int) -> None:
    talk.feed(b"".join(talk.peer.request(one, b"x") for one in stream_ids))


def test_the_second_answer_is_referred_to() -> None:
    talk = Talk()
    asked(talk, 1, 3, 5)
    for one in (1, 3, 5):
        talk.sink(one).exchange.answer(TYPED_OK, (b"x",), 1)
    assert [len(one) for one in blocks(talk)] == [19, 15, 2, 1, 2, 1]
    for one in talk.peer.responses.values():
        assert dict(one.heads[0])["content-type"] == "application/grpc"
        assert one.trailers == {"grpc-status": "0"}


def test_trailers_wait_with_their_body_and_are_encoded_when_they_are_sent() -> None:
    """Meanwhile others are answered, a stream is reset, and the client's table changes."""
    talk = Talk(peer=Peer(window=10))
    asked(talk, 1, 3, 5, 7)
    talk.sink(1).exchange.answer(TYPED_OK, (bytes(20),), 20)
    talk.sink(3).exchange.start(200, TYPED_OK.headers)
    talk.sink(3).exchange.send(bytes(20))
    talk.sink(3).exchange.finish(TRAILERS)
    talk.sink(5).exchange.answer(TYPED_OK, (b"x",), 1)
    talk.feed(reset(3, CANCEL))
    talk.feed(talk.peer.resize_table(0))
    talk.feed(talk.peer.grow(1, 100))
    talk.feed(talk.peer.resize_table(4096))
    asked(talk, 9, 11)
    for one in (7, 9, 11):
        talk.sink(one).exchange.answer(TYPED_OK, (b"x",), 1)
    assert [len(one) for one in blocks(talk)][-2:] == [2, 1]
    for one in (1, 5, 7, 9, 11):
        assert talk.peer.responses[one].trailers == {"grpc-status": "0"}


def test_an_answer_to_nobody_is_not_counted_as_sent() -> None:
    talk = Talk()
    asked(talk, 1, 3)
    talk.feed(reset(1, CANCEL))
    talk.sinks[0].exchange.answer(TYPED_OK, (b"x",), 1)
    talk.sinks[1].exchange.answer(TYPED_OK, (b"x",), 1)
    assert [len(one) for one in blocks(talk)] == [19, 15]
