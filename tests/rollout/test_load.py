"""The load of a rollout: it comes when it is due, asks again, and counts every request once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from random import Random

from benchmarks.rollout.load import MOST_ATTEMPTS, Load, Transient, Wrong
from benchmarks.rollout.outcomes import Kind, Outcome, Outcomes, Way

RATE_PER_S = 500.0


class Answers:
    """A client whose answers are given beforehand: by the number of a request and of its attempt."""

    kind = Kind.GRPC_UNARY
    way = Way.ENVOY

    def __init__(self, answer: Callable[[int, int], int], count: int, delay_s: float = 0.0) -> None:
        self.attempts: dict[int, int] = {}
        #: So many requests came.
        self.had_enough = asyncio.Event()
        self._count = count
        self.is_closed = False
        self._answer = answer
        self._delay_s = delay_s

    async def ask(self, number: int) -> int:
        attempt = self.attempts[number] = self.attempts.get(number, 0) + 1
        if len(self.attempts) >= self._count:
            self.had_enough.set()
        await asyncio.sleep(self._delay_s)
        return self._answer(number, attempt)

    async def close(self) -> None:
        self.is_closed = True


def loaded(client: Answers) -> tuple[Load, list[Outcome]]:
    """What became of its requests."""

    async def run() -> tuple[Load, list[Outcome]]:
        outcomes = Outcomes()
        load = Load(RATE_PER_S, [client], outcomes, Random(1))
        async with load.running():
            await client.had_enough.wait()
        return load, outcomes.all

    return asyncio.run(run())


def test_every_request_is_counted_once_and_waited_for() -> None:
    client = Answers(lambda number, attempt: 1, 40, delay_s=0.05)
    load, outcomes = loaded(client)
    assert client.is_closed
    assert len(outcomes) == len(client.attempts) >= 40
    assert not any(one.lost or one.retried for one in outcomes)
    assert load.n_sent_again == {Kind.GRPC_UNARY: 0}


def test_requests_come_when_they_are_due_whatever_became_of_the_others() -> None:
    _, outcomes = loaded(Answers(lambda number, attempt: 1, 50, delay_s=0.3))
    due = sorted(one.due_s for one in outcomes)
    assert due[49] - due[0] < 0.3  # one after the other they would take 15 s
    assert all(one.ended_s - one.due_s >= 0.3 for one in outcomes)
    gaps = [late - early for early, late in itertools.pairwise(due)]
    assert 0.5 / RATE_PER_S < sum(gaps) / len(gaps) < 2 / RATE_PER_S


def test_what_a_proxy_sent_again_is_counted_also_at_the_same_time() -> None:
    load, outcomes = loaded(Answers(lambda number, attempt: 2, 30, delay_s=0.1))
    assert load.n_sent_again == {Kind.GRPC_UNARY: len(outcomes)}


def test_a_failure_that_passes_is_asked_again_and_one_that_does_not_is_a_loss() -> None:
    def answer(number: int, attempt: int) -> int:
        if number == 3 and attempt == 1:
            raise Transient("503")
        if number == 5:
            raise Wrong("expected 1, got 2")
        return 1

    load, outcomes = loaded(Answers(answer, 20))
    assert [one.why for one in load.failures] == ["503"]
    assert sum(one.retried for one in outcomes) == 1
    assert [one.lost for one in outcomes if one.lost] == ["expected 1, got 2"]


def test_a_failure_that_stays_is_a_loss_that_says_what_came_first() -> None:
    def answer(number: int, attempt: int) -> int:
        if number == 0:
            raise Transient(f"failure {attempt}")
        return 1

    client = Answers(answer, 5)
    _, outcomes = loaded(client)
    assert client.attempts[0] == MOST_ATTEMPTS
    (lost,) = (one.lost for one in outcomes if one.lost)
    assert lost == f"failure {MOST_ATTEMPTS}, and before that failure 1"
