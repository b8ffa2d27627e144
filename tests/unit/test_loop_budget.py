"""The time budget of a loop iteration: a connection with much to process yields to others."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from functools import partial

from http1_talk import GET, Talk, answer_ok
from http2_peer import POST, Peer, frame
from http2_scene import BodyReceiver, RecordingWay
from http2_scene import Talk as Http2Talk

from gpuserve.front.net.connection import (
    BUDGET_S,
    CROWDED_BUDGET_S,
    CROWDED_READ_NBYTES,
    PREFACE,
    READ_NBYTES,
    Connection,
    LoopBudget,
)
from gpuserve.front.net.exchange import AnswerHead, Exchange
from gpuserve.front.net.http1_protocol import Http1
from gpuserve.front.net.http2_protocol import Http2


class Loop:
    """A loop that is turned by hand, with a manual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: list[Callable[[], None]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._later.append((self.now + delay_s, callback))

    @property
    def n_due(self) -> int:
        return len(self._soon) + len(self._later)

    def next_turn(self) -> bool:
        """Run one iteration; return whether anything was due. Sleep if only timers are left."""
        if not self._soon and self._later:
            self.now = max(self.now, min(at for at, _ in self._later))
        due = [one for one in self._later if one[0] <= self.now]
        self._later = [one for one in self._later if one[0] > self.now]
        soon, self._soon = [*self._soon, *(callback for _, callback in due)], []
        for callback in soon:
            callback()
        return bool(soon)


class Speaker:
    """A connection with a number of parts to process, each of which takes some time."""

    def __init__(self, loop: Loop, turn: LoopBudget, parts: int, takes_s: float = BUDGET_S / 2) -> None:
        self.heard: list[int] = []
        self._parts = iter(range(parts))
        self._last = parts - 1
        self._loop, self._turn, self._takes_s = loop, turn, takes_s

    def flush(self) -> None:
        self.heard.append(-1)

    def resume(self) -> None:
        for part in self._parts:
            self.heard.append(part)
            self._loop.now += self._takes_s
            if part < self._last and self._turn.is_spent():
                self._turn.defer(self)
                return


def speaking(
    n: int = 1, parts: int = 1, takes_s: float = BUDGET_S / 2
) -> tuple[Loop, LoopBudget, list[Speaker]]:
    """A loop, its budget, and so many connections, whose first parts are processed if there are several."""
    loop = Loop()
    turn = LoopBudget(loop.call_soon, loop.call_later, lambda: loop.now)
    speakers = [Speaker(loop, turn, parts, takes_s) for _ in range(n)]
    if parts > 1:
        for speaker in speakers:
            speaker.resume()
    return loop, turn, speakers


def reading(loop: Loop, turn: LoopBudget, n: int) -> list[Speaker]:
    """So many connections that only read."""
    readers = [Speaker(loop, turn, 1, takes_s=0.0) for _ in range(n)]
    for reader in readers:
        turn.defer_reading(reader)
    return readers


def test_writes_of_all_connections_in_one_turn_are_sent_by_one_callback() -> None:
    loop, turn, speakers = speaking(3)
    for one in speakers:
        turn.flush_later(one)
    assert loop.n_due == 1
    assert [one.heard for one in speakers] == [[], [], []]
    loop.next_turn()
    assert [one.heard for one in speakers] == [[-1], [-1], [-1]]
    turn.flush_later(speakers[0])
    loop.next_turn()
    assert speakers[0].heard == [-1, -1]
    assert not loop.next_turn()


def test_short_input_is_processed_in_one_turn() -> None:
    loop, _, (speaker,) = speaking(parts=10, takes_s=BUDGET_S / 20)
    assert speaker.heard == list(range(10))
    loop.next_turn()
    assert not loop.next_turn(), "a loop with nothing to do must sleep"


def test_connections_are_processed_round_robin_and_exceed_the_budget_by_at_most_one_part() -> None:
    loop, _, speakers = speaking(5, parts=9)
    began = loop.now
    while loop.next_turn():
        assert loop.now - began <= 2 * BUDGET_S
        began = loop.now
        counts = sorted(len(one.heard) for one in speakers)
        assert counts[-1] - counts[0] <= 4
    assert [one.heard for one in speakers] == [list(range(9))] * 5


def test_a_connection_that_only_reads_does_not_wait_for_slow_ones() -> None:
    loop, turn, _ = speaking(20, parts=50)
    assert turn.is_spent()
    readers = reading(loop, turn, 40)
    heard = []
    for _ in range(3):
        loop.next_turn()
        heard.append(sum(map(len, (one.heard for one in readers))))
    assert heard == [16, 32, 40]


def test_the_next_turn_is_scheduled_once_however_long_a_connection_waits() -> None:
    loop, turn, takes_long = speaking(2, parts=9, takes_s=10 * BUDGET_S)
    readers = reading(loop, turn, 200)
    while loop.next_turn():
        assert loop.n_due <= 1
        loop.now += CROWDED_BUDGET_S / 4
    assert all(one.heard == list(range(9)) for one in takes_long)
    assert all(one.heard == [0] for one in readers)


def test_less_is_read_of_each_connection_while_many_wait() -> None:
    loop, turn, speakers = speaking(300)
    assert len(turn.buffer) == READ_NBYTES
    turn.is_spent()
    loop.now += 2 * BUDGET_S
    for speaker in speakers:
        assert turn.is_spent()
        turn.defer(speaker)
    assert len(turn.buffer) == CROWDED_READ_NBYTES
    while loop.next_turn():
        pass
    assert len(turn.buffer) == READ_NBYTES


def by_turns(way: RecordingWay, protocol: Http1 | Http2, count: Callable[[], int]) -> list[int]:
    """Have the protocol go on while its connection waits for the next turn; the count after each turn."""
    counts = [count()]
    while way.waits:
        way.waits = False
        protocol.resume()
        counts.append(count())
    return counts


def hundred_requests(peer: Peer, flags: int) -> bytes:
    first, again = peer.encoder.encode(POST), peer.encoder.encode(POST)
    return b"".join([frame(1, flags, 1, first), *(frame(1, flags, 3 + 2 * n, again) for n in range(99))])


def test_requests_in_one_packet_are_answered_turn_by_turn() -> None:
    talk = Talk(answer_ok, hurried=True)
    talk.http1.feed(GET * 5)
    assert by_turns(talk.way, talk.http1, lambda: len(talk.sinks)) == [1, 2, 3, 4, 5]


def test_a_body_in_very_many_chunks_is_taken_turn_by_turn() -> None:
    head = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    talk = Talk(answer_ok, hurried=True)
    talk.http1.feed(head + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
    assert len(by_turns(talk.way, talk.http1, lambda: 0)) > 6
    assert (talk.sinks[0].body, talk.sinks[0].ended) == (b"x" * 5000, True)


def test_frames_are_taken_turn_by_turn() -> None:
    def answer(sink: BodyReceiver, end: bool) -> None:
        sink.exchange.answer(AnswerHead(200, (), [(b"grpc-status", b"0")]), (b"ok",), 2)

    peer = Peer()
    way = RecordingWay(hurried=True)
    talk = Http2Talk(answer, peer=peer, way=way)
    talk.http2.feed(hundred_requests(peer, 5))
    heard = by_turns(way, talk.http2, lambda: len(talk.sinks))
    assert heard[-1] == 100
    assert max(later - sooner for sooner, later in itertools.pairwise(heard)) <= 17


def test_streams_of_a_lost_connection_are_dropped_turn_by_turn() -> None:
    peer = Peer()
    way = RecordingWay()
    talk = Http2Talk(None, peer=peer, way=way)
    talk.http2.feed(hundred_requests(peer, 4))
    way.hurried = True
    talk.http2.lost()
    dropped = by_turns(way, talk.http2, lambda: sum(sink.n_abandoned for sink in talk.sinks))
    assert dropped == [16, 32, 48, 64, 80, 96, 100]
    assert all(sink.n_abandoned == 1 for sink in talk.sinks)


async def test_a_connection_that_is_lost_goes_on_until_its_streams_are_dropped() -> None:
    sinks: list[BodyReceiver] = []
    clock = itertools.count()

    def accept(exchange: Exchange) -> BodyReceiver:
        sinks.append(BodyReceiver(exchange, None))
        return sinks[-1]

    async def turns_until(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - no event announces the turns
            await asyncio.sleep(0)

    loop = asyncio.get_running_loop()
    turn = LoopBudget(loop.call_soon, loop.call_later, lambda: next(clock) * BUDGET_S / 2)
    protocols = partial(Http1, handler=accept), partial(Http2, handler=accept)
    ours, theirs = socket.socketpair()
    peer = Peer()
    async with asyncio.timeout(20):
        with theirs:
            _, connection = await loop.create_connection(
                lambda: Connection(*protocols, turn, set(), loop), sock=ours
            )
            theirs.sendall(PREFACE + peer.first_settings() + hundred_requests(peer, 4))
            await turns_until(lambda: len(sinks) == 100)
        await turns_until(lambda: sum(sink.n_abandoned for sink in sinks) == 100)
    assert not connection.held
    assert [sink.n_abandoned for sink in sinks] == [1] * 100
