"""What a worker sees of a gathered batch is the concatenation of its requests, wherever their bytes lie; and
afterwards every block is free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from driver_scene import PHASES, SPEC, Scene
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_process import raised

from gpuserve.core.errors import Unavailable
from gpuserve.front.ipc.batch_messages import run_message
from gpuserve.front.ipc.gather import ONE_TURN_NBYTES, DeviceInputs, Gathered, copy_in_parts, gather
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.ipc.worker_memory import LentBlock, OutputMemory
from gpuserve.front.models.ensemble_run import ReferenceCount, lend_output
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.requests.inference import (
    Data,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    RegionSlice,
)
from gpuserve.model.spec import InstanceSpec
from gpuserve_worker.execution.batch_inputs import copy_fills
from gpuserve_worker.execution.loop import HostPath
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import TensorSpec, encode_bytes, numpy_dtype

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
        self.receive_memory()
        run = wire.WORKER.decode(wire.WORKER.encode(run))  # type: ignore[assignment]
        assert copy_fills(run, self.session.mapping, self.session.regions, self.session.loans) == {}
        return self.session.inputs.arrays(run.batch_id, run.inputs)["x"]

    def receive_memory(self) -> None:
        """Process the messages about memory that have come."""
        with contextlib.suppress(BlockingIOError):
            while (received := self.far.receive()) is not None:
                message, fds = received
                self.session.process_memory_message(message, fds)
                for fd in fds:
                    os.close(fd)

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


@contextmanager
def gathered_batch(
    parts: list[Part],
    inner: int,
    datatype: str = "INT32",
    *,
    read_only: bool = False,
    on_device: bool = False,
) -> Iterator[tuple[Plane, list[InferRequest], list[Any], Gathered]]:
    """Gather requests with these parts; afterwards every block is free."""
    arrays = [values(part, inner, datatype) for part in parts]
    with plane(read_only=read_only) as made:
        requests = requests_of(made, arrays, parts, datatype)
        nbytes = sum(len(one.inputs[0].data) for one in requests)
        rows = sum(part.rows for part in parts)
        inputs = frozenset({"x"} if on_device else ())
        gathered = gather(requests, rows, True, nbytes, made.arena, made.link, read_only, inputs)
        if not on_device:
            assert bool(gathered.joins) == (nbytes > ONE_TURN_NBYTES)
            for _ in copy_in_parts(gathered.joins, made.arena):
                pass
        yield made, requests, arrays, gathered
        for block in gathered.blocks:
            block.free()
        free_inputs(requests)
        assert made.arena.statistics().blocks == made.lender.statistics().blocks == 0


def free_inputs(requests: list[InferRequest]) -> None:
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
    with gathered_batch(parts, inner, datatype, read_only=read_only) as (made, requests, arrays, gathered):
        rows = [part.rows for part in parts]
        seen = made.seen(run_message(1, rows, requests, gathered))
        expected = np.concatenate(arrays)
        assert (seen.shape, seen.tolist()) == (expected.shape, expected.tolist())
        if datatype != "BYTES":
            assert seen.flags.writeable is not read_only
            if not read_only:
                seen[:] = 0  # what others see as well is as it was
                check_unchanged(made, requests, arrays, parts)
        del seen


@pytest.mark.parametrize("inner", [600_000, 1 << 20])
async def test_a_large_batch_is_copied_in_parts(inner: int) -> None:
    parts = [Part(kind, 1, n) for n, kind in enumerate(KINDS)]
    with gathered_batch(parts, inner) as (made, requests, arrays, gathered):
        seen = made.seen(run_message(1, [1] * len(parts), requests, gathered))
        assert np.array_equal(seen, np.concatenate(arrays))
        del seen


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
async def test_a_single_request_is_copied_only_if_necessary(kind: str, read_only: bool) -> None:
    with gathered_batch([Part(kind, 1, 1)], 6000, read_only=read_only) as (_, _, _, gathered):
        found = type(gathered.tensors[0].payload)
        at_once = {"block": wire.Ref, "lent": wire.Loan, "region": wire.Place, "shared": wire.Loan}
        copied = kind in {"bytes", "view"} or (kind in {"region", "shared"} and not read_only)
        assert found is (wire.Ref if copied else at_once[kind])
        assert len(gathered.blocks) == copied
        assert len(gathered.fills) == (kind in {"region", "shared"} and copied)


async def test_device_memory_is_always_copied() -> None:
    part = Part("region", 1, 1)
    with plane(read_only=True) as made:
        requests = requests_of(made, [values(part, 6000, "INT32")], [part], "INT32")
        requests[0].regions[0].device = "cuda:0"
        nbytes = len(requests[0].inputs[0].data)
        gathered = gather(requests, 1, True, nbytes, made.arena, made.link, True)
        assert isinstance(gathered.tensors[0].payload, wire.Ref)
        assert len(gathered.fills) == 1
        gathered.blocks[0].free()


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
        free_inputs(requests)
        assert made.lender.statistics().blocks == 0


# ---- gather parts ----------------------------------------------------------------------------


IN_SHARED = {"block", "region", "lent", "shared"}
WIDTH = 6000


def fetched(made: Plane, payload: Any) -> bytes:
    """What a worker copies to its device."""
    made.receive_memory()
    match wire.payload(payload):
        case wire.Parts(parts):
            return b"".join([fetched(made, one) for one in parts])
        case wire.Place() as place:
            return bytes(made.session.regions.view(place))
        case wire.Loan(segment, offset, nbytes):
            return bytes(made.session.loans.view(segment, offset, nbytes))
        case wire.Ref() as ref:
            return bytes(made.session.mapping.view(*ref))
        case found:
            assert isinstance(found, bytes)
            return found


@settings(max_examples=examples(100), deadline=None)
@given(parts_of_a_batch)
async def test_a_batch_for_a_device_is_the_concatenation_of_its_parts(parts: list[Part]) -> None:
    with gathered_batch(parts, WIDTH, on_device=True) as (made, _, arrays, gathered):
        run = wire.WORKER.decode(wire.WORKER.encode(wire.Run(1, (), gathered.tensors)))
        (tensor,) = wire.tensors(run.inputs)
        assert fetched(made, tensor.payload) == b"".join([wire_bytes(one) for one in arrays])
        kinds = [part.kind for part in parts]
        on_heap = [len(wire_bytes(a)) for a, kind in zip(arrays, kinds, strict=True) if kind not in IN_SHARED]
        assert sum(block.nbytes for block in gathered.blocks) == sum(on_heap)
        assert gathered.fills == ()
        if isinstance(tensor.payload, wire.Parts):
            assert len(tensor.payload.parts) == len(parts)


@pytest.mark.parametrize("kind", KINDS)
async def test_small_batches_for_a_device_travel_in_the_message(kind: str) -> None:
    with gathered_batch([Part(kind, 1, 1)], 8, on_device=True) as (_, _, _, gathered):
        found = type(gathered.tensors[0].payload)
        assert found is (wire.Place if kind == "region" else bytes)


async def test_bools_of_a_client_are_looked_at_on_the_host() -> None:
    parts = [Part("region", 1, 1), Part("block", 1, 2)]
    with gathered_batch(parts, 20000, "BOOL", read_only=True, on_device=True) as (_, _, _, gathered):
        assert isinstance(gathered.tensors[0].payload, wire.Ref)
        assert len(gathered.fills) == 1


def spec_of(*devices: str, memory: str = "gpu", read_only: bool = False) -> Any:
    instances = tuple(InstanceSpec(f"i{n}", device, {}) for n, device in enumerate(devices))
    inputs = (TensorSpec("x", "FP32", (-1,), False, memory), TensorSpec("s", "BYTES", (-1,), True, memory))
    return dataclasses.replace(SPEC, inputs=inputs, instances=instances, read_only_inputs=read_only)


def test_which_inputs_go_to_a_device() -> None:
    mixed = DeviceInputs(spec_of("cuda:0", "cpu"))
    assert mixed.by_instance == {"i0": {"x"}}
    assert mixed.everywhere == frozenset()
    assert DeviceInputs(spec_of("cuda:0", "cuda:1")).everywhere == {"x"}
    assert DeviceInputs(spec_of("cuda:0", memory="cpu")).everywhere == frozenset()


def large_request(scene: Scene, name: str = "x") -> tuple[InferRequest, Block]:
    block = scene.driver.arena.allocate(4 * WIDTH)
    assert block is not None
    block.view[:] = bytes(4 * WIDTH)
    return InferRequest("m", "", "", {}, [InputTensor(name, "FP32", (1, WIDTH), block)], (), None), block


@pytest.mark.parametrize(
    ("devices", "again"), [(("cuda:0", "cuda:1"), True), (("cuda:0", "cpu"), False), (("cpu", "cpu"), False)]
)
async def test_a_body_that_no_callable_can_write_to_is_run_again(
    devices: tuple[str, ...], again: bool
) -> None:
    scene = Scene(spec_of(*devices), arena_nbytes=1 << 26)
    try:
        await scene.settle()
        pending = scene.driver.submit(large_request(scene)[0])
        await scene.settle()
        first = scene.busy(0)
        assert first is not None
        first.die()
        scene.workers.remove(first)
        await scene.settle()
        second = scene.busy(0)
        assert (second is not None) is again
        if second is not None:
            assert scene.driver.arena.statistics().blocks == 1
            second.answer([True])
            await scene.settle()
            pending.answer.result().close()
        else:
            assert isinstance(pending.answer.exception(), Unavailable)
        assert scene.driver.arena.statistics().blocks == 0
    finally:
        scene.close()


def joined(scene: Scene) -> list[PendingRequest]:
    return [scene.driver.submit(large_request(scene)[0]) for _ in range(3)]


async def test_blocks_of_several_requests_are_theirs_until_the_worker_has_read_them() -> None:
    scene = Scene(spec_of("cuda:0"), arena_nbytes=1 << 26)
    try:
        await scene.settle()
        requests = joined(scene)
        await scene.settle()
        (worker,) = scene.workers
        run = worker.runs.pop(0)
        (tensor, *_) = wire.tensors(run.inputs)
        assert isinstance(tensor.payload, wire.Parts)
        assert scene.driver.arena.statistics().blocks == 3
        requests[0].cancel()  # which frees nothing that the worker reads
        assert scene.driver.arena.statistics().blocks == 3
        row = wire.WireTensor("y", "FP32", (1, 1), bytes(4))
        worker.say(wire.Done(run.batch_id, None, ((row,),) * 3, False, *PHASES))
        await scene.settle()
        assert scene.driver.arena.statistics().blocks == 3
        worker.say(wire.Released((run.batch_id,)))
        await scene.settle()
        assert scene.driver.arena.statistics().blocks == 0
        for one in requests[1:]:
            one.answer.result().close()
    finally:
        scene.close()


def test_a_place_in_a_region_needs_no_block() -> None:
    place = RegionSlice("r", 0, 8)
    assert DeviceInputs(spec_of("cuda:0")).cannot_be_written([InputTensor("other", "FP32", (2,), place)])
