"""An instance that gets its next batch just before the current one ends: timing, choice and outcome."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any

import pytest
from exploring import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ideal_server import ideal_latencies
from scheduled import Clocked, model_spec

from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState
from gpuserve.front.scheduling.slots import LEAD_S, Batch
from gpuserve.model.spec import BatchingSpec, InstanceSpec

MS = 1e-3


class Leading(Clocked):
    """A scheduler that knows how long full batches take, or single requests where it does not merge."""

    def __init__(self, took_s: float = 5 * MS, up: int = 1, **options: Any) -> None:
        super().__init__(ModelScheduler(model_spec(**{"max_batch_size": 4, **options})), up)
        for _ in range(2 * up):
            self.submit(4)
            self.end(self.must_next(), took_s)

    def submit(self, count: int) -> list[QueuedRequest]:
        requests = [QueuedRequest(1, 1, "") for _ in range(count)]
        for request in requests:
            self.scheduler.submit(request, self.now)
        return requests

    def end(self, batch: Batch, took_s: float | None) -> None:
        """End a batch, and all single ones that were submitted with it."""
        self.scheduler.complete(batch.batch_id, took_s, self.now)
        while self.scheduler.statistics().queued and (rest := self.next()) is not None:
            self.scheduler.complete(rest.batch_id, took_s, self.now)


def test_a_full_batch_goes_a_lead_before_the_one_that_runs_ends() -> None:
    model = Leading()
    model.submit(4)
    running = model.must_next()
    waiting = model.submit(4)
    assert model.next() is None
    wakeup = model.scheduler.next_wakeup(model.now)
    assert wakeup == pytest.approx(5 * MS - LEAD_S / 2)
    model.now = 5 * MS - LEAD_S - 1e-6
    assert model.next() is None
    model.now = wakeup
    held = model.must_next()
    assert (held.requests, held.instance) == (waiting, running.instance)
    model.submit(4)
    assert model.next() is None, "one is enough for so long"


def test_what_could_grow_does_not_go_before() -> None:
    model = Leading()
    model.submit(4)
    model.must_next()
    model.submit(3)
    assert model.scheduler.next_wakeup(model.now) is None
    model.now = 4.9 * MS
    assert model.next() is None
    model.submit(1)
    assert model.must_next().rows == 4


@pytest.mark.parametrize(("took_s", "count"), [(0.3 * MS, 4), (0.01 * MS, 16)])
def test_short_calls_that_end_within_the_lead_go_ahead_up_to_a_number(took_s: float, count: int) -> None:
    model = Leading(took_s, max_batch_size=0)
    model.submit(20)
    assert len([*iter(model.next, None)]) == count


def test_with_several_instances_it_goes_to_the_first_to_be_free_and_never_past_an_idle_one() -> None:
    model = Leading(up=3)
    model.submit(4)
    first = model.must_next()
    model.now = 1 * MS
    model.submit(4)
    second = model.must_next()
    model.now = 4.5 * MS
    model.submit(4)
    third = model.must_next()
    assert len({first.instance, second.instance, third.instance}) == 3
    model.submit(8)
    assert model.must_next().instance == first.instance
    assert model.next() is None
    model.now = 5.5 * MS
    assert model.must_next().instance == second.instance


def test_a_batch_that_takes_longer_than_expected_has_one_behind_it_and_no_more() -> None:
    model = Leading()
    model.submit(12)
    running = model.must_next()
    model.now = 4.5 * MS
    model.must_next()
    model.now = 100 * MS
    assert model.next() is None
    model.end(running, 100 * MS)
    assert model.next() is None


@pytest.mark.parametrize("took_s", [0.05 * MS, 5 * MS])
def test_behind_a_batch_that_should_have_ended_nothing_is_held(took_s: float) -> None:
    model = Leading(took_s)
    model.submit(4)
    model.must_next()
    model.now = took_s + 1.1 * MS
    model.submit(8)
    assert model.next() is None
    assert model.scheduler.next_wakeup(model.now) is None


def test_where_times_differ_nothing_is_bound_early_beside_another_instance() -> None:
    model = Leading(up=2)
    model.submit(4)
    model.end(model.must_next(), 7 * MS)
    model.submit(12)
    assert {model.must_next().instance for _ in range(2)} == {"i0", "i1"}
    model.now = 4.5 * MS
    assert model.next() is None
    model.scheduler.retire("i1")
    assert model.must_next().instance == "i0", "there is no other"


def test_a_death_has_tried_what_ran_and_not_what_was_held() -> None:
    model = Leading()
    ran = model.submit(4)
    model.must_next()
    model.now = 4.5 * MS
    held = model.submit(4)
    model.must_next()
    assert model.scheduler.instance_down("i0") == []
    assert {one.attempts for one in ran} == {1}
    assert {one.attempts for one in held} == {0}
    model.scheduler.instance_up("i0")
    assert model.must_next().requests == ran[:1]
    assert model.next() is None, "nothing waits behind what may kill its worker"


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 1},
        {"decoupled": True},
        {"concurrency": 1},
        {"instances": (InstanceSpec("i0", "cuda:0", {}),)},
        {"up": 0, "slots": 2},
    ],
)
def test_who_takes_more_at_once_or_holds_some_at_all_times_does_not_lead(options: dict[str, Any]) -> None:
    slots = options.get("slots", 1)
    model = Leading(**{name: one for name, one in options.items() if name != "slots"})
    if slots > 1:
        model.scheduler.instance_up("a", slots=slots)
        for _ in range(2):
            model.submit(4)
            model.end(model.must_next(), 5 * MS)
    model.submit(40)
    assert len([*iter(model.next, None)]) == slots + options.get("prefetch", 0)
    model.now = 4.9 * MS
    assert model.next() is None


# ---- under load -----------------------------------------------------------------------------------

#: From the front to a worker, and from the end of a batch until the front has taken its answer.
OUT_S, BACK_S = 0.1 * MS, 0.25 * MS
BATCH_S, ROWS = 5 * MS, 32


def arrivals(instances: int, load: float, seconds: float) -> list[float]:
    chance = random.Random(instances)
    rate = load * instances * ROWS / BATCH_S
    times = itertools.accumulate(chance.expovariate(rate) for _ in itertools.count())
    return list(itertools.takewhile(lambda at: at < seconds, times))


class Server:
    """Instances that take ``BATCH_S`` a batch, one after the other, and a link that takes time."""

    def __init__(self, arrivals_s: list[float], instances: int) -> None:
        self.scheduler = ModelScheduler(model_spec(max_batch_size=ROWS))
        self.free_at = {str(number): 0.0 for number in range(instances)}
        for name in self.free_at:
            self.scheduler.instance_up(name)
        self._number = itertools.count()
        self._events = [(at, next(self._number), None) for at in arrivals_s]
        self.latencies: list[float] = []
        #: How much sooner another instance was free than the one that a batch was given to.
        self.regrets: list[float] = []

    def run(self) -> None:
        events: list[tuple[float, int, Batch | None]] = self._events  # type: ignore[assignment]
        heapq.heapify(events)
        wakeup = -1.0
        while events:
            now, number, batch = heapq.heappop(events)
            if batch is not None:
                self.scheduler.complete(batch.batch_id, BATCH_S, now)
                self.latencies += [now - one.enqueued_at for one in batch.requests]
            elif number >= 0:
                self.scheduler.submit(QueuedRequest(1, 1, ""), now)
            elif now != wakeup:
                continue
            while (batch := self.scheduler.next_batch(now)) is not None:
                heapq.heappush(events, (self._begin(batch, now) + BACK_S, next(self._number), batch))
            soonest = self.scheduler.next_wakeup(now)
            if soonest is not None:
                wakeup = soonest + 0.4 * MS  # as late as timers are
                heapq.heappush(events, (wakeup, -1, None))

    def _begin(self, batch: Batch, now: float) -> float:
        free_at = self.free_at
        mine, first = max(now, free_at[batch.instance]), max(now, min(free_at.values()))
        self.regrets.append(mine - first)
        free_at[batch.instance] = max(free_at[batch.instance], now + OUT_S) + BATCH_S
        return free_at[batch.instance]


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_at_95_percent_load_the_tail_is_near_that_of_the_ideal_server(instances: int) -> None:
    at = arrivals(instances, 0.95, 3.0 / instances)
    server = Server(at, instances)
    server.run()
    served, ideal = sorted(server.latencies), sorted(ideal_latencies(at, instances, BATCH_S, ROWS))
    p99 = len(served) * 99 // 100
    assert served[p99] <= 1.5 * ideal[p99]
    # What begins at once does so an OUT_S later than the front expects, and its end is seen later.
    assert max(server.regrets) <= OUT_S + BACK_S + 1e-9


# ---- whatever happens -----------------------------------------------------------------------------


class LeadingMachine(RuleBasedStateMachine):
    """Clients, workers that take as long as expected, deaths and resizing, in any order."""

    @initialize(
        took_us=st.sampled_from([20, 70, 300, 5000]),
        max_batch_size=st.sampled_from([0, 1, 4]),
        merge=st.booleans(),
    )
    def start(self, took_us: int, max_batch_size: int, merge: bool) -> None:
        self.took_s = took_us * 1e-6
        batching = BatchingSpec(merge=merge)
        self.scheduler = ModelScheduler(model_spec(max_batch_size=max_batch_size, batching=batching))
        self.most = max_batch_size if merge else 0
        for rows in range(1, 5):  # so that all is known
            for _ in range(2):
                self.scheduler._slots.service_time.observe(rows, self.took_s)
        self.now = 0.0
        #: What each instance has, and when the first of it ends.
        self.at: dict[str, list[Batch]] = {}
        self.ends_at: dict[str, float] = {}
        self.retired: set[str] = set()
        self.requests: list[QueuedRequest] = []
        self.instance_up("a")

    @rule(count=st.integers(1, 12))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self.requests.append(QueuedRequest(1, 1, ""))
            self.scheduler.submit(self.requests[-1], self.now)
        self.pump()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.cancel(data.draw(st.sampled_from(self.requests[-20:])))
        self.pump()

    @rule(name=st.sampled_from("abc"))
    def instance_up(self, name: str) -> None:
        if name not in self.at:
            self.scheduler.instance_up(name)
            self.at[name], self.ends_at[name] = [], math.inf
        self.pump()

    @rule(name=st.sampled_from("abc"))
    def retire(self, name: str) -> None:
        if name in self.at:
            self.scheduler.retire(name)
            self.retired.add(name)

    @rule(name=st.sampled_from("abc"))
    def instance_down(self, name: str) -> None:
        if name not in self.at:
            return
        batches = self.at.pop(name)
        self.retired.discard(name)
        before = {one: one.attempts for batch in batches for one in batch.requests}
        lost = self.scheduler.instance_down(name)
        for place, batch in enumerate(batches):
            tried = place == 0 or all(one.may_wait for one in batches[: place + 1])
            assert all(one.attempts == before[one] + tried for one in batch.requests)
        assert all(one.attempts == 2 for one in lost)
        self.pump()

    @rule(step_us=st.sampled_from([5, 60, 400, 4000]))
    def time_passes(self, step_us: int) -> None:
        until = self.now + step_us * 1e-6
        while True:
            ends = [(at, name) for name, at in self.ends_at.items() if name in self.at and at <= until]
            if not ends:
                break
            self.now, name = min(ends)
            batch = self.at[name].pop(0)
            self.ends_at[name] = self.now + self.took_s if self.at[name] else math.inf
            self.scheduler.complete(batch.batch_id, self.took_s, self.now)
            self.pump()
        self.now = until
        self.pump()

    def pump(self) -> None:
        while (batch := self.scheduler.next_batch(self.now)) is not None:
            self.given(batch)
        wakeup = self.scheduler.next_wakeup(self.now)
        assert wakeup is None or wakeup > self.now
        up = [batches for name, batches in self.at.items() if name not in self.retired]
        assert not self.scheduler.statistics().queued or all(up), "an idle instance takes what waits"

    def given(self, batch: Batch) -> None:
        batches = self.at[batch.instance]
        assert batch.instance not in self.retired
        if batches:
            others = [name for name in self.at if name not in self.retired]
            assert all(self.at[name] for name in others), "it waits behind another, and an instance is idle"
            waits_s = self._free_in(batch.instance)
            assert waits_s <= LEAD_S + 1e-9
            assert len(batches) < 16
            assert not batches[0].requests[0].attempts, "it waits behind what may kill its worker"
            assert batch.alone or batch.rows == self.most, "what is held could have grown"
        else:
            self.ends_at[batch.instance] = self.now + self.took_s
        batches.append(batch)

    def _free_in(self, name: str) -> float:
        return self.ends_at[name] - self.now + (len(self.at[name]) - 1) * self.took_s

    @invariant()
    def counts_are_exact(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        counts = self.scheduler.statistics()
        held = [one for batches in self.at.values() for batch in batches for one in batch.requests]
        assert counts.running_requests == len(held)
        assert counts.running_batches == sum(map(len, self.at.values()))
        assert counts.room == sum(not self.at[name] for name in self.at if name not in self.retired)
        assert counts.queued == sum(one.state is RequestState.QUEUED for one in self.requests)
        ended = counts.finished + counts.cancelled + counts.lost
        assert counts.accepted == len(self.requests) == counts.queued + len(held) + ended


LeadingMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestLeading = LeadingMachine.TestCase
