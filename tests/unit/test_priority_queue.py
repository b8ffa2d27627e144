"""Priorities and queue policies, rule by rule, with figures; Q-1 … Q-8 are the rules of Triton's queues in
the order of the requirements. ``test_priority_queue_properties.py`` covers random sequences of events.
"""

from __future__ import annotations

from typing import Any

import pytest
from scheduled import US_A_SECOND, Clocked, model_spec

from gpuserve.core.errors import Code, DeadlineExceeded, QueueFull
from gpuserve.core.states import IllegalTransition
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.priority_queue import PriorityQueue, make_request_queue
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestQueue
from gpuserve.model.spec import BatchingSpec, PolicySpec, QueueSpec

NO_POLICY = PolicySpec()


class Model(Clocked):
    """A scheduler of three levels, the second of which is the default, on one instance."""

    def __init__(
        self,
        *,
        levels: int = 3,
        default: int = 2,
        policy: PolicySpec = NO_POLICY,
        policies: tuple[tuple[int, PolicySpec], ...] = (),
        delay_us: int = 0,
        max_batch_size: int = 8,
        max_requests: int = 0,
        ready: bool = True,
    ) -> None:
        spec = model_spec(
            max_batch_size=max_batch_size,
            batching=BatchingSpec(delay_us),
            queue=QueueSpec(max_requests, 0, levels, default if levels else 0, policy, policies),
            prefetch=0,
            retry_on_worker_death=True,
        )
        super().__init__(ModelScheduler(spec), instances=int(ready))

    def submit(self, priority: int = 0, *, own_limit_us: int = 0, **more: Any) -> QueuedRequest:
        timeout_s = own_limit_us / US_A_SECOND or None
        request = QueuedRequest(1, 1, more.pop("key", ""), **more, priority=priority, timeout_s=timeout_s)
        self.scheduler.submit(request, self.now)
        return request

    def submit_all(self, *priorities: int) -> list[QueuedRequest]:
        return [self.submit(priority) for priority in priorities]

    def run_all(self) -> list[list[QueuedRequest]]:
        """The requests of every batch that goes now, each ending before the next is formed."""
        batches = []
        while (batch := self.next()) is not None:
            batches.append(batch.requests)
            self.scheduler.complete(batch.batch_id)
        return batches

    def run_new_instance(self) -> list[list[QueuedRequest]]:
        self.scheduler.instance_up("i0")
        return self.run_all()


def reject(timeout_us: int, **more: Any) -> PolicySpec:
    return PolicySpec("reject", timeout_us, **more)


def delay(timeout_us: int, **more: Any) -> PolicySpec:
    return PolicySpec("delay", timeout_us, **more)


# ---- priorities -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (QueueSpec(), RequestQueue),
        (QueueSpec(max_requests=3, max_nbytes=9), RequestQueue),
        (QueueSpec(policies=((1, reject(5)),)), RequestQueue),
        (QueueSpec(priority_levels=1, default_priority=1), PriorityQueue),
        (QueueSpec(policy=delay(5)), PriorityQueue),
    ],
)
def test_a_model_with_levels_or_a_policy_has_lanes(spec: QueueSpec, kind: type[RequestQueue]) -> None:
    assert type(make_request_queue(spec)) is kind


@pytest.mark.parametrize(
    ("priorities", "max_batch_size", "order"),
    [
        pytest.param(
            (3, 0, 4, 2, 1 << 63, 1), 1, [[5], [1], [2], [3], [4], [0]], id="q1: no or unknown priority"
        ),
        pytest.param(
            (3, 1, 2, 1, 3, 2), 1, [[1], [3], [2], [5], [0], [4]], id="q2: within a level the older"
        ),
        pytest.param((3, 1, 2, 3), 3, [[1, 2, 0], [3]], id="q2: a batch reaches into lower levels"),
    ],
)
def test_a_higher_level_goes_first_and_an_unknown_one_is_the_default(
    priorities: tuple[int, ...], max_batch_size: int, order: list[list[int]]
) -> None:
    model = Model(max_batch_size=max_batch_size)
    submitted = model.submit_all(*priorities)
    assert [[submitted.index(request) for request in batch] for batch in model.run_all()] == order


def test_q2_the_walk_through_the_levels_passes_over_another_shape() -> None:
    model = Model()
    low, middle, high = model.submit(3), model.submit(2, key="other"), model.submit(1)
    assert model.run_all() == [[high, low], [middle]]


