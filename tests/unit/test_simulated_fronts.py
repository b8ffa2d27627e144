"""The simulation of several fronts: the ideal server is its limit, and slots go where they should."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scenarios.arrivals import Schedule, poisson
from benchmarks.scenarios.ideal import ideal_latencies
from benchmarks.simulations.fronts import Run, Simulation
from benchmarks.simulations.outcome import outcome
from benchmarks.simulations.setting import LENDING, Costs, Deployment, Model, Sharing, hashed, in_turns

ARRIVALS = st.lists(st.floats(0, 2), min_size=1, max_size=80).map(sorted)
FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0)
#: Powers of two, so that sums are exact.
STEP_S = 2.0**-10


def simulated(what: Deployment, arrivals: list[float], connection: list[int] | None = None) -> Run:
    """Every request is on the connection of its own front, which is 0 unless it is said."""
    fronts = connection or [0] * len(arrivals)
    return Simulation(what, Schedule(tuple(arrivals), tuple(fronts)), range(what.fronts)).run()


def latencies(run: Run) -> list[float]:
    return [one.answered_at_s - one.arrived_at_s for one in run.answered]


@pytest.mark.parametrize("sharing", Sharing)
@given(ARRIVALS, st.integers(1, 4), st.integers(1, 8))
def test_one_front_that_costs_nothing_is_the_ideal_server(
    sharing: Sharing, arrivals: list[float], workers: int, max_rows: int
) -> None:
    what = Deployment(Model(0.5, max_rows), FREE, 1, workers, sharing)
    run = simulated(what, arrivals)
    expected = sorted(ideal_latencies(arrivals, workers, 0.5, max_rows))
    assert sorted(latencies(run)) == pytest.approx(expected)


@pytest.mark.parametrize("sharing", Sharing)
@given(ARRIVALS, st.integers(2, 4), st.integers(0, 2), st.randoms(use_true_random=False))
def test_every_request_is_answered_once_at_its_front_and_no_batch_is_too_large(
    sharing: Sharing, arrivals: list[float], fronts: int, prefetch: int, choice: Random
) -> None:
    connection = [choice.randrange(fronts) for _ in arrivals]
    what = Deployment(Model(0.05, 3), Costs(0.001), fronts, 4, sharing, prefetch)
    run = simulated(what, arrivals, connection)
    came = Counter(zip(arrivals, connection, strict=True))
    assert Counter((one.arrived_at_s, one.front) for one in run.answered) == came
    assert all(1 <= rows <= 3 for _, rows in run.batches)
    assert sum(rows for _, rows in run.batches) == len(arrivals)
    assert min(latencies(run)) > 0.05


def test_what_a_request_and_a_batch_cost_is_in_the_latency() -> None:
    costs = Costs(10 * STEP_S, 2 * STEP_S, 0.0, 3 * STEP_S, 5 * STEP_S)
    run = simulated(Deployment(Model(1.0, 8), costs, 1, 1, Sharing.DIVIDED), [0.0])
    # Read and answered, sent, both ways, around the callable.
    assert latencies(run) == pytest.approx([1.0 + (10 + 2 + 2 * 3 + 5) * STEP_S])
    assert run.busy_s == pytest.approx([12 * STEP_S])


def test_an_instance_that_is_always_busy_stands_still_between_batches() -> None:
    # 5,000 us of 5,000 + 75 in the worker + 2 x 50 between the processes + 40 in the front.
    schedule = poisson(1.2 * 6400, 2.0, 8, 1)
    what = Deployment(Model(0.005, 32), Costs(20e-6), 1, 1, Sharing.DIVIDED)
    seen = outcome(Simulation(what, schedule, [0] * 8).run())
    assert seen.throughput_hz / 6400 == pytest.approx(5000 / 5215, abs=0.01)
    assert seen.mean_rows == 32


def test_an_idle_worker_is_asked_for_a_slot_which_takes_two_ways_more() -> None:
    costs = Costs(0.0, 0.0, 2 * STEP_S, STEP_S, 0.0)
    run = simulated(Deployment(Model(1.0, 8), costs, 1, 1, Sharing.LENT_TO_OLDEST), [0.0])
    assert latencies(run) == pytest.approx([1.0 + (4 + 2) * STEP_S])


def test_a_front_that_has_its_own_workers_gets_no_others() -> None:
    run = simulated(Deployment(Model(1.0, 1), FREE, 2, 2, Sharing.DIVIDED), [0.0, 0.0])
    assert sorted(latencies(run)) == [1.0, 2.0]


@pytest.mark.parametrize("sharing", sorted(LENDING, key=str))
def test_a_front_alone_gets_all_workers_where_slots_are_lent(sharing: Sharing) -> None:
    run = simulated(Deployment(Model(1.0, 1), FREE, 2, 2, sharing), [0.0, 0.0])
    assert latencies(run) == [1.0, 1.0]


def test_batches_of_all_fronts_wait_in_one_line_where_each_has_a_slot() -> None:
    what = Deployment(Model(1.0, 8), FREE, 4, 1, Sharing.SLOT_EACH)
    run = simulated(what, [0.0] * 4, [0, 1, 2, 3])
    assert sorted(latencies(run)) == [1.0, 2.0, 3.0, 4.0]
    assert [rows for _, rows in run.batches] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("sharing", "order"), [(Sharing.LENT_TO_OLDEST, [0, 1, 2, 2]), (Sharing.LENT_TO_MOST, [0, 2, 2, 1])]
)
def test_a_slot_is_lent_to_the_one_that_the_sharing_says(sharing: Sharing, order: list[int]) -> None:
    # While front 0 has the worker, one request comes to front 1, and later two come to front 2.
    run = simulated(Deployment(Model(1.0, 2), FREE, 3, 1, sharing), [0.0, 0.25, 0.5, 0.5], [0, 1, 2, 2])
    assert [one.front for one in run.answered] == order


def test_a_hash_spreads_few_connections_unevenly_and_turns_do_not() -> None:
    assert sorted(Counter(hashed(4, 4, 20)).values()) == [1, 1, 2]
    assert Counter(hashed(1, 4, 20)).total() == 1
    assert 64 < max(Counter(hashed(256, 4, 20)).values()) < 90
    assert set(Counter(in_turns(256, 4)).values()) == {64}


def test_the_same_seed_leads_to_the_same_figures() -> None:
    schedule = poisson(20_000, 0.1, 4, 1)
    what = Deployment(Model(0.002, 8), Costs(20e-6), 4, 8, Sharing.LENT_TO_OLDEST, 1)
    first, second = (Simulation(what, schedule, hashed(4, 4, 1)).run() for _ in range(2))
    assert first == second
    assert outcome(first) == outcome(second)


def test_an_outcome_leaves_the_beginning_out_and_knows_the_quiet_front() -> None:
    run = simulated(
        Deployment(Model(0.5, 4), FREE, 2, 2, Sharing.DIVIDED),
        [0.0, 0.0, 5.0, 7.0, 10.0],
        [0, 0, 0, 1, 0],
    )
    seen = outcome(run)
    assert (seen.p50_s, seen.p99_s, seen.quiet_p99_s) == (0.5, 0.5, 0.5)
    assert seen.throughput_hz == pytest.approx(2 / 8)
    assert seen.mean_rows == 1.0
