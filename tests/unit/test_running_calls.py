"""Which calls are overdue, by a clock that the tests keep."""

from __future__ import annotations

from gpuserve.front.models.in_flight import RunningCall
from gpuserve.front.models.model_workers import (
    REPORT_AFTER_S,
    CallWatch,
    OverdueCall,
)
from gpuserve.front.process.generations import poll_period_s

PERIOD_S = 0.25


class Looks:
    """A watch that is made to look at times that go on."""

    def __init__(self, limit_s: float) -> None:
        self.watch = CallWatch(limit_s)
        self.now = 100.0

    def at(self, seconds: float, *calls: RunningCall) -> list[OverdueCall]:
        self.now = 100.0 + seconds
        return self.watch.poll(calls, self.now, self.now + PERIOD_S)

    def until(self, seconds: float, *calls: RunningCall) -> list[OverdueCall]:
        """Look every period up to that time; all that was overdue."""
        found = []
        while self.now + PERIOD_S <= 100.0 + seconds:
            found += self.at(self.now + PERIOD_S - 100.0, *calls)
        return found


def call(batch: int = 1, began_at: float = 0.0, responses: int = 0, *, held: bool = False) -> RunningCall:
    return RunningCall("a", batch, 100.0 + began_at, responses, held)


def test_a_call_is_overdue_once_when_its_limit_is_over() -> None:
    looks = Looks(1.0)
    assert looks.until(0.75, call()) == []
    assert looks.at(1.0, call()) == [OverdueCall(call(), 1.0, 1.0)]
    assert looks.until(5.0, call()) == []


def test_what_was_behind_another_counts_from_when_that_ended() -> None:
    looks = Looks(1.0)
    assert looks.until(0.75, call(1)) == []
    assert looks.until(1.5, call(2, began_at=0.75)) == []
    (overdue,) = looks.at(1.75, call(2, began_at=0.75))
    assert overdue.call.batch_id == 2


def test_each_response_of_a_stream_begins_the_time_anew() -> None:
    looks = Looks(1.0)
    assert looks.until(0.75, call()) == []
    assert looks.until(1.75, call(responses=1)) == []
    assert len(looks.at(2.0, call(responses=1))) == 1


def test_a_stream_whose_client_does_not_read_waits_for_nobody() -> None:
    looks = Looks(1.0)
    assert looks.until(10.0, call(responses=3, held=True)) == []
    assert looks.until(10.75, call(responses=3)) == []
    assert len(looks.at(11.0, call(responses=3))) == 1


def test_the_time_that_the_machine_stood_still_counts_for_nobody() -> None:
    looks = Looks(5.0)
    assert looks.until(1.0, call()) == []
    assert looks.at(1000.0, call(), call(2, began_at=1.1)) == []
    assert looks.until(1003.5, call(), call(2, began_at=1.1)) == []
    assert [one.call.batch_id for one in looks.until(1005.5, call(), call(2, began_at=1.1))] == [1, 2]


def test_without_a_limit_a_call_is_told_of_once_and_an_instance_once_a_minute() -> None:
    looks = Looks(0.0)
    assert looks.until(REPORT_AFTER_S - PERIOD_S, call()) == []
    (told,) = looks.at(REPORT_AFTER_S, call(), call(2))
    assert (told.call.batch_id, told.limit_s) == (1, 0.0)
    later = looks.until(3 * REPORT_AFTER_S, call(), call(2))
    assert [one.call.batch_id for one in later] == [2]


def test_it_is_looked_often_enough_for_the_shortest_limit() -> None:
    assert poll_period_s([]) == poll_period_s([0.0]) == 1.0
    assert poll_period_s([0.0, 0.5, 30.0]) == 0.125
    assert poll_period_s([3600.0]) == 0.4
    assert poll_period_s([0.001]) == 0.05
