"""Questions to other models: which answer is whose, who waits, and that nothing that was lent is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpuserve_worker.inference.model_calls import (
    CallReply,
    CallRequest,
    ModelCall,
    ModelCallError,
    OutgoingCalls,
    Question,
    call_request,
)
from gpuserve_worker.inference.model_context import ModelContext

TIMEOUT_S = 10.0
FAILED = ModelCallError("INTERNAL", "it failed")


class Line:
    """A port whose other end is the test."""

    def __init__(self) -> None:
        self.asked: dict[int, Question] = {}
        self.called_off: list[int] = []
        self.given_back: list[int] = []
        self.changed = threading.Condition()
        self.refusal: ModelCallError | None = None
        #: What a question is answered with at once.
        self.answers: list[CallReply] = []
        self.reply: Callable[[int, CallReply], bool] | None = None

    def ask(self, call_id: int, question: Question) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked[call_id] = question
        for one in self.answers:
            assert self.reply is not None
            assert self.reply(call_id, one)

    def cancel_call(self, call_id: int) -> None:
        self.called_off.append(call_id)

    def return_lease(self, lease: int) -> None:
        self.given_back.append(lease)

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, TIMEOUT_S)

    def wakes(self) -> bool:
        return True


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def calls(line: Line) -> OutgoingCalls:
    made = OutgoingCalls()
    made.open(line)
    return made


@pytest.fixture
def context(calls: OutgoingCalls) -> ModelContext:
    return ModelContext("m", 1, "cpu#0", "cpu", (), (), 0, (), False, calls)


def outputs(value: float, lease: int = 0, *, final: bool = True) -> CallReply:
    return CallReply({"y": np.array([value])}, {}, None, final, lease)


END = CallReply(None, {}, None, True)


def ask(calls: OutgoingCalls) -> ModelCall:
    return calls.ask(call_request("other", {}, stream=True, blocks=True))


def test_answers_are_told_apart(calls: OutgoingCalls) -> None:
    first, second = ask(calls), ask(calls)
    assert calls.reply(second.call_id, outputs(2))
    assert not first.is_ready()
    assert calls.reply(first.call_id, outputs(1))
    assert [one.next_reply().outputs for one in (first, second)] == [{"y": [1.0]}, {"y": [2.0]}]


def test_what_was_lent_is_given_back_once_taken(calls: OutgoingCalls, line: Line) -> None:
    call = ask(calls)
    calls.reply(call.call_id, outputs(1, lease=7, final=False))
    calls.reply(call.call_id, outputs(2, lease=8))
    assert line.given_back == []
    call.next_reply()
    assert line.given_back == [7]
    calls.forget(call)
    assert (line.given_back, line.called_off) == ([7, 8], [])


def test_a_forgotten_call_is_cancelled_and_its_late_answer_refused(calls: OutgoingCalls, line: Line) -> None:
    call = ask(calls)
    calls.forget(call)
    assert line.called_off == [call.call_id]
    assert not calls.reply(call.call_id, outputs(1, lease=7))
    assert not calls.reply(99, outputs(1))


def test_no_lease_is_lost_between_an_answer_and_a_forgetting(calls: OutgoingCalls, line: Line) -> None:
    """Of the receiving and the cancelling thread exactly one closes the lease."""
    for lease in range(1, 500):
        call, start = ask(calls), threading.Barrier(2)
        refused: list[int] = []

        def receive(
            call: ModelCall = call, lease: int = lease, start: Any = start, into: Any = refused
        ) -> None:
            start.wait(TIMEOUT_S)
            if not calls.reply(call.call_id, outputs(1, lease)):
                into.append(lease)

        receiving = threading.Thread(target=receive)
        receiving.start()
        start.wait(TIMEOUT_S)
        calls.forget(call)
        receiving.join(TIMEOUT_S)
        assert line.given_back + refused == [lease]
        line.given_back.clear()


def test_a_question_that_cannot_be_asked_is_forgotten(calls: OutgoingCalls, line: Line) -> None:
    line.refusal = ModelCallError("RESOURCE_EXHAUSTED", "no memory")
    with pytest.raises(ModelCallError, match="no memory"):
        ask(calls)
    assert not calls.reply(1, outputs(1))


def test_without_a_server_nobody_is_asked(context: ModelContext) -> None:
    alone = context._replace(calls=OutgoingCalls())
    with pytest.raises(ModelCallError, match="no other model can be asked before a server") as raised:
        alone.infer("other", {})
    assert raised.value.code.value == "UNAVAILABLE"


def test_at_the_end_waiting_calls_fail_and_no_call_is_accepted(
    calls: OutgoingCalls, context: ModelContext
) -> None:
    call = ask(calls)
    calls.close("it ends")
    with pytest.raises(ModelCallError, match="it ends"):
        raise call.next_reply().error or AssertionError
    with pytest.raises(ModelCallError, match="it ends"):
        context.infer("other", {})
    with pytest.raises(ModelCallError, match="it ends"):
        list(context.stream("other", {}))


def test_whoever_waits_hears_of_a_lost_front(calls: OutgoingCalls, line: Line) -> None:
    call = ask(calls)
    heard: list[CallReply] = []
    waiting = threading.Thread(target=lambda: heard.append(call.next_reply()))
    waiting.start()
    with line.changed:
        calls.fail_all("gone")
        line.changed.notify_all()
    waiting.join(TIMEOUT_S)
    assert str(heard[0].error) == "gone"
    ask(calls)  # the next front is there


@pytest.mark.parametrize(
    "last", [[END], [outputs(2)._replace(final=True)], [CallReply(None, {}, FAILED, True)]]
)
def test_ends_of_streams(
    calls: OutgoingCalls, line: Line, context: ModelContext, last: list[CallReply]
) -> None:
    line.answers = [outputs(1, lease=3, final=False), *last]
    line.reply = calls.reply
    heard: list[float] = []
    failures: list[str] = []
    try:
        heard += [float(one["y"][0]) for one in context.stream("other", {})]
    except ModelCallError as error:
        failures.append(str(error))
    assert failures == [str(one.error) for one in last if one.error is not None]
    assert heard == ([] if failures else [1.0] + [2.0] * (last[0].outputs is not None))
    assert (line.given_back, line.called_off) == ([3], [])


def test_an_abandoned_stream_is_cancelled_wherever_it_dies(
    calls: OutgoingCalls, line: Line, context: ModelContext
) -> None:
    call = ask(calls)

    class Dies:
        def __del__(self) -> None:
            calls.forget(call)

    with calls._lock:  # a collection may come in the middle of any line
        ring: list[Any] = [Dies()]
        ring.append(ring)
        del ring
        gc.collect()
    assert line.called_off == [call.call_id]


def test_the_event_loop_runs_while_a_task_waits(
    calls: OutgoingCalls, line: Line, context: ModelContext
) -> None:
    async def main() -> tuple[float, int]:
        turns = 0
        asking = asyncio.create_task(context.infer_async("other", {}))
        while turns < 5:
            await asyncio.sleep(0)
            turns += 1
        (call_id,) = line.asked
        calls.reply(call_id, outputs(3, lease=4))
        return float((await asking)["y"][0]), turns

    assert asyncio.run(main()) == (3.0, 5)
    assert line.given_back == [4]


async def test_a_task_that_is_cancelled_calls_its_question_off(line: Line, context: ModelContext) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(context.infer_async("other", {}), 0.01)
    assert line.called_off == [1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": None}, "the name of a model that is called: expected a str, got None"),
        ({"inputs": [1]}, r"the inputs of a call to model 'other': expected arrays by name, got \[1\]"),
        ({"requested_outputs": (1,)}, "an output asked of model 'other': expected a str, got 1"),
        ({"parameters": {"a": 1 << 63}}, "parameter 'a' of a call to model 'other': expected a bool, an int"),
        ({"parameters": {"a": np.float32(1)}}, "parameter 'a' of a call to model 'other'"),
        ({"parameters": {"a": "\udc80"}}, "parameter 'a' of a call to model 'other'"),
        ({"parameters": {1: 1}}, "parameter 1 of a call to model 'other'"),
        ({"timeout_s": 0}, "timeout_s of a call to model 'other': expected a positive number, got 0"),
        ({"timeout_s": -1}, "timeout_s of a call to model 'other': expected a positive number, got -1"),
        ({"timeout_s": float("nan")}, "timeout_s of a call to model 'other'"),
        ({"timeout_s": float("inf")}, "timeout_s of a call to model 'other'"),
        ({"timeout_s": "1"}, "timeout_s of a call to model 'other'"),
    ],
)
def test_calls_that_cannot_travel_are_refused(
    line: Line, context: ModelContext, changes: dict[str, Any], text: str
) -> None:
    given: dict[str, Any] = {"model": "other", "inputs": {}, **changes}
    with pytest.raises(ModelCallError, match=text) as raised:
        context.infer(given.pop("model"), given.pop("inputs"), **given)
    assert raised.value.code.value == "INVALID_ARGUMENT"
    assert line.asked == {}


def test_one_output_may_be_named_alone() -> None:
    made = call_request("m", {}, version=3, requested_outputs="y", timeout_s=1.5, stream=False, blocks=False)
    assert made == CallRequest("m", "3", {}, ("y",), {}, 1.5, False, False)
