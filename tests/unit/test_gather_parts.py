"""Inputs that go to a device: what lies in shared memory is not moved, and whose it is does not change."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from driver_scene import PHASES, SPEC, Scene
from exploring import examples
from hypothesis import given, settings
from test_gather_properties import (
    KINDS,
    Part,
    Plane,
    free_all,
    parts_of_a_batch,
    plane,
    requests_of,
    values,
    wire_bytes,
)

from gpuserve.core.errors import Unavailable
from gpuserve.front.ipc.gather import DeviceInputs, Gathered, gather
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.requests.inference import InferRequest, InputTensor, RegionSlice
from gpuserve.model.spec import InstanceSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import TensorSpec

IN_SHARED_MEMORY = {"block", "region", "lent", "shared"}
WIDTH = 6000


def gathered_for_device(made: Plane, requests: list[InferRequest], parts: list[Part]) -> Gathered:
    nbytes = sum(len(one.inputs[0].data) for one in requests)
    rows = sum(part.rows for part in parts)
    return gather(requests, rows, True, nbytes, made.arena, made.link, made.read_only, frozenset({"x"}))


def fetched(made: Plane, payload: Any) -> bytes:
    """What a worker copies to its device."""
    while (received := made._received()) is not None:
        message, fds = received
        made.session.process_memory_message(message, fds)
        for fd in fds:
            os.close(fd)
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
    arrays = [values(part, WIDTH, "INT32") for part in parts]
    with plane(read_only=False) as made:
        requests = requests_of(made, arrays, parts, "INT32")
        gathered = gathered_for_device(made, requests, parts)
        run = wire.WORKER.decode(wire.WORKER.encode(wire.Run(1, (), gathered.tensors)))
        (tensor,) = wire.tensors(run.inputs)
        assert fetched(made, tensor.payload) == b"".join([wire_bytes(one) for one in arrays])
        kinds = [part.kind for part in parts]
        on_heap = [
            len(wire_bytes(a)) for a, kind in zip(arrays, kinds, strict=True) if kind not in IN_SHARED_MEMORY
        ]
        assert sum(block.nbytes for block in gathered.blocks) == sum(on_heap)
        assert gathered.fills == ()
        if isinstance(tensor.payload, wire.Parts):
            assert len(tensor.payload.parts) == len(parts)
        free_all(made, requests, gathered)
        assert made.arena.statistics().blocks == made.lender.statistics().blocks == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_small_batches_for_a_device_travel_in_the_message(kind: str) -> None:
    part = Part(kind, 1, 1)
    with plane(read_only=False) as made:
        requests = requests_of(made, [values(part, 8, "INT32")], [part], "INT32")
        gathered = gathered_for_device(made, requests, [part])
        found = type(gathered.tensors[0].payload)
        assert found is (wire.Place if kind == "region" else bytes)
        free_all(made, requests, gathered)


async def test_bools_of_a_client_are_looked_at_on_the_host() -> None:
    parts = [Part("region", 1, 1), Part("block", 1, 2)]
    with plane(read_only=True) as made:
        requests = requests_of(made, [values(one, 20000, "BOOL") for one in parts], parts, "BOOL")
        gathered = gathered_for_device(made, requests, parts)
        assert isinstance(gathered.tensors[0].payload, wire.Ref)
        assert len(gathered.fills) == 1
        free_all(made, requests, gathered)


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
    ("devices", "again"),
    [(("cuda:0", "cuda:1"), True), (("cuda:0", "cpu"), False), (("cpu", "cpu"), False)],
)
async def test_a_body_that_no_callable_can_have_written_to_is_run_again(
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