@pytest.mark.parametrize(
    ("key", "later_us", "order"), [("", 400, [["high", "low"]]), ("other", 0, [["high"], ["low"]])]
)
def test_the_delay_is_that_of_the_oldest_and_a_higher_level_goes_first(
    key: str, later_us: int, order: list[list[str]]
) -> None:
    model = Model(delay_us=1000)
    names = {model.submit(3): "low"}
    assert model.next() is None
    model.at_us = later_us
    names[model.submit(1, key=key)] = "high"
    assert model.next() is None
    assert model.wakeup_us() == 1000
    model.at_us = 1000
    assert [[names[one] for one in batch] for batch in model.run_all()] == order


def test_a_higher_level_that_fills_the_batch_of_a_waiting_one_goes_before_it() -> None:
    model = Model(delay_us=1000, max_batch_size=2)
    first = model.submit(2)
    assert model.next() is None
    high = model.submit(1)
    assert model.run_all() == [[high, first]]


def test_a_second_run_comes_before_every_level() -> None:
    model = Model(max_batch_size=1)
    low = model.submit(3)
    assert model.next() is not None
    high = model.submit(1)
    assert model.scheduler.instance_down("i0") == []
    model.scheduler.instance_up("i1")
    assert model.run_all() == [[low], [high]]


def test_a_thousand_million_levels_cost_nothing() -> None:
    model = Model(levels=10**9, default=10**9, max_batch_size=1)
    requests = model.submit_all(*range(1000, 0, -1))
    assert [batch[0] for batch in model.run_all()] == requests[::-1]
    queue = model.scheduler._queue  # type: ignore[attr-defined]
    assert isinstance(queue, PriorityQueue)
    assert not queue.waiting
    assert (len(queue.waiting), len(queue._requests), len(queue.waiting._lanes)) == (0, 0, 0)  # type: ignore[attr-defined]


def test_cancelled_requests_of_all_levels_do_not_pile_up() -> None:
    model = Model(ready=False)
    kept = model.submit(3)
    for number in range(300):
        assert model.scheduler.cancel(model.submit(1 + number % 3))
        assert len(model.scheduler._queue.waiting) <= 3  # type: ignore[attr-defined]
    assert model.run_new_instance() == [[kept]]


# ---- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "accepted", "refused", "text"),
    [
        pytest.param(
            {"policies": ((1, PolicySpec(max_requests=2)),)}, (1, 1), 1, "2 requests of priority 1", id="q3"
        ),
        pytest.param(
            {"levels": 0, "policy": PolicySpec(max_requests=1)}, (0,), 7, "1 requests", id="q3: no levels"
        ),
        pytest.param(
            {"policy": PolicySpec(max_requests=2), "max_requests": 2},
            (1, 2),
            3,
            "2 requests",
            id="whole queue",
        ),
    ],
)
def test_a_level_has_a_limit_of_its_own_beside_that_of_the_whole_queue(
    limits: Any, accepted: tuple[int, ...], refused: int, text: str
) -> None:
    model = Model(**limits, ready=False)
    model.submit_all(*accepted)
    with pytest.raises(QueueFull, match=rf"^Exceeds maximum queue size of {text}$") as caught:
        model.submit(refused)
    assert caught.value.code is Code.UNAVAILABLE


def test_the_limit_of_a_level_counts_what_waits_in_it() -> None:
    model = Model(policies=((1, PolicySpec(max_requests=2)),), ready=False)
    first, _ = model.submit_all(1, 1)
    with pytest.raises(QueueFull):
        model.submit(1)
    model.submit(2)
    assert model.scheduler.cancel(first)
    model.submit(1)
    assert (model.count("queued"), model.count("rejected")) == (3, 1)


def test_delayed_requests_count_towards_the_limit_and_running_ones_do_not() -> None:
    model = Model(policy=delay(100, max_requests=1), max_batch_size=1, ready=False)
    model.submit(1)
    assert model.expire_at(100) == []
    with pytest.raises(QueueFull):
        model.submit(1)
    model.scheduler.instance_up("i0")
    assert model.next() is not None
    model.submit(1)
    assert model.count("running_requests") == 1


# ---- time in the queue ----------------------------------------------------------------------


