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
    DATA,
    PREFACE,
    Peer,
    grow,
    reset,
)
from http2_scene import BodyReceiver, RecordingWay, Talk
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.net.http2_streams import UNSENT_NBYTES

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
def test_responses_stay_in_their_windows_and_come_whole(
    steps: list[tuple[Any, ...]], limit_nbytes: int
) -> None:
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
    assert released.times == {1: 0}
    talk.way.take(1000)
    assert released.times == {1: 0}
    talk.way.take()
    assert released.times == {1: 1}
