"""Queued requests of a model that is reloaded, while instances of the retired generation may hang."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from driver_scene import SPEC, Scene, Worker, request

from gpuserve.core.errors import DeadlineExceeded, QueueFull
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.requests.inference import InferResponse
from gpuserve.model.spec import InstanceSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve_worker.memory.arena import Block


def one(**changes: Any) -> ModelSpec:
    """A model with one instance that runs one request at a time, but for the changes."""
    return dataclasses.replace(SPEC, **{"instances": SPEC.instances[:1], "max_batch_size": 1} | changes)


ONE = one()


@contextlib.asynccontextmanager
async def reloaded(old: ModelSpec = ONE, new: ModelSpec = ONE) -> AsyncIterator[tuple[Scene, Scene]]:
    """The driver of a model and the driver that is loaded in its place."""
    scenes = Scene(old, arena_nbytes=1 << 25), Scene(new)
    try:
        yield scenes
    finally:
        for one in scenes:
            one.close()


async def hung_with(old: Scene, *waiting: float | None) -> None:
    """Let the only worker run a request for ever, and others wait behind it, each with a timeout."""
    for timeout_s in (None, *waiting):
        old.submit(1, 1.0, timeout_s)
        await old.settle()


async def answered(new: Scene, pending: PendingRequest) -> None:
    """Have the new instance run a request, and wait for its answer."""
    await new.settle()
    new.workers[0].answer([True])
    response = await asyncio.wait_for(pending.answer, 1)
    assert isinstance(response, InferResponse)
    response.close()


async def test_what_waits_behind_a_hung_instance_is_answered_by_the_new_one() -> None:
    async with reloaded() as (old, new):
        await hung_with(old, None, None)
        assert old.driver.transfer_queue(new.driver)
        assert not old.driver.transfer_queue(new.driver)
        assert (old.driver.unfinished, new.driver.unfinished) == (1, 2)
        for pending in old.pending[1:]:
            await answered(new, pending)
        old.workers[0].answer([True])  # it was only slow
        (await asyncio.wait_for(old.pending[0].answer, 1)).close()


async def test_what_an_instance_only_held_goes_over_when_that_is_given_up() -> None:
    async with reloaded(one(prefetch=1)) as (old, new):
        await hung_with(old, None)
        assert len(old.workers[0].runs) == 2
        assert not old.driver.transfer_queue(new.driver)
        old.driver.workers.release_all()
        assert old.driver.transfer_queue(new.driver)
        await new.settle()
        assert (old.driver.unfinished, len(new.workers[0].runs)) == (1, 1)  # what was begun stays


async def test_its_time_goes_on_and_its_client_may_still_leave() -> None:
    async with reloaded() as (old, new):
        await hung_with(old, 0.05, 60.0)
        old.driver.transfer_queue(new.driver)
        new.driver.workers.instance_down("a", "it died", 0.0)
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s were given to model 'm', and .* still queued"):
            await asyncio.wait_for(old.pending[1].answer, 1)
        assert new.driver.unfinished == 1
        old.pending[2].cancel()
        assert new.driver.unfinished == 0


async def test_a_time_that_a_queue_policy_keeps_goes_on() -> None:
    policy = PolicySpec(default_timeout_us=60_000_000, allow_timeout_override=True)
    spec = one(queue=QueueSpec(policy=policy))
    async with reloaded(spec, spec) as (old, new):
        await hung_with(old, 5.0)
        old.driver.transfer_queue(new.driver)
        pending = old.pending[1]
        assert pending.timeout_at == pytest.approx(pending.enqueued_at + 5.0)


async def test_a_body_in_the_memory_of_the_old_driver_moves() -> None:
    async with reloaded() as (old, new):
        await hung_with(old)
        block = old.driver.arena.allocate(4)
        block.view[:] = bytes(4)
        asked = request(1, 1.0)
        asked.inputs[0].data = block
        pending = old.driver.submit(asked)
        old.driver.transfer_queue(new.driver)
        assert not isinstance(asked.inputs[0].data, Block)
        assert (old.driver.arena.statistics().blocks, pending.retriable) == (0, True)
        await answered(new, pending)


async def test_a_load_that_takes_other_requests_is_given_none() -> None:
    async with reloaded(new=one(max_batch_size=2)) as (old, new):
        await hung_with(old, None)
        assert not old.driver.transfer_queue(new.driver)
        assert old.driver.unfinished == 2


async def test_whoever_has_no_room_there_is_told_so() -> None:
    async with reloaded(new=one(queue=QueueSpec(1))) as (old, new):
        await hung_with(old, None, None)
        old.driver.transfer_queue(new.driver)
        with pytest.raises(QueueFull, match="maximum queue size of 1 requests"):
            await asyncio.wait_for(old.pending[2].answer, 1)
        assert new.driver.unfinished == 1


async def test_answers_that_keep_their_order_do_not_wait_for_the_hung_one() -> None:
    spec = one(batching=dataclasses.replace(ONE.batching, preserve_ordering=True))
    async with reloaded(spec, spec) as (old, new):
        await hung_with(old, None)
        old.driver.transfer_queue(new.driver)
        await answered(new, old.pending[1])


async def test_it_goes_on_at_an_instance_that_comes_later() -> None:
    async with reloaded(new=one(instances=(InstanceSpec("a", "cpu", {}),))) as (old, new):
        await hung_with(old, None)
        new.workers[0].die()
        await new.settle()
        old.driver.transfer_queue(new.driver)
        new.workers[0] = Worker(new.driver, "a")
        await new.settle()
        assert len(new.workers[0].runs) == 1
