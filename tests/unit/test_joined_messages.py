"""Several messages joined in one datagram: each is read and answered by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from driver_scene import FAILURE, PHASES, SPEC, Scene, Worker
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import RequestError
from gpuserve.front.requests.inference import InferResponse
from gpuserve.model.spec import QueueSpec
from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.datagram import joined
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import TensorSpec

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


def test_a_link_gives_them_one_by_one() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        end = Link(right)
        left.send(datagram_of(wire.Shrink(), wire.Attach(3), wire.Free(())))
        left.send(datagram_of(wire.Unlend(1)))
        assert [end.receive() for _ in range(2)] == [(wire.Shrink(), []), (wire.Attach(3), [])]
        assert end.has_message()
        assert [end.receive() for _ in range(2)] == [(wire.Free(()), []), (wire.Unlend(1), [])]
        assert not end.has_message()


@pytest.mark.parametrize("first", [wire.Segment(1, 10), wire.Shrink()])
def test_what_has_a_descriptor_comes_by_itself(first: wire.Message) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("test")
    with left, right:
        fds = [memory] if isinstance(first, wire.Segment) else []
        datagram.send(left, datagram_of(first, wire.Segment(2, 10)), fds)
        with pytest.raises(wire.WireError, match="descriptor"):
            Link(right).receive()
    os.close(memory)


# ---- at the front ---------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def settled(spec: Any = UNBATCHED) -> AsyncIterator[tuple[Scene, Worker]]:
    there = Scene(spec, direct=True)
    try:
        await there.settle()
        yield there, there.workers[0]
    finally:
        there.close()


def done(run: wire.Run) -> wire.Done:
    tensor = wire.WireTensor("y", "FP32", (1, 1), bytes(4))
    return wire.Done(run.batch_id, None, ((tensor,),), True, *PHASES)


def outcomes(there: Scene) -> list[list[type]]:
    return [[type(one) for one in there.answers.get(pending, [])] for pending in there.pending]


async def test_what_is_sent_in_one_turn_is_one_datagram_and_so_are_its_answers() -> None:
    async with settled() as (there, worker):
        for n in range(5):
            there.submit(1, n, None)
        for _ in range(3):
            await asyncio.sleep(0)
        first, rest = worker.receive_one(), worker.runs
        assert len(first) == len(rest) == 5
        worker.send_raw(datagram_of(*map(done, rest)))
        await there.settle()
        assert outcomes(there) == [[InferResponse]] * 5


async def test_each_answer_of_a_datagram_is_that_of_its_request() -> None:
    async with settled() as (there, worker):
        for n in range(4):
            there.submit(1, n, None)
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
    async with settled(replace(UNBATCHED, queue=QueueSpec(20))) as (there, worker):
        for n in range(12):
            there.submit(1, n, None)
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
    async with settled() as (there, worker):
        for n in range(3):
            there.submit(1, n, None)
        await there.settle()
        a, b, _ = worker.runs
        worker.send_raw(datagram_of(done(a), done(b), wire.Done(999, None, None, True, *PHASES)))
        for _ in range(6):
            await asyncio.sleep(0)
        assert outcomes(there) == [[InferResponse], [InferResponse], []]
