"""How long a batch is expected to take, and batches that wait for clients that send again."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from present import present
from scheduled import Model, model_spec

from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.slots import ServiceTime
from gpuserve.model.spec import BatchingSpec

BATCH_S = 0.005


class Simulation:
    """One instance whose batches take ``takes_s(rows)``; ``again`` yields the pauses of answered clients."""

    def __init__(self, again: Callable[[int], Iterator[float]], *, anticipate: bool = True) -> None:
        batching = BatchingSpec(anticipate=anticipate)
        self.scheduler = ModelScheduler(model_spec(max_batch_size=64, batching=batching))
        self.scheduler.instance_up("i0")
        self.takes_s: Callable[[int], float] = lambda _: BATCH_S
        self.again = again
        self.now = 0.0
        self.rows: list[int] = []
        self.waits_s: list[float] = []
        self._events: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()

    def send(self, at: float) -> None:
        self._at(at, "request")

    def run(self, n_batches: int, n_clients: int = 0, apart_s: float = 50e-6) -> None:
        """Run so many batches, of which clients send the first requests one after the other."""
        for position in range(n_clients):
            self.send(position * apart_s)
        running = None
        while len(self.rows) < n_batches and self._events:
            self.now, _, kind = heapq.heappop(self._events)
            if kind == "request":
                self.scheduler.submit(QueuedRequest(1, 1, "", self.now + 10), self.now)
            elif kind == "end":
                assert running is not None
                self.scheduler.complete(running.batch_id, self.takes_s(running.rows), self.now)
                for pause_s in self.again(running.rows):
                    self.send(self.now + pause_s)
                running = None
            if running is None and (running := self.scheduler.next_batch(self.now)) is not None:
                self.rows.append(running.rows)
                self.waits_s += [self.now - one.enqueued_at for one in running.requests]
                self._at(self.now + self.takes_s(running.rows), "end")
            elif running is None and (at := self.scheduler.next_wakeup(self.now)) is not None:
                assert at > self.now, "a wakeup at once would never end"
                self._at(at, "wakeup")
        if running is not None:
            self.scheduler.complete(running.batch_id)

    def _at(self, at: float, kind: str) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind))


def one_by_one(n: int) -> Iterator[float]:
    """Answered clients send again 50 µs after one another."""
    return (1e-3 + 50e-6 * position for position in range(n))


def clients(n: int, **options: bool) -> Simulation:
    simulation = Simulation(one_by_one, **options)
    simulation.run(300, n)
    return simulation


@pytest.mark.parametrize("n", [2, 8, 48])
def test_clients_that_send_again_make_one_batch(n: int) -> None:
    assert min(clients(n).rows[-100:]) > 0.95 * n


def test_without_anticipation_they_take_turns() -> None:
    assert max(clients(48, anticipate=False).rows[-100:]) < 48


def test_a_batch_does_not_wait_if_more_rows_take_as_much_longer() -> None:
    simulation = Simulation(one_by_one)
    simulation.takes_s = lambda rows: rows * BATCH_S / 16
    simulation.run(300, 48)
    busy_s = sum(map(simulation.takes_s, simulation.rows))
    assert simulation.now < 1.02 * busy_s


def test_a_batch_does_not_wait_for_clients_that_have_left() -> None:
    left = itertools.count()
    simulation = Simulation(lambda n: one_by_one(n if next(left) < 200 else n // 2))
    simulation.run(206, 32)
    assert max(simulation.waits_s) < 2 * BATCH_S


@pytest.mark.parametrize(
    "pause",
    [
        lambda chance: chance.uniform(0.3, 0.6),
        lambda chance: chance.expovariate(1 / 0.3),
        lambda chance: chance.expovariate(1),
        lambda chance: 0.1 if chance.random() < 0.9 else chance.uniform(0, 5),
        lambda chance: 0.1 if chance.random() < 0.5 else chance.uniform(0, 3),
    ],
    ids=["within half a batch", "mostly soon", "any time", "nine of ten at once", "half at once"],
)
def test_pauses_of_all_kinds_cost_no_throughput(pause: Callable[[random.Random], float]) -> None:
    """``pause``, in batch times; batches take 0.5 to 1.5 of their usual time."""
    rates = []
    for anticipate in (True, False):
        chance = random.Random(3)
        again = partial(_pauses, chance, pause)
        simulation = Simulation(again, anticipate=anticipate)
        simulation.takes_s = lambda _, chance=chance: BATCH_S * chance.uniform(0.5, 1.5)
        simulation.run(400, 16, 1e-5)
        rates.append(sum(simulation.rows) / simulation.now)
    assert rates[0] > 0.95 * rates[1]


def _pauses(chance: random.Random, pause: Callable[[random.Random], float], n: int) -> Iterator[float]:
    return (BATCH_S * pause(chance) + 1e-5 for _ in range(n))


@pytest.mark.parametrize("rate", [0.3, 1.0, 2.0, 8.0, 40.0])
def test_independent_requests_wait_no_longer(rate: float) -> None:
    """``rate`` requests come in the time of a batch."""
    waits_s = []
    for anticipate in (True, False):
        chance = random.Random(7)
        simulation = Simulation(lambda _: iter(()), anticipate=anticipate)
        at = 0.0
        for _ in range(4000):
            at += chance.expovariate(rate / BATCH_S)
            simulation.send(at)
        simulation.run(4000)
        waits_s.append(sum(simulation.waits_s) / len(simulation.waits_s))
    assert waits_s[0] < 1.02 * waits_s[1]


def test_a_deadline_is_not_missed_by_waiting() -> None:
    simulation = clients(8)
    scheduler, now = simulation.scheduler, simulation.now + 1
    for _ in range(8):
        scheduler.submit(QueuedRequest(1, 1, ""), now)
    batch = present(scheduler.next_batch(now))
    scheduler.complete(batch.batch_id, BATCH_S, now + BATCH_S)
    now += BATCH_S
    scheduler.submit(QueuedRequest(1, 1, ""), now + 1e-4)
    assert scheduler.next_batch(now + 1e-4) is None
    scheduler.submit(QueuedRequest(1, 1, "", deadline=now + BATCH_S + 5e-4), now + 2e-4)
    assert scheduler.next_batch(now + 2e-4) is not None


# ---- how long a batch is expected to take ----


def known(*observed: tuple[int, float]) -> ServiceTime:
    """What is known after each of these was observed three times."""
    time = ServiceTime()
    for rows, seconds in observed:
        for _ in range(3):
            time.observe(rows, seconds)
    return time


def test_nothing_is_known_before_a_second_batch_which_need_not_be_as_slow_as_the_first() -> None:
    time = ServiceTime()
    assert time.estimate(8) is None
    time.observe(8, 30.0)
    assert time.estimate(8) is None
    time.observe(8, 0.005)
    assert time.estimate(8) == 0.005


def test_two_outliers_change_nothing_and_a_new_time_is_known_after_three() -> None:
    time = known((32, 0.005), (32, 0.005))
    time.observe(32, 9.0)
    time.observe(32, 0.0)
    assert time.estimate(32) == 0.005
    for _ in range(3):
        time.observe(32, 0.05)
    assert time.estimate(32) == 0.05


def test_an_unknown_size_takes_the_least_that_it_can() -> None:
    time = known((16, 0.016), (64, 0.064))
    assert time.estimate(4) == 0.004
    assert time.estimate(40) == 0.04
    assert time.estimate(512) == 0.064
    assert known((32, 0.005)).estimate(64) == 0.005


@settings(max_examples=examples(200), deadline=None)
@given(
    fixed=st.floats(0, 1), each=st.floats(0, 1), seen=st.lists(st.integers(1, 512)), rows=st.integers(1, 512)
)
def test_where_more_rows_take_more_time_no_estimate_is_far_above_it(
    fixed: float, each: float, seen: list[int], rows: int
) -> None:
    estimate = known(*((one, fixed + each * one) for one in seen)).estimate(rows)
    assert (estimate is None) is (not seen)
    if estimate is not None:  # 25 % is the width of a size
        assert 0 <= estimate <= (fixed + each * rows) * 1.25 + 1e-9


def test_a_scheduler_learns_from_batches_that_ended_well() -> None:
    model = Model()
    for took_s in (0.004, None, 0.004):
        model.submit(rows=8)
        model.scheduler.complete(model.must_next().batch_id, took_s)
    assert model.scheduler._slots.service_time.estimate(8) == 0.004
