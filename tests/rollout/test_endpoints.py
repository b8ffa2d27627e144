"""The endpoint list: every consumer hears of each change, in its own time, and never of an older list."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rollout.endpoints import Endpoint, Endpoints


class Clock:
    """``call_later`` on a time of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> None:
        heapq.heappush(self._calls, (self.now + delay_s, next(self._numbers), callback))

    def run_until(self, at_s: float) -> None:
        while self._calls and self._calls[0][0] <= at_s:
            self.now, _, callback = heapq.heappop(self._calls)
            callback()
        self.now = at_s


class Consumer:
    """Keeps the lists that reached it, and when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.heard: list[tuple[float, tuple[str, ...]]] = []

    def __call__(self, endpoints: Sequence[Endpoint]) -> None:
        self.heard.append((self._clock.now, tuple(one.pod for one in endpoints)))


def listed(*pods: str) -> list[Endpoint]:
    return [Endpoint(pod, "127.0.0.1", 80, 81) for pod in pods]


def test_who_subscribes_hears_the_list_of_now() -> None:
    clock = Clock()
    endpoints = Endpoints(5.0, Random(1), clock.call_later)
    endpoints.publish(listed("a"))
    consumer = Consumer(clock)
    endpoints.subscribe(consumer)
    clock.run_until(0.0)
    assert consumer.heard == [(0.0, ("a",))]


def test_a_change_reaches_each_consumer_in_its_own_time() -> None:
    clock = Clock()
    endpoints = Endpoints(5.0, Random(1), clock.call_later)
    consumers = [Consumer(clock) for _ in range(20)]
    for consumer in consumers:
        endpoints.subscribe(consumer)
    clock.run_until(1.0)
    endpoints.publish(listed("a"))
    clock.run_until(6.0)
    times = [consumer.heard[-1][0] for consumer in consumers]
    assert all(consumer.heard[-1][1] == ("a",) for consumer in consumers)
    assert all(1.0 <= at_s <= 6.0 for at_s in times)
    assert max(times) - min(times) > 2.5


def test_a_list_that_is_as_before_is_no_change() -> None:
    clock = Clock()
    endpoints = Endpoints(0.0, Random(1), clock.call_later)
    consumer = Consumer(clock)
    endpoints.subscribe(consumer)
    for _ in range(3):
        endpoints.publish(listed("a"))
        clock.run_until(clock.now + 1.0)
    assert [pods for _, pods in consumer.heard] == [(), ("a",)]


@given(st.integers(), st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12))
def test_lists_come_in_their_order_and_the_last_one_always_comes(seed: int, pauses_s: list[float]) -> None:
    clock = Clock()
    endpoints = Endpoints(5.0, Random(seed), clock.call_later)
    consumer = Consumer(clock)
    endpoints.subscribe(consumer)
    for number, pause_s in enumerate(pauses_s):
        clock.run_until(clock.now + pause_s)
        endpoints.publish(listed(f"{number:03}"))
    clock.run_until(clock.now + 5.0)
    heard = [pods for _, pods in consumer.heard]
    assert heard == sorted(heard)
    assert heard[-1] == (f"{len(pauses_s) - 1:03}",)
