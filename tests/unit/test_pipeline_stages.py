"""The stages of batches on a worker with a device: the order of each, what overlaps what, and who is to
blame.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve_worker.cuda.pipeline import (
    ANNOUNCED_NBYTES,
    NEXT,
    BatchStage,
    IllegalStep,
    Pipeline,
    PipelinedBatch,
)


def pipeline_of(count: int) -> tuple[Pipeline[PipelinedBatch], list[PipelinedBatch]]:
    """Batches that have come, numbered from 0."""
    pipeline: Pipeline[PipelinedBatch] = Pipeline()
    batches = [PipelinedBatch(number) for number in range(count)]
    for batch in batches:
        pipeline.receive(batch)
    return pipeline, batches


def stages(*batches: PipelinedBatch) -> list[str]:
    return [one.stage.name for one in batches]


def call(pipeline: Pipeline[PipelinedBatch], batch: PipelinedBatch) -> None:
    if batch.stage is BatchStage.RECEIVED:
        pipeline.staged(batch)
    pipeline.called(batch)


def compute(pipeline: Pipeline[PipelinedBatch], batch: PipelinedBatch, nbytes: int = 0) -> None:
    call(pipeline, batch)
    pipeline.returned(batch, nbytes)


def test_inputs_arrive_while_another_batch_computes_and_a_third_leaves() -> None:
    pipeline, (first, second, third) = pipeline_of(3)
    compute(pipeline, first)
    call(pipeline, second)
    assert pipeline.next_to_stage() is third
    pipeline.staged(third)
    assert stages(first, second, third) == ["LEAVING", "COMPUTING", "ARRIVING"]
    assert (len(pipeline), pipeline.leaving) == (1, 1)


def test_one_is_called_at_a_time_in_the_order_in_which_they_came() -> None:
    pipeline, (first, second) = pipeline_of(2)
    pipeline.staged(first)
    pipeline.staged(second)
    with pytest.raises(IllegalStep, match="batch 1 is called out of turn"):
        pipeline.called(second)
    pipeline.called(first)
    assert pipeline.next_to_call() is None
    with pytest.raises(IllegalStep):
        pipeline.called(second)
    pipeline.returned(first, 0)
    assert pipeline.next_to_call() is second


def test_they_are_answered_in_that_order_too() -> None:
    pipeline, (first, second) = pipeline_of(2)
    compute(pipeline, first)
    compute(pipeline, second)
    with pytest.raises(IllegalStep, match="batch 1 is answered out of turn"):
        pipeline.answered(second)
    pipeline.answered(first)
    pipeline.answered(second)
    assert (pipeline.leaving, second.stage) == (0, BatchStage.ENDED)


OTHER_STEPS = [one for one in itertools.product(BatchStage, BatchStage) if one[1] not in NEXT.get(one[0], ())]


@pytest.mark.parametrize(("stage", "then"), OTHER_STEPS)
def test_every_other_step_is_refused(stage: BatchStage, then: BatchStage) -> None:
    batch = PipelinedBatch(7)
    batch.stage = stage
    with pytest.raises(IllegalStep, match=f"batch 7: {then.name} after {stage.name}"):
        batch.advance(then)
    assert batch.stage is stage


def test_what_waits_is_dropped_with_its_front_and_what_was_called_is_not() -> None:
    pipeline, (called, staged, received) = pipeline_of(3)
    call(pipeline, called)
    pipeline.staged(staged)
    assert pipeline.drop_waiting() == [staged, received]
    assert stages(called, staged, received) == ["COMPUTING", "DROPPED", "DROPPED"]
    assert (len(pipeline), pipeline.next_to_stage(), pipeline.next_to_call()) == (0, None, None)
    pipeline.returned(called, 0)
    pipeline.answered(called)


@pytest.mark.parametrize(
    ("nbytes", "count", "is_early"),
    [(ANNOUNCED_NBYTES, 2, True), (ANNOUNCED_NBYTES - 1, 2, False), (ANNOUNCED_NBYTES, 1, False)],
)
def test_a_slot_is_said_to_be_free_early_for_a_large_copy_with_others_behind_it(
    nbytes: int, count: int, is_early: bool
) -> None:
    pipeline, (first, *_) = pipeline_of(count)
    compute(pipeline, first, nbytes)
    assert pipeline.computed(first) is (first if is_early else None)


def test_it_is_for_one_batch_at_a_time() -> None:
    pipeline, (first, second, _) = pipeline_of(3)
    compute(pipeline, first, ANNOUNCED_NBYTES)
    compute(pipeline, second, ANNOUNCED_NBYTES)
    assert pipeline.computed(second) is None
    assert pipeline.computed(first) is first
    pipeline.answered(first)
    assert pipeline.computed(second) is second


def test_who_is_to_blame_for_a_fault_is_known_of_one_suspect() -> None:
    pipeline, (first, second, third) = pipeline_of(3)
    compute(pipeline, first)
    assert pipeline.is_only_possible_cause(first)
    call(pipeline, second)
    assert not pipeline.is_only_possible_cause(first)
    assert not pipeline.is_only_possible_cause(second)
    first.is_cleared = True
    assert pipeline.is_only_possible_cause(second)
    assert not pipeline.is_only_possible_cause(first)
    assert not pipeline.is_only_possible_cause(third)


@given(st.lists(st.sampled_from(["receive", "stage", "call", "return", "answer", "drop"]), max_size=60))
def test_whatever_happens_each_stage_keeps_the_order(steps: list[str]) -> None:
    pipeline: Pipeline[PipelinedBatch] = Pipeline()
    batches: list[PipelinedBatch] = []
    computing: PipelinedBatch | None = None
    for step in steps:
        batch = None
        match step:
            case "receive":
                batches.append(PipelinedBatch(len(batches)))
                pipeline.receive(batches[-1])
            case "stage" if (batch := pipeline.next_to_stage()) is not None:
                pipeline.staged(batch)
            case "call" if (batch := pipeline.next_to_call()) is not None:
                call(pipeline, batch)
                computing = batch
            case "return" if computing is not None:
                pipeline.returned(computing, ANNOUNCED_NBYTES)
                computing = None
            case "answer" if pipeline.leaving:
                pipeline.answered(next(one for one in batches if one.stage is BatchStage.LEAVING))
            case "drop":
                pipeline.drop_waiting()
        leaving = [one for one in batches if one.stage is BatchStage.LEAVING]
        assert pipeline.leaving == len(leaving)
        found = stages(*(one for one in batches if one.stage is not BatchStage.DROPPED))
        order = ["ENDED", "LEAVING", "COMPUTING", "ARRIVING", "RECEIVED"]
        assert found == sorted(found, key=order.index)
        assert found.count("COMPUTING") <= 1