def test_q4_each_level_has_the_time_of_its_policy() -> None:
    model = Model(policy=reject(500), policies=((1, reject(100)), (3, PolicySpec())), ready=False)
    high, middle, low = model.submit_all(1, 2, 3)
    assert model.wakeup_us() == 100
    assert model.expire_at(99) == []
    assert model.expire_at(100) == [high]
    assert model.wakeup_us() == 500
    assert model.expire_at(10**9) == [middle]
    assert model.wakeup_us() is None
    assert model.run_new_instance() == [[low]]


@pytest.mark.parametrize(
    ("policy", "own_limit_us", "expires_at_us"),
    [
        (reject(500, allow_timeout_override=True), 200, 200),
        (reject(500, allow_timeout_override=True), 800, 500),
        (reject(500, allow_timeout_override=True), 0, 500),
        (reject(500), 200, 500),
        (PolicySpec(allow_timeout_override=True, max_requests=9), 200, None),
    ],
)
def test_q4_a_requests_own_limit_shortens_the_policys_where_it_may(
    policy: PolicySpec, own_limit_us: int, expires_at_us: int | None
) -> None:
    model = Model(policy=policy, ready=False)
    request = model.submit(own_limit_us=own_limit_us)
    assert model.wakeup_us() == expires_at_us
    took_over = expires_at_us == own_limit_us
    assert request.timeout_s == (None if took_over else own_limit_us / US_A_SECOND or None)


def test_q5_a_rejected_request_never_runs_even_if_expire_was_forgotten() -> None:
    model = Model(policy=reject(100))
    late = model.submit()
    model.at_us = 100
    assert model.next() is None
    assert model.wakeup_us() == 100
    assert model.expire_at(100) == [late]
    assert model.count("expired") == 1
    assert model.run_all() == []


def test_q6_a_delayed_request_goes_after_its_level_and_before_the_next() -> None:
    model = Model(policies=((1, delay(100)),), max_batch_size=1, ready=False)
    slow, low = model.submit_all(1, 2)
    assert model.expire_at(150) == []
    new = model.submit(1)
    assert model.run_new_instance() == [[new], [slow], [low]]


def test_q6_a_delayed_request_is_delayed_once_and_never_rejected() -> None:
    model = Model(levels=0, policy=delay(100), ready=False)
    requests = model.submit_all(0, 0)
    assert model.expire_at(100) == []
    assert model.wakeup_us() is None
    assert model.expire_at(10**9) == []
    assert model.run_new_instance() == [requests]


def test_delayed_requests_can_be_cancelled_and_are_taken_out_once_with_all_others() -> None:
    model = Model(policy=delay(100), ready=False)
    cancelled, delayed = model.submit_all(1, 1)
    assert model.expire_at(100) == []
    assert model.scheduler.cancel(cancelled)
    assert (model.count("queued"), model.count("cancelled")) == (1, 1)
    other = model.submit(1)
    assert model.scheduler.remove_all() == [other, delayed]
    assert (model.count("queued"), model.count("cancelled")) == (0, 3)


def test_a_clients_deadline_holds_for_a_request_that_was_delayed() -> None:
    model = Model(policy=delay(100), ready=False)
    request = model.submit(deadline=300 / US_A_SECOND)
    assert model.expire_at(100) == []
    assert model.wakeup_us() == 300
    assert model.expire_at(300) == [request]
    with pytest.raises(DeadlineExceeded):
        model.submit(deadline=300 / US_A_SECOND)


def test_a_time_that_runs_out_inside_a_waiting_batch_takes_its_request_out() -> None:
    model = Model(policies=((1, reject(500)),), delay_us=1000)
    late, kept = model.submit(1), model.submit(2)
    assert model.next() is None
    assert model.wakeup_us() == 500
    assert model.expire_at(500) == [late]
    model.at_us = 1000
    assert model.run_all() == [[kept]]


def test_q7_the_time_does_not_reach_a_running_request_nor_its_second_run() -> None:
    model = Model(policy=reject(100))
    request = model.submit()
    assert model.next() is not None
    assert model.expire_at(200) == []
    assert model.scheduler.instance_down("i0") == []
    assert model.expire_at(300) == []
    assert model.wakeup_us() is None
    model.scheduler.instance_up("i1")
    assert model.run_all() == [[request]]


def test_a_request_is_submitted_once_and_keeps_its_place() -> None:
    model = Model(max_batch_size=1, ready=False)
    high, low = model.submit_all(1, 3)
    low.priority = 1
    with pytest.raises(IllegalTransition, match="state QUEUED cannot submit"):
        model.scheduler.submit(low, 0.0)
    assert model.run_new_instance() == [[high], [low]]
