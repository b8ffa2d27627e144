"""Messages of every size cross a link, alone or joined in a datagram, and no descriptor is lost."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from driver_scene import FAILURE, PHASES, SPEC, Scene, Worker
from hypothesis import given
from hypothesis import strategies as st
from present import present

from gpuserve.core.errors import RequestError
from gpuserve.front.requests.inference import InferResponse
from gpuserve.model.spec import QueueSpec
from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.datagram import joined
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import TensorSpec

TIMEOUT_S = 20.0


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


Ends = tuple[Link, Link, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends of a link and the raw socket of the first; no descriptor may be left over."""
    before = open_fds()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.settimeout(TIMEOUT_S)
    right.settimeout(TIMEOUT_S)
    yield Link(left), Link(right), left
    left.close()
    right.close()
    assert open_fds() == before


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def log_of(nbytes: int) -> wire.Log:
    return wire.Log(40, "x" * nbytes, "")


@pytest.mark.parametrize(
    "nbytes", [1, datagram.MAX_DATAGRAM_NBYTES - 100, datagram.MAX_DATAGRAM_NBYTES, 5 << 20]
)
def test_messages_of_any_size_arrive_whole(ends: Ends, nbytes: int) -> None:
    sender, receiver, _ = ends
    sender.send(log_of(nbytes))
    assert receiver.receive() == (log_of(nbytes), [])


def test_a_descriptor_arrives_close_on_exec(ends: Ends, memory: int) -> None:
    sender, receiver, _ = ends
    sender.send(wire.Segment(3, 10), (memory,))
    message, (fd,) = present(receiver.receive())
    assert message == wire.Segment(3, 10)
    assert os.path.sameopenfile(fd, memory)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_the_end_is_none_and_a_receiver_can_be_told_to_stop_and_still_send(ends: Ends) -> None:
    left, right, _ = ends
    right.stop_receiving()
    assert right.receive() is None
    right.send(wire.Stop())
    right.close()
    assert left.receive() == (wire.Stop(), [])
    assert left.receive() is None


def test_try_send_does_not_wait(ends: Ends) -> None:
    sender, receiver, raw = ends
    raw.settimeout(None)  # with a timeout Python itself waits for room in the buffer
    sent = 0
    while sender.try_send(log_of(60_000)):
        sent += 1
    assert sent > 0
    for _ in range(sent):
        assert receiver.receive() == (log_of(60_000), [])
    receiver.close()
    assert not sender.try_send(wire.Stop())


def test_datagrams_that_cannot_be_received(ends: Ends, memory: int) -> None:
    sender, receiver, raw = ends
    directory = os.open("/", os.O_RDONLY)
    spilled = bytes([datagram.SPILLED])
    many = array.array("i", [memory] * (2 * datagram.MAX_FDS))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)]
    for send, error, text in (
        (lambda: sender.send(wire.Stop(), (memory, memory)), wire.WireError, "descriptors"),
        (lambda: sender.send(wire.Segment(1, 1)), wire.WireError, "descriptors"),
        (lambda: socket.send_fds(raw, [b"\x93\x01"], [memory]), wire.WireError, "not a message"),
        (lambda: raw.send(spilled), OSError, "without its memory"),
        (lambda: socket.send_fds(raw, [spilled], [directory, memory]), IsADirectoryError, "directory"),
        (lambda: raw.send(b"\x91\x02" + bytes(datagram.MAX_DATAGRAM_NBYTES)), OSError, "over"),
        (lambda: raw.sendmsg([wire.WORKER.encode(wire.Stop())], rights), OSError, "descriptors"),
    ):
        send()
        with pytest.raises(error, match=text):
            receiver.receive()
    os.close(directory)


def test_a_failed_send_leaves_nothing_open(ends: Ends) -> None:
    sender, receiver, _ = ends
    receiver.close()
    before = open_fds()
    with pytest.raises(BrokenPipeError):
        sender.send(log_of(1 << 20))
    assert open_fds() == before


def test_an_end_takes_memory_for_what_came_and_not_for_what_could_come() -> None:
    before = resident_nbytes()
    buffers = [datagram.receive_buffer() for _ in range(300)]
    assert {len(buffer) for buffer in buffers} == {datagram.MAX_DATAGRAM_NBYTES}
    assert resident_nbytes() - before < len(buffers) * datagram.MAX_DATAGRAM_NBYTES // 4


def resident_nbytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- several messages in one datagram ----


#: One instance, which holds several requests ahead, each by itself.
TENSORS = {"inputs": (TensorSpec("x", "FP32", (1, 1)),), "outputs": (TensorSpec("y", "FP32", (1, 1)),)}
UNBATCHED = replace(SPEC, max_batch_size=0, **TENSORS, instances=SPEC.instances[:1], prefetch=5)


