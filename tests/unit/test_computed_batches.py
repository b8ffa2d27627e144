"""A batch whose call is over and whose outputs are still on their way: its slot is free, it has not ended,
and it has begun.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_scene import SPEC, Scene
from exploring import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from scheduled import Model, must_next
from test_batcher_properties import SchedulerMachine

from gpuserve.front.requests.inference import InferResponse
from gpuserve.front.scheduling.rate_limiter import RateLimitedSource, SharedResources
from gpuserve.front.scheduling.slots import Batch
from gpuserve_worker.protocol import wire

#: One instance that holds one batch besides the one it runs.
ONE = replace(SPEC, instances=SPEC.instances[:1], prefetch=1, max_batch_size=1)


class ComputedMachine(SchedulerMachine):
    """As the machine of all schedulers, with workers that say when a batch is computed."""

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        first: dict[str, Batch] = {}
        for batch in self.running.values():  # an instance computes its batches in their order
            if batch.slots:
                first.setdefault(batch.instance, batch)
        if first:
            self.scheduler.computed(first[data.draw(st.sampled_from(sorted(first)))])

    def _load(self, instance: str) -> int:
        return sum(batch.instance == instance for batch in self.running.values() if batch.slots)

    def _begun(self, batches: list[Batch]) -> list[Batch]:
        others = [batch for batch in batches if batch.slots]
        return [batch for batch in batches if not batch.slots] + others[:1]


ComputedMachine.TestCase.settings = settings(
    max_examples=examples(150), deadline=None, stateful_step_count=40
)
TestComputed = ComputedMachine.TestCase


def test_a_computed_batch_frees_its_slot_and_has_not_ended() -> None:
    model = Model(max_batch_size=1, prefetch=1)
    requests = model.submit_many(4)
    first, second = model.must_next(), model.must_next()
    assert model.next() is None
    model.scheduler.computed(first)
    assert model.must_next().requests == [requests[2]]
    assert (model.count("running_batches"), model.count("room")) == (3, 0)
    assert model.scheduler.complete(first.batch_id).requests == [requests[0]]
    assert (model.count("finished"), model.count("room"), model.next()) == (1, 0, None)
    model.scheduler.complete(second.batch_id)
    assert model.must_next().requests == [requests[3]]


def test_a_batch_is_computed_once_however_often_it_is_said() -> None:
    model = Model(max_batch_size=1)
    model.submit_many(1)
    batch = model.must_next()
    for _ in range(2):
        model.scheduler.computed(batch)
    assert model.count("room") == 1
    model.scheduler.complete(batch.batch_id)
    assert model.count("room") == 1


def test_what_was_computed_or_ran_has_had_its_try_and_what_was_held_has_not() -> None:
    model = Model(max_batch_size=1, prefetch=1)
    computed, ran, held = model.submit_many(3)
    model.scheduler.computed(model.must_next())
    model.must_next(), model.must_next()
    assert model.scheduler.instance_down("i0") == []
    assert [one.attempts for one in (computed, ran, held)] == [1, 1, 0]
    model.scheduler.instance_up("i0")
    assert [model.must_next().requests for _ in range(2)] == [[computed], [ran]]


def test_a_computed_batch_that_may_not_run_again_is_lost_with_its_worker() -> None:
    model = Model(max_batch_size=1, retry_on_death=False)
    computed, running = model.submit_many(2)
    model.scheduler.computed(model.must_next())
    model.must_next()
    assert model.scheduler.instance_down("i0") == [computed, running]
    assert model.count("lost") == 2


def test_a_computed_batch_keeps_its_resources_until_it_has_ended() -> None:
    limiter = SharedResources(())
    model = Model(max_batch_size=1, prefetch=1, instances=0)
    limited = RateLimitedSource(model.scheduler, ONE.instances, limiter, lambda: None)
    model.scheduler.instance_up(ONE.instances[0].name)
    model.submit_many(2)
    batch = must_next(limited, model.now)
    model.scheduler.computed(batch)
    assert limited.complete(batch.batch_id) is batch
    assert model.count("room") == 2


async def _three_at_a_worker(scene: Scene) -> None:
    await scene.settle()
    for value in range(4):
        scene.submit(1, float(value), None)
    await scene.settle()
    (worker,) = scene.workers
    assert len(worker.runs) == 2
    worker.compute(0)
    await scene.settle()
    assert len(worker.runs) == 3


async def test_the_front_sends_the_next_batch_and_answers_each_once() -> None:
    scene = Scene(ONE)
    await _three_at_a_worker(scene)
    assert not scene.pending[0].is_over
    for _ in range(4):
        scene.workers[0].answer([True])
        await scene.settle()
    assert all(isinstance(one.answer.result(), InferResponse) for one in scene.pending)
    scene.close()


async def test_when_the_worker_dies_all_are_run_again_in_their_order() -> None:
    scene = Scene(ONE)
    await _three_at_a_worker(scene)
    scene.replace(0)
    await scene.revive(0)
    assert [one.attempts for one in scene.pending] == [1, 1, 0, 0]
    for _ in range(4):
        await scene.answer([True])
    assert all(isinstance(one.answer.result(), InferResponse) for one in scene.pending)
    scene.close()


@pytest.mark.parametrize("batch_id", [7, 0])
async def test_an_unknown_batch_cannot_be_computed(batch_id: int, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(ONE)
    await scene.settle()
    scene.submit(1, 1.0, None)
    await scene.settle()
    if batch_id == 0:
        scene.workers[0].answer([True])
        await scene.settle()
    scene.workers[0].say(wire.Computed((batch_id,)))
    await scene.settle()
    scene.close()
    assert caplog.records[0].getMessage() == "instance a broke the protocol"
