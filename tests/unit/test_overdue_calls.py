"""Which calls of instances are overdue, who is told, and what runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from driver_scene import SPEC, Scene, Worker

from gpuserve.core.errors import DeadlineExceeded
from gpuserve.front.models.in_flight import RunningCall
from gpuserve.front.models.model_workers import REPORT_AFTER_S, CallWatch, OverdueCall
from gpuserve.front.process.generations import poll_period_s

LIMIT_S = 5.0
#: Each instance holds one batch besides the one that it runs.
WATCHED = dataclasses.replace(SPEC, prefetch=1, execution_timeout_s=LIMIT_S)


def worker(scene: Scene, name: str) -> Worker:
    return next(one for one in scene.workers if one.instance == name)


@contextlib.asynccontextmanager
async def filled() -> AsyncIterator[tuple[Scene, OverdueCall]]:
    """Four full batches, of which each instance runs one and holds one, and the first overdue call."""
    scene = Scene(WATCHED)
    for value in range(4):
        scene.submit(4, float(value), None)
        await scene.settle()
    assert [len(one.runs) for one in scene.workers] == [2, 2]
    now = asyncio.get_running_loop().time()
    assert scene.driver.overdue.poll(now, now + LIMIT_S) == []
    first, second = scene.driver.overdue.poll(now + LIMIT_S, now + 2 * LIMIT_S)
    assert {first.call.instance, second.call.instance} == {"a", "b"}
    yield scene, first
    scene.close()


async def test_the_batch_that_hangs_is_told_and_what_was_only_held_runs_elsewhere() -> None:
    async with filled() as (scene, first):
        hung = first.call.instance
        rest = worker(scene, "b" if hung == "a" else "a")
        assert scene.driver.overdue.terminate(first, 1.0)
        await scene.settle()
        (error,) = [one.answer.exception() for one in scene.pending if one.answer.done()]
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


async def test_one_that_comes_back_in_the_last_moment_is_answered() -> None:
    async with filled() as (scene, first):
        worker(scene, first.call.instance).answer([True])
        assert not scene.driver.overdue.terminate(first, 1.0)
        await scene.settle()
        assert [one.answer.exception() for one in scene.pending if one.answer.done()] == [None]
        assert len(scene.driver.workers.instances.up) == 2


async def test_another_of_the_same_name_may_be_up_before_the_first_is_dead() -> None:
    async with filled() as (scene, first):
        link = scene.driver.workers.instances.up[first.call.instance]
        assert scene.driver.overdue.terminate(first, 1.0)
        successor = Worker(scene.driver, first.call.instance)
        scene.workers.append(successor)
        await scene.settle()
        assert len(successor.runs) == 1
        assert scene.driver.overdue.reap(link)
        assert not scene.driver.overdue.reap(link)
        assert len(scene.driver.workers.instances.up) == 2


async def test_nobody_is_told_who_went_before_and_the_instance_is_ended_all_the_same() -> None:
    async with filled() as (scene, first):
        for number in range(len(scene.pending)):
            scene.cancel(number)
        assert scene.driver.overdue.terminate(first, 1.0)
        await scene.settle()
        assert all(one.answer.cancelled() for one in scene.pending)
        assert list(scene.driver.workers.instances.up) != [first.call.instance]
        counts = scene.driver.statistics()
        assert (counts.lost, counts.retried) == (0, 0)


# ---- which calls are overdue, by a clock of the test ----


PERIOD_S = 0.25


class Looks:
    """A watch that is made to look at times that go on."""

    def __init__(self, limit_s: float) -> None:
        self.watch = CallWatch(limit_s)
        self.now = 100.0

    def at(self, seconds: float, *calls: RunningCall) -> list[OverdueCall]:
        self.now = 100.0 + seconds
        return self.watch.poll(calls, self.now, self.now + PERIOD_S)

    def until(self, seconds: float, *calls: RunningCall) -> list[OverdueCall]:
        """Look every period up to that time; all that was overdue."""
        found = []
        while self.now + PERIOD_S <= 100.0 + seconds:
            found += self.at(self.now + PERIOD_S - 100.0, *calls)
        return found


def call(batch: int = 1, began_at: float = 0.0, responses: int = 0, *, held: bool = False) -> RunningCall:
    return RunningCall("a", batch, 100.0 + began_at, responses, held)


def test_a_call_is_overdue_once_when_its_limit_is_over() -> None:
    looks = Looks(1.0)
    assert looks.until(0.75, call()) == []
    assert looks.at(1.0, call()) == [OverdueCall(call(), 1.0, 1.0)]
    assert looks.until(5.0, call()) == []


def test_what_was_behind_another_counts_from_when_that_ended() -> None:
    looks = Looks(1.0)
    assert looks.until(0.75, call(1)) == []
    assert looks.until(1.5, call(2, began_at=0.75)) == []
    (overdue,) = looks.at(1.75, call(2, began_at=0.75))
    assert overdue.call.batch_id == 2


def test_each_response_of_a_stream_begins_the_time_anew_and_one_that_is_held_waits_for_nobody() -> None:
    looks = Looks(1.0)
    assert looks.until(0.75, call()) == []
    assert looks.until(1.75, call(responses=1)) == []
    assert len(looks.at(2.0, call(responses=1))) == 1
    looks = Looks(1.0)
    assert looks.until(10.0, call(responses=3, held=True)) == []
    assert looks.until(10.75, call(responses=3)) == []
    assert len(looks.at(11.0, call(responses=3))) == 1


def test_the_time_that_the_machine_stood_still_counts_for_nobody() -> None:
    looks = Looks(5.0)
    assert looks.until(1.0, call()) == []
    assert looks.at(1000.0, call(), call(2, began_at=1.1)) == []
    assert looks.until(1003.5, call(), call(2, began_at=1.1)) == []
    assert [one.call.batch_id for one in looks.until(1005.5, call(), call(2, began_at=1.1))] == [1, 2]


def test_without_a_limit_a_call_is_told_of_once_and_an_instance_once_a_minute() -> None:
    looks = Looks(0.0)
    assert looks.until(REPORT_AFTER_S - PERIOD_S, call()) == []
    (told,) = looks.at(REPORT_AFTER_S, call(), call(2))
    assert (told.call.batch_id, told.limit_s) == (1, 0.0)
    later = looks.until(3 * REPORT_AFTER_S, call(), call(2))
    assert [one.call.batch_id for one in later] == [2]


def test_it_is_looked_often_enough_for_the_shortest_limit() -> None:
    assert poll_period_s([]) == poll_period_s([0.0]) == 1.0
    assert poll_period_s([0.0, 0.5, 30.0]) == 0.125
    assert poll_period_s([3600.0]) == 0.4
    assert poll_period_s([0.001]) == 0.05
