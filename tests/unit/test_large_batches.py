"""Batches whose bodies are copied over several turns of the event loop, and what happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from driver_scene import SPEC, Scene

from gpuserve.core.errors import NoMemory, RequestError
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.model.spec import InstanceSpec
from gpuserve_worker.protocol.tensor import TensorSpec

MIB = 1 << 20
FLOATS = 6 * MIB // 4
ONE = dataclasses.replace(
    SPEC, inputs=(TensorSpec("x", "FP32", (-1,)),), instances=(InstanceSpec("a", "cpu", {}),)
)
TWO = dataclasses.replace(ONE, instances=SPEC.instances)


@contextlib.asynccontextmanager
async def settled(spec: Any = ONE, mib: int = 256) -> AsyncIterator[Scene]:
    scene = Scene(spec, arena_nbytes=mib * MIB)
    try:
        await scene.settle()
        yield scene
        assert scene.driver.arena.statistics().blocks == 0
    finally:
        scene.close()


def submitted(scene: Scene, n: int, floats: int = FLOATS) -> list[PendingRequest]:
    made = []
    for _ in range(n):
        tensor = InputTensor("x", "FP32", (1, floats), bytes(4 * floats))
        made.append(InferRequest("m", "", "", {}, [tensor], (), None))
    return [scene.driver.submit(one) for one in made]


async def all_copied(scene: Scene) -> None:
    for _ in range(64):
        await scene.settle()


async def answered(scene: Scene, pending: list[PendingRequest]) -> None:
    worker = scene.busy(0)
    assert worker is not None
    worker.answer([True])
    await scene.settle()
    for one in pending:
        one.answer.result().close()


async def test_other_events_run_between_the_parts_and_later_batches_wait() -> None:
    async with settled() as scene:
        large, small, n_turns = submitted(scene, 4), [], 0
        (worker,) = scene.workers
        while not worker.runs:
            await asyncio.sleep(0)
            worker.hear()
            n_turns += 1
            if n_turns == 4:
                small = submitted(scene, 1, 4)
        assert n_turns > 4 * FLOATS * 4 // (2 * MIB)
        assert len(worker.runs[0].requests) == 4
        await answered(scene, large)
        await all_copied(scene)
        await answered(scene, small)


async def test_a_worker_that_dies_meanwhile() -> None:
    async with settled(TWO) as scene:
        large = submitted(scene, 4)
        await scene.settle()
        dead = next(one for one in scene.workers if scene.driver.workers.instances.up[one.instance].in_flight)
        dead.die()
        scene.workers.remove(dead)
        await all_copied(scene)
        while (worker := scene.busy(0)) is not None:
            worker.answer([True])
            await all_copied(scene)
        for one in large:
            one.answer.result().close()


async def test_an_arena_without_room() -> None:
    async with settled(mib=16) as scene:
        large = submitted(scene, 4)
        await all_copied(scene)
        assert all(isinstance(one.answer.exception(), NoMemory) for one in large)
        small = submitted(scene, 1)
        await all_copied(scene)
        await answered(scene, small)


async def test_requests_that_are_cancelled_meanwhile() -> None:
    async with settled() as scene:
        large = submitted(scene, 4)
        await scene.settle()
        for one in large[:3]:
            one.cancel()
        await all_copied(scene)
        await answered(scene, large[3:])


async def test_a_model_that_is_closed_meanwhile() -> None:
    async with settled() as scene:
        large = submitted(scene, 4)
        await scene.settle()
        scene.driver.close()
        await all_copied(scene)
        assert all(isinstance(one.answer.exception(), RequestError) for one in large)
