"""Requests that an ingress process forwards to the front, with failures of either side and of clients."""

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
from gpuserve.front.net.exchange import AnswerHead, ConnectionEndpoints, Exchange, Head, Header
from gpuserve.front.net.exchange import BodyReceiver as SinkOfBody
from gpuserve.front.protocols.access.authorization import client_uid
from gpuserve.front.protocols.router import refuse

MIB: Final = 1 << 20
OK: Final = AnswerHead(200, ((b"a", b"b"),), ((b"c", b"d"),))
GRPC: Final = ((b"content-type", b"application/grpc"),)


class Scene:
    """An IPC channel to a front whose body receivers do nothing by themselves."""

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
        """Answer with a borrowed body; ``released`` records when the body is released."""
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
    """Run the test in its own event loop, and check that neither end holds anything afterwards."""

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


# ---- content ------------------------------------------------------------------------------------


@in_a_scene
async def test_a_request_and_its_answer_arrive_as_they_were(scene: Scene) -> None:
    head = Head("PUT", b"/%41?q", [(b"te", b"trailers"), (b"x", b"\xff")], "2", 1 << 60, "https")
    ends = ConnectionEndpoints(("fe80::1%eth0", 5), ("::1", 80), True, source=b"\xfe\x80" + bytes(6))
    client = scene.open(head, ends)
    client.come(b"abc")
    client.come(b"", end=True)
    await scene.way.settle()
    (sink,) = scene.sinks
    seen = sink.exchange.head
    assert list(seen.headers) == head.headers
    told = ["method", "target", "path", "query", "http_version", "content_length", "scheme", "trailers"]
    assert [getattr(seen, one) for one in told] == [getattr(head, one) for one in told]
    assert (sink.exchange.endpoints, seen.is_grpc) == (ends, head.is_grpc)
    assert (sink.body, sink.ended) == (b"abc", True)
    assert (sink.exchange.started, sink.exchange.ended) == (False, False)
    scene.answer(sink, b"body")
    assert (sink.exchange.started, sink.exchange.ended, scene.released) == (True, True, [0])
    await scene.way.settle()
    assert (client.status, client.body) == (200, b"body")
    assert (client.headers, client.trailers) == (OK.headers, OK.trailers)
    assert client.is_whole
    assert sink.n_abandoned == 0


