"""Which models go for another: as in a plain LRU cache, and never more of them than necessary."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.supervisor.models.memory_policy import Plan, Resident, Use, plan_start

CPU, GPU = "cpu", "cuda:0"
GIB = 1 << 30


def resident(key: int, used_at: float, use: Use = Use.IDLE, **nbytes: int) -> Resident:
    return Resident(key, nbytes or {CPU: 1}, used_at, use)


def test_the_least_recently_used_go_and_only_those_that_hold_what_is_short() -> None:
    here = [resident(1, 3.0), resident(2, 1.0, cpu=0, **{GPU: 5}), resident(3, 2.0), resident(4, 4.0)]
    assert plan_start({CPU: 2}, {CPU: 2, GPU: 0}, here) == Plan(True)
    assert plan_start({CPU: 2}, {CPU: 0, GPU: 0}, here) == Plan(False, (3, 1))
    assert plan_start({GPU: 1}, {CPU: 0, GPU: 0}, here) == Plan(False, (2,))
    assert plan_start({CPU: 9, GPU: 9}, {}, here) == Plan(True), "without a budget nothing is short"


def test_none_goes_while_all_would_not_suffice_and_what_leaves_or_may_be_idle_is_waited_for() -> None:
    here = [resident(1, 1.0), resident(2, 2.0, Use.HELD), resident(3, 3.0)]
    assert plan_start({CPU: 3}, {CPU: 0}, here) == Plan(False, suffices=False)
    assert plan_start({CPU: 2}, {CPU: 0}, here) == Plan(False, (1, 3))
    here = [resident(1, 9.0, Use.LEAVING), resident(2, 1.0)]
    assert plan_start({CPU: 1}, {CPU: 0}, here) == Plan(False)
    assert plan_start({CPU: 2}, {CPU: 0}, here) == Plan(False, (2,))


def test_a_model_that_is_too_large_starts_when_nothing_else_is_left() -> None:
    assert plan_start({CPU: 9}, {CPU: 2}, [resident(1, 1.0)]) == Plan(False, (1,))
    assert plan_start({CPU: 9}, {CPU: 3}, [resident(1, 1.0, Use.LEAVING)]) == Plan(False)
    assert plan_start({CPU: 9}, {CPU: 3}, [Resident(2, {GPU: 1}, 1.0, Use.HELD)]) == Plan(True)


def zipf(models: int, requests: int, seed: int) -> Sequence[int]:
    weights = [1 / rank for rank in range(1, models + 1)]
    return random.Random(seed).choices(range(models), weights, k=requests)


@pytest.mark.parametrize("seed", range(3))
def test_zipf_traffic_hits_as_often_as_in_a_plain_lru_cache(seed: int) -> None:
    capacity, taken = 10, 0
    lru: OrderedDict[int, None] = OrderedDict()
    here: dict[int, Resident] = {}
    for now, model in enumerate(zipf(100, 5000, seed)):
        is_hit = model in lru
        lru[model] = None
        lru.move_to_end(model)
        if len(lru) > capacity:
            lru.popitem(last=False)
        taken += (model in here) is is_hit
        if model not in here:
            plan = plan_start({CPU: 1}, {CPU: capacity - len(here)}, here.values())
            for key in plan.evicted:
                del here[key]
        here[model] = resident(model, now)
    assert taken == 5000
    assert here.keys() == lru.keys()


# ---- sleep ----------------------------------------------------------------------------------

#: A model of 8 on its GPU: its process has 1 on the host, and 1 on the GPU that stays when it sleeps.
AWAKE, ASLEEP = {CPU: 1, GPU: 9}, {CPU: 9, GPU: 1}


def sleeper(key: int, used_at: float, *, asleep: bool = False) -> Resident:
    if asleep:
        return Resident(key, ASLEEP, used_at, Use.ASLEEP)
    return Resident(key, AWAKE, used_at, Use.IDLE, ASLEEP)


def test_a_model_sleeps_while_the_host_has_room_for_its_weights() -> None:
    here = [sleeper(1, 1.0), sleeper(2, 2.0)]
    assert plan_start({CPU: 1, GPU: 9}, {CPU: 9, GPU: 1}, here) == Plan(False, (), (1,))
    assert plan_start({CPU: 1, GPU: 9}, {GPU: 1}, here) == Plan(False, (), (1,)), "the host has no limit"
    assert plan_start({CPU: 1, GPU: 9}, {CPU: 8, GPU: 1}, here) == Plan(False, (1,))
    assert plan_start({CPU: 9}, {CPU: 8, GPU: 1}, here) == Plan(False, (1,)), "sleep frees nothing there"


def test_a_model_that_has_slept_for_longer_makes_room_on_the_host() -> None:
    here = [sleeper(1, 1.0, asleep=True), sleeper(2, 2.0)]
    wanted = {CPU: 0, GPU: 8}
    assert plan_start(wanted, {CPU: 0, GPU: 0}, here) == Plan(False, (1,)), "first that, to keep the budget"
    leaving = here[0]._replace(use=Use.LEAVING)
    assert plan_start(wanted, {CPU: 0, GPU: 0}, [leaving, here[1]]) == Plan(False)
    assert plan_start(wanted, {CPU: 9, GPU: 1}, here[1:]) == Plan(False, (), (2,))


def test_sleeping_models_end_for_a_gpu_only_if_all_idle_ones_do_not_suffice() -> None:
    here = [sleeper(1, 1.0, asleep=True), sleeper(2, 2.0)]
    assert plan_start({GPU: 8}, {CPU: 99, GPU: 0}, here) == Plan(False, (), (2,))
    assert plan_start({GPU: 9}, {CPU: 99, GPU: 0}, here) == Plan(False, (1,), (2,))
    assert plan_start({GPU: 10}, {CPU: 99, GPU: 0}, here) == Plan(False, (1, 2))
    assert plan_start({CPU: 5}, {CPU: 0, GPU: 0}, here) == Plan(False, (1,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host", [0, 40, 10_000])
def test_no_two_models_swap_while_a_third_idles_asleep_or_not(seed: int, host: int) -> None:
    """The models that are awake are those that a plain LRU cache of the GPU would hold."""
    gpu, lru = 90, OrderedDict[int, None]()
    here: dict[int, Resident] = {}

    def free() -> dict[str, int]:
        taken = [one.nbytes for one in here.values()]
        return {CPU: 10 + host - sum(one[CPU] for one in taken), GPU: gpu - sum(one[GPU] for one in taken)}

    for now, model in enumerate(zipf(30, 3000, seed)):
        lru[model] = None
        lru.move_to_end(model)
        while model not in here or here[model].use is Use.ASLEEP:
            at = here.get(model)
            wanted = {one: max(0, AWAKE[one] - (at.nbytes[one] if at else 0)) for one in (CPU, GPU)}
            others = [one for key, one in here.items() if key != model]
            plan = plan_start(wanted, free(), others)
            assert plan.starts or plan.evicted or plan.asleep
            for key in plan.evicted:
                del here[key]
            for key in plan.asleep:
                here[key] = sleeper(key, here[key].used_at, asleep=True)
            if plan.starts:
                break
        here[model] = sleeper(model, now)
        assert min(free().values()) >= 0
        awake = [key for key, one in here.items() if one.use is Use.IDLE]
        latest = list(reversed(lru))[: len(awake)]
        assert set(awake) == set(latest)
        assert len(awake) >= min(len(lru), (gpu - 30) // 9)
    assert bool([one for one in here.values() if one.use is Use.ASLEEP]) is (host > 0)


SOME_NBYTES = st.dictionaries(st.sampled_from([CPU, GPU]), st.integers(0, 5))
ANY_RESIDENT = st.builds(
    Resident, st.integers(1, 1 << 30), SOME_NBYTES, st.floats(0, 10), st.sampled_from(Use), st.none()
)
RESIDENTS = st.lists(ANY_RESIDENT, max_size=6, unique_by=lambda one: one.key)
NBYTES = st.fixed_dictionaries({CPU: st.integers(0, 9), GPU: st.integers(0, 9)})


@given(NBYTES, NBYTES, RESIDENTS)
def test_a_plan_evicts_idle_models_alone_and_what_it_waits_for_suffices_or_is_all_there_is(
    wanted: dict[str, int], free: dict[str, int], here: list[Resident]
) -> None:
    plan = plan_start(wanted, free, here)
    by_key = {one.key: one for one in here}
    gone = [by_key[key] for key in plan.evicted]
    assert all(one.use in {Use.IDLE, Use.ASLEEP} for one in gone)
    if plan.starts:
        assert not gone
        return
    coming = [one for one in here if one.use is Use.LEAVING] + gone
    assert coming or any(one.use is Use.HELD for one in here), "a model that waits has something to wait for"

    def fits(others: list[Resident]) -> bool:
        left = {one: free[one] + sum(other.nbytes.get(one, 0) for other in others) for one in free}
        return all(wanted[device] <= left[device] for device in free)

    if gone and fits(coming):
        assert not fits(coming[:-1]), "the last one was not necessary"
