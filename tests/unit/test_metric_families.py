"""Metrics of callables: what a worker tells of them, and what a front makes of what its workers tell."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.observability.metrics import prometheus
from gpuserve.front.observability.metrics.callable_metrics import CallableMetrics
from gpuserve.metrics import MetricFamily
from gpuserve_worker.inference.callable_metrics import Metric, MetricError, MetricKind, MetricRegistry
from gpuserve_worker.protocol.metric_changes import MAX_SERIES, MetricChange

OWNER = ("m", 1)
OTHER = ("n", 1)
CHANGE = MetricChange("c", "counter", "", {}, (), False, (1.0,))


def counter(registry: MetricRegistry, name: str = "c", **labels: str) -> Metric:
    return registry.series(registry.family(name, "", MetricKind.COUNTER), labels, None)


def gauge(registry: MetricRegistry, name: str = "g") -> Metric:
    return registry.series(registry.family(name, "", MetricKind.GAUGE), None, None)


def lines(metrics: CallableMetrics) -> list[str]:
    return [line for family in metrics.families() for line in family.samples]


def test_what_workers_counted_is_added_up_and_told_once() -> None:
    front, workers = CallableMetrics(), [MetricRegistry() for _ in range(3)]
    for number, registry in enumerate(workers, 1):
        metric = counter(registry, of="rows")
        metric.increment(number)
        front.apply(OWNER, registry.collect())
        metric.increment(10)
        front.apply(OWNER, registry.collect())
        assert registry.collect() == ()
    assert lines(front) == ['c{of="rows"} 36.0']


def test_a_new_front_is_told_all_of_it() -> None:
    registry = MetricRegistry()
    count, level, moved = counter(registry), gauge(registry), gauge(registry, "moved")
    CallableMetrics().apply(OWNER, registry.collect())
    count.increment(3)
    level.set(7)
    moved.increment(-2)
    CallableMetrics().apply(OWNER, registry.collect())
    registry.start_over()
    front = CallableMetrics()
    front.apply(OWNER, registry.collect())
    assert lines(front) == ["c 3.0", "g 7.0", "moved -2.0"]


def test_a_gauge_is_what_it_was_set_to_last_and_moves_from_there() -> None:
    front, one, other = CallableMetrics(), MetricRegistry(), MetricRegistry()
    gauge(one).set(5)
    front.apply(OWNER, one.collect())
    gauge(other).increment(2)
    front.apply(OWNER, other.collect())
    assert lines(front) == ["g 7.0"]
    gauge(one).increment(1)
    front.apply(OWNER, one.collect())
    assert lines(front) == ["g 8.0"]


@given(st.lists(st.floats(-10, 10), max_size=50), st.lists(st.floats(-10, 10), max_size=5, unique=True))
def test_every_observed_value_is_in_its_bucket(values: list[float], bounds: list[float]) -> None:
    bounds = sorted(set(bounds))
    registry, front = MetricRegistry(), CallableMetrics()
    family = registry.family("h", "", MetricKind.HISTOGRAM)
    for value in values:
        registry.series(family, None, bounds).observe(value)
        front.apply(OWNER, registry.collect())
    registry.series(family, None, bounds)
    front.apply(OWNER, registry.collect())
    expected = [*(sum(value <= bound for value in values) for bound in bounds), len(values)]
    shown = [float(line.rpartition(" ")[2]) for line in lines(front) if "_bucket" in line]
    assert shown == expected


def test_whoever_follows_is_woken_once_for_what_changes_together() -> None:
    registry, woken = MetricRegistry(), []
    metric = counter(registry)
    registry.follow(lambda: woken.append(1))
    assert len(woken) == 1  # what was before
    metric.increment()
    assert len(woken) == 1
    registry.collect()
    metric.increment()
    metric.increment()
    assert len(woken) == 2


def test_threads_lose_no_count() -> None:
    registry, total = MetricRegistry(), 0.0
    metric = counter(registry)
    threads = [threading.Thread(target=lambda: [metric.increment() for _ in range(2000)]) for _ in range(4)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        total += sum(change.values[0] for change in registry.collect())
    for one in threads:
        one.join()
    assert total + sum(change.values[0] for change in registry.collect()) == metric.value() == 8000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda r: counter(r, "a-b"), "'a-b'"),
        (lambda r: counter(r, ""), "named ''"),
        (lambda r: counter(r, "nv_x"), "the server's own"),
        (lambda r: counter(r, "gpuserve_x"), "the server's own"),
        (lambda r: r.family("x", 3, MetricKind.COUNTER), "description"),
        (lambda r: r.family("x", "", "summary"), "summary"),
        (lambda r: (counter(r), r.family("c", "", MetricKind.GAUGE)), "'c' is a counter already"),
        (lambda r: counter(r).increment(-1), "never becomes less"),
        (lambda r: counter(r).increment(float("nan")), "finite"),
        (lambda r: counter(r).increment("1"), "'1'"),
        (lambda r: counter(r).set(1), "only a gauge"),
        (lambda r: counter(r).observe(1), "only a histogram"),
        (lambda r: counter(r, **{"a-b": "1"}), "'a-b'"),
        (lambda r: counter(r, le="1"), "'le'"),
        (lambda r: counter(r, a=1), "'a'"),
        (lambda r: r.series(r.family("x", "", MetricKind.COUNTER), {}, [1.0]), "no buckets"),
        (lambda r: r.series(r.family("h", "", MetricKind.HISTOGRAM), {}, None), "upper bounds"),
        (lambda r: r.series(r.family("h", "", MetricKind.HISTOGRAM), {}, [2, 1]), "ascending"),
        (lambda r: r.series(r.family("h", "", MetricKind.HISTOGRAM), {}, [1]).set(1), "only a gauge"),
        (lambda r: r.series(r.family("h", "", MetricKind.HISTOGRAM), {}, [1]).value(), "no single value"),
        (lambda r: r.series(r.family("h", "", MetricKind.HISTOGRAM), {}, [1]).increment(), "observe"),
    ],
)
def test_a_metric_that_cannot_be_says_why(wrong: Any, said: str) -> None:
    with pytest.raises(MetricError, match=said):
        wrong(MetricRegistry())


def test_an_instance_and_a_front_have_only_so_many_series() -> None:
    registry = MetricRegistry()
    for number in range(MAX_SERIES):
        counter(registry, request=str(number))
    with pytest.raises(MetricError, match=str(MAX_SERIES)):
        counter(registry, request="one more")
    assert counter(registry, request="1").value() == 0
    front = CallableMetrics(max_series=2)
    for number in range(5):
        front.apply(OWNER, [CHANGE._replace(labels={"n": str(number)})])
    assert lines(front) == ['c{n="0"} 1.0', 'c{n="1"} 1.0']


def test_a_series_stays_for_as_long_as_one_of_its_models() -> None:
    front = CallableMetrics()
    front.apply(OWNER, [CHANGE])
    front.apply(OTHER, [CHANGE])
    front.forget(OWNER)
    assert lines(front) == ["c 2.0"]
    front.forget(OTHER)
    assert lines(front) == []
    front.apply(OWNER, [CHANGE._replace(kind="gauge")])
    assert prometheus.page(front.families()) == b"# HELP c \n# TYPE c gauge\nc 1.0\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_set": True},
        {"values": (1.0, 2.0)},
        {"values": ("1",)},
        {"kind": "histogram", "bounds": (1.0,)},
        {"family": "c\n"},
        {"labels": {"a": 'x"', "b}": ""}},
        {"labels": []},
    ],
)
def test_what_no_worker_says_is_refused(wrong: dict[str, Any]) -> None:
    for fields in (CHANGE._replace(**wrong), ("c", "counter")):
        with pytest.raises((ValueError, TypeError)):
            CallableMetrics().apply(OWNER, [tuple(fields)])


def test_a_callable_that_no_server_calls_counts_for_itself() -> None:
    family = MetricFamily("by_hand", "Of a test.", MetricFamily.COUNTER)
    before = family.metric().value()
    family.metric().increment(2)
    assert family.metric().value() == before + 2
