"""The scheduler of one model, rule by rule, with figures. Time is a number that the test writes.

B-1 … B-8 are the rules of Triton's dynamic batcher in the order of the requirements; what holds for every
sequence of events is in ``test_batcher_properties.py``.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from gpuserve.errors import Code, DeadlineExceeded, QueueFull, Unavailable
from gpuserve.front.scheduler.batcher import (
    Batch,
    IllegalTransition,
    ModelScheduler,
    QueuedRequest,
    RequestState,
)
from gpuserve.front.scheduler.queue import TRANSITIONS, Deadlines, advance
from gpuserve.spec import BatchingSpec, QueueSpec

US = 1e-6


class Watchable(QueuedRequest):
    """A request whose life can be watched."""

    __slots__ = ("__weakref__",)


class Model:
    """A scheduler, its instances, and a clock in microseconds that only moves when told."""

    def __init__(
        self,
        *,
        instances: int = 1,
        max_batch_size: int = 8,
        delay_us: int = 0,
        preferred: tuple[int, ...] = (),
        merge: bool = True,
        max_requests: int = 0,
        max_nbytes: int = 0,
        prefetch: int = 0,
        retry_on_death: bool = True,
    ) -> None:
        self.scheduler = ModelScheduler(
            max_batch_size=max_batch_size,
            batching=BatchingSpec(delay_us, preferred, merge),
            queue=QueueSpec(max_requests, max_nbytes),
            prefetch=prefetch,
            retry_on_death=retry_on_death,
        )
        for number in range(instances):
            self.scheduler.instance_up(f"i{number}")
        self.at_us = 0

    @property
    def now(self) -> float:
        return self.at_us * US

    def submit(
        self,
        rows: int = 1,
        *,
        key: str = "",
        nbytes: int = 1,
        timeout_us: int | None = None,
        retriable: bool = True,
    ) -> QueuedRequest:
        deadline = None if timeout_us is None else (self.at_us + timeout_us) * US
        request = Watchable(rows, nbytes, key, deadline, retriable)
        self.scheduler.submit(request, self.now)
        return request

    def submit_many(self, count: int, **kwargs: Any) -> list[QueuedRequest]:
        return [self.submit(**kwargs) for _ in range(count)]

    def next(self) -> Batch | None:
        return self.scheduler.next_batch(self.now)

    def must_next(self) -> Batch:
        batch = self.next()
        assert batch is not None
        return batch

    def run_all(self) -> list[int]:
        """Rows of every batch that goes now, each ending before the next is formed."""
        sizes = []
        while (batch := self.next()) is not None:
            sizes.append(batch.rows)
            self.scheduler.complete(batch.batch_id)
        return sizes

    def wakeup_us(self) -> int | None:
        wakeup = self.scheduler.next_wakeup(self.now)
        return None if wakeup is None else round(wakeup / US)

    def count(self, name: str) -> int:
        value: int = getattr(self.scheduler.statistics(), name)
        return value


# ---- B-1 … B-8 ------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_batch_size", "merge"), [(0, True), (8, False), (0, False)])
def test_b1_without_merging_every_request_is_alone_in_order_and_at_once(
    max_batch_size: int, merge: bool
) -> None:
    model = Model(max_batch_size=max_batch_size, merge=merge, delay_us=1000, instances=3)
    first, second, third = (model.submit(rows) for rows in (1, 3, 2))
    batches = [model.must_next() for _ in range(3)]
    assert [batch.requests for batch in batches] == [[first], [second], [third]]
    assert [batch.rows for batch in batches] == [1, 3, 2]
    assert [batch.instance for batch in batches] == ["i0", "i1", "i2"]
    assert all(batch.alone for batch in batches)


def test_b2_the_default_preferred_size_is_max_batch_size() -> None:
    model = Model(max_batch_size=4, delay_us=1000)
    model.submit_many(3)
    assert model.next() is None
    model.submit()
    assert model.run_all() == [4]


def test_b3_no_batch_is_formed_without_a_free_slot() -> None:
    model = Model(instances=0)
    model.submit_many(3)
    assert model.next() is None
    model.scheduler.instance_up("late")
    assert model.must_next().rows == 3


def test_b3_rows_never_exceed_max_batch_size_and_no_request_is_cut() -> None:
    model = Model(max_batch_size=8)
    for rows in (3, 4, 2, 8, 1):
        model.submit(rows)
    assert model.run_all() == [7, 2, 8, 1]


def test_b3_what_would_exceed_max_batch_size_sends_what_is_there_now() -> None:
    model = Model(max_batch_size=8, delay_us=1000)
    model.submit(5)
    assert model.next() is None
    model.submit(4)
    assert model.run_all() == [5]
    assert model.count("queued_rows") == 4


def test_b3_another_merge_key_sends_what_is_there_now() -> None:
    model = Model(delay_us=1000)
    same = model.submit_many(2, key="a")
    other = model.submit(key="b")
    assert model.must_next().requests == same
    assert model.count("queued") == 1
    model.scheduler.complete(0)
    assert model.next() is None, "the delay of the second key has not run out"
    model.at_us = 1000
    assert model.must_next().requests == [other]


def test_b3_the_walk_does_not_reach_past_another_merge_key() -> None:
    model = Model()
    requests = [model.submit(key=key) for key in "aaba"]
    batches = []
    while (batch := model.next()) is not None:
        batches.append(batch.requests)
        model.scheduler.complete(batch.batch_id)
    assert batches == [requests[:2], requests[2:3], requests[3:]]


def test_b4_the_largest_preferred_size_that_the_walk_hits_is_best() -> None:
    model = Model(max_batch_size=16, preferred=(2, 4, 8), delay_us=1000)
    model.submit_many(7)
    assert model.must_next().rows == 4


def test_b4_going_over_the_largest_preferred_size_makes_what_came_before_best() -> None:
    model = Model(max_batch_size=8, preferred=(4,), delay_us=1000)
    model.submit(3)
    model.submit(3)
    assert model.must_next().rows == 3
    model.scheduler.complete(0)
    assert model.next() is None, "three rows alone wait for a fourth"


def test_b5_1_best_is_sent_although_more_is_queued() -> None:
    model = Model(max_batch_size=16, preferred=(8,), delay_us=1000)
    model.submit_many(10)
    assert model.must_next().rows == 8


def test_b5_2_a_single_request_over_every_preferred_size_does_not_wait() -> None:
    model = Model(max_batch_size=8, preferred=(4,), delay_us=1000)
    model.submit(5)
    assert model.must_next().rows == 5


def test_b5_2_best_goes_before_another_merge_key() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    model.submit_many(6, key="a")
    model.submit(key="b")
    assert model.run_all() == [4, 2]
    assert model.count("queued") == 1


def test_b5_3_and_4_wait_is_what_the_oldest_has_left_of_the_delay() -> None:
    model = Model(delay_us=1000)
    model.submit()
    model.at_us = 400
    model.submit()
    assert model.next() is None
    assert model.wakeup_us() == 1000
    model.at_us = 999
    assert model.next() is None
    model.at_us = 1000
    assert model.run_all() == [2]
    assert model.wakeup_us() is None


def test_b5_4_the_nearest_deadline_of_a_waiting_request_wakes_earlier() -> None:
    model = Model(delay_us=1000)
    model.submit(timeout_us=5000)
    model.submit(timeout_us=300)
    assert model.next() is None
    assert model.wakeup_us() == 300


def test_b5_4_an_arrival_that_meets_a_preferred_size_ends_the_wait() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    model.submit_many(3)
    assert model.next() is None
    model.at_us = 10
    model.submit()
    assert model.run_all() == [4]


def test_b6_without_delay_six_go_as_four_and_two() -> None:
    model = Model(preferred=(4, 8))
    model.submit_many(6)
    assert model.run_all() == [4, 2]


def test_b6_without_delay_three_go_at_once() -> None:
    model = Model(preferred=(4, 8))
    model.submit_many(3)
    assert model.run_all() == [3]


def test_b7_with_delay_six_at_once_send_four_and_two_start_anew() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    requests = model.submit_many(6)
    assert model.run_all() == [4]
    assert model.wakeup_us() == 1000
    late = model.submit_many(2)
    batch = model.must_next()
    assert batch.requests == requests[4:] + late


def test_b8_when_the_delay_has_run_out_everything_walked_goes() -> None:
    model = Model(preferred=(4, 8), delay_us=1000)
    model.submit_many(3)
    assert model.run_all() == []
    model.at_us = 1000
    assert model.run_all() == [3]


def test_b8_when_the_delay_has_run_out_best_does_not_count() -> None:
    model = Model(instances=0, preferred=(4, 8), delay_us=1000)
    model.submit_many(6)
    model.at_us = 1500
    model.scheduler.instance_up("late")
    assert model.run_all() == [6]


def test_b8_when_the_delay_has_run_out_max_batch_size_still_counts() -> None:
    model = Model(instances=0, delay_us=1000)
    model.submit(5)
    model.submit(4)
    model.at_us = 1000
    model.scheduler.instance_up("late")
    assert model.run_all() == [5, 4]


# ---- late binding ---------------------------------------------------------------------------


def test_a_backlog_becomes_one_batch_when_a_slot_comes_free() -> None:
    model = Model()
    model.submit()
    running = model.must_next()
    model.submit_many(5)
    assert model.next() is None
    assert model.wakeup_us() is None, "only the end of the batch can change anything"
    model.scheduler.complete(running.batch_id)
    assert model.must_next().rows == 5


def test_batches_go_where_the_fewest_run_then_where_the_last_use_is_longest_ago() -> None:
    model = Model(instances=3, merge=False, prefetch=1)
    model.submit_many(6)
    placed = [model.must_next() for _ in range(6)]
    assert [batch.instance for batch in placed] == ["i0", "i1", "i2", "i0", "i1", "i2"]
    model.submit_many(3)
    assert model.next() is None
    for batch in (placed[2], placed[5], placed[1]):
        model.scheduler.complete(batch.batch_id)
    assert [model.must_next().instance for _ in range(3)] == ["i2", "i1", "i2"]


def test_prefetch_is_room_for_more_than_the_running_batch() -> None:
    model = Model(prefetch=2, max_batch_size=1)
    model.submit_many(4)
    assert [model.must_next().instance for _ in range(3)] == ["i0"] * 3
    assert model.next() is None
    assert (model.count("room"), model.count("running_batches"), model.count("queued")) == (0, 3, 1)


def test_the_delay_is_no_reason_to_wake_without_room() -> None:
    model = Model(instances=0, delay_us=1000)
    model.submit()
    assert model.wakeup_us() is None
    model.scheduler.instance_up("i0")
    assert model.wakeup_us() == 1000


def test_an_instance_cannot_be_up_twice() -> None:
    model = Model()
    with pytest.raises(ValueError, match="'i0' is up already"):
        model.scheduler.instance_up("i0")
    assert model.count("room") == 1


# ---- the limits of the queue ----------------------------------------------------------------


def test_the_queue_is_limited_in_requests() -> None:
    model = Model(instances=0, max_requests=2)
    model.submit_many(2)
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size of 2 requests$") as caught:
        model.submit()
    assert caught.value.code is Code.UNAVAILABLE
    assert (model.count("queued"), model.count("accepted"), model.count("rejected")) == (2, 2, 1)


def test_running_requests_do_not_count_towards_the_limit() -> None:
    model = Model(max_requests=1)
    model.submit()
    model.must_next()
    model.submit()
    with pytest.raises(QueueFull):
        model.submit()


def test_the_queue_is_limited_in_bytes() -> None:
    model = Model(instances=0, max_nbytes=100)
    model.submit(nbytes=60)
    model.submit(nbytes=40)
    with pytest.raises(QueueFull, match="of 100 bytes: 100 bytes are queued and the request has 1"):
        model.submit(nbytes=1)
    assert model.count("queued_nbytes") == 100


def test_an_empty_queue_takes_a_request_larger_than_the_limit() -> None:
    model = Model(max_nbytes=100)
    model.submit(nbytes=1000)
    with pytest.raises(QueueFull):
        model.submit(nbytes=1)
    assert model.run_all() == [1]
    assert model.submit(nbytes=1000).state is RequestState.QUEUED


def test_a_cancelled_request_makes_room_at_once() -> None:
    model = Model(instances=0, max_requests=1)
    assert model.scheduler.cancel(model.submit())
    assert model.submit().state is RequestState.QUEUED


def test_a_rejected_request_is_untouched() -> None:
    model = Model(instances=0, max_requests=1)
    model.submit()
    rejected = QueuedRequest(1, 1, "")
    with pytest.raises(QueueFull):
        model.scheduler.submit(rejected, 0.0)
    assert rejected.state is RequestState.NEW


def test_a_draining_scheduler_refuses_the_new_and_runs_the_queued() -> None:
    model = Model()
    model.submit_many(2)
    model.scheduler.stop_accepting()
    assert model.scheduler.draining
    with pytest.raises(Unavailable, match="has stopped accepting new inference requests"):
        model.submit()
    assert model.run_all() == [2]
    assert model.count("rejected") == 1


# ---- cancellation ---------------------------------------------------------------------------


def test_a_cancelled_request_in_the_queue_never_runs() -> None:
    model = Model()
    first, second, third = model.submit_many(3)
    assert model.scheduler.cancel(second) is True
    assert model.must_next().requests == [first, third]
    assert second.state is RequestState.FINISHED
    assert second.cancelled
    assert model.count("cancelled") == 1


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


def test_cancelling_the_odd_one_out_lets_its_neighbours_share_a_batch() -> None:
    model = Model()
    first, odd, last = (model.submit(key=key) for key in "aba")
    assert model.scheduler.cancel(odd)
    assert model.must_next().requests == [first, last]


def test_cancelling_a_running_request_only_drops_its_result() -> None:
    model = Model()
    request, other = model.submit_many(2)
    batch = model.must_next()
    assert model.scheduler.cancel(request) is False
    assert model.scheduler.cancel(request) is False
    assert (request.cancelled, request.state) == (True, RequestState.RUNNING)
    assert model.scheduler.complete(batch.batch_id).requests == [request, other]
    assert (model.count("finished"), model.count("cancelled")) == (1, 1)


def test_cancelling_a_finished_request_changes_nothing() -> None:
    model = Model()
    request = model.submit()
    assert model.run_all() == [1]
    assert model.scheduler.cancel(request) is False
    assert request.cancelled is False
    assert (model.count("finished"), model.count("cancelled")) == (1, 0)


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
    with pytest.raises(DeadlineExceeded, match=r"^Request timeout expired before the request was queued$"):
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
    assert deadlines.nearest() is None


# ---- the death of an instance ---------------------------------------------------------------


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


def test_every_batch_that_the_dead_instance_held_is_run_again() -> None:
    model = Model(prefetch=1, max_batch_size=2)
    requests = model.submit_many(4)
    assert [model.must_next().requests, model.must_next().requests] == [requests[:2], requests[2:]]
    assert model.scheduler.instance_down("i0") == []
    assert model.count("queued") == 4


def test_a_batch_that_had_not_begun_is_not_counted_as_tried() -> None:
    model = Model(prefetch=1, max_batch_size=1, retry_on_death=False)
    running, waiting = model.submit(), model.submit()
    assert [model.must_next().requests, model.must_next().requests] == [[running], [waiting]]
    assert model.scheduler.instance_down("i0") == [running]
    assert (running.attempts, waiting.attempts, waiting.state) == (1, 0, RequestState.QUEUED)


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
def test_a_request_that_may_not_run_twice_is_lost_with_its_worker(
    retry_on_death: bool, retriable: bool
) -> None:
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


def test_the_end_of_a_batch_of_a_dead_instance_is_unknown() -> None:
    model = Model()
    model.submit()
    batch = model.must_next()
    model.scheduler.instance_down("i0")
    model.scheduler.instance_up("i0")
    with pytest.raises(KeyError):
        model.scheduler.complete(batch.batch_id)
    assert model.count("room") == 1


def test_a_death_told_twice_does_nothing() -> None:
    model = Model(instances=2)
    assert model.scheduler.instance_down("i0") == []
    assert model.scheduler.instance_down("i0") == []
    assert (model.count("instances"), model.count("room")) == (1, 1)


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


def test_a_request_is_submitted_once() -> None:
    model = Model()
    request = model.submit()
    with pytest.raises(IllegalTransition, match="state QUEUED cannot submit"):
        model.scheduler.submit(request, 0.0)
    assert model.count("queued") == 1


def test_a_request_that_was_never_submitted_cannot_be_cancelled() -> None:
    with pytest.raises(IllegalTransition, match="state NEW cannot cancel"):
        Model().scheduler.cancel(QueuedRequest(1, 1, ""))


def test_statistics_of_a_moment() -> None:
    model = Model(instances=2, max_batch_size=4)
    running = model.submit_many(2, rows=2)
    batch = model.must_next()
    model.submit(rows=3, nbytes=30)
    statistics = model.scheduler.statistics()
    assert batch.requests == running
    assert statistics._asdict() == {
        "queued": 1,
        "queued_rows": 3,
        "queued_nbytes": 30,
        "running_batches": 1,
        "running_requests": 2,
        "instances": 2,
        "room": 1,
        "accepted": 3,
        "finished": 0,
        "rejected": 0,
        "cancelled": 0,
        "expired": 0,
        "retried": 0,
        "lost": 0,
    }
    with pytest.raises(AttributeError):
        statistics.queued = 0  # type: ignore[misc]
