"""What holds for the scheduler of one model whatever happens, in whatever order.

The machine plays the driver with a clock of its own and keeps its own books: a plain list of what waits,
from which ``expected_batch`` works every batch out afresh, by the letter of the rules and with no thought
for speed.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from exploring import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled import model_spec

from gpuserve.core.errors import DeadlineExceeded, QueueFull
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, QueueSpec

US = 1e-6
INSTANCES = ("a", "b", "c")


def expected_batch(
    waiting: list[QueuedRequest], now: float, is_held: bool, max_batch_size: int, batching: BatchingSpec
) -> list[QueuedRequest]:
    """B-1 and B-3 … B-5 over a list; [] is to wait. No delay has run out for a batch that is only held.

    The shape whose first request is next goes first. If it is to wait, the first shape of the same lane that
    fills a batch goes; but the first request gives way to no younger one once its delay has run out.
    """
    if not batching.merge or max_batch_size == 0:
        return waiting[:1]
    groups: dict[Any, list[QueuedRequest]] = {}
    for request in waiting:
        groups.setdefault(request.merge_key, []).append(request)
    leading, *others = groups.values()
    found = expected_batch_of_one_shape(leading, -math.inf if is_held else now, max_batch_size, batching)
    full_rows = max(batching.preferred_batch_sizes or (max_batch_size,))
    full = [group for group in others if sum(one.rows for one in group) >= full_rows]
    if found or not full or lane_of(full[0][0]) != lane_of(leading[0]):
        return found
    return expected_batch_of_one_shape(leading, now, max_batch_size, batching) or expected_batch_of_one_shape(
        full[0], -math.inf, max_batch_size, batching
    )


def lane_of(request: QueuedRequest) -> Any:
    return getattr(request, "lane", None)


def expected_batch_of_one_shape(
    waiting: list[QueuedRequest], now: float, max_batch_size: int, batching: BatchingSpec
) -> list[QueuedRequest]:
    preferred = batching.preferred_batch_sizes or (max_batch_size,)
    best, total, count, closed = 0, 0, 0, False
    for request in waiting:
        if count and total + request.rows > max(preferred) and best == 0:
            best = count
        if count and total + request.rows > max_batch_size:
            closed = True
            break
        total += request.rows
        count += 1
        if total in preferred:
            best = count
    delay_s = batching.max_queue_delay_us * US
    oldest_at = min(request.enqueued_at for request in waiting[:count])
    exceeded = batching.max_queue_delay_us > 0 and now >= oldest_at + delay_s
    at_once = batching.max_queue_delay_us == 0 and now > -math.inf
    if best and not exceeded:
        return waiting[:best]
    if closed or total >= max(preferred) or exceeded or at_once:
        return waiting[:count]
    return []


@st.composite
def batchings(draw: st.DrawFn, max_batch_size: int) -> BatchingSpec:
    sizes = st.sets(st.integers(1, max_batch_size), max_size=3) if max_batch_size else st.just(set())
    return BatchingSpec(
        max_queue_delay_us=draw(st.sampled_from([0, 7, 1000])),
        preferred_batch_sizes=tuple(sorted(draw(sizes))),
        merge=draw(st.sampled_from([True, True, True, True, True, False])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Clients, workers and time, in any order, against one scheduler."""

    @initialize(
        data=st.data(), max_batch_size=st.sampled_from([8, 4, 8, 8, 16, 0, 1]), prefetch=st.integers(0, 2)
    )
    def start(self, data: st.DataObject, max_batch_size: int, prefetch: int) -> None:
        self.max_batch_size = max_batch_size
        self.batching = data.draw(batchings(max_batch_size))
        self.queue = data.draw(self.queues())
        self.prefetch = prefetch
        self.retry_on_death = data.draw(st.booleans())
        self.scheduler = ModelScheduler(
            model_spec(
                max_batch_size=max_batch_size,
                batching=self.batching,
                queue=self.queue,
                prefetch=prefetch,
                retry_on_worker_death=self.retry_on_death,
            )
        )
        self.now = 0.0
        self.submitted: list[QueuedRequest] = []
        self.waiting: list[QueuedRequest] = []
        self.retried: list[QueuedRequest] = []
        self.running: dict[int, Batch] = {}
        self.up: set[str] = set()
        self.rejected = 0
        #: How each accepted request ended. Ending twice fails in ``_end``.
        self.ends: dict[QueuedRequest, str] = {}
        self.deaths: dict[QueuedRequest, int] = {}
        for instance in INSTANCES[: data.draw(st.integers(0, len(INSTANCES)))]:
            self.instance_up(instance)

    @staticmethod
    def queues() -> st.SearchStrategy[QueueSpec]:
        return st.builds(
            QueueSpec, max_requests=st.sampled_from([0, 30, 0, 5]), max_nbytes=st.sampled_from([0, 60, 0, 10])
        )

    def _end(self, request: QueuedRequest, how: str) -> None:
        assert request not in self.ends, "a request ends once"
        self.ends[request] = how

    @property
    def queued(self) -> list[QueuedRequest]:
        return self.retried + self.waiting

    def _load(self, instance: str) -> int:
        return sum(batch.instance == instance for batch in self.running.values())

    # ---- clients ----

    @rule(
        rows=st.sampled_from([1, 1, 1, 2, 3, 8]),
        nbytes=st.sampled_from([1, 1, 0, 4, 12]),
        key=st.sampled_from("aaabbcd"),
        timeout_us=st.sampled_from([None, None, None, None, 0, 3, 500]),
        retriable=st.sampled_from([True, True, False]),
        priority=st.integers(0, 4),
        own_limit_us=st.sampled_from([None, 2, 300]),
        copies=st.integers(1, 6),
    )
    def submit(
        self,
        rows: int,
        nbytes: int,
        key: str,
        timeout_us: int | None,
        retriable: bool,
        priority: int,
        own_limit_us: int | None,
        copies: int,
    ) -> None:
        rows = min(rows, max(1, self.max_batch_size))
        for _ in range(copies):
            deadline = None if timeout_us is None else self.now + timeout_us * US
            limit_s = None if own_limit_us is None else own_limit_us * US
            self._submit(QueuedRequest(rows, nbytes, (key,), deadline, retriable, priority, limit_s))

    def _refusal(self, request: QueuedRequest) -> type[Exception] | None:
        """What a new request is to be refused with."""
        queued = self.queued
        limits = self.queue
        too_many = bool(limits.max_requests) and len(queued) >= limits.max_requests
        total_nbytes = sum(one.nbytes for one in queued) + request.nbytes
        too_large = bool(limits.max_nbytes and queued) and total_nbytes > limits.max_nbytes
        if request.deadline is not None and request.deadline <= self.now:
            return DeadlineExceeded
        return QueueFull if too_many or too_large else None

    def _submit(self, request: QueuedRequest) -> None:
        expected = self._refusal(request)
        if expected is not None:
            with pytest.raises(expected):
                self.scheduler.submit(request, self.now)
            assert request.state is RequestState.NEW
            self.rejected += 1
            return
        self.scheduler.submit(request, self.now)
        self.submitted.append(request)
        self.waiting.append(request)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.submitted[-20:]))
        was_queued = request in self.waiting or request in self.retried
        assert self.scheduler.cancel(request) is was_queued
        if was_queued:
            (self.waiting if request in self.waiting else self.retried).remove(request)
            self._end(request, "cancelled")

    # ---- workers ----

    @rule(instance=st.sampled_from(INSTANCES))
    def instance_up(self, instance: str) -> None:
        if instance not in self.up:
            self.scheduler.instance_up(instance)
            self.up.add(instance)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        assert self.scheduler.complete(batch.batch_id) is batch
        for request in batch.requests:
            self._end(request, "cancelled" if request.cancelled else "finished")
        with pytest.raises(KeyError):
            self.scheduler.complete(batch.batch_id)

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def instance_down(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.up)))
        self.up.remove(instance)
        self._go_down(instance)

    def _go_down(self, instance: str) -> None:
        lost = self.scheduler.instance_down(instance)
        here = sorted(n for n, batch in self.running.items() if batch.instance == instance)
        died, expected_lost = [self.running.pop(number) for number in here], []
        for batch in died:
            for request in batch.requests:
                expected_lost += self._die(request, began=batch in self._begun(died))
        assert lost == expected_lost
        self.retried.sort(key=self.submitted.index)

    def _begun(self, batches: list[Batch]) -> list[Batch]:
        """Those of an instance's batches that it had begun."""
        return batches[:1]

    def _die(self, request: QueuedRequest, began: bool) -> list[QueuedRequest]:
        """Book a death under a request that ``began`` to run: [request] where that loses it."""
        self.deaths[request] = self.deaths.get(request, 0) + began
        if request.cancelled:
            self._end(request, "cancelled")
        elif not began or (self.deaths[request] == 1 and request.retriable and self.retry_on_death):
            self.retried.append(request)
        else:
            self._end(request, "lost")
            return [request]
        return []

    # ---- the driver ----

    @rule(step_us=st.sampled_from([0, 1, 3, 8, 600]))
    def time_passes(self, step_us: int) -> None:
        self.now += step_us * US

    @rule(instance_gets=st.integers(1, 3))
    def next_batch(self, instance_gets: int) -> None:
        for _ in range(instance_gets):
            self._next_batch()

    def _next_batch(self) -> Batch | None:
        room = sum(1 + self.prefetch - self._load(instance) for instance in self.up)
        expired = bool(self._due() or self._to_be_delayed())
        expected: list[QueuedRequest] = []
        if room and not expired and self.queued:
            expected = self.retried[:1] or expected_batch(
                self.in_order(), self.now, not self._idle(), self.max_batch_size, self.batching
            )
        loads = {instance: self._load(instance) for instance in self.up}
        batch = self.scheduler.next_batch(self.now)
        assert (batch.requests if batch else []) == expected
        if batch is None:
            return None
        merging = self.batching.merge and self.max_batch_size > 0
        assert batch.alone == (bool(self.retried) or not merging)
        assert loads[batch.instance] == min(loads.values()) <= self.prefetch
        assert batch.batch_id not in self.running
        assert batch.rows == sum(request.rows for request in batch.requests)
        assert len(batch.requests) == 1 if batch.alone else batch.rows <= self.max_batch_size
        assert len({request.merge_key for request in batch.requests}) == 1
        self._check_that_nobody_starves(batch)
        self.running[batch.batch_id] = batch
        for request in batch.requests:
            (self.retried or self.waiting).remove(request)
        return batch

    def _check_that_nobody_starves(self, batch: Batch) -> None:
        """No request whose delay has run out gives way to a batch whose first request stands behind it."""
        if self.retried:
            return
        delay_s = self.batching.max_queue_delay_us * US
        order = self.in_order()
        before = order[: order.index(batch.requests[0])]
        assert all(self.now < one.enqueued_at + delay_s for one in before)
        same = [one for one in order if one.merge_key == batch.requests[0].merge_key]
        assert batch.requests == same[: len(batch.requests)], "a shape keeps its order"

    def _idle(self) -> bool:
        """Whether an instance would run a batch at once."""
        return any(self._load(instance) == 0 for instance in self.up)

    # ---- time, which policies of the queue make more of ----

    def in_order(self) -> list[QueuedRequest]:
        """What waits, in the order in which it is to go."""
        return self.waiting

    def _due(self) -> list[QueuedRequest]:
        """What is to leave the queue now."""
        return [one for one in self.queued if one.deadline is not None and one.deadline <= self.now]

    def _to_be_delayed(self) -> list[QueuedRequest]:
        """What is to step back now."""
        return []

    def _has_time(self, request: QueuedRequest) -> bool:
        """Whether time alone changes something for a queued request."""
        return request.deadline is not None

    @rule()
    def expire(self) -> None:
        self._expire()

    def _expire(self) -> bool:
        """Whether anything was due."""
        due, delayed = self._due(), self._to_be_delayed()
        expired = self.scheduler.expire(self.now)
        assert (set(expired), len(expired)) == (set(due), len(due))
        for request in expired:
            self._end(request, "expired")
        self.waiting = [request for request in self.waiting if request not in self.ends]
        self.retried = [request for request in self.retried if request not in self.ends]
        return bool(due or delayed)

    @rule()
    def sleep_until_wakeup(self) -> None:
        """Soundness: where only time is missing a time is named; before it nothing, at it something."""
        self._expire()
        while self._next_batch() is not None:
            pass
        wakeup = self.scheduler.next_wakeup(self.now)
        timed = any(self._has_time(request) for request in self.queued)
        assert (wakeup is not None) == bool(self.queued and (self._idle() or timed))
        if wakeup is not None:
            assert wakeup > self.now
            before = self.now + (wakeup - self.now) * 0.999
            if before < wakeup:  # two times may be neighbours, with none between them
                self.now = before
                assert not self._expire()
                assert self._next_batch() is None
            self.now = wakeup
            assert self._expire() or self._next_batch() is not None

    # ---- what always holds ----
    @invariant()
    def books_agree(self) -> None:
        statistics = self.scheduler.statistics()
        queued = self.queued
        ends = [*self.ends.values()]
        running = [request for batch in self.running.values() for request in batch.requests]
        computing = [one for batch in self.running.values() if batch.slots for one in batch.requests]
        expected: dict[str, Any] = {
            "queued": len(queued),
            "queued_rows": sum(request.rows for request in queued),
            "queued_nbytes": sum(request.nbytes for request in queued),
            "running_batches": len(self.running),
            "running_requests": len(running),
            "computing_requests": len(computing),
            "computing_rows": sum(request.rows for request in computing),
            **dict.fromkeys(("instances", "slots"), len(self.up)),
            "room": len(self.up) * (1 + self.prefetch) - sum(map(self._load, self.up)),
            "accepted": len(self.submitted),
            "finished": ends.count("finished"),
            "rejected": self.rejected,
            "cancelled": ends.count("cancelled"),
            "expired": ends.count("expired"),
            "lost": ends.count("lost"),
        }
        actual = statistics._asdict()
        del actual["retried"], actual["sequences"], actual["seats"]
        n_shapes = len({one.merge_key for one in self.waiting})
        assert actual.pop("shape_groups") in {0, n_shapes}
        assert actual == expected

    @invariant()
    def nothing_is_lost(self) -> None:
        statistics = self.scheduler.statistics()
        assert statistics.accepted == (
            statistics.queued
            + statistics.running_requests
            + statistics.finished
            + statistics.cancelled
            + statistics.expired
            + statistics.lost
        )

    @invariant()
    def every_request_is_where_the_books_say(self) -> None:
        running = {request for batch in self.running.values() for request in batch.requests}
        for request in self.submitted:
            if request in self.ends:
                assert request.state is RequestState.FINISHED
            elif request in running:
                assert request.state is RequestState.RUNNING
            else:
                assert request.state is RequestState.QUEUED
            assert request.attempts == self.deaths.get(request, 0) <= 2

    def teardown(self) -> None:
        """Whatever state it was left in: with a worker, no new requests and time, everything ends."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.draining = True
        self.instance_up("a")
        while self.queued or self.running:
            for batch_id in sorted(self.running):
                batch = self.running.pop(batch_id)
                self.scheduler.complete(batch_id)
                for request in batch.requests:
                    self._end(request, "cancelled" if request.cancelled else "finished")
            self.sleep_until_wakeup()
        assert set(self.ends) == set(self.submitted)
        self.books_agree()


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(250),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase
