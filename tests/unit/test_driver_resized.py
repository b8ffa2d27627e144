"""A driver whose model gets more instances, or fewer, while requests wait and run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from driver_scene import SPEC, Scene, Worker

from gpuserve.front.requests.inference import InferResponse
from gpuserve.model.spec import InstanceSpec, ModelSpec


def having(*names: str) -> ModelSpec:
    return dataclasses.replace(SPEC, instances=tuple(InstanceSpec(name, "cpu", {}) for name in names))


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """The instances "a" and "b", and a request of a whole batch at each."""
    one = Scene(SPEC)
    for value in (1.0, 2.0):
        one.submit(4, value, None)
        await one.settle()
    assert [len(worker.runs) for worker in one.workers] == [1, 1]
    yield one
    one.close()
    await one.settle()


def worker(one: Scene, name: str) -> Worker:
    return next(worker for worker in one.workers if worker.instance == name)


async def until_answered(one: Scene, number: int) -> InferResponse:
    await one.settle()
    answer = await asyncio.wait_for(one.pending[number].answer, 5.0)
    assert isinstance(answer, InferResponse)
    return answer


async def test_a_new_instance_takes_what_waits() -> None:
    async with scene() as one:
        one.submit(4, 3.0, None)
        await one.settle()
        one.driver.resize(having("a", "b", "c"))
        one.workers.append(Worker(one.driver, "c"))
        await one.settle()
        assert len(worker(one, "c").runs) == 1
        worker(one, "c").answer([True])
        await until_answered(one, 2)
        assert one.driver.workers.instances.in_rotation() == ["a", "b", "c"]


async def test_one_that_is_retired_answers_and_goes() -> None:
    async with scene() as one:
        driver = one.driver
        driver.resize(having("a"))
        driver.workers.retire_instance("b")
        one.submit(4, 3.0, None)
        await one.settle()
        instances = driver.workers.instances
        assert (list(instances.up), instances.in_rotation()) == (["a", "b"], ["a"])
        assert not driver.workers.is_idle("b")
        worker(one, "b").answer([True])
        await until_answered(one, 1)
        assert driver.workers.is_idle("b")
        driver.workers.release_instance("b")
        assert "b" not in driver.workers.instances
        assert not worker(one, "b").runs
        worker(one, "a").answer([True])
        await until_answered(one, 0)
        worker(one, "a").answer([True])
        await until_answered(one, 2)
        assert driver.statistics().retried == 0
        assert one.metrics.instance("b").restarts == 0
        driver.workers.instance_down("b", "it crossed our word")


async def test_what_is_let_go_before_it_has_finished_runs_elsewhere() -> None:
    async with scene() as one:
        one.driver.resize(having("a"))
        one.driver.workers.retire_instance("b")
        one.driver.workers.release_instance("b")
        for number in (0, 1):
            worker(one, "a").answer([True])
            await until_answered(one, number)
        assert one.driver.statistics().retried == 1
        assert one.metrics.instance("b").restarts == 0


async def test_one_that_is_down_is_forgotten_at_once() -> None:
    async with scene() as one:
        dead = worker(one, "b")
        dead.die()
        one.workers.remove(dead)
        await asyncio.sleep(0.0)
        await one.settle()
        one.driver.resize(having("a"))
        one.driver.workers.retire_instance("b")
        assert one.driver.workers.is_idle("b")
        one.driver.workers.release_instance("b")
        assert "b" not in one.driver.workers.instances
        assert one.driver.ready
        for number in (0, 1):
            worker(one, "a").answer([True])
            await until_answered(one, number)
