"""Requests that leave the scheduler before their batch is done: cancelled, expired, or with a dead worker."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
from scheduled import Model

from gpuserve.core.errors import DeadlineExceeded, QueueFull
from gpuserve.core.states import IllegalTransition
from gpuserve.front.scheduling.request_queue import (
    TRANSITIONS,
    Deadlines,
    QueuedRequest,
    RequestState,
    advance,
)
from gpuserve.front.scheduling.slots import Batch

# ---- cancellation ---------------------------------------------------------------------------


def test_a_cancelled_request_in_the_queue_never_runs() -> None:
    model = Model()
    first, odd, last = (model.submit(key=key) for key in "aba")
    assert model.scheduler.cancel(odd) is True
    assert model.must_next().requests == [first, last], "its neighbours share a batch"
    assert (odd.state, odd.cancelled, model.count("cancelled")) == (RequestState.FINISHED, True, 1)


def test_cancelling_inside_a_waiting_batch_moves_the_delay_to_the_next_oldest() -> None:
    model = Model(delay_us=1000)
    oldest = model.submit()
    model.at_us = 300
    model.submit_many(2)
    assert model.next() is None
    assert model.scheduler.cancel(oldest)
    assert model.wakeup_us() == 1300
    model.at_us = 1000
    assert model.next() is None
    model.at_us = 1300
    assert model.run_all() == [2]


def test_cancelling_a_running_request_only_drops_its_result() -> None:
    model = Model()
    request, other = model.submit_many(2)
    batch = model.must_next()
    for _ in range(2):
        assert model.scheduler.cancel(request) is False
        assert (request.cancelled, request.state) == (True, RequestState.RUNNING)
    assert model.scheduler.complete(batch.batch_id).requests == [request, other]
    assert model.scheduler.cancel(other) is False, "it has finished"
    assert other.cancelled is False
    assert (model.count("finished"), model.count("cancelled")) == (1, 1)


def test_cancelled_requests_do_not_pile_up_while_nothing_can_run() -> None:
    model = Model(instances=0)
    kept = model.submit()
    alive: weakref.WeakSet[QueuedRequest] = weakref.WeakSet()
    for _ in range(100):
        request = model.submit()
        alive.add(request)
        assert model.scheduler.cancel(request)
        del request
        assert len(alive) <= 1
    model.scheduler.instance_up("i0")
    assert model.must_next().requests == [kept]


# ---- deadlines ------------------------------------------------------------------------------


def test_a_request_whose_deadline_has_passed_is_refused() -> None:
    model = Model()
    with pytest.raises(DeadlineExceeded, match=r"^Deadline Exceeded before the request was queued$"):
        model.submit(timeout_us=0)
    assert (model.count("rejected"), model.count("accepted")) == (1, 0)


def test_expired_requests_leave_the_queue_nearest_deadline_first() -> None:
    model = Model(instances=0)
    late, kept, early, at_the_moment = (model.submit(timeout_us=t) for t in (90, 200, 50, 100))
    without = model.submit()
    assert model.wakeup_us() == 50
    model.at_us = 100
    assert model.scheduler.expire(model.now) == [early, late, at_the_moment]
    assert model.scheduler.expire(model.now) == []
    assert model.count("expired") == 3
    assert model.wakeup_us() == 200
    model.scheduler.instance_up("i0")
    assert model.must_next().requests == [kept, without]


def test_a_request_that_expires_inside_a_waiting_batch_is_not_sent_with_it() -> None:
    model = Model(delay_us=1000)
    first, expiring, last = model.submit(), model.submit(timeout_us=500), model.submit()
    assert model.next() is None
    model.at_us = 500
    assert model.scheduler.expire(model.now) == [expiring]
    model.at_us = 1000
    assert model.must_next().requests == [first, last]


def test_nothing_runs_after_its_deadline_even_if_expire_was_forgotten() -> None:
    model = Model()
    request = model.submit(timeout_us=100)
    other = model.submit()
    model.at_us = 100
    assert model.next() is None
    assert model.wakeup_us() == 100, "at once: expire() has something to give"
    assert model.scheduler.expire(model.now) == [request]
    assert model.must_next().requests == [other]


def test_a_deadline_does_not_reach_a_running_request() -> None:
    model = Model()
    model.submit(timeout_us=100)
    model.must_next()
    model.at_us = 200
    assert model.scheduler.expire(model.now) == []
    assert model.wakeup_us() is None


def test_a_far_deadline_does_not_keep_a_finished_request() -> None:
    model = Model()
    request = model.submit(timeout_us=3_600_000_000)
    watched = weakref.ref(request)
    assert model.run_all() == [1]
    del request
    assert watched() is None


def test_deadlines_of_departed_requests_are_forgotten() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        request = QueuedRequest(1, 1, "")
        request.sequence = number
        deadlines.add(request, 3600.0)
        deadlines.discard(request)
    assert len(deadlines.heap) <= 65
    assert deadlines.nearest() == math.inf


# ---- the death of an instance ---------------------------------------------------------------


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_may_have_killed_a_worker_waits_for_an_instance_without_company(is_cancelled: bool) -> None:
    model = Model(instances=0, max_batch_size=1)
    model.scheduler.instance_up("first", 2)
    died = model.submit()
    model.must_next()
    model.scheduler.instance_up("second", 2)
    company = model.submit()
    beside = model.must_next()
    assert (beside.instance, beside.requests) == ("second", [company])
    model.scheduler.instance_down("first")
    fresh = model.submit()
    assert model.next() is None, "the second runs something, and nothing goes before what died"
    if is_cancelled:
        assert model.scheduler.cancel(died)
    else:
        model.scheduler.complete(beside.batch_id)
        alone = model.must_next()
        assert (alone.requests, alone.slots) == ([died], 2)
        model.scheduler.complete(alone.batch_id)
    assert model.must_next().requests == [fresh]


def test_requests_of_a_dead_instance_run_again_first_alone_and_in_order() -> None:
    model = Model(instances=2, max_batch_size=3, delay_us=1000)
    died = model.submit_many(3)
    assert model.must_next().instance == "i0"
    waiting = model.submit_many(2)
    assert model.scheduler.instance_down("i0") == []
    assert (model.count("queued"), model.count("retried"), model.count("room")) == (5, 3, 1)
    for request in died:
        batch = model.must_next()
        assert (batch.requests, batch.instance, batch.alone) == ([request], "i1", True)
        model.scheduler.complete(batch.batch_id)
    assert model.next() is None, "the others still wait for their delay"
    model.at_us = 1000
    batch = model.must_next()
    assert (batch.requests, batch.alone) == (waiting, False)


def test_requests_of_several_dead_instances_run_again_by_age() -> None:
    model = Model(instances=2, max_batch_size=2)
    model.submit_many(4)
    older, younger = model.must_next().requests, model.must_next().requests
    assert model.scheduler.instance_down("i1") == []
    assert model.scheduler.instance_down("i0") == []
    model.scheduler.instance_up("i2")
    again = []
    while (batch := model.next()) is not None:
        again += batch.requests
        model.scheduler.complete(batch.batch_id)
    assert again == older + younger


@pytest.mark.parametrize("retry_on_death", [True, False])
def test_a_batch_that_had_not_begun_is_run_again_and_not_counted_as_tried(retry_on_death: bool) -> None:
    model = Model(prefetch=1, max_batch_size=1, retry_on_death=retry_on_death)
    running, waiting = model.submit(), model.submit()
    assert [model.must_next().requests, model.must_next().requests] == [[running], [waiting]]
    assert model.scheduler.instance_down("i0") == ([] if retry_on_death else [running])
    assert (running.attempts, waiting.attempts, waiting.state) == (1, 0, RequestState.QUEUED)
    assert model.count("queued") == 1 + retry_on_death


def short_batches(model: Model, count: int) -> list[Batch]:
    """Batches of one request each that are at the instance, after some that were short."""
    for _ in range(3):
        model.submit()
        model.scheduler.complete(model.must_next().batch_id, 1e-5)
    model.submit_many(count)
    return [model.must_next() for _ in range(count)]


def test_all_that_may_have_begun_when_an_answer_waits_for_the_next_is_tried() -> None:
    model = Model(prefetch=3, max_batch_size=1)
    batches = short_batches(model, 4)
    assert [one.may_wait for one in batches] == [True, True, True, False]  # nothing follows the last
    batches[2].may_wait = False  # before it begins those before it are answered
    assert model.scheduler.instance_down("i0") == []
    assert [one.requests[0].attempts for one in batches] == [1, 1, 0, 0]
    model.scheduler.instance_up("i0")
    again = [model.must_next() for _ in range(4)]
    assert not any(one.may_wait for one in again)
    assert model.scheduler.instance_down("i0") == again[0].requests
    assert [one.requests[0].attempts for one in batches] == [2, 1, 0, 0]


def test_no_answer_waits_where_a_request_may_not_run_again() -> None:
    model = Model(prefetch=1, max_batch_size=1, retry_on_death=False)
    assert not any(one.may_wait for one in short_batches(model, 2))
    model = Model(prefetch=1, max_batch_size=1)
    model.scheduler.complete(short_batches(model, 1)[0].batch_id, 1e-5)
    model.submit(retriable=False)
    model.submit()
    assert not model.must_next().may_wait


def test_a_request_under_which_two_workers_died_is_lost() -> None:
    model = Model(instances=2)
    request = model.submit()
    for name in ("i0", "i1"):
        assert model.must_next().instance == name
        lost = model.scheduler.instance_down(name)
    assert lost == [request]
    assert (request.attempts, request.state) == (2, RequestState.FINISHED)
    assert (model.count("lost"), model.count("retried"), model.count("queued")) == (1, 1, 0)


@pytest.mark.parametrize(("retry_on_death", "retriable"), [(False, True), (True, False)])
def test_a_request_that_may_not_run_twice_is_lost(retry_on_death: bool, retriable: bool) -> None:
    model = Model(retry_on_death=retry_on_death)
    requests = [model.submit(retriable=retriable) for _ in range(2)]
    model.must_next()
    assert model.scheduler.instance_down("i0") == requests
    assert [request.attempts for request in requests] == [1, 1]
    assert (model.count("lost"), model.count("retried")) == (2, 0)


def test_a_cancelled_request_is_not_run_again() -> None:
    model = Model()
    request = model.submit()
    model.must_next()
    model.scheduler.cancel(request)
    assert model.scheduler.instance_down("i0") == []
    assert request.state is RequestState.FINISHED
    assert (model.count("queued"), model.count("cancelled"), model.count("lost")) == (0, 1, 0)


def test_a_request_that_waits_for_its_second_run_can_be_cancelled_or_expire() -> None:
    model = Model()
    cancelled, expiring, kept = model.submit(), model.submit(timeout_us=100), model.submit()
    model.must_next()
    assert model.scheduler.instance_down("i0") == []
    assert model.scheduler.cancel(cancelled)
    model.at_us = 100
    assert model.scheduler.expire(model.now) == [expiring]
    model.scheduler.instance_up("i0")
    assert model.must_next().requests == [kept]


def test_a_full_queue_still_takes_back_what_it_accepted() -> None:
    model = Model(max_requests=1)
    running = model.submit()
    model.must_next()
    model.submit()
    assert model.scheduler.instance_down("i0") == []
    assert (running.state, model.count("queued")) == (RequestState.QUEUED, 2)
    with pytest.raises(QueueFull):
        model.submit()


def test_a_death_told_twice_does_nothing_and_its_batches_are_unknown() -> None:
    model = Model(instances=2)
    model.submit()
    batch = model.must_next()
    for _ in range(2):
        assert model.scheduler.instance_down(batch.instance) == []
        assert (model.count("instances"), model.count("room")) == (1, 1)
    model.scheduler.instance_up(batch.instance)
    with pytest.raises(KeyError):
        model.scheduler.complete(batch.batch_id)
    assert model.count("room") == 2


# ---- states ---------------------------------------------------------------------------------


@pytest.mark.parametrize("event", TRANSITIONS)
@pytest.mark.parametrize("state", RequestState)
def test_an_event_is_legal_in_one_state_only(state: RequestState, event: Any) -> None:
    source, target = TRANSITIONS[event]
    request = QueuedRequest(1, 1, "")
    request.state = state
    if state is source:
        advance([request], event)
        assert request.state is target
    else:
        expected = f"request in state {state.name} cannot {event}: only {source.name} allows it"
        with pytest.raises(IllegalTransition, match=expected):
            advance([request], event)
        assert request.state is state


def test_a_request_is_submitted_once_and_cancelled_only_after_that() -> None:
    model = Model()
    request = model.submit()
    with pytest.raises(IllegalTransition, match="state QUEUED cannot submit"):
        model.scheduler.submit(request, 0.0)
    assert model.count("queued") == 1
    with pytest.raises(IllegalTransition, match="state NEW cannot cancel"):
        model.scheduler.cancel(QueuedRequest(1, 1, ""))


def test_statistics_of_a_moment() -> None:
    model = Model(instances=2, max_batch_size=4)
    running = model.submit_many(2, rows=2)
    batch = model.must_next()
    model.submit(rows=3, nbytes=30)
    statistics = model.scheduler.statistics()
    assert batch.requests == running
    assert statistics._asdict() == dict.fromkeys(statistics._fields, 0) | {
        "queued": 1,
        "queued_rows": 3,
        "queued_nbytes": 30,
        "running_batches": 1,
        "running_requests": 2,
        "computing_requests": 2,
        "computing_rows": 4,
        "instances": 2,
        "slots": 2,
        "room": 1,
        "accepted": 3,
    }
    with pytest.raises(AttributeError):
        statistics.queued = 0  # type: ignore[misc]


# ---- instances that run several batches at once ---------------------------------------------


def concurrent(at_once: int, **kwargs: Any) -> Model:
    model = Model(instances=0, max_batch_size=1, **kwargs)
    model.scheduler.instance_up("i0", at_once)
    return model


@pytest.mark.parametrize("retry_on_death", [True, False])
def test_all_that_an_instance_had_begun_is_tried_once_more_one_after_the_other(retry_on_death: bool) -> None:
    """A stream that was begun is never run again."""
    model = concurrent(4, retry_on_death=retry_on_death)
    requests = model.submit_many(3)
    for _ in requests:
        model.must_next()
    assert model.scheduler.instance_down("i0") == ([] if retry_on_death else requests)
    assert [one.attempts for one in requests] == [1, 1, 1]
    if not retry_on_death:
        return
    model.scheduler.instance_up("i0", 4)

    late = model.submit()
    for request in requests:
        batch = model.must_next()
        assert batch.requests == [request]
        assert model.next() is None  # nothing runs beside it
        assert model.wakeup_us() is None
        model.scheduler.complete(batch.batch_id)
    assert model.must_next().requests == [late]


def test_what_kills_workers_takes_nobody_along_twice() -> None:
    model = concurrent(4)
    poison, *others = model.submit_many(3)
    for _ in range(3):
        model.must_next()
    model.scheduler.instance_down("i0")
    model.scheduler.instance_up("i0", 4)
    assert model.must_next().requests == [poison]
    assert model.scheduler.instance_down("i0") == [poison]
    model.scheduler.instance_up("i0", 4)
    assert model.run_all() == [1, 1]
    assert model.count("finished") == 2
    assert [one.attempts for one in others] == [1, 1]
