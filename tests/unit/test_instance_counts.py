"""The same model with another number of instances on each of its devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument
from gpuserve.devices.placement import Placement
from gpuserve.model.placement import instances_by_device, joined, with_count
from gpuserve.model.spec import MAX_INSTANCES, InstanceSpec, ModelSpec, StepSpec

DEVICES = ("cpu", "cuda:0", "cuda:1", "cuda:2")
SOURCE = {"path": "model.py:f"}


def instance(name: str, device: str) -> InstanceSpec:
    return InstanceSpec(
        name, device, SOURCE, placement=Placement(() if device == "cpu" else (f"GPU-{device}",))
    )


def model(*instances: InstanceSpec) -> ModelSpec:
    return ModelSpec("m", (), (), 0, instances)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """As a config file or ``bind()`` makes them: numbered on each device, or over all of them."""
    devices = draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=8))
    if draw(st.booleans()):
        return model(*(instance(str(number), device) for number, device in enumerate(devices)))
    counts: dict[str, int] = {}
    made = []
    for device in devices:
        made.append(instance(f"{device}#{counts.get(device, 0)}", device))
        counts[device] = counts.get(device, 0) + 1
    return model(*made)


@given(models(), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_each_device_has_so_many_and_what_stays_is_what_was(spec: ModelSpec, counts: list[int]) -> None:
    devices = set(instances_by_device(spec))
    for count in counts:
        new = with_count(spec, count)
        assert instances_by_device(new) == dict.fromkeys(devices, count)
        assert len({one.name for one in new.instances}) == len(new.instances)
        for device in devices:
            before = [one for one in spec.instances if one.device == device]
            after = [one for one in new.instances if one.device == device]
            assert after[: len(before)] == before[:count], "the last ones go, and new ones come behind"
            assert all(one.placement == before[0].placement for one in after)
        spec = new


@given(models(), st.integers(1, 5))
def test_those_that_are_new_join_one_by_one(spec: ModelSpec, count: int) -> None:
    wanted = with_count(spec, count)
    there = {one.name for one in spec.instances}
    now = spec
    for one in reversed([one for one in wanted.instances if one.name not in there]):
        now = joined(now, wanted, one.name)
        there.add(one.name)
        assert {other.name for other in now.instances} == there
        assert len(now.instances) == len(there)
    assert all(one in now.instances for one in wanted.instances)


def test_names_are_those_of_a_config_file() -> None:
    spec = model(instance("cuda:0#0", "cuda:0"), instance("cuda:1#0", "cuda:1"))
    names = [one.name for one in with_count(spec, 2).instances]
    assert names == ["cuda:0#0", "cuda:0#1", "cuda:1#0", "cuda:1#1"]
    assert [one.name for one in with_count(model(instance("0", "cpu")), 3).instances] == ["0", "1", "2"]


def test_those_that_are_down_go_first() -> None:
    spec = model(*(instance(f"cpu#{number}", "cpu") for number in range(4)))
    for down, left in ((("cpu#0",), ["cpu#1", "cpu#2"]), (("cpu#0", "cpu#1", "cpu#3"), ["cpu#0", "cpu#2"])):
        smaller = with_count(spec, 2, down)
        assert [one.name for one in smaller.instances] == left
        assert with_count(smaller, 4).instances[:2] == smaller.instances


def test_different_callables_stay_as_many_as_they_are() -> None:
    spec = model(instance("0", "cpu"), InstanceSpec("1", "cpu", {"path": "other.py:f"}))
    assert with_count(spec, 2).instances == spec.instances
    for count in (1, 3):
        with pytest.raises(InvalidArgument, match=f"different callables: there cannot be {count} on each"):
            with_count(spec, count)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2", None])
def test_what_is_no_number_of_instances(count: object) -> None:
    with pytest.raises(InvalidArgument, match=r"1 at least, got"):
        with_count(model(instance("0", "cpu")), count)  # type: ignore[arg-type]


def test_what_cannot_be() -> None:
    two = model(instance("cuda:0#0", "cuda:0"), instance("cuda:1#0", "cuda:1"))
    assert len(with_count(two, MAX_INSTANCES // 2).instances) == MAX_INSTANCES
    with pytest.raises(InvalidArgument, match="256 instances at most, given 129 on each of 2 devices"):
        with_count(two, MAX_INSTANCES // 2 + 1)
    ensemble = ModelSpec("e", (), (), 0, (), steps=(StepSpec("m", 0, (), ()),))
    with pytest.raises(InvalidArgument, match="'e' is an ensemble and has no instances of its own"):
        with_count(ensemble, 2)
