"""Which call is sent when, and what is counted of it, with connections that answer when they are told to."""

from __future__ import annotations

import pytest

from gpuserve.cli.bench.load_generator import (
    CONNECTION_LOST,
    CallCounts,
    Failure,
    LoadGenerator,
    TimedCall,
    count_durations,
)
from gpuserve.cli.bench.load_plan import ArrivalPattern, due_times


class Link:
    """A connection for so many calls at once, that are answered by ``answer``."""

    def __init__(self, load: LoadGenerator, most: int) -> None:
        self.out = bytearray()
        self._load = load
        self._most = most
        self.calls: list[TimedCall] = []
        self.is_usable = True
        self.can_cancel = True

    @property
    def has_room(self) -> bool:
        return len(self.calls) < self._most

    @property
    def in_flight(self) -> int:
        return len(self.calls)

    def on_connected(self) -> None: ...

    def start_call(self, call: TimedCall) -> None:
        self.calls.append(call)

    def receive(self, data: bytes, now: float) -> None: ...

    def cancel(self, call: TimedCall) -> bool:
        self.calls.remove(call)
        return self.can_cancel

    def fail_all(self, failure: Failure, now: float) -> None:
        self._most = 0
        for _ in self.calls[:]:
            self.answer(now, failure)

    def answer(self, now: float, failure: Failure | None = None) -> None:
        call = self.calls.pop(0)
        if failure is None:
            self._load.on_response(call, now)
        self._load.on_end(call, failure, now)


def loaded(most: int = 100, **options: float) -> tuple[LoadGenerator, Link]:
    load = LoadGenerator(1, options.get("timeout_s", 10.0), int(options.get("max_in_flight", 1000)))
    link = Link(load, most)
    load.add_connection(link, 0.0)
    if "rate_hz" in options:
        load.start_open(due_times(ArrivalPattern.CONSTANT, options["rate_hz"], 0), 0.0)
        load.measure(0.0)
    elif "in_flight" in options:
        load.start_closed(int(options["in_flight"]), 0.0)
        load.measure(0.0)
    return load, link


def seconds(interval: CallCounts, name: str) -> list[float]:
    values, counts = getattr(interval, name)
    return [value / 1e9 for value, count in zip(values, counts, strict=True) for _ in range(count)]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    load, link = loaded()
    load.start_closed(3, 0.0)
    assert link.in_flight == 3
    load.measure(1.0)
    for now in (1.5, 2.0, 2.5, 3.0):
        link.answer(now)
        assert link.in_flight == 3
    taken = load.samples.pop_counts(2.0, 0.5)
    # Three of the four were sent before the measurement: they are throughput, and no latencies.
    assert (taken.completed, taken.sent, taken.duration_s, taken.cpu_s) == (4, 4, 2.0, 0.5)
    assert seconds(taken, "latencies") == pytest.approx([1.5])


def test_an_open_loop_counts_from_the_due_time() -> None:
    """One connection, one call at once: the second waits for the first, and says so."""
    load, link = loaded(most=1, rate_hz=1.0)
    assert load.next_due_s == 0.0
    load.release(0.0)
    load.release(1.0)
    assert (link.in_flight, load.unanswered, load.next_due_s) == (1, 2, 2.0)
    link.answer(5.0)
    link.answer(6.0)
    taken = load.samples.pop_counts(6.0, 0.0)
    assert seconds(taken, "latencies") == pytest.approx([5.0, 5.0])
    assert seconds(taken, "lags") == pytest.approx([1e-9, 4.0])


def test_a_client_that_comes_late_sends_everything_that_is_due() -> None:
    load, link = loaded(rate_hz=10.0)
    load.release(1.05)
    assert link.in_flight == 11
    assert seconds(load.samples.pop_counts(1.0, 0.0), "lags")[-1] == pytest.approx(1.05)


def test_answers_after_the_end_are_latencies_and_no_throughput() -> None:
    load, link = loaded(rate_hz=1.0)
    load.release(1.0)
    link.answer(1.5)
    load.drain()
    link.answer(4.0)
    taken = load.samples.pop_counts(2.0, 0.0)
    assert taken.completed == 1
    assert seconds(taken, "latencies") == pytest.approx([1.5, 3.0])
    assert load.next_due_s is None


def test_what_is_never_answered_has_waited() -> None:
    load, link = loaded(most=2, rate_hz=1.0)
    load.release(2.0)
    load.drain()
    assert load.finish(10.0) == []
    assert seconds(load.samples.pop_counts(2.0, 0.0), "waited") == pytest.approx([8.0, 9.0, 10.0])
    assert (load.unanswered, link.in_flight) == (0, 0)


def test_a_closed_loop_has_nothing_due_when_it_ends() -> None:
    load, link = loaded(most=1)
    load.start_closed(3, 0.0)
    load.measure(1.0)
    load.drain()
    assert load.unanswered == 1
    link.answer(2.0)
    assert load.unanswered == 0
    assert load.finish(3.0) == []


def test_a_call_whose_time_is_over_fails_and_is_replaced() -> None:
    load, link = loaded(timeout_s=2.0, in_flight=2)
    assert load.expire(1.9) == []
    link.can_cancel = False
    assert load.expire(2.0) == [link, link]
    assert link.in_flight == 2
    taken = load.samples.pop_counts(2.0, 0.0)
    assert (taken.failures["timeout"][0], taken.completed) == (2, 0)


def test_a_lost_connection_fails_its_calls() -> None:
    load, link = loaded(in_flight=2)
    load.pool.remove(link)
    link.fail_all(CONNECTION_LOST, 1.0)
    assert load.samples.pop_counts(1.0, 0.0).failures["connection lost"][0] == 2
    other = Link(load, 10)
    load.add_connection(other, 2.0)
    assert other.in_flight == 2


def test_calls_go_to_all_connections_in_turn() -> None:
    load = LoadGenerator(1, 1.0, 100)
    links = [Link(load, 2) for _ in range(3)]
    for link in links:
        load.add_connection(link, 0.0)
    load.start_closed(3, 0.0)
    assert [link.in_flight for link in links] == [1, 1, 1]


def test_an_open_loop_is_bounded() -> None:
    load, link = loaded(max_in_flight=5, rate_hz=1000.0)
    load.release(1.0)
    assert (link.in_flight, load.unanswered) == (5, 1001)


def test_responses_of_a_stream() -> None:
    load, link = loaded(in_flight=1)
    call = link.calls[0]
    for now in (1.0, 1.25, 2.0):
        load.on_response(call, now)
    link.calls.clear()
    load.on_end(call, None, 2.5)
    taken = load.samples.pop_counts(3.0, 0.0)
    assert (taken.responses, taken.completed) == (3, 1)
    assert seconds(taken, "first") == pytest.approx([1.0])
    assert seconds(taken, "gaps") == pytest.approx([0.25, 0.75])
    assert seconds(taken, "latencies") == pytest.approx([2.5])


def test_durations_are_counted_to_three_digits() -> None:
    values, counts = count_durations([0.001_000_1, 0.001_000_2, 0.5, 3.0, 0.0])
    assert values == [1, 1_000_000, 500_000_000, 3_000_000_000]
    assert counts == [1, 2, 1, 1]
    assert count_durations([]) == ([], [])
