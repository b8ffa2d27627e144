"""The report of a rollout: what counts as lost, what is excused, and that a report says so."""

from __future__ import annotations

import pytest

from benchmarks.rollout.journal import Event, Journal, What
from benchmarks.rollout.load import Failure
from benchmarks.rollout.outcomes import Kind, Outcome, Outcomes, Way
from benchmarks.rollout.report import Findings, markdown
from benchmarks.rollout.scenarios import Scenario, Step

CRASH_S = 100.0


def findings(
    *outcomes: Outcome, failures: tuple[Failure, ...] = (), events: tuple[Event, ...] = ()
) -> Findings:
    noted, journal = Outcomes(), Journal()
    for outcome in outcomes:
        noted.note(outcome)
    for event in (Event(0.0, "p", "127.0.0.2", What.CREATED), *events):
        journal.note(event)
    steps = [Step(Scenario.ROLLOUTS, 0.0, 50.0, "1 of 1"), Step(Scenario.CRASHES, 90.0, 110.0, "1 of 1")]
    return Findings({"Pods": "3"}, steps, noted, failures, {Kind.HTTP_INFER: 7}, journal)


def crash() -> Event:
    return Event(CRASH_S, "p", "127.0.0.2", What.CRASHED)


def request(due_s: float, way: Way = Way.DIRECT, lost: str = "", *, took_s: float = 0.002) -> Outcome:
    return Outcome(Kind.HTTP_INFER, way, due_s, due_s + took_s, lost)


def test_a_run_without_requests_is_not_good() -> None:
    assert not findings().good()


def test_all_answered_is_good() -> None:
    found = findings(request(1.0), request(2.0, Way.ENVOY))
    assert found.good()
    assert "**2 requests, 0 lost.**" in markdown(found)


@pytest.mark.parametrize(
    ("due_s", "took_s", "way", "is_lost"),
    [
        (CRASH_S - 0.1, 0.2, Way.DIRECT, False),  # it was under way
        (CRASH_S + 5.0, 0.1, Way.DIRECT, False),  # the client had not heard of it
        (CRASH_S - 0.1, 0.2, Way.ENVOY, True),
        (CRASH_S - 0.2, 0.1, Way.DIRECT, True),
        (CRASH_S + 60.0, 0.1, Way.DIRECT, True),
    ],
)
def test_only_a_crash_excuses_a_loss_and_only_without_envoy(
    due_s: float, took_s: float, way: Way, is_lost: bool
) -> None:
    found = findings(request(due_s, way, "reset", took_s=took_s), events=(crash(),))
    assert [len(found.lost), len(found.excused)] == ([1, 0] if is_lost else [0, 1])
    assert found.good() is not is_lost
    assert ("## Lost\n" in markdown(found)) is is_lost


def test_a_pod_that_outlives_its_grace_period_is_not_good() -> None:
    found = findings(request(1.0), events=(Event(9.0, "p", "127.0.0.2", What.OUTLIVED_GRACE),))
    assert not found.good()
    assert "1 pods outlived their grace period" in markdown(found)


def test_the_tables_count_by_scenario_and_by_kind() -> None:
    retried = Outcome(Kind.HTTP_INFER, Way.ENVOY, 95.0, 95.5, retried=True)
    text = markdown(findings(request(1.0), request(60.0), retried))
    assert "| rollouts | 1 | 50 | 1 | 0 | 0 | 2.0 | 2.0 |" in text
    assert "| kill -9 of a whole pod | 1 | 20 | 1 | 1 | 0 | 500.0 | 500.0 |" in text
    assert "| `infer` | direct | 2 | 0 | 0 | 2.0 | 2.0 | 2.0 |" in text
    assert "`infer` 7" in text


def test_failures_that_no_crash_explains_are_listed_with_what_happened_before() -> None:
    term = Event(20.0, "p", "127.0.0.2", What.TERM)
    failures = (
        Failure(Kind.HTTP_INFER, Way.DIRECT, 20.5, "503 a|b"),
        Failure(Kind.GRPC_UNARY, Way.DIRECT, CRASH_S + 1.0, "reset"),
    )
    found = findings(request(1.0), failures=failures, events=(term, crash()))
    text = markdown(found)
    assert [len(found.unexplained), len(found.explained)] == [1, 1]
    assert "1 attempts failed though no pod was killed" in text
    assert "| ModelInfer | direct | reset | 1 |" in text
    assert "503 a\\|b" in text
    assert "-0.50 s 127.0.0.2 SIGTERM" in text


def test_from_sigterm_to_the_exit_of_each_container() -> None:
    journal = Journal()
    for at_s, what in ((1.0, What.STARTED), (5.0, What.TERM), (5.5, What.EXITED), (9.0, What.EXITED)):
        journal.note(Event(at_s, "p", "127.0.0.2", what))
    assert journal.endings_s() == [0.5]
