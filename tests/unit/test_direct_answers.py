"""Answers that come by a call: in the turn in which they are there, once, and not after the request was
taken back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from driver_scene import SPEC, Scene, request
from ensemble_scene import Scene as EnsembleScene
from graphs import MEMBERS

from gpuserve.core.errors import DeadlineExceeded, Internal, RequestError, Unavailable
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.model_driver import Driver, ModelDriver
from gpuserve.front.models.model_tracer import ModelTracer, trace_ids
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.observability.tracing.request_trace import Trace
from gpuserve.front.observability.tracing.trace_settings import Sampler, TraceLevel, TraceValues
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.statistics import FailureReason
from gpuserve.model.spec import ModelSpec, StepSpec
from gpuserve_worker.protocol.tensor import TensorSpec

#: Two steps, one after the other.
CHAIN = replace(
    MEMBERS["m11"],
    name="chain",
    inputs=(TensorSpec("x", "FP32", (-1,)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    instances=(),
    steps=(
        StepSpec("m11", 0, (("i0", "x"),), (("o0", "t"),)),
        StepSpec("m11", 0, (("i0", "t"),), (("o0", "y"),)),
    ),
)
ONE_WORKER = replace(SPEC, instances=SPEC.instances[:1])


def ask(driver: Driver, into: list[Answer], timeout_s: float | None = None) -> PendingRequest:
    return submitted(driver, request(1, 1.0, timeout_s), into)


def submitted(driver: Driver, asked: InferRequest, into: list[Answer]) -> PendingRequest:
    return driver.submit(asked, on_answer=lambda _, answer: into.append(answer))


async def test_a_request_that_is_called_back_has_no_future() -> None:
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    pending = ask(scene.driver, answers)
    assert not hasattr(pending, "answer")
    assert (pending.is_over, pending.is_cancelled) == (False, False)
    await scene.answer([True])
    assert isinstance(answers[0], InferResponse)
    assert len(answers) == 1
    assert (pending.is_over, pending.is_cancelled) == (True, False)
    pending.cancel()
    scene.close()
    assert (len(answers), pending.is_cancelled) == (1, False)
    assert scene.metrics.outcomes.cancellations == 0


async def test_all_answers_of_a_batch_come_in_the_turn_in_which_it_ends() -> None:
    scene, turns = Scene(ONE_WORKER, direct=True), list[int]()
    turn = 0
    scene.on_answer = lambda _: turns.append(turn)
    for _ in range(3):
        scene.submit(1, 1.0, None)
    await scene.settle()
    scene.workers[0].answer([True, False, True])
    while not turns:
        turn += 1
        await asyncio.sleep(0)
    assert turns == [turn] * 3
    kinds = [type(scene.answers[one][0]) for one in scene.pending]
    assert kinds == [InferResponse, Internal, InferResponse]
    scene.close()


async def test_a_batch_that_fails_is_an_error() -> None:
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    ask(scene.driver, answers)
    await scene.answer([])
    assert [type(one) for one in answers] == [Internal]
    scene.close()


@pytest.mark.parametrize("runs", [False, True])
async def test_a_request_that_is_late_is_an_error(runs: bool) -> None:
    scene, is_late = Scene(ONE_WORKER, direct=True), asyncio.Event()
    scene.on_answer = lambda _: is_late.set()
    scene.submit(1, 1.0, 1e-3)
    if runs:
        await scene.settle()
    await is_late.wait()
    (answers,) = scene.answers.values()
    assert [type(one) for one in answers] == [DeadlineExceeded]
    scene.close()


async def test_a_request_whose_worker_is_lost_twice_is_an_error() -> None:
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    ask(scene.driver, answers)
    for _ in range(2):
        await scene.settle()
        scene.replace(0)
        await scene.revive(0)
    (answer,) = answers
    assert isinstance(answer, RequestError)
    scene.close()


async def test_a_model_that_is_removed_tells_whoever_waits() -> None:
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    pending = ask(scene.driver, answers)
    scene.close()
    assert [type(one) for one in answers] == [Unavailable]
    pending.cancel()
    assert scene.metrics.outcomes.cancellations == 0


@pytest.mark.parametrize("runs", [False, True])
async def test_a_request_that_is_taken_back_hears_no_more(runs: bool) -> None:
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    pending = ask(scene.driver, answers)
    if runs:
        await scene.settle()
    pending.cancel()
    pending.cancel()
    assert (pending.is_over, pending.is_cancelled) == (True, True)
    await scene.settle()
    if runs:
        scene.workers[0].answer([True])
        await scene.settle()
    scene.close()
    assert answers == []
    assert scene.metrics.outcomes.cancellations == 1


async def test_the_memory_of_an_answer_that_comes_after_all_is_given_back() -> None:
    scene, answers, closed = Scene(ONE_WORKER, direct=True), list[Answer](), list[str]()
    pending = ask(scene.driver, answers)
    pending.cancel()
    pending.deliver(InferResponse("m", "1", "", {}, [], lambda: closed.append("outputs")))
    assert (answers, closed) == ([], ["outputs"])
    scene.close()


async def test_an_answer_out_of_the_cache_comes_before_submit_returns() -> None:
    spec = replace(ONE_WORKER, response_cache=True)
    scene, answers = Scene(spec, ResponseCache(1 << 16), direct=True), list[Answer]()
    ask(scene.driver, answers)
    await scene.answer([True])
    again = ask(scene.driver, answers)
    assert again.is_over
    assert [type(one) for one in answers] == [InferResponse] * 2
    scene.close()


async def test_whoever_is_answered_may_take_others_back_and_ask_again() -> None:
    scene = Scene(ONE_WORKER, direct=True)

    def leave(pending: PendingRequest) -> None:
        if pending is scene.pending[0]:
            scene.pending[1].cancel()
            scene.submit(1, 2.0, None)

    scene.on_answer = leave
    for _ in range(3):
        scene.submit(1, 1.0, None)
    await scene.answer([True])
    scene.workers[0].answer([True])
    await scene.settle()
    answered = [one in scene.answers for one in scene.pending]
    assert answered == [True, False, True, True]
    scene.close()


async def test_a_defect_of_one_taker_is_not_that_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(ONE_WORKER, direct=True)

    def fail(pending: PendingRequest) -> None:
        if pending is scene.pending[0]:
            raise ValueError("of the taker")

    scene.on_answer = fail
    for _ in range(2):
        scene.submit(1, 1.0, None)
    await scene.answer([True])
    assert scene.pending[1] in scene.answers
    assert scene.driver.ready  # its worker broke nothing
    scene.close()
    assert "cannot deliver an answer of model m" in caplog.text


async def test_an_ensemble_answers_by_the_same_call() -> None:
    scene, answers = EnsembleScene(CHAIN), list[Answer]()

    def submit() -> PendingRequest:
        inputs = [InputTensor(one.name, "FP32", (1, 1), bytes(4)) for one in CHAIN.inputs]
        asked = InferRequest(CHAIN.name, "", "", {}, inputs, (), None)
        return submitted(scene.ensemble, asked, answers)

    async def go_on() -> None:
        for _ in range(8):
            await scene.settle()
            for worker in scene.workers.values():
                if worker.runs:
                    worker.answer(well=True)

    submit()
    await go_on()
    (answer,) = answers
    assert isinstance(answer, InferResponse)
    answer.close()
    left = submit()
    left.cancel()
    left.cancel()
    await go_on()
    submit()
    scene.ensemble.close()
    assert [type(one) for one in answers[1:]] == [Unavailable]
    assert left.is_cancelled
    assert scene.metrics.outcomes.cancellations == 1
    scene.close()


@pytest.mark.parametrize(("leaves", "error"), [(False, ""), (True, "CANCELLED")])
async def test_a_trace_ends_with_the_answer_or_the_cancellation(leaves: bool, error: str) -> None:
    traces: list[Trace] = []
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    scene.driver.tracer = tracer(ONE_WORKER, traces)
    pending = ask(scene.driver, answers)
    await scene.settle()
    if leaves:
        pending.cancel()
    scene.workers[0].answer([True])
    await scene.settle()
    assert len(answers) == (not leaves)
    scene.close()
    assert [one.error for one in traces] == [error]


async def test_a_trace_tells_of_an_error() -> None:
    traces: list[Trace] = []
    driver = ModelDriver(ONE_WORKER, 1 << 20, ModelMetrics("m", "1", dict))
    driver.tracer = tracer(ONE_WORKER, traces)
    answers: list[Answer] = []
    ask(driver, answers)
    driver.close()
    assert isinstance(answers[0], RequestError)
    assert [one.error for one in traces] == ["UNAVAILABLE"]


def tracer(spec: ModelSpec, traces: list[Trace]) -> ModelTracer:
    sampler = Sampler(TraceValues(TraceLevel.TIMESTAMPS.value, 1, -1, 0))
    return ModelTracer(spec, sampler, "", trace_ids(1), set(), traces.append, follows_callers=False)


async def test_a_request_that_cannot_be_in_time_is_told_before_its_time_is_over() -> None:
    scene, answers = Scene(ONE_WORKER, direct=True), list[Answer]()
    for _ in range(2):  # the worker says that a batch takes an hour
        ask(scene.driver, [])
        await scene.settle()
        scene.workers[0].claim(3600 * 10**9)
        await scene.settle()
    ask(scene.driver, [])
    await scene.settle()
    ask(scene.driver, answers, timeout_s=60.0)
    await scene.settle()
    assert not answers, "it is in nobody's way"
    ask(scene.driver, [])
    await scene.settle()
    assert isinstance(answers[0], DeadlineExceeded)
    text = "Deadline Exceeded: 60 s were given to model 'm', and less is left than a batch takes"
    assert str(answers[0]) == text
    assert scene.metrics.statistics.failures[FailureReason.REJECTED] == 1
    scene.close()
