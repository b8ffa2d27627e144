"""The front's end of a link: when a worker counts as dead, and what becomes of one that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from processes import measured, until

from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.memory.segments import SEGMENT_NBYTES
from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.link import Link

TIMEOUT_S = 10.0
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Worker:
    """A process that does nothing, its end of the link in our hands, and the front's end of it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(SLEEPER)
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[wire.Message] = []
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        on_down = lambda _, reason: self.down.set_result(reason)  # noqa: E731
        alive = os.pidfd_open(self.process.pid)
        self.link = WorkerLink("cpu#0", 1, ours, alive, 7, self._on_messages, on_down)
        self.link.open()

    def _on_messages(self, _: WorkerLink, messages: Sequence[wire.Message]) -> bool:
        self.heard += messages
        return False

    def say(self, *messages: wire.Message) -> None:
        for message in messages:
            self.end.send(wire.WORKER.encode(message))

    def hear(self, n_datagrams: int) -> list[list[wire.Message]]:
        """The messages of each of the next datagrams."""
        received = [datagram.receive(self.end, datagram.receive_buffer()) for _ in range(n_datagrams)]
        return [wire.WORKER.decode_all(data) for data, _ in received]

    async def reason(self) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.down

    def close(self) -> None:
        self.link.close()
        self.end.close()
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def worker_and_link() -> AsyncIterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.close()