@in_a_scene
async def test_equal_heads_are_one_object_and_so_are_heads_of_answers(scene: Scene) -> None:
    clients = [scene.open(Head("GET", b"/a", [(b"n", b"%d" % (n // 2))], "1.1", None)) for n in range(4)]
    await scene.way.settle()
    heads = [one.exchange.head for one in scene.sinks]
    assert heads[0] is heads[1]
    assert heads[1] is not heads[2]
    heads_of_answers: list[AnswerHead] = []
    for client, sink in zip(clients, scene.sinks, strict=True):
        client.answer = lambda head, *rest: heads_of_answers.append(head)  # type: ignore[method-assign]
        scene.answer(sink, b"")
    await scene.way.settle()
    assert (len(heads_of_answers), len(set(heads_of_answers))) == (4, 1)
    for _ in range(2):
        scene.open(Head("GET", b"/a", [(b"n", bytes(5000))], "1.1", None))
    await scene.way.settle()
    assert scene.sinks[4].exchange.head is not scene.sinks[5].exchange.head, "a long head is not kept"
    for sink in scene.sinks[4:]:
        scene.answer(sink, b"")


@pytest.mark.parametrize(
    ("method", "target", "headers", "depends"),
    [
        ("POST", b"/v2/systemsharedmemory/region/r/register", (), True),
        ("GET", b"/v2/systemsharedmemory/region/r/register", (), False),
        ("POST", b"/v2/cudasharedmemory/region/r/register", (), False),
        ("POST", b"/inference.GRPCInferenceService/SystemSharedMemoryRegister", GRPC, True),
    ],
)
@in_a_scene
async def test_the_user_is_asked_where_the_socket_is_and_told_where_it_matters(
    scene: Scene, method: str, target: bytes, headers: tuple[Header, ...], depends: bool
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        head = Head(method, target, headers, "2" if headers else "1.1", None)
        scene.open(head, ConnectionEndpoints(None, ("/run/x", None), False, ours))

        await scene.way.settle()
        (sink,) = scene.sinks
        assert client_uid(sink.exchange) == (os.getuid() if depends else None)
        scene.answer(sink, b"")


@in_a_scene
async def test_a_streamed_response(scene: Scene) -> None:
    client, sink = await scene.opened()
    client.come(b"", end=True)
    exchange = sink.exchange
    exchange.start(201, OK.headers)
    exchange.send(b"one")
    await exchange.room()
    await scene.way.settle()
    assert (client.status, client.body, client.ended) == (201, b"one", False)
    exchange.drop_unsent()
    exchange.send(b"two")
    exchange.finish(OK.trailers)
    await scene.way.settle()
    assert (client.body, client.trailers, client.n_dropped) == (b"onetwo", OK.trailers, 1)
    for nothing in (exchange.send, exchange.finish):
        nothing(b"")
    exchange.reset()
    exchange.drop_unsent()
    exchange.start(200, ())
    scene.answer(sink, b"late")
    assert scene.released == [0]


# ---- endings ------------------------------------------------------------------------------------


@in_a_scene
async def test_an_answer_sent_while_the_request_is_accepted(scene: Scene) -> None:
    class AtOnce(FrontSink):
        def __init__(self, exchange: Exchange) -> None:
            super().__init__(exchange)
            exchange.answer(OK, (b"at once",), 7)

    def accept(exchange: Exchange) -> SinkOfBody:
        scene.sinks.append(AtOnce(exchange))
        return scene.sinks[-1]

    scene.way.close()
    scene.way = Way(accept)
    client = scene.open()
    client.come(b"abc", end=True)
    await scene.way.settle()
    assert client.body == b"at once"
    assert [(sink.n_abandoned, sink.body) for sink in scene.sinks] == [(1, b"")]


@in_a_scene
async def test_a_client_that_leaves_while_a_sender_waits_for_room(scene: Scene) -> None:
    client, sink = await scene.opened()
    client.read(False)
    sink.exchange.start(200, ())
    sink.exchange.send(bytes(MIB))
    waiting = asyncio.ensure_future(sink.exchange.room())
    await scene.way.settle()
    assert not waiting.done()
    client.leave()
    await scene.way.settle()
    with pytest.raises(ConnectionResetError):
        await waiting
    assert sink.n_abandoned == 1


@in_a_scene
async def test_exchanges_of_a_dead_ingress_process_end(scene: Scene) -> None:
    for _ in range(3):
        await scene.opened()
    scene.answer(scene.sinks[0], bytes(4 * MIB))
    scene.sinks[1].exchange.start(200, ())
    scene.sinks[1].exchange.send(bytes(4 * MIB))
    waiting = asyncio.ensure_future(scene.sinks[1].exchange.room())
    await asyncio.sleep(0)
    scene.way.ingress.close()
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
    # The ingress process has ended.
    scene.way.forwarding = RequestForwarder(scene.way.ingress, FrontOutage(), refuse)


@in_a_scene
async def test_a_defect_breaks_one_request_off(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FrontSink):
        def receive_body(self, data: Any, end: bool) -> None:
            raise ZeroDivisionError

    clients = [scene.open() for _ in range(2)]
    await scene.way.settle()
    scene.sinks[0].__class__ = Broken
    with caplog.at_level(logging.ERROR):
        for client in clients:
            client.come(b"abc", end=True)
        await scene.way.settle()
    assert [client.is_broken for client in clients] == [True, False]
    assert scene.sinks[1].body == b"abc"
    scene.answer(scene.sinks[1], b"")
    assert "aborted a request" in caplog.text


# ---- flow control -------------------------------------------------------------------------------


@in_a_scene
async def test_consumed_bytes_are_reported_except_for_small_bodies(scene: Scene) -> None:
    client, sink = await scene.opened()
    client.come(bytes(100))
    await scene.way.settle()
    sink.exchange.consumed(100)
    await scene.way.settle()
    assert client.consumed_nbytes == 100
    client.come(bytes(100), end=True)
    await scene.way.settle()
    sink.exchange.consumed(100)
    await scene.way.settle()
    assert client.consumed_nbytes == 100
    sink.exchange.consumed(8 << 10)
    await scene.way.settle()
    assert client.consumed_nbytes == 200 + (8 << 10)
    scene.answer(sink, b"")
    sink.exchange.consumed(1 << 20)


@pytest.mark.parametrize("nbytes", [65536, 65537, MIB, 16 * MIB])
@in_a_scene
async def test_a_large_answer_arrives_whole_with_little_buffered(scene: Scene, nbytes: int) -> None:
    body = os.urandom(nbytes)
    client, sink = await scene.opened()
    scene.answer(sink, body)
    assert scene.released == ([0] if nbytes < MIB else [])
    await scene.way.settle()
    assert client.body == body
    assert client.is_whole
    assert scene.released == [0]
    assert scene.way.most_waiting_nbytes < 512 << 10


@in_a_scene
async def test_a_stream_waits_for_its_client(scene: Scene) -> None:
    client, sink = await scene.opened()
    exchange = sink.exchange
    client.read(False)
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
    assert n_sent == 5  # the buffer limit, and one more
    assert len(asyncio.all_tasks()) == 3  # the test, the sender, and one in the ingress process
    client.read(True)
    await scene.way.settle()
    await sending
    assert len(client.body) == 4 * MIB


@in_a_scene
async def test_one_large_part_of_a_stream_is_buffered_in_the_ingress_process(scene: Scene) -> None:
    """The part is sent as the client reads, also if the front sends nothing more meanwhile."""
    (client, sink), (other, other_sink) = await scene.opened(), await scene.opened()
    for one, its in ((client, sink), (other, other_sink)):
        one.read(False)
        its.exchange.start(200, ())
        its.exchange.send(os.urandom(8 * MIB))
    await scene.way.settle()
    assert len(client.body) == len(other.body) == 256 << 10
    other_sink.exchange.drop_unsent()
    for its in (sink, other_sink):
        its.exchange.finish()
    client.read(True)
    await scene.way.settle()
    assert len(client.body) == 8 * MIB
    assert (len(other.body), other.ended, other.n_dropped) == (256 << 10, True, 1)


@in_a_scene
async def test_a_large_answer_does_not_delay_others(scene: Scene) -> None:
    """Relative measure: a small answer requested together with the large one arrives long before it."""
    (large, large_sink), (small, small_sink) = await scene.opened(), await scene.opened()
    began = time.perf_counter()
    large_sink.exchange.answer(OK, (bytes(64 * MIB),), 64 * MIB)
    scene.answer(small_sink, b"small")
    took_s: dict[IngressExchange, float] = {}

    def note(client: IngressExchange, *answer: Any) -> None:
        IngressExchange.answer(client, *answer)
        took_s[client] = time.perf_counter() - began

    for client in (large, small):
        client.answer = functools.partial(note, client)  # type: ignore[method-assign]
    await scene.way.settle()
    assert len(large.body) == 64 * MIB
    assert took_s[small] < took_s[large]


# ---- random operations --------------------------------------------------------------------------

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
    """Executes operations one by one, and records the expected outcome."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.received: list[IngressExchange] = []
        self.asked: list[bytes] = []
        self.answered: dict[FrontSink, bytes] = {}
        self.n_lent = 0

    async def do(self, operation: tuple[Any, ...]) -> None:
        name, *rest = operation
        match name:
            case "open":
                self.received.append(self.scene.open())
                self.asked.append(b"")
            case "turn":
                await asyncio.sleep(0)
            case "settle":
                await self.scene.way.settle()
            case "leave" | "body" | "last of body" | "read":
                if self.received:
                    self._of_client(name, rest[0] % len(self.received), *rest[1:])
            case _:
                if self.scene.sinks:
                    self._of_front(name, self.scene.sinks[rest[0] % len(self.scene.sinks)], *rest[1:])

    def _of_client(self, name: str, number: int, size: int = 0) -> None:
        client = self.received[number]
        if name == "leave":
            client.leave()
        elif name == "read":
            client.read(bool(size))
        else:
            data = os.urandom(size)
            self.asked[number] += data
            client.come(data, name == "last of body")

    def _of_front(self, name: str, sink: FrontSink, size: int = 0) -> None:
        exchange, body = sink.exchange, os.urandom(size)
        if name in ("answer", "start", "start whole") and exchange.started and not exchange.ended:
            return  # a wrong use of the exchange, which other tests cover
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
        if how == "the ingress process dies":
            way.ingress.close()
            await way.settle()
            way.forwarded.close()
            return
        for client in self.received:
            client.read(True)
            if how == "all leave":
                client.leave()
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
        if how == "the ingress process dies":
            return
        assert self.scene.way.forwarding.n_open == 0
        assert len(sinks) == len(self.received)
        for client, asked, sink in zip(self.received, self.asked, sinks, strict=True):
            assert asked.startswith(bytes(sink.body))
            answered = self.answered.get(sink, b"")
            if not (client.is_gone or client.is_broken or client.n_dropped):
                assert client.body == answered
            elif not client.n_dropped:
                assert answered.startswith(client.body)


@given(
    st.lists(OPERATIONS, max_size=40),
    st.sampled_from(["all is answered", "all leave", "the ingress process dies"]),
)
async def test_nothing_is_leaked_or_lost_in_any_order(operations: list[tuple[Any, ...]], how: str) -> None:
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
