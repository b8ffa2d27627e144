"""Requests that a coroutine serves: their bodies, cancellation, and responses."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
from http1_talk import CHUNKED, GET, OK, OK_ANSWER, RecordingWay, post

from gpuserve.core.errors import InvalidArgument, NoMemory, ResourceExhausted
from gpuserve.front.ipc.heap_memory import AWAITED_NBYTES, REQUEST_NBYTES, Intake
from gpuserve.front.net.async_requests import AsyncHandler, AsyncRequest, AsyncRequests, ClientGone
from gpuserve.front.net.exchange import ConnectionEndpoints, Exchange
from gpuserve.front.net.http1_protocol import Http1

BROKEN = b"HTTP/1.1 500 "


class Scene:
    """An HTTP/1 connection whose requests a coroutine serves."""

    def __init__(self, serve: AsyncHandler) -> None:
        self.requests = AsyncRequests()
        self.way = RecordingWay()
        self.http1 = Http1(self.way, lambda exchange: self.requests.start(exchange, serve))

    async def through(self) -> bytes:
        """What was sent when every request is served."""
        await asyncio.gather(*self.requests.tasks, return_exceptions=True)
        return self.way.sent


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def echo_length(request: AsyncRequest) -> None:
    request.exchange.answer(OK_ANSWER, (b"%2d" % len(await request.body(10)),), 2)


@pytest.mark.parametrize(
    "sent",
    [post(b"abc"), post(b""), CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"],
    ids=["whole", "none", "parts"],
)
async def test_the_body_is_read_whole(sent: bytes) -> None:
    scene = Scene(echo_length)
    for position in range(len(sent)):
        scene.http1.feed(sent[position : position + 1])
        await asyncio.sleep(0)
    assert (await scene.through())[-2:] == (b" 0" if sent == post(b"") else b" 3")


async def test_parts_come_as_they_do_and_then_none() -> None:
    seen: list[Any] = []

    async def serve(request: AsyncRequest) -> None:
        while seen[-1:] != [None]:
            seen.append(await request.part())
        seen.append(request.complete)
        request.exchange.answer(OK_ANSWER, (b"ok",), 2)

    scene = Scene(serve)
    scene.http1.feed(CHUNKED + b"2\r\nab\r\n")
    await turns()
    scene.http1.feed(b"1\r\nc\r\n")
    scene.http1.feed(b"1\r\nd\r\n0\r\n\r\n")
    assert await scene.through() == OK
    assert seen == [b"ab", b"cd", None, True]


@pytest.mark.parametrize("refusal", [ResourceExhausted, InvalidArgument])
async def test_a_body_over_the_limit_is_refused(refusal: Any) -> None:
    raised: list[str] = []

    async def serve(request: AsyncRequest) -> None:
        with pytest.raises(refusal) as error:
            await request.body(3, refusal)
        raised.append(str(error.value))
        request.exchange.answer(OK_ANSWER, (b"ok",), 2)

    scene = Scene(serve)
    scene.http1.feed(post(b"abcd"))
    assert await scene.through() == OK
    assert raised == ["the request body is over the limit of 3 bytes"]


@pytest.mark.parametrize("where", ["part", "future", "wait_until_gone", "already"])
async def test_a_waiter_is_told_that_the_client_is_gone(where: str, caplog: pytest.LogCaptureFixture) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended: list[type] = []

    async def serve(request: AsyncRequest) -> None:
        try:
            if where == "already":
                await request.wait_until_gone()
            if where == "wait_until_gone":
                await request.wait_until_gone()
                raise ClientGone
            await (request.part() if where == "part" else request.wait_unless_gone(future))
        except ConnectionResetError as error:
            ended.append(type(error))
            raise

    scene = Scene(serve)
    scene.http1.feed(post(b"abc")[:-3] if where == "part" else GET)
    await turns()
    scene.http1.lost()
    assert await scene.through() == b""
    assert ended == [ClientGone]
    assert future.cancelled() is (where in ("future", "already"))
    assert not caplog.records


async def test_a_future_that_is_there_is_given() -> None:
    future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(request: AsyncRequest) -> None:
        request.exchange.answer(OK_ANSWER, (await request.wait_unless_gone(future),), 2)

    scene = Scene(serve)
    scene.http1.feed(GET)
    await turns()
    future.set_result(b"ok")
    assert await scene.through() == OK


@pytest.mark.parametrize("begun", [False, True])
async def test_a_defect_is_logged_and_ends_a_response(begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(request: AsyncRequest) -> None:
        if begun:
            request.exchange.start(200, [(b"content-length", b"3")])
            request.exchange.send(b"a")
        raise RuntimeError("a defect")

    scene = Scene(serve)
    scene.http1.feed(GET)
    sent = await scene.through()
    assert sent.endswith(b"\r\n\r\na") if begun else sent.startswith(BROKEN)
    assert scene.way.said == (["close"] if begun else [])
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_response_that_was_forgotten_is_an_error() -> None:
    async def serve(request: AsyncRequest) -> None:
        await request.body(10)

    scene = Scene(serve)
    scene.http1.feed(GET)
    assert (await scene.through()).startswith(BROKEN)


async def test_the_end_of_the_server_cancels_what_runs() -> None:
    async def serve(request: AsyncRequest) -> None:
        await asyncio.get_running_loop().create_future()

    scene = Scene(serve)
    scene.http1.feed(GET)
    await turns()
    await scene.requests.stop()
    assert scene.way.sent.startswith(BROKEN)
    assert not scene.requests.tasks


class Opened:
    """An exchange of which nothing is asked but where its client is."""

    ended = started = True
    endpoints = ConnectionEndpoints(("10.0.0.1", 5), ("", 0), tls=False, source="10.0.0.1")
    head = None

    def consumed(self, nbytes: int) -> None:
        pass


def opened(requests: AsyncRequests, serve: AsyncHandler, **kind: bool) -> AsyncRequest:
    return requests.start(cast("Exchange", Opened()), serve, **kind)


async def test_what_nobody_reads_is_counted_and_with_it_the_request() -> None:
    intake, goes_on, seen = Intake(1 << 20, lambda: None), asyncio.Event(), list[int]()

    async def serve(request: AsyncRequest) -> None:
        seen.append(len(await request.part() or b""))
        await goes_on.wait()
        seen.append(len(await request.part() or b""))

    request = opened(AsyncRequests(intake), serve)
    await turns()
    assert intake.nbytes == AWAITED_NBYTES + 1, "it waits for its body"
    request.receive_body(b"a", end=False)
    await turns()
    for _ in range(3):
        request.receive_body(bytes(100_000), end=False)
    assert intake.nbytes == AWAITED_NBYTES + 300_000
    goes_on.set()
    await turns()
    assert seen == [1, 300_000]
    assert intake.nbytes == 0, "it is served"


async def test_what_there_is_no_memory_for_is_not_kept_and_who_reads_is_told() -> None:
    intake, goes_on = Intake(1 << 20, lambda: None), asyncio.Event()

    async def serve(request: AsyncRequest) -> None:
        await goes_on.wait()
        with pytest.raises(NoMemory, match="from this address"):
            await request.part()
        await goes_on.wait()

    requests = AsyncRequests(intake)
    request = opened(requests, serve)
    await turns()
    for _ in range(100):
        request.receive_body(bytes(200_000), end=False)
        assert intake.nbytes < 900_000
    goes_on.set()
    await asyncio.gather(*requests.tasks)
    assert intake.nbytes == 0


async def test_a_stream_that_sleeps_is_begun_by_its_first_part_or_when_all_are_woken() -> None:
    begun: list[AsyncRequest] = []

    async def serve(request: AsyncRequest) -> None:
        begun.append(request)
        await request.wait_until_gone()

    intake = Intake(1 << 20, lambda: None)
    requests = AsyncRequests(intake)
    first, second, third = (opened(requests, serve, is_stream=True, dormant=True) for _ in range(3))
    await turns()
    assert (begun, len(requests.tasks), intake.nbytes) == ([], 0, 3 * (REQUEST_NBYTES + 1))
    second.receive_body(b"a", end=False)
    third.abandon()
    await turns()
    assert begun == [second]
    requests.start_all_dormant()
    await turns()
    assert begun == [second, first]
    first.abandon()
    second.abandon()
    await turns()
    assert (len(requests.tasks), intake.nbytes) == (0, 0)


async def test_a_stream_for_which_there_is_no_memory_is_not_begun() -> None:
    requests = AsyncRequests(Intake(3 * REQUEST_NBYTES, lambda: None))
    opened(requests, echo_length, is_stream=True, dormant=True)
    opened(requests, echo_length, is_stream=True, dormant=True)
    with pytest.raises(NoMemory):
        opened(requests, echo_length, is_stream=True, dormant=True)