async def test_a_death_is_noticed_by_the_pidfd_though_others_hold_the_link_open() -> None:
    async with worker_and_link() as worker:
        started = time.monotonic()
        worker.process.kill()
        assert await worker.reason() == "its process died"
        noticed_s = time.monotonic() - started
        measured(f"death noticed by the front after {noticed_s * 1e3:.2f} ms")
        assert noticed_s < 0.2


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage",
        b"\x91\x01",  # a message without its fields
        wire.WORKER.encode(wire.DropSegment(5)),  # of a segment that was never announced
        wire.WORKER.encode(wire.Segment(1, 10)),  # without its descriptor
        wire.WORKER.encode(wire.DropSegment({})),  # type: ignore[arg-type]
    ],
)
async def test_a_worker_that_breaks_the_protocol_is_killed_and_only_then_down(garbage: bytes) -> None:
    async with worker_and_link() as worker:
        worker.end.send(wire.WORKER.encode(wire.Attached(7)))
        worker.end.send(garbage)
        assert (await worker.reason()).startswith("it broke the protocol")
        assert worker.process.wait(TIMEOUT_S) == -signal.SIGKILL


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """None but those that are open already."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_message_that_we_had_no_descriptor_for_is_told_and_the_worker_lives() -> None:
    async with worker_and_link() as worker:
        failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _, told: failed.set_result(told["exception"]))
        memory = os.memfd_create("test")
        worker.end.send(wire.WORKER.encode(wire.Attached(7)))
        datagram.send(worker.end, wire.WORKER.encode(wire.Segment(1, 10)), [memory])
        os.close(memory)
        with no_descriptor_left():
            assert datagram.is_starved(await failed)
        worker.end.send(wire.WORKER.encode(wire.Released((1,))))
        await until(lambda: worker.heard)
        worker.link.send(wire.Free(()))  # nothing is sent to one that is given up
        end = Link(worker.end)
        assert [end.receive() for _ in range(2)] == [(wire.Attach(7), []), (wire.Free(()), [])]
        assert worker.process.poll() is None
        assert not worker.down.done()


async def test_a_large_message_that_we_had_no_descriptor_for_is_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[Any] = []
    send_now = datagram.send
    monkeypatch.setattr(datagram, "send", lambda *given: (tries.append(given), send_now(*given)))
    async with worker_and_link() as worker:
        message = wire.Log(40, "x" * datagram.MAX_DATAGRAM_NBYTES, "")
        with no_descriptor_left():
            worker.link.send(message)
            worker.link.send(wire.Free(()))
            before = len(tries)
            await until(lambda: len(tries) > before)
        end = Link(worker.end)
        assert await asyncio.to_thread(end.receive) == (wire.Attach(7), [])
        assert await asyncio.to_thread(end.receive) == (message, [])
        assert await asyncio.to_thread(end.receive) == (wire.Free(()), [])


async def test_only_a_worker_with_a_large_arena_is_asked_to_shrink_it() -> None:
    async with worker_and_link() as worker:
        end = Link(worker.end)
        end.send(wire.Attached(7))
        arena = Arena(1 << 30, lambda n, fd, nbytes: end.send(wire.Segment(n, nbytes), [fd]), lambda _: None)
        for n in (1, 2):
            arena.allocate(SEGMENT_NBYTES)
            await until(lambda nbytes=n * SEGMENT_NBYTES: worker.link.outputs.nbytes == nbytes)
            worker.link.shrink()
        worker.link.send(wire.Free(()))
        said = [await asyncio.to_thread(end.receive) for _ in range(3)]
        assert said == [(wire.Attach(7), []), (wire.Shrink(), []), (wire.Free(()), [])]
        arena.close()


async def test_a_worker_that_only_closes_its_link_is_killed_too() -> None:
    async with worker_and_link() as worker:
        worker.end.close()
        assert await worker.reason() == "its link ended"
        assert worker.process.wait(TIMEOUT_S) == -signal.SIGKILL


async def test_a_link_that_is_closed_tells_nothing_and_kills_nobody() -> None:
    async with worker_and_link() as worker:
        worker.end.close()
        await asyncio.sleep(0)  # one turn of the loop: the end of the link is read
        worker.link.close()
        worker.link.close()
        worker.link.send(wire.Free(()))
        assert worker.process.poll() is None
        assert not worker.down.done()


async def test_what_was_meant_for_an_earlier_front_is_not_heard() -> None:
    async with worker_and_link() as worker:
        worker.say(wire.Released((1,)), wire.Attached(6), wire.Released((2,)), wire.Attached(7))
        worker.say(wire.Released((3,)))
        await until(lambda: worker.heard)
        assert worker.heard == [wire.Released((3,))]


@pytest.mark.parametrize("is_sent_to", [True, False])
async def test_what_a_worker_said_before_it_died_is_heard_though_it_left_something_unread(
    *, is_sent_to: bool
) -> None:
    async with worker_and_link() as worker:
        worker.say(wire.Attached(7), wire.Released((3,)))
        worker.end.close()  # the front's ``Attach`` was not read
        if is_sent_to:
            worker.link.send(wire.Free(()))
        worker.process.kill()
        await worker.reason()
        assert worker.heard == [wire.Released((3,))]


async def test_what_is_posted_leaves_with_others_in_as_few_datagrams_as_fit() -> None:
    async with worker_and_link() as worker:
        large = wire.Log(40, "x" * (datagram.MAX_DATAGRAM_NBYTES // 2 - 100), "")
        for message in (large, large, large, wire.Shrink()):
            worker.link.post(message)
        worker.link.flush()
        worker.link.post(wire.Free(()))
        worker.link.send(wire.Shrink())  # after what was posted before
        together = [[large, large], [large, wire.Shrink()], [wire.Free(())], [wire.Shrink()]]
        assert worker.hear(5) == [[wire.Attach(7)], *together]


async def test_what_is_posted_soon_leaves_with_the_next_message_or_at_the_end_of_the_turn() -> None:
    async with worker_and_link() as worker:
        freed = [wire.Free(((0, n),)) for n in range(3)]
        worker.link.post_soon(freed[0])
        worker.link.post(wire.Shrink())
        worker.link.flush()
        worker.link.post_soon(freed[1])
        worker.link.post_soon(freed[2])
        await asyncio.sleep(0)
        assert worker.hear(3) == [[wire.Attach(7)], [freed[0], wire.Shrink()], [freed[1], freed[2]]]
