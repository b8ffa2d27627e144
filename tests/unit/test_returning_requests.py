"""Batches that wait for clients that send again when they are answered, with a simulated clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from scheduled import model_spec

from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest
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

    def run(self, n_batches: int) -> None:
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
    for position in range(n):
        simulation.send(position * 50e-6)
    simulation.run(300)
    return simulation


@pytest.mark.parametrize("n", [2, 8, 48])
def test_clients_that_send_again_make_one_batch(n: int) -> None:
    assert min(clients(n).rows[-100:]) > 0.95 * n


def test_without_anticipation_they_take_turns() -> None:
    assert max(clients(48, anticipate=False).rows[-100:]) < 48


def test_a_batch_does_not_wait_if_more_rows_take_as_much_longer() -> None:
    simulation = Simulation(one_by_one)
    simulation.takes_s = lambda rows: rows * BATCH_S / 16
    for position in range(48):
        simulation.send(position * 50e-6)
    simulation.run(300)
    busy_s = sum(map(simulation.takes_s, simulation.rows))
    assert simulation.now < 1.02 * busy_s


def test_a_batch_does_not_wait_for_clients_that_have_left() -> None:
    left = itertools.count()
    simulation = Simulation(lambda n: one_by_one(n if next(left) < 200 else n // 2))
    for position in range(32):
        simulation.send(position * 50e-6)
    simulation.run(206)
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
        for position in range(16):
            simulation.send(position * 1e-5)
        simulation.run(400)
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
    batch = scheduler.next_batch(now)
    assert batch is not None
    scheduler.complete(batch.batch_id, BATCH_S, now + BATCH_S)
    now += BATCH_S
    scheduler.submit(QueuedRequest(1, 1, ""), now + 1e-4)
    assert scheduler.next_batch(now + 1e-4) is None
    scheduler.submit(QueuedRequest(1, 1, "", deadline=now + BATCH_S + 5e-4), now + 2e-4)
    assert scheduler.next_batch(now + 2e-4) is not None