def datagram_of(*messages: wire.Message) -> bytes:
    return joined([wire.WORKER.encode(one) for one in messages])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 255, 256, 1000])
def test_any_number_of_messages_is_one_datagram(n: int) -> None:
    messages = [wire.Cancel(number, 0) for number in range(n)]
    assert wire.WORKER.decode_all(datagram_of(*messages)) == messages


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=20))
def test_pieces_that_are_no_messages_are_refused_or_read(pieces: list[bytes]) -> None:
    try:
        messages = wire.WORKER.decode_all(joined(pieces))
    except wire.WireError:
        return
    assert messages


def test_messages_in_messages_are_refused() -> None:
    inner = datagram_of(wire.Shrink(), wire.Shrink())
    with pytest.raises(wire.WireError, match="not a message"):
        wire.WORKER.decode_all(joined([inner, inner]))


def test_a_link_gives_them_one_by_one(ends: Ends) -> None:
    _, end, raw = ends
    raw.send(datagram_of(wire.Shrink(), wire.Attach(3), wire.Free(())))
    raw.send(datagram_of(wire.Unlend(1)))
    assert [end.receive() for _ in range(2)] == [(wire.Shrink(), []), (wire.Attach(3), [])]
    assert end.has_message()
    assert [end.receive() for _ in range(2)] == [(wire.Free(()), []), (wire.Unlend(1), [])]
    assert not end.has_message()


@pytest.mark.parametrize("first", [wire.Segment(1, 10), wire.Shrink()])
def test_what_has_a_descriptor_comes_by_itself(first: wire.Message, ends: Ends, memory: int) -> None:
    _, end, raw = ends
    datagram.send(raw, datagram_of(first, wire.Segment(2, 10)), [memory] * isinstance(first, wire.Segment))
    with pytest.raises(wire.WireError, match="descriptor"):
        end.receive()


# ---- at the front ---------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def settled(n_requests: int, spec: Any = UNBATCHED) -> AsyncIterator[tuple[Scene, Worker]]:
    """A scene to which so many requests are submitted."""
    there = Scene(spec, direct=True)
    try:
        await there.settle()
        for n in range(n_requests):
            there.submit(1, n, None)
        yield there, there.workers[0]
    finally:
        there.close()


def done(run: wire.Run) -> wire.Done:
    tensor = wire.WireTensor("y", "FP32", (1, 1), bytes(4))
    return wire.Done(run.batch_id, None, ((tensor,),), True, *PHASES)


def outcomes(there: Scene) -> list[list[type]]:
    return [[type(one) for one in there.answers.get(pending, [])] for pending in there.pending]


async def test_what_is_sent_in_one_turn_is_one_datagram_and_so_are_its_answers() -> None:
    async with settled(5) as (there, worker):
        for _ in range(3):
            await asyncio.sleep(0)
        first, rest = worker.receive_one(), worker.runs
        assert len(first) == len(rest) == 5
        worker.send_raw(datagram_of(*map(done, rest)))
        await there.settle()
        assert outcomes(there) == [[InferResponse]] * 5


async def test_each_answer_of_a_datagram_is_that_of_its_request() -> None:
    async with settled(4) as (there, worker):
        await there.settle()
        a, b, c, d = worker.runs
        there.cancel(2)
        failed = wire.Failed(b.batch_id, FAILURE, True)
        worker.send_raw(datagram_of(done(a), failed, done(c), wire.Released((a.batch_id,)), done(d)))
        await there.settle()
        kinds = outcomes(there)
        assert kinds[0] == kinds[3] == [InferResponse]
        assert issubclass(kinds[1][0], RequestError)
        assert kinds[2] == []  # nobody waits for it


async def test_ends_that_are_here_together_are_followed_by_one_datagram() -> None:
    async with settled(12, replace(UNBATCHED, queue=QueueSpec(20))) as (there, worker):
        await there.settle()
        first = [worker.runs.pop(0) for _ in range(6)]
        assert not worker.runs  # there is no room for more
        for run in first[:4]:
            worker.send_raw(datagram_of(done(run)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(worker.receive_one()) == 4
        assert sum(map(len, outcomes(there))) == 4


async def test_nonsense_in_a_datagram_takes_no_answers_from_those_before_it() -> None:
    async with settled(3) as (there, worker):
        await there.settle()
        a, b, _ = worker.runs
        worker.send_raw(datagram_of(done(a), done(b), wire.Done(999, None, None, True, *PHASES)))
        for _ in range(6):
            await asyncio.sleep(0)
        assert outcomes(there) == [[InferResponse], [InferResponse], []]
