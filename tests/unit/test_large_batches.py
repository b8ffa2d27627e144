"""Batches copied over several turns of the event loop, and the first responses of streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from driver_scene import SPEC, Scene, Worker
from present import present

from gpuserve.core.errors import NoMemory, RequestError
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.model.spec import InstanceSpec
from gpuserve_worker.protocol import wire
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
    worker = present(scene.busy(0))
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


@pytest.mark.parametrize("closes", [True, False])
async def test_requests_that_are_cancelled_or_whose_model_is_closed_meanwhile(closes: bool) -> None:
    async with settled() as scene:
        large = submitted(scene, 4)
        await scene.settle()
        if closes:
            scene.driver.close()
            await all_copied(scene)
            assert all(isinstance(one.answer.exception(), RequestError) for one in large)
            return
        for one in large[:3]:
            one.cancel()
        await all_copied(scene)
        await answered(scene, large[3:])


# ---- the first responses of a stream ----


STREAM = replace(SPEC, decoupled=True, instances=SPEC.instances[:1])


@contextlib.asynccontextmanager
async def streams(n: int = 1, **options: Any) -> AsyncIterator[tuple[Scene, Worker]]:
    """A worker that has the one request of each of so many streams."""
    scene = Scene(replace(STREAM, **options))
    await scene.settle()
    for _ in range(n):
        scene.submit(1, 1.0, None)
    await scene.settle()
    yield scene, scene.workers[0]
    scene.close()


async def test_a_worker_may_go_on_once_the_first_response_has_left() -> None:
    seen: list[str] = []
    async with streams() as (scene, worker):
        link = scene.driver.workers.instances.up["a"]
        send, loop = link.send, asyncio.get_running_loop()

        def on_send(message: wire.Message, *fds: Any) -> None:
            seen.append(type(message).__name__)
            send(message, *fds)

        def on_response(response: Any) -> None:
            response.close()
            # Like a connection: data written in one loop iteration is sent in the next.
            loop.call_soon(loop.call_soon, seen.append, "left")

        link.send = on_send  # type: ignore[method-assign]
        scene.pending[0].on_response = on_response
        for _ in range(2):
            worker.give([True])
        await scene.settle()
        (batch,) = worker.runs
        assert worker.credits == [wire.Credit(((batch.batch_id, wire.YIELD_WINDOW - 1),))]
    assert seen == ["left", "Credit", "left"]


async def test_a_stream_of_one_response_needs_no_credit() -> None:
    async with streams() as (scene, worker):
        worker.give([True])
        worker.end()
        await scene.settle()
        assert scene.responses == 1
        assert scene.pending[0].answer.done()
        assert not worker.credits


async def test_a_worker_gets_credit_for_all_its_streams_in_one_message() -> None:
    async with streams(2, max_active=2, max_batch_size=1) as (scene, worker):
        for pending in scene.pending:
            pending.on_response = lambda response: response.close()
        first, second = worker.runs
        one = (wire.WireTensor("y", "FP32", (), bytes(4)),)
        for step in range(16):
            runs = (first,) if step < 5 else (first, second)
            worker.say(wire.Stepped(1, 1, 2, tuple([run.batch_id for run in runs]), None, (one,) * len(runs)))
        await scene.settle()
        assert worker.credits == [wire.Credit(((first.batch_id, 16), (second.batch_id, 10)))]
