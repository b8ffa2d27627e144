"""A request that a door passes on: what the front does with it, and what becomes of it whoever goes when."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ipc_scene import ENDS, HEAD, FrontSink, IngressExchange, Way

from gpuserve.front.ingress.forwarding import RequestForwarder
from gpuserve.front.ingress.ipc_channel import FrontOutage
from gpuserve.front.net.exchange import AnswerHead, ConnectionEndpoints, Exchange, Head
from gpuserve.front.net.exchange import BodyReceiver as SinkOfBody
from gpuserve.front.protocols.access.authorization import client_uid
from gpuserve.front.protocols.router import refuse

MIB: Final = 1 << 20
OK: Final = AnswerHead(200, ((b"a", b"b"),), ((b"c", b"d"),))


class Scene:
    """A way to a front whose sinks do nothing by themselves."""

    def __init__(self) -> None:
        self.sinks: list[FrontSink] = []
        self.released: list[int] = []
        self.way = Way(self.accept)

    def accept(self, exchange: Exchange) -> SinkOfBody:
        self.sinks.append(FrontSink(exchange))
        return self.sinks[-1]

    def open(self, head: Head = HEAD, ends: ConnectionEndpoints = ENDS) -> IngressExchange:
        return IngressExchange(head, ends).open(self.way.forwarding.accept)

    async def opened(self) -> tuple[IngressExchange, FrontSink]:
        exchange = self.open()
        await self.way.settle()
        return exchange, self.sinks[-1]

    def answer(self, sink: FrontSink, body: bytes) -> None:
        """Answer with a body that is lent; ``released`` notes when it is given back."""
        number = self.sinks.index(sink)
        memory = bytearray(body)

        def release() -> None:
            self.released.append(number)
            memory[:] = bytes(len(memory))

        sink.exchange.answer(OK, (b"", memoryview(memory)), len(body), release)

    @property
    def n_open(self) -> tuple[int, int]:
        return self.way.forwarding.n_open, self.way.forwarded.n_open


def in_a_scene(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test in an event loop of its own, after which neither end has anything left."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        async def whole() -> None:
            scene = Scene()
            try:
                await test(scene, **arguments)
                await scene.way.settle()
                assert scene.n_open == (0, 0)
                assert len(asyncio.all_tasks()) == 1
            finally:
                scene.way.close()

        asyncio.run(whole())

    signature = inspect.signature(test)
    _, *fixtures = signature.parameters.values()
    run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
    return run


# ---- what is told -------------------------------------------------------------------------------


@in_a_scene
async def test_a_request_and_its_answer_arrive_as_they_were(scene: Scene) -> None:
    head = Head("PUT", b"/%41?q", [(b"te", b"trailers"), (b"x", b"\xff")], "2", 1 << 60, "https")
    ends = ConnectionEndpoints(("fe80::1%eth0", 5), ("::1", 80), True, source=b"\xfe\x80" + bytes(6))
    door = scene.open(head, ends)
    door.come(b"abc")
    door.come(b"", end=True)
    await scene.way.settle()
    (sink,) = scene.sinks
    seen = sink.exchange.head
    assert list(seen.headers) == head.headers
    told = (
        "method",
        "target",
        "path",
        "query",
        "http_version",
        "content_length",
        "scheme",
        "trailers",
        "is_grpc",
    )
    assert [getattr(seen, one) for one in told] == [getattr(head, one) for one in told]
    assert sink.exchange.endpoints == ends
    assert (sink.body, sink.ended) == (b"abc", True)
    assert (sink.exchange.started, sink.exchange.ended) == (False, False)
    scene.answer(sink, b"body")
    assert (sink.exchange.started, sink.exchange.ended, scene.released) == (True, True, [0])
    await scene.way.settle()
    assert (door.status, door.headers, door.trailers, door.body) == (200, OK.headers, OK.trailers, b"body")
    assert door.is_whole
    assert sink.n_abandoned == 0


@in_a_scene
async def test_equal_heads_are_one_object_and_so_are_heads_of_answers(scene: Scene) -> None:
    doors = [scene.open(Head("GET", b"/a", [(b"n", b"%d" % (n // 2))], "1.1", None)) for n in range(4)]
    await scene.way.settle()
    heads = [one.exchange.head for one in scene.sinks]
    assert heads[0] is heads[1]
    assert heads[1] is not heads[2]
    heads_of_answers: list[AnswerHead] = []
    for door, sink in zip(doors, scene.sinks, strict=True):
        door.answer = lambda head, *rest: heads_of_answers.append(head)  # type: ignore[method-assign]
        scene.answer(sink, b"")
    await scene.way.settle()
    assert len(heads_of_answers) == 4
    assert len(set(heads_of_answers)) == 1


@in_a_scene
async def test_a_long_head_is_not_kept(scene: Scene) -> None:
    for _ in range(2):
        scene.open(Head("GET", b"/a", [(b"n", bytes(5000))], "1.1", None))
    await scene.way.settle()
    assert scene.sinks[0].exchange.head is not scene.sinks[1].exchange.head
    for sink in scene.sinks:
        scene.answer(sink, b"")


@pytest.mark.parametrize(
    ("head", "depends"),
    [
        (Head("POST", b"/v2/systemsharedmemory/region/r/register", (), "1.1", None), True),
        (Head("GET", b"/v2/systemsharedmemory/region/r/register", (), "1.1", None), False),
        (Head("POST", b"/v2/cudasharedmemory/region/r/register", (), "1.1", None), False),
        (
            Head(
                "POST",
                b"/inference.GRPCInferenceService/SystemSharedMemoryRegister",
                ((b"content-type", b"application/grpc"),),
                "2",
                None,
            ),
            True,
        ),
    ],
)
@in_a_scene
async def test_the_user_is_asked_where_the_socket_is_and_told_where_it_matters(
    scene: Scene, head: Head, depends: bool
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        scene.open(head, ConnectionEndpoints(None, ("/run/x", None), False, ours))
        await scene.way.settle()
        (sink,) = scene.sinks
        assert client_uid(sink.exchange) == (os.getuid() if depends else None)
        scene.answer(sink, b"")


@in_a_scene
async def test_a_streamed_response(scene: Scene) -> None:
    door, sink = await scene.opened()
    door.come(b"", end=True)
    exchange = sink.exchange
    exchange.start(201, OK.headers)
    exchange.send(b"one")
    await exchange.room()
    await scene.way.settle()
    assert (door.status, door.body, door.ended) == (201, b"one", False)
    exchange.drop_unsent()
    exchange.send(b"two")
    exchange.finish(OK.trailers)
    await scene.way.settle()
    assert (door.body, door.trailers, door.n_dropped) == (b"onetwo", OK.trailers, 1)
    for nothing in (exchange.send, exchange.finish):
        nothing(b"")
    exchange.reset()
    exchange.drop_unsent()
    exchange.start(200, ())
    scene.answer(sink, b"late")
    assert scene.released == [0]


# ---- who goes -----------------------------------------------------------------------------------


@in_a_scene
async def test_who_answers_when_it_accepts(scene: Scene) -> None:
    class AtOnce(FrontSink):
        def __init__(self, exchange: Exchange) -> None:
            super().__init__(exchange)
            exchange.answer(OK, (b"at once",), 7)

    def accept(exchange: Exchange) -> SinkOfBody:
        scene.sinks.append(AtOnce(exchange))
        return scene.sinks[-1]

    scene.way.close()
    scene.way = Way(accept)
    door = scene.open()
    door.come(b"abc", end=True)
    await scene.way.settle()
    assert door.body == b"at once"
    assert [(sink.n_abandoned, sink.body) for sink in scene.sinks] == [(1, b"")]


@in_a_scene
async def test_a_client_that_leaves_while_somebody_waits_for_room(scene: Scene) -> None:
    door, sink = await scene.opened()
    door.read(False)
    sink.exchange.start(200, ())
    sink.exchange.send(bytes(MIB))
    waiting = asyncio.ensure_future(sink.exchange.room())
    await scene.way.settle()
    assert not waiting.done()
    door.leave()
    await scene.way.settle()
    with pytest.raises(ConnectionResetError):
        await waiting
    assert sink.n_abandoned == 1


@in_a_scene
async def test_a_door_that_is_gone_takes_its_exchanges_with_it(scene: Scene) -> None:
    for _ in range(3):
        await scene.opened()
    scene.answer(scene.sinks[0], bytes(4 * MIB))
    scene.sinks[1].exchange.start(200, ())
    scene.sinks[1].exchange.send(bytes(4 * MIB))
    waiting = asyncio.ensure_future(scene.sinks[1].exchange.room())
    await asyncio.sleep(0)
    scene.way.door.close()
    await scene.way.settle()
    assert scene.way.lost == ["front"]
    scene.way.forwarded.close()
    with pytest.raises(ConnectionResetError):
        await waiting
    assert [sink.n_abandoned for sink in scene.sinks] == [1, 1, 1]
    assert scene.released == [0]
    for sink in scene.sinks:
        sink.exchange.reset()
        sink.exchange.consumed(1)
        scene.answer(sink, b"late")
    assert scene.released == [0, 0, 1, 2]  # the first of them has been given two bodies
    scene.way.forwarding = RequestForwarder(scene.way.door, FrontOutage(), refuse)  # that process has ended


@in_a_scene
async def test_a_defect_breaks_one_request_off(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FrontSink):
        def receive_body(self, data: Any, end: bool) -> None:
            raise ZeroDivisionError

    doors = [scene.open() for _ in range(2)]
    await scene.way.settle()
    scene.sinks[0].__class__ = Broken
    with caplog.at_level(logging.ERROR):
        for door in doors:
            door.come(b"abc", end=True)
        await scene.way.settle()
    assert [door.is_broken for door in doors] == [True, False]
    assert scene.sinks[1].body == b"abc"
    scene.answer(scene.sinks[1], b"")
    assert "aborted a request" in caplog.text


# ---- how much is on its way ---------------------------------------------------------------------


@in_a_scene
async def test_what_is_consumed_is_told_but_for_small_bodies(scene: Scene) -> None:
    door, sink = await scene.opened()
    door.come(bytes(100))
    await scene.way.settle()
    sink.exchange.consumed(100)
    await scene.way.settle()
    assert door.consumed_nbytes == 100
    door.come(bytes(100), end=True)
    await scene.way.settle()
    sink.exchange.consumed(100)
    await scene.way.settle()
    assert door.consumed_nbytes == 100
    sink.exchange.consumed(8 << 10)
    await scene.way.settle()
    assert door.consumed_nbytes == 200 + (8 << 10)
    scene.answer(sink, b"")
    sink.exchange.consumed(1 << 20)


@pytest.mark.parametrize("nbytes", [65536, 65537, MIB, 16 * MIB])
@in_a_scene
async def test_a_large_answer_arrives_whole_and_little_of_it_waits(scene: Scene, nbytes: int) -> None:
    body = os.urandom(nbytes)
    door, sink = await scene.opened()
    scene.answer(sink, body)
    assert scene.released == ([0] if nbytes < MIB else [])
    await scene.way.settle()
    assert door.body == body
    assert door.is_whole
    assert scene.released == [0]
    assert scene.way.most_waiting_nbytes < 512 << 10


@in_a_scene
async def test_a_stream_waits_for_its_client(scene: Scene) -> None:
    door, sink = await scene.opened()
    exchange = sink.exchange
    door.read(False)
    exchange.start(200, ())
    n_sent = 0

    async def send() -> None:
        nonlocal n_sent
        while n_sent < 64:
            exchange.send(bytes(64 << 10))
            n_sent += 1
            await exchange.room()
        exchange.finish()

    sending = asyncio.ensure_future(send())
    await scene.way.settle()
    assert n_sent == 5  # as much as may wait, and one more
    assert len(asyncio.all_tasks()) == 3  # this one, it, and one at the door
    door.read(True)
    await scene.way.settle()
    await sending
    assert len(door.body) == 4 * MIB


@in_a_scene
async def test_one_large_part_of_a_stream_waits_here(scene: Scene) -> None:
    """And goes as its client reads, also where no more of it is wanted meanwhile."""
    (door, sink), (other, other_sink) = await scene.opened(), await scene.opened()
    for one, its in ((door, sink), (other, other_sink)):
        one.read(False)
        its.exchange.start(200, ())
        its.exchange.send(os.urandom(8 * MIB))
    await scene.way.settle()
    assert len(door.body) == len(other.body) == 256 << 10
    other_sink.exchange.drop_unsent()
    for its in (sink, other_sink):
        its.exchange.finish()
    door.read(True)
    await scene.way.settle()
    assert len(door.body) == 8 * MIB
    assert (len(other.body), other.ended, other.n_dropped) == (256 << 10, True, 1)


@in_a_scene
async def test_a_large_answer_does_not_hold_the_others_up(scene: Scene) -> None:
    """Judged beside itself: a small answer that is asked for with it is there long before it."""
    (large, large_sink), (small, small_sink) = await scene.opened(), await scene.opened()
    began = time.perf_counter()
    large_sink.exchange.answer(OK, (bytes(64 * MIB),), 64 * MIB)
    scene.answer(small_sink, b"small")
    took_s: dict[IngressExchange, float] = {}

    def note(door: IngressExchange, *answer: Any) -> None:
        IngressExchange.answer(door, *answer)
        took_s[door] = time.perf_counter() - began

    for door in (large, small):
        door.answer = functools.partial(note, door)  # type: ignore[method-assign]
    await scene.way.settle()
    assert len(large.body) == 64 * MIB
    assert took_s[small] < took_s[large]


# ---- anything, in any order ---------------------------------------------------------------------

NUMBERS: Final = st.integers(0, 3)
SIZES: Final = st.sampled_from([0, 1, 5000, 64 << 10, 70_000, 300_000, MIB])
OPERATIONS: Final = st.one_of(
    st.tuples(st.sampled_from(["open", "turn", "settle"])),
    st.tuples(st.sampled_from(["leave", "start", "start whole", "finish", "drop", "reset"]), NUMBERS),
    st.tuples(st.sampled_from(["body", "last of body", "answer", "send", "send last"]), NUMBERS, SIZES),
    st.tuples(st.just("consumed"), NUMBERS, SIZES),
    st.tuples(st.just("read"), NUMBERS, st.booleans()),
)


class Run:
    """Does one thing after the other, and remembers what should come of it."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.doors: list[IngressExchange] = []
        self.asked: list[bytes] = []
        self.answered: dict[FrontSink, bytes] = {}
        self.n_lent = 0

    async def do(self, operation: tuple[Any, ...]) -> None:
        name, *rest = operation
        match name:
            case "open":
                self.doors.append(self.scene.open())
                self.asked.append(b"")
            case "turn":
                await asyncio.sleep(0)
            case "settle":
                await self.scene.way.settle()
            case "leave" | "body" | "last of body" | "read":
                if self.doors:
                    self._of_client(name, rest[0] % len(self.doors), *rest[1:])
            case _:
                if self.scene.sinks:
                    self._of_front(name, self.scene.sinks[rest[0] % len(self.scene.sinks)], *rest[1:])

    def _of_client(self, name: str, number: int, size: int = 0) -> None:
        door = self.doors[number]
        if name == "leave":
            door.leave()
        elif name == "read":
            door.read(bool(size))
        else:
            data = os.urandom(size)
            self.asked[number] += data
            door.come(data, name == "last of body")

    def _of_front(self, name: str, sink: FrontSink, size: int = 0) -> None:
        exchange, body = sink.exchange, os.urandom(size)
        if name in ("answer", "start", "start whole") and exchange.started and not exchange.ended:
            return  # a mistake, which is not what this is about
        if name in ("send", "send last", "finish", "drop") and not exchange.started:
            return
        if name in ("answer", "send", "send last") and not exchange.ended:
            self.answered[sink] = self.answered.get(sink, b"") + body
        match name:
            case "answer":
                self.n_lent += 1
                self.scene.answer(sink, body)
            case "start" | "start whole":
                exchange.start(200, (), end=name == "start whole")
            case "send" | "send last":
                exchange.send(body, end=name == "send last")
            case "finish":
                exchange.finish()
            case "drop":
                exchange.drop_unsent()
            case "reset":
                exchange.reset()
            case "consumed":
                exchange.consumed(size)

    async def end(self, how: str) -> None:
        way = self.scene.way
        if how == "the door dies":
            way.door.close()
            await way.settle()
            way.forwarded.close()
            return
        for door in self.doors:
            door.read(True)
            if how == "all leave":
                door.leave()
        await way.settle()
        for sink in self.scene.sinks:
            if not sink.exchange.started:
                self.answered[sink] = b"last"
                sink.exchange.answer(OK, (b"last",), 4)
            elif not sink.exchange.ended:
                sink.exchange.finish()
        await way.settle()

    def check(self, how: str) -> None:
        sinks = self.scene.sinks
        assert len(self.scene.released) == self.n_lent
        assert all(sink.exchange.ended for sink in sinks)
        assert all(sink.n_abandoned == 1 or sink.ended for sink in sinks)
        assert all(sink.n_abandoned <= 1 for sink in sinks)
        assert self.scene.way.forwarded.n_open == 0
        if how == "the door dies":
            return
        assert self.scene.way.forwarding.n_open == 0
        assert len(sinks) == len(self.doors)
        for door, asked, sink in zip(self.doors, self.asked, sinks, strict=True):
            assert asked.startswith(bytes(sink.body))
            answered = self.answered.get(sink, b"")
            if not (door.is_gone or door.is_broken or door.n_dropped):
                assert door.body == answered
            elif not door.n_dropped:
                assert answered.startswith(door.body)


@given(st.lists(OPERATIONS, max_size=40), st.sampled_from(["all is answered", "all leave", "the door dies"]))
def test_nothing_is_left_and_nothing_lost_in_any_order(operations: list[tuple[Any, ...]], how: str) -> None:
    async def whole() -> None:
        run = Run()
        try:
            for operation in operations:
                await run.do(operation)
            await run.end(how)
            run.check(how)
        finally:
            run.scene.way.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    asyncio.run(whole())
