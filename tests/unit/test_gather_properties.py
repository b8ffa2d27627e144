"""What a worker sees of a gathered batch is the concatenation of its requests, wherever their bytes lie; and
afterwards every block is free.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_process import raised

from gpuserve.front.ipc.batch_messages import run_message
from gpuserve.front.ipc.gather import ONE_TURN_NBYTES, Gathered, copy_in_parts, gather
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.ipc.worker_memory import LentBlock, OutputMemory
from gpuserve.front.models.ensemble_run import ReferenceCount, lend_output
from gpuserve.front.requests.inference import (
    Data,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    RegionSlice,
)
from gpuserve_worker.execution.batch_inputs import copy_fills
from gpuserve_worker.execution.loop import HostPath
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import encode_bytes, numpy_dtype

KINDS = ("bytes", "view", "block", "region", "lent", "shared")
DATATYPES = ("INT32", "BOOL", "BYTES")
REGION = 5


class Part(NamedTuple):
    """Where the input of one request lies, and how many rows it is."""

    kind: str
    rows: int
    seed: int


class Plane:
    """A front and one worker, with a link between them; and another worker, whose memory is lent."""

    def __init__(self, *, read_only: bool) -> None:
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.setblocking(False)
        pidfd = os.memfd_create("pidfd")
        self.link = WorkerLink("i", 1, ours, pidfd, 1, lambda *_: False, lambda *_: None)
        self.far = Link(self.end)
        self.session = FrontSession(self.far, HostPath(), raised, read_only_inputs=read_only)
        self.read_only = read_only
        self.arena = Arena(
            1 << 28, lambda n, fd, size: self.link.send(wire.Segment(n, size), [fd]), self._drop
        )
        self.outputs = OutputMemory()
        self.lender = Arena(1 << 28, self.outputs.attach, self.outputs.detach)
        self.file = os.memfd_create("client")
        self.written = 0
        self.lent: list[Block] = []

    def _announce(self, segment: int, fd: int, nbytes: int) -> None:
        self.link.send(wire.Segment(segment, nbytes), [fd])

    def _drop(self, segment: int) -> None:
        self.link.send(wire.DropSegment(segment))

    def place(self, kind: str, data: bytes) -> Data:
        """These bytes in a memory of that kind."""
        match kind:
            case "bytes":
                return data
            case "view":
                return memoryview(bytearray(data))
            case "block":
                return self._block(self.arena, data)
            case "region":
                made = RegionSlice("r", self.written, len(data))
                made.number = REGION
                self.written += os.pwrite(self.file, data, self.written) + 3  # no boundary of any kind
                return made
            case _:
                block = self._block(self.lender, data)
                self.lent.append(block)
                at = (block.segment, block.offset, block.nbytes)
                return self.outputs.lend_block(*at, lambda: self.lender.free(block), shared=kind == "shared")

    def _block(self, arena: Arena, data: bytes) -> Block:
        block = arena.allocate(len(data))
        block.view[:] = data
        return block

    def register(self) -> None:
        os.ftruncate(self.file, self.written + 1)
        self.session.regions.attach(REGION, self.file, 0, self.written + 1)

    def seen(self, run: wire.Run) -> Any:
        """What the worker makes of a batch."""
        while (received := self._received()) is not None:
            message, fds = received
            self.session.process_memory_message(message, fds)
            for fd in fds:
                os.close(fd)
        run = wire.WORKER.decode(wire.WORKER.encode(run))  # type: ignore[assignment]
        assert copy_fills(run, self.session.mapping, self.session.regions, self.session.loans) == {}
        return self.session.inputs.arrays(run.batch_id, run.inputs)["x"]

    def _received(self) -> Any:
        try:
            return self.far.receive()
        except BlockingIOError:
            return None

    def close(self) -> None:
        self.session.close()
        self.link.close()
        self.end.close()
        self.arena.close()
        self.lender.close()
        self.outputs.close()
        os.close(self.file)


@contextmanager
def plane(*, read_only: bool) -> Iterator[Plane]:
    made = Plane(read_only=read_only)
    try:
        yield made
    finally:
        made.close()


def values(part: Part, inner: int, datatype: str) -> Any:
    random = np.random.default_rng(part.seed)
    shape = (part.rows, inner)
    if datatype == "BYTES":
        whole = np.empty(shape, object)
        whole.flat = [random.bytes(int(n)) for n in random.integers(0, 9, part.rows * inner)]
        return whole
    return random.integers(0, 2 if datatype == "BOOL" else 1 << 30, shape).astype(numpy_dtype(datatype))


def wire_bytes(array: Any) -> bytes:
    return encode_bytes(array.ravel().tolist()) if array.dtype == object else bytes(array.tobytes())


def requests_of(made: Plane, arrays: list[Any], parts: list[Part], datatype: str) -> list[InferRequest]:
    placed = [made.place(part.kind, wire_bytes(one)) for part, one in zip(parts, arrays, strict=True)]
    requests = []
    for array, data in zip(arrays, placed, strict=True):
        tensor = InputTensor("x", datatype, array.shape, data)
        regions = (data,) if isinstance(data, RegionSlice) else ()
        requests.append(InferRequest("m", "", "", {}, [tensor], (), None, regions=regions))
    made.register()
    return requests


def gathered_by(made: Plane, requests: list[InferRequest], parts: list[Part]) -> Gathered:
    nbytes = sum(len(one.inputs[0].data) for one in requests)
    rows = sum(part.rows for part in parts)
    gathered = gather(requests, rows, True, nbytes, made.arena, made.link, made.read_only)
    assert bool(gathered.joins) == (nbytes > ONE_TURN_NBYTES)
    for _ in copy_in_parts(gathered.joins, made.arena):
        pass
    return gathered


def free_all(made: Plane, requests: list[InferRequest], gathered: Gathered) -> None:
    for block in gathered.blocks:
        block.free()
    for request in requests:
        if isinstance(data := request.inputs[0].data, Block):
            data.free()


part_of_a_batch = st.builds(Part, st.sampled_from(KINDS), st.integers(1, 3), st.integers(0, 1 << 16))
parts_of_a_batch = st.lists(part_of_a_batch, min_size=1, max_size=6)


@settings(max_examples=examples(100), deadline=None)
@given(parts_of_a_batch, st.sampled_from([1, 7, 900, 6000]), st.sampled_from(DATATYPES), st.booleans())
async def test_a_batch_is_the_concatenation_of_its_requests(
    parts: list[Part], inner: int, datatype: str, read_only: bool
) -> None:
    arrays = [values(part, inner, datatype) for part in parts]
    with plane(read_only=read_only) as made:
        requests = requests_of(made, arrays, parts, datatype)
        gathered = gathered_by(made, requests, parts)
        rows = [part.rows for part in parts]
        seen = made.seen(run_message(1, rows, requests, gathered))
        expected = np.concatenate(arrays)
        assert seen.shape == expected.shape
        assert seen.tolist() == expected.tolist()
        if datatype != "BYTES":
            assert seen.flags.writeable is not read_only
            if not read_only:
                seen[:] = 0  # what others see as well is as it was
                check_unchanged(made, requests, arrays, parts)
        del seen
        free_all(made, requests, gathered)
        assert made.arena.statistics().blocks == 0
        assert made.lender.statistics().blocks == 0


@pytest.mark.parametrize("inner", [600_000, 1 << 20])
async def test_a_large_batch_is_copied_in_parts(inner: int) -> None:
    parts = [Part(kind, 1, n) for n, kind in enumerate(KINDS)]
    arrays = [values(part, inner, "INT32") for part in parts]
    with plane(read_only=False) as made:
        requests = requests_of(made, arrays, parts, "INT32")
        gathered = gathered_by(made, requests, parts)
        seen = made.seen(run_message(1, [1] * len(parts), requests, gathered))
        assert np.array_equal(seen, np.concatenate(arrays))
        del seen
        free_all(made, requests, gathered)
        assert made.arena.statistics().blocks == made.lender.statistics().blocks == 0


def check_unchanged(made: Plane, requests: list[InferRequest], arrays: list[Any], parts: list[Part]) -> None:
    for request, array, part in zip(requests, arrays, parts, strict=True):
        data = request.inputs[0].data
        if isinstance(data, RegionSlice):
            assert os.pread(made.file, data.nbytes, data.offset) == wire_bytes(array)
        elif part.kind == "shared":
            assert isinstance(data, LentBlock)
            assert bytes(data.view) == wire_bytes(array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read_only", [False, True])
async def test_what_is_alone_in_its_batch_is_copied_only_where_it_has_to_be(
    kind: str, read_only: bool
) -> None:
    part = Part(kind, 1, 1)
    array = values(part, 6000, "INT32")
    with plane(read_only=read_only) as made:
        requests = requests_of(made, [array], [part], "INT32")
        gathered = gathered_by(made, requests, [part])
        found = type(gathered.tensors[0].payload)
        at_once = {"block": wire.Ref, "lent": wire.Loan, "region": wire.Place, "shared": wire.Loan}
        copied = kind in {"bytes", "view"} or (kind in {"region", "shared"} and not read_only)
        assert found is (wire.Ref if copied else at_once[kind])
        assert len(gathered.blocks) == copied
        assert len(gathered.fills) == (kind in {"region", "shared"} and copied)
        free_all(made, requests, gathered)


async def test_device_memory_is_always_copied() -> None:
    part = Part("region", 1, 1)
    with plane(read_only=True) as made:
        requests = requests_of(made, [values(part, 6000, "INT32")], [part], "INT32")
        requests[0].regions[0].device = "cuda:0"
        gathered = gathered_by(made, requests, [part])
        assert isinstance(gathered.tensors[0].payload, wire.Ref)
        assert len(gathered.fills) == 1
        free_all(made, requests, gathered)


def test_an_output_in_device_memory_is_copied_for_the_step_that_reads_it() -> None:
    placement = RegionSlice("r", 8, 4000)
    placement.number, placement.device = 7, "cuda:0"
    output = OutputTensor("y", "FP32", (1, 900), b"", placed=True)
    response = InferResponse("m", "1", "", {}, [output])
    references = ReferenceCount(response.close)
    (found,) = lend_output(output, response, references, 1, shared=False, placement=placement)
    assert isinstance(found, RegionSlice)
    assert (found.number, found.offset, found.nbytes, found.device) == (7, 8, 3600, "cuda:0")


async def test_nothing_stays_allocated_where_there_is_no_memory() -> None:
    parts = [Part("region", 1, 1), Part("lent", 1, 2)]
    arrays = [values(part, 6000, "INT32") for part in parts]
    with plane(read_only=False) as made:
        requests = requests_of(made, arrays, parts, "INT32")
        made.arena.close()
        full = Arena(0, lambda *_: None, lambda _: None)
        with pytest.raises(OutOfMemory):
            gather(requests, 2, True, 48000, full, made.link)
        assert full.statistics().blocks == 0
        free_all(made, requests, Gathered((), [], False))
        assert made.lender.statistics().blocks == 0
