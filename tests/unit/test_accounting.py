"""Whatever happens to requests between a driver and its workers, each of them is counted once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from driver_scene import PHASES, SPEC, Scene, request
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserve.core.errors import RequestError
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.requests.inference import Sequence
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.model.spec import BatchingSpec, ModelSpec, SequenceBatching

STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 2), st.just(1)),
    st.tuples(st.just("hurried"), st.integers(1, 4), st.just(1)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("answer"), st.integers(0, 1), st.sampled_from([[True], [True, False], []])),
    st.tuples(st.just("die"), st.integers(0, 1)),
)
STREAM_STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 1), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(
        st.just("give"),
        st.integers(0, 1),
        st.lists(st.sampled_from([True, True, None, False]), min_size=1, max_size=4),
    ),
    st.tuples(st.just("answer"), st.integers(0, 1), st.just([])),
    st.tuples(st.just("end"), st.integers(0, 1)),
    st.tuples(st.just("die"), st.integers(0, 1)),
)


async def act(scene: Scene, step: tuple[Any, ...]) -> None:
    match step:
        case ("submit", rows, value):
            scene.submit(rows, value, None)
        case ("hurried", rows, value):
            scene.submit(rows, value, 1e-5)
        case ("cancel", number):
            scene.cancel(number)
        case ("answer", number, well):
            if (worker := scene.busy(number)) is not None:
                worker.answer(well)
        case ("give", number, responses):
            if (worker := scene.busy(number)) is not None:
                worker.give(responses)
        case ("end", number):
            if (worker := scene.busy(number)) is not None:
                worker.end()
        case ("die", number):
            scene.replace(number)
            await scene.revive(number)


async def play(
    spec: ModelSpec, cache: ResponseCache | None, steps: list[Any], *, direct: bool = False
) -> Scene:
    scene = Scene(spec, cache, direct=direct)
    await scene.settle()
    for step, at_once in steps:
        await act(scene, step)
        if not at_once:
            await scene.settle()
    await scene.settle()
    scene.close()
    await asyncio.sleep(0)
    if not direct:
        for one in scene.pending:  # what was not asked for is no fault of the test
            if one.answer.done() and not one.answer.cancelled():
                one.answer.exception()
    return scene


def error_of(scene: Scene, pending: PendingRequest) -> object:
    """Return the error of a request that was not cancelled, or None if it was answered."""
    if not scene.direct:
        return pending.answer.exception()
    (answer,) = scene.answers[pending]
    return answer if isinstance(answer, RequestError) else None


def check(scene: Scene) -> Counter[str]:
    """Everything adds up; what became of the requests that nobody took back."""
    statistics, durations = scene.metrics.statistics, scene.metrics.statistics.durations()
    fates: Counter[str] = Counter()
    for one in scene.pending:
        assert one.is_over
        if one.is_cancelled:
            fates["left"] += 1
            assert one not in scene.answers
        else:
            fates["failed" if isinstance(error_of(scene, one), RequestError) else "answered"] += 1
    assert all(one.counted for one in scene.pending)
    succeeded, failed = durations["success"].times, durations["fail"].times
    assert succeeded + failed == len(scene.pending) + scene.refused
    assert sum(statistics.failures.values()) == failed
    assert fates["answered"] <= succeeded <= fates["answered"] + fates["left"]
    canceled = statistics.failures[FailureReason.CANCELED]
    assert canceled == scene.metrics.outcomes.cancellations <= fates["left"]
    assert sum(scene.metrics.outcomes.failures.values()) + canceled + scene.refused == failed
    assert durations["queue"].times == succeeded
    executions = statistics.executions()
    assert executions.requests == durations["compute_infer"].times
    assert executions.requests + statistics.cache_hits == succeeded
    assert executions.request_infer_ns == executions.requests * PHASES[1]
    assert executions.compute_infer_ns == executions.count * PHASES[1]
    assert sum(one.count for one in statistics.by_size().values()) == executions.count
    assert min((one.ns for one in durations.values()), default=0) >= 0
    return fates


@settings(max_examples=examples(200), deadline=None)
@given(
    steps=st.lists(st.tuples(STEPS, st.booleans()), max_size=25),
    in_order=st.booleans(),
    cached=st.booleans(),
    direct=st.booleans(),
)
async def test_requests_are_counted_once(
    steps: list[Any], in_order: bool, cached: bool, direct: bool
) -> None:
    spec = replace(SPEC, batching=BatchingSpec(preserve_ordering=in_order), response_cache=cached)
    scene = await play(spec, ResponseCache(1 << 16) if cached else None, steps, direct=direct)
    check(scene)
    if cached:
        statistics = scene.metrics.statistics
        succeeded = statistics.durations()["success"].times
        # An answer that was on its way while its client left is kept, and its request may be CANCELED.
        assert statistics.cache_hits + statistics.cache_misses >= succeeded


@settings(max_examples=examples(200), deadline=None)
@given(steps=st.lists(st.tuples(STREAM_STEPS, st.booleans()), max_size=25), direct=st.booleans())
async def test_every_response_of_a_stream_is_counted_once(steps: list[Any], direct: bool) -> None:
    scene = await play(replace(SPEC, decoupled=True), None, steps, direct=direct)
    check(scene)
    totals: Counter[str] = Counter()
    for one in scene.metrics.statistics.responses:
        totals.update({name: duration.times for name, duration in one.durations().items()})
    assert totals["success"] == scene.responses
    assert totals["empty_response"] == scene.metrics.statistics.executions().requests
    assert totals["compute_infer"] == totals["success"] + totals["fail"]


async def test_the_responses_of_streams_are_counted_by_their_index() -> None:
    scene = Scene(replace(SPEC, decoupled=True, instances=SPEC.instances[:1]), None)
    (worker,) = scene.workers
    await scene.settle()
    for responses, leaves in (([True, True], False), ([True], True), ([True, False], False), ([], False)):
        scene.submit(1, 1.0, None)
        await scene.settle()
        for good in responses:
            worker.give([good])
            await scene.settle()
        if leaves:
            scene.cancel(-1)
        worker.end()
        await scene.settle()
    scene.pending[2].answer.exception()
    scene.close()
    found = [
        {name: one.times for name, one in index.durations().items() if one.times}
        for index in scene.metrics.statistics.responses
    ]
    assert found == [
        {"success": 3, "empty_response": 1, "compute_infer": 3, "compute_output": 3},
        {"success": 1, "fail": 1, "cancel": 1, "compute_infer": 2, "compute_output": 2},
        {"empty_response": 1},
    ]
    assert scene.metrics.statistics.durations()["success"].times == 2
    assert scene.metrics.statistics.failures[FailureReason.BACKEND] == 1
    assert scene.metrics.statistics.failures[FailureReason.CANCELED] == 1
    assert scene.metrics.first_response.cumulative()[-1] == ("+Inf", 3)


@pytest.mark.parametrize("phase", [-1, 1 << 63, "soon", None])
async def test_a_worker_that_gives_no_duration_is_ended_and_its_requests_go_on(phase: Any) -> None:
    scene = Scene(replace(SPEC, instances=SPEC.instances[:1]), None)
    await scene.settle()
    scene.submit(1, 1.0, None)
    await scene.settle()
    scene.workers[0].claim(phase)
    await scene.settle()
    scene.replace(0)
    await scene.revive(0)
    await scene.answer([True])
    scene.close()
    assert check(scene) == {"answered": 1}


@pytest.mark.parametrize("in_order", [False, True])
async def test_a_request_that_is_answered_and_taken_back_is_counted_once(in_order: bool) -> None:
    """The second of two batches ends first; its answer waits for the other's where they go in order."""
    spec = replace(SPEC, batching=BatchingSpec(preserve_ordering=in_order, merge=False))
    scene = Scene(spec, None)
    await scene.settle()
    scene.submit(1, 1.0, None)
    scene.submit(1, 2.0, None)
    await scene.settle()
    second = next(worker for worker in scene.workers if worker.runs[0].batch_id == 1)
    second.answer([True])
    await scene.settle()
    for number in (1, 0, 1):
        scene.cancel(number)
    await scene.settle()
    scene.close()
    statistics = scene.metrics.statistics
    assert statistics.durations()["success"].times == 1
    assert statistics.failures[FailureReason.CANCELED] == 1


async def test_the_rest_of_a_sequence_goes_with_one_that_is_taken_back() -> None:
    spec = replace(SPEC, instances=SPEC.instances[:1], sequence=SequenceBatching("oldest"))
    scene = Scene(spec, None)
    await scene.settle()
    for number in range(3):
        asked = request(1, 1.0)
        asked.sequence = Sequence(7, number == 0, False)
        scene.pending.append(scene.driver.submit(asked))
    await scene.settle()
    scene.cancel(1)
    await scene.answer([True])
    scene.close()
    assert scene.metrics.statistics.durations()["success"].times == 1
    assert scene.metrics.statistics.failures[FailureReason.CANCELED] == 2
    assert isinstance(scene.pending[2].answer.exception(), RequestError)
