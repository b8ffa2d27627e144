"""What a driver does with an instance whose callable is not back: who is told, what runs elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses

from driver_scene import SPEC, Scene, Worker

from gpuserve.core.errors import DeadlineExceeded
from gpuserve.front.models.model_workers import OverdueCall

LIMIT_S = 5.0
#: Each instance holds one batch besides the one that it runs.
WATCHED = dataclasses.replace(SPEC, prefetch=1, execution_timeout_s=LIMIT_S)


def worker(scene: Scene, name: str) -> Worker:
    return next(one for one in scene.workers if one.instance == name)


async def overdue(scene: Scene) -> list[OverdueCall]:
    """The calls that are overdue when their limit is just over."""
    now = asyncio.get_running_loop().time()
    assert scene.driver.overdue.poll(now, now + LIMIT_S) == []
    return scene.driver.overdue.poll(now + LIMIT_S, now + 2 * LIMIT_S)


async def filled(scene: Scene) -> None:
    """Four full batches: each instance runs one and holds one."""
    for value in range(4):
        scene.submit(4, float(value), None)
        await scene.settle()
    assert [len(one.runs) for one in scene.workers] == [2, 2]


def test_the_batch_that_hangs_is_told_and_what_was_only_held_runs_elsewhere() -> None:
    async def run() -> None:
        scene = Scene(WATCHED)
        await filled(scene)
        first, second = await overdue(scene)
        assert {first.call.instance, second.call.instance} == {"a", "b"}
        hung = first.call.instance
        rest = worker(scene, "b" if hung == "a" else "a")
        assert scene.driver.overdue.terminate(first, 1.0)
        await scene.settle()
        told = [one.answer.exception() for one in scene.pending if one.answer.done()]
        (error,) = told
        assert isinstance(error, DeadlineExceeded)
        assert str(error) == (
            f"model 'm': the callable of instance {hung} was not back within execution_timeout_s, 5 s, "
            "and was ended"
        )
        for _ in range(3):
            rest.answer([True])
            await scene.settle()
        assert all(one.answer.done() for one in scene.pending)
        counts = scene.driver.statistics()
        assert (counts.finished, counts.lost, counts.retried) == (3, 1, 1)
        assert (scene.metrics.instance(hung).timeouts, scene.metrics.instance(hung).restarts) == (1, 1)
        scene.close()

    asyncio.run(run())


async def test_one_that_comes_back_in_the_last_moment_is_answered() -> None:
    scene = Scene(WATCHED)
    await filled(scene)
    first, _ = await overdue(scene)
    worker(scene, first.call.instance).answer([True])
    assert not scene.driver.overdue.terminate(first, 1.0)
    await scene.settle()
    assert [one.answer.exception() for one in scene.pending if one.answer.done()] == [None]
    assert len(scene.driver.workers.instances.up) == 2
    scene.close()


async def test_another_of_the_same_name_may_be_up_before_the_first_is_dead() -> None:
    scene = Scene(WATCHED)
    await filled(scene)
    first, _ = await overdue(scene)
    link = scene.driver.workers.instances.up[first.call.instance]
    assert scene.driver.overdue.terminate(first, 1.0)
    successor = Worker(scene.driver, first.call.instance)
    scene.workers.append(successor)
    await scene.settle()
    assert len(successor.runs) == 1
    assert scene.driver.overdue.reap(link)
    assert not scene.driver.overdue.reap(link)
    assert len(scene.driver.workers.instances.up) == 2
    scene.close()


async def test_nobody_is_told_who_went_before_and_the_instance_is_ended_all_the_same() -> None:
    scene = Scene(WATCHED)
    await filled(scene)
    first, _ = await overdue(scene)
    for number in range(len(scene.pending)):
        scene.cancel(number)
    assert scene.driver.overdue.terminate(first, 1.0)
    await scene.settle()
    assert all(one.answer.cancelled() for one in scene.pending)
    assert list(scene.driver.workers.instances.up) != [first.call.instance]
    counts = scene.driver.statistics()
    assert (counts.lost, counts.retried) == (0, 0)
    scene.close()
