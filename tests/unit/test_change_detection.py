"""Detection of bursts of refusals and of slow batches from the metrics of models."""

from __future__ import annotations

from typing import Any

import pytest

from gpuserve.core.errors import QueueFull, Unavailable
from gpuserve.core.event_log import EventKind
from gpuserve.front.observability.metrics.change_detection import BURST, PAUSE_S, AnomalyDetector
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics


class Watched:
    """A model that is looked at once a second."""

    def __init__(self) -> None:
        self.metrics = ModelMetrics("m", "2", dict)
        self.now = 100.0
        self._noticing = AnomalyDetector()
        assert self.look() == []

    def look(self, after_s: float = 1.0) -> list[tuple[EventKind, dict[str, Any]]]:
        self.now += after_s
        found = list(self._noticing.poll(self.metrics, self.now))
        assert all((one.model, one.version) == ("m", 2) for one in found)
        return [(one.kind, dict(one.facts)) for one in found]

    def refuse(self, count: int) -> None:
        for _ in range(count):
            self.metrics.refused(QueueFull("full"))

    def replace(self) -> None:
        """Load it anew, with an account of its own."""
        self.metrics = ModelMetrics("m", "2", dict)

    def run(self, duration_s: float, count: int = 1) -> None:
        for _ in range(count):
            self.metrics.instance("cpu#0").compute.observe(duration_s)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_burst_of_refusals_is_told(watched: Watched) -> None:
    watched.refuse(BURST - 1)
    watched.metrics.refused(Unavailable("gone"))
    reasons = {"queue_full": BURST - 1, "unavailable": 1}
    assert watched.look() == [(EventKind.REFUSALS, {"refusals": BURST, "reasons": reasons, "period_s": 1.0})]


def test_a_few_refusals_now_and_then_are_not(watched: Watched) -> None:
    for _ in range(20):
        watched.refuse(BURST - 1)
        assert watched.look() == []


def test_a_burst_that_goes_on_is_told_again_after_a_pause_with_all_of_it(watched: Watched) -> None:
    told = []
    for _ in range(int(PAUSE_S) + 1):
        watched.refuse(100)
        told += [facts["refusals"] for _, facts in watched.look()]
    assert told == [100, 100 * PAUSE_S]


def test_a_second_burst_does_not_count_what_was_before_it(watched: Watched) -> None:
    watched.refuse(BURST)
    assert watched.look()
    watched.refuse(1)
    watched.look(PAUSE_S)
    watched.refuse(BURST)
    ((_, facts),) = watched.look()
    assert (facts["refusals"], facts["period_s"]) == (BURST, 1.0)


def test_a_batch_that_takes_much_longer_than_usual_is_told(watched: Watched) -> None:
    watched.run(0.01, 50)
    assert watched.look() == []
    watched.run(0.01, 5)
    watched.run(0.7)
    watched.run(0.3)
    assert watched.look() == [(EventKind.SLOW_BATCH, {"over_s": 0.5, "usual_s": 0.01, "batches": 2})]
    watched.run(0.7)
    assert watched.look() == []  # so soon
    watched.run(0.7)
    assert watched.look(PAUSE_S) != []


@pytest.mark.parametrize(
    ("usual_s", "count", "slow_s"),
    [(0.01, 5, 2.0), (0.00001, 100, 0.05), (1.0, 100, 4.0), (0.01, 100, 0.011)],
    ids=["too few are known", "nobody would notice", "not ten times", "as always"],
)
def test_these_are_not_slow(watched: Watched, usual_s: float, count: int, slow_s: float) -> None:
    watched.run(usual_s, count)
    watched.look()
    watched.run(slow_s)
    assert watched.look() == []


def test_a_model_that_is_replaced_begins_anew(watched: Watched) -> None:
    watched.refuse(5 * BURST)
    watched.look()
    watched.replace()
    watched.refuse(BURST)
    assert watched.look() == []  # the first look
    watched.refuse(BURST)
    ((_, facts),) = watched.look()
    assert facts["refusals"] == BURST


def test_models_that_are_gone_are_forgotten() -> None:
    noticing = AnomalyDetector()
    models = [ModelMetrics(name, "1", dict) for name in ("a", "b")]
    for one in models:
        assert list(noticing.poll(one, 1.0)) == []
    models[0].outcomes.rejections["queue_full"] = models[1].outcomes.rejections["queue_full"] = BURST
    noticing.retain(models[1:])
    assert [notice.model for one in models for notice in noticing.poll(one, 2.0)] == ["b"]
