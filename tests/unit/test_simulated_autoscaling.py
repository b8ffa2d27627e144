"""A fleet under the simulated autoscaler: nothing is lost from the books, and what is told of it is true."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulations import capacity
from benchmarks.simulations.autoscaling import tables, traffic
from benchmarks.simulations.autoscaling.controller import Kind, Policy, Rules, Scaling
from benchmarks.simulations.autoscaling.fleet import Fleet
from benchmarks.simulations.autoscaling.grid import (
    BASE,
    STARTS_S,
    Point,
    cases,
    choose,
    longest_waits_ms,
    point,
    points,
    with_target,
)
from benchmarks.simulations.autoscaling.run import USUAL, Outcome, Setting, Surroundings, quantiles, run
from benchmarks.simulations.autoscaling.service import (
    LOADS,
    Service,
    Steady,
    load_at,
    measured,
    steady,
    steady_states,
)
from gpuserve.export.manifests import scaling

RESULTS = capacity.RESULTS
POD = Service("pod", 0.01, 10, 1, "made up")  # 1,000 rows a second


@cache
def states() -> tuple[Steady, ...]:
    return steady_states(POD, 1, 1000)


def outcome(
    rates: list[float], setting: Setting = BASE, seed: int = 1, where: Surroundings = USUAL
) -> Outcome:
    arrivals = traffic.arrivals(traffic.Trace("t", tuple(rates)), seed)
    return run(POD, states(), arrivals, setting, seed, where)


# ---- a pod ----------------------------------------------------------------------------------


def test_the_measured_pods_are_those_of_the_results() -> None:
    batches, singles = measured(RESULTS)
    assert batches.capacity_hz == pytest.approx(32 / 0.0054)
    assert singles.capacity_hz == pytest.approx(3607, abs=1)
    assert (batches.slot_rows, singles.slot_rows) == (32, 8)


@pytest.mark.parametrize("load", [0.2, 0.6])
def test_the_saturation_is_what_littles_law_says_of_the_time_that_requests_are_there(load: float) -> None:
    seen = steady(POD, load, 1)
    stay_s = POD.batch_s + sum(seen.waits_s) / len(seen.waits_s)
    assert seen.saturation == pytest.approx(load * POD.capacity_hz * stay_s / POD.slot_rows, rel=0.06)


def test_where_nothing_waits_the_saturation_is_the_load() -> None:
    many = Service("many", 0.01, 1, 64, "made up")
    assert steady(many, 0.5, 1).saturation == pytest.approx(0.5, rel=0.03)


def test_a_higher_saturation_is_a_higher_load() -> None:
    loads = [load_at(states(), target / 10) for target in range(1, 15)]
    assert loads == sorted(loads)
    assert load_at(states(), 0.0) == 0.0
    assert load_at(states(), 1e9) == LOADS[-1]


# ---- traffic --------------------------------------------------------------------------------


def test_the_day_has_its_night_its_top_and_its_noise() -> None:
    day = traffic.diurnal(1000.0, 1).rates_hz
    assert len(day) == traffic.DAY_S
    assert max(day[:3600]) < 250
    assert min(day[42_000:45_000]) > 800
    assert sum(day) / len(day) == pytest.approx(530, rel=0.03)


def test_bursts_are_of_two_rates_and_take_their_part_of_the_time() -> None:
    rates = traffic.bursty(1.0, 4.0, 1, 400_000, calm_s=90, burst_s=10).rates_hz
    assert set(rates) == {1.0, 4.0}
    assert rates.count(4.0) / len(rates) == pytest.approx(0.1, abs=0.01)


def test_a_trace_of_ones_own_is_read_and_a_wrong_one_told() -> None:
    assert traffic.read("t", ["10,5", "", "12,7", "15,0"], 2.0).rates_hz == (10.0, 10.0, 14.0, 14.0, 14.0)
    with pytest.raises(ValueError, match="line 2: expected 'seconds,requests a second', got 'x'"):
        traffic.read("t", ["1,2", "x"])
    with pytest.raises(ValueError, match="times must rise"):
        traffic.read("t", ["5,2", "4,2"])
    with pytest.raises(ValueError, match="two lines"):
        traffic.read("t", ["5,2"])


@given(st.floats(0, 400), st.integers(0, 100))
@settings(max_examples=30)
def test_arrivals_are_as_many_as_the_rate_says(rate: float, seed: int) -> None:
    counts = traffic.arrivals(traffic.Trace("t", (rate,) * 400), seed)
    assert abs(sum(counts) - 400 * rate) <= 6 * math.sqrt(400 * rate) + 1


# ---- the fleet ------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 6)), min_size=1, max_size=40),
    st.integers(0, 2000),
    st.integers(0, 5),
)
@settings(max_examples=60)
def test_every_request_is_accepted_or_refused_and_pods_add_up(
    seconds: list[tuple[int, int]], queue_rows: int, start_s: int
) -> None:
    fleet = Fleet(
        POD, states(), random.Random(1), pods=2, start_s=start_s, drain_s=3.0, queue_rows=queue_rows
    )
    for now, (requests, pods) in enumerate(seconds):
        fleet.serve(now, requests)
        assert all(0 <= one.backlog <= queue_rows and one.pods > 0 for one in fleet.ready(now))
        fleet.scrape(now, 2)
        assert len(fleet.readings(math.inf)) <= fleet.pods
        assert all(0 <= one <= 1.5 for one in fleet.readings(1.5))
        fleet.scale(now, pods)
        assert fleet.pods == pods
    tally = fleet.tally
    accepted = math.fsum(tally.steady.values()) + math.fsum(weight for _, weight in tally.overload)
    assert tally.requests == sum(requests for requests, _ in seconds)
    assert accepted + tally.refused == pytest.approx(tally.requests)
    assert all(wait_s <= queue_rows / POD.capacity_hz for wait_s, _ in tally.overload)


def test_a_fleet_that_is_never_full_refuses_nothing_and_costs_its_pods() -> None:
    steady_load = Setting(Scaling(0.5, Rules(0), Rules(0), least=3, most=3))
    seen = outcome([1500.0] * 300, steady_load)
    assert (seen.refused, seen.events, seen.most_pods) == (0.0, 0, 3)
    assert seen.pod_s == 3 * 300
    assert 0 < seen.p50_s < seen.p99_s <= 0.02


def test_more_requests_lead_to_more_pods_after_they_have_started_and_fewer_to_fewer() -> None:
    seen = outcome([300.0] * 300 + [2000.0] * 600 + [300.0] * 1800)
    pods = {at: pods for at, pods, _ in seen.history}
    assert seen.refused > 0  # one pod for two and more, until others have started
    assert pods[284] < pods[899] > pods[2684]
    assert seen.most_pods <= 10


def test_what_waits_for_pods_that_take_longer_to_start_is_refused() -> None:
    rates = [300.0] * 300 + [3000.0] * 600
    parts = [outcome(rates, where=replace(USUAL, start_s=start_s)).refused_part for start_s in (1, 60, 240)]
    assert parts == sorted(parts)
    assert parts[2] > 2 * parts[1] > 0


def test_a_fleet_is_the_same_for_the_same_seed_and_only_for_it() -> None:
    rates = list(traffic.bursty(300, 2000, 1, 1200, 200, 60).rates_hz)
    assert outcome(rates) == outcome(rates)
    assert outcome(rates) != outcome(rates, seed=2)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 9)), min_size=1, max_size=30), st.floats(0, 1))
def test_a_quantile_has_its_part_of_the_weight(weighted: list[tuple[float, float]], part: float) -> None:
    (found,) = quantiles(weighted, [part])
    total = math.fsum(weight for _, weight in weighted)
    assert math.fsum(weight for value, weight in weighted if value <= found) >= part * total * (1 - 1e-9)
    assert math.fsum(weight for value, weight in weighted if value < found) <= part * total * (1 + 1e-9)


# ---- what is taken --------------------------------------------------------------------------


def at(
    target: float, window_s: int, case: str, pods: float, refused: float = 0.0, p99_ms: float = 1.0
) -> Point:
    return Point(target, window_s, STARTS_S[0], case, refused, 0.0, p99_ms, pods, pods, 1, 1)


def test_targets_are_walked_upwards_while_days_keep_their_limits() -> None:
    found = [
        at(0.7, 300, "day", 3.0, p99_ms=3.0),
        at(0.5, 300, "day", 5.0),
        at(0.6, 300, "day", 4.0),
        at(0.8, 300, "day", 2.0),
    ]
    assert choose(found, {"day": 2.0}) == (0.6, 300)
    assert choose(found, {"day": 3.0}) == (0.8, 300)
    with pytest.raises(ValueError, match="under no setting"):
        choose(found, {"day": 0.5})
    refusing = [one._replace(refused_part=0.01) for one in found]
    with pytest.raises(ValueError, match="under no setting"):
        choose(refusing, {"day": 3.0})


def test_a_target_that_costs_some_case_more_pods_is_not_taken() -> None:
    found = [
        *(at(target, 300, "day", 1 - target) for target in (0.5, 0.6, 0.7)),
        *(at(target, 300, "bursts", pods, 0.1) for target, pods in ((0.5, 6.0), (0.6, 5.0), (0.7, 5.5))),
    ]
    assert choose(found, {"day": 2.0}) == (0.6, 300)


@pytest.mark.parametrize(("longer", "window_s"), [(0.0999, 120), (0.05, 300)])
def test_a_longer_window_has_to_be_worth_it(longer: float, window_s: int) -> None:
    found = [
        *(at(0.6, window, "day", 1.0) for window in (120, 300)),
        at(0.6, 120, "bursts", 1.0, 0.1),
        at(0.6, 300, "bursts", 2.0, longer),
    ]
    assert choose(found, {"day": 2.0}) == (0.6, window_s)


def test_a_small_grid_from_the_service_times_to_the_tables() -> None:
    over = cases([POD], day_s=900, bursty_s=900, requests=1000)
    found = points(over, targets=(0.4, 0.8), windows_s=(120,), starts_s=STARTS_S[:1])
    assert [one.target for one in found] == [0.4, 0.4, 0.8, 0.8]
    assert found[0].pods > found[2].pods >= 1
    assert set(longest_waits_ms(over)) == {over[0].name}
    lines = list(tables.by_target(found, 120, STARTS_S[0]))
    assert len(lines) == 2 + 4
    assert len({line.count("|") for line in lines}) == 1
    written = tables.plain(found, (0.4, 120), "python -m x")
    assert json.loads(json.dumps(written))["points"][0]["case"] == over[0].name
    own = tables.own(over, over[1].trace, over[1].arrivals)
    assert point(own[0], with_target(BASE, 0.8, 120)) == found[3]


# ---- one front, one node, a fleet -----------------------------------------------------------


def test_a_busy_front_was_seen_to_do_what_its_cpu_time_says() -> None:
    for cost in capacity.measured():
        assert cost.seen_hz <= 1.02 / cost.front_s
        assert capacity.Node(cost).most_hz() == pytest.approx(1 / cost.front_s)  # the front is first


def test_what_is_slowest_limits_a_node() -> None:
    node = capacity.Node(capacity.Cost("row", "", 10e-6, 100e-6, 0.0), workers=4)
    assert node.front_hz == pytest.approx(100_000)
    assert node.workers_hz == pytest.approx(40_000)
    assert node.most_hz() == pytest.approx(40_000)
    assert node.most_hz(5_000) == 5_000


@given(st.integers(1, 64), st.floats(100, 1e6), st.floats(0.1, 1.0))
def test_nodes_for_a_rate_are_enough_and_one_fewer_is_not(nodes: int, node_hz: float, load: float) -> None:
    rate_hz = nodes * node_hz * load
    assert capacity.nodes_for(rate_hz, node_hz, load) == nodes
    assert capacity.nodes_for(rate_hz * 1.01, node_hz, load) > nodes
    assert capacity.fleet_hz(node_hz, (1 / nodes,) * nodes) == pytest.approx(nodes * node_hz)


@given(st.integers(1, 64), st.integers(0, 5))
@settings(max_examples=20)
def test_connections_spread_at_random_fill_one_node_before_the_others(nodes: int, seed: int) -> None:
    shares = capacity.hashed_shares(nodes, 16 * nodes, seed)
    assert sum(shares) == pytest.approx(1)
    assert 1000 <= capacity.fleet_hz(1000, shares) <= nodes * 1000 * (1 + 1e-9)


def test_the_tail_of_a_front_with_few_requests_ends_before_its_core_is_full() -> None:
    cheap, dear = (capacity.Cost("row", "", front_s, 0.0, 0.0) for front_s in (20e-6, 600e-6))
    assert capacity.tail_limit(dear, 2000) < capacity.tail_limit(cheap, 2000) <= 0.95


# ---- what is shipped ------------------------------------------------------------------------


def test_the_shipped_settings_are_those_that_were_taken() -> None:
    written = json.loads((RESULTS / "autoscaling.json").read_text())
    assert written["taken"] == {"target": scaling.SATURATION_TARGET, "window_s": scaling.DOWN_WINDOW_S}
    up = Rules(scaling.UP_WINDOW_S, (Policy(Kind.PERCENT, scaling.UP_PERCENT, scaling.UP_PERIOD_S),))
    down = Rules(scaling.DOWN_WINDOW_S, (Policy(Kind.PERCENT, scaling.DOWN_PERCENT, scaling.DOWN_PERIOD_S),))
    taken = with_target(BASE, scaling.SATURATION_TARGET, scaling.DOWN_WINDOW_S).scaling
    assert (taken.up, taken.down) == (up, down)
    page = (Path(__file__).resolve().parents[2] / "docs" / "autoscaling.md").read_text()
    assert f"Taken: target {scaling.SATURATION_TARGET:g}, window down {scaling.DOWN_WINDOW_S} s." in page
    assert written["command"] in page
