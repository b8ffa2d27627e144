"""Requests that must run on one device among those that may run on any: example by example."""

from __future__ import annotations

import pytest
from device_requests import BoundRequest
from scheduled import model_spec, must_next

from gpuserve.core.errors import InvalidArgument, QueueFull, RequestError, Unavailable
from gpuserve.devices.machine import GpuLink
from gpuserve.front.models.instances import ModelInstances
from gpuserve.front.models.model_driver import DeviceCheck
from gpuserve.front.requests.inference import InferRequest, RegionSlice
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.device_scheduler import (
    DeviceScheduler,
    LinkBetween,
    link_by_name,
    make_scheduler,
)
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.model.spec import BatchingSpec, InstanceSpec, ModelSpec, PolicySpec, QueueSpec, SequenceBatching

DEVICES = {"a": "cuda:0", "b": "cuda:1", "c": "cpu"}


def scheduler(
    *up: str,
    queue: QueueSpec | None = None,
    delay_us: int = 0,
    prefetch: int = 0,
    max_batch_size: int = 8,
    link_between: LinkBetween = link_by_name,
) -> DeviceScheduler:
    made = DeviceScheduler(
        lambda slots, suspects: ModelScheduler(
            model_spec(
                max_batch_size=max_batch_size,
                batching=BatchingSpec(max_queue_delay_us=delay_us),
                queue=queue or QueueSpec(),
                prefetch=prefetch,
                retry_on_worker_death=True,
            ),
            slots,
            suspects,
        ),
        link_between,
    )
    for name in up:
        made.instance_up(name, 1, DEVICES[name])
    return made


def submit(
    to: DeviceScheduler, device: str = "", at: float = 0.0, priority: int = 0, near: str = ""
) -> BoundRequest:
    request = BoundRequest(1, 1, "", device=device, priority=priority, near=near)
    to.submit(request, at)
    return request


def test_a_request_runs_on_the_device_whose_memory_it_names() -> None:
    one = scheduler("a", "b", "c")
    bound = submit(one, "cuda:1")
    batch = must_next(one, 0.0)
    assert (batch.instance, batch.requests) == ("b", [bound])


def test_it_waits_for_that_device_while_others_have_room() -> None:
    one = scheduler("a", "b")
    first, second = submit(one, "cuda:0"), submit(one)
    batch = must_next(one, 0.0)
    assert batch.requests == [first]
    later = submit(one, "cuda:0", 1.0)
    other = must_next(one, 1.0)
    assert (other.instance, other.requests) == ("b", [second])
    assert one.next_batch(1.0) is None
    one.complete(other.batch_id)
    assert one.next_batch(1.0) is None
    one.complete(batch.batch_id)
    last = must_next(one, 1.0)
    assert (last.instance, last.requests) == ("a", [later])


def test_requests_of_one_device_share_a_batch_and_those_of_none_are_apart() -> None:
    one = scheduler("a", "b")
    bound = [submit(one, "cuda:0") for _ in range(3)]
    free = [submit(one) for _ in range(2)]
    batches = [one.next_batch(0.0), one.next_batch(0.0)]
    assert [(batch.instance, batch.requests) for batch in batches if batch] == [("a", bound), ("b", free)]


def test_the_oldest_has_the_next_turn_at_an_instance() -> None:
    one = scheduler("a", max_batch_size=0)
    order = [submit(one, device, at) for at, device in enumerate(["", "cuda:0", "", "cuda:0"])]
    ran = []
    while (batch := one.next_batch(9.0)) is not None:
        ran += batch.requests
        one.complete(batch.batch_id)
    assert ran == order


def test_priority_goes_before_age() -> None:
    one = scheduler("a", queue=QueueSpec(priority_levels=3, default_priority=3, policy=PolicySpec()))
    free = submit(one, priority=2)
    bound = submit(one, "cuda:0", 1.0, priority=1)
    ran = []
    while (batch := one.next_batch(2.0)) is not None:
        ran += batch.requests
        one.complete(batch.batch_id)
    assert ran == [bound, free]


def test_what_its_worker_died_under_runs_again_on_the_same_device() -> None:
    one = scheduler("a", "b")
    bound, free = submit(one, "cuda:0"), submit(one)
    for _ in range(2):
        assert one.next_batch(0.0) is not None
    assert one.instance_down("a") == []
    assert one.next_batch(0.0) is None, "its device has no instance now"
    one.instance_up("a", 1, "cuda:0")
    batch = must_next(one, 0.0)
    assert (batch.instance, batch.requests, bound.attempts) == ("a", [bound], 1)
    assert one.instance_down("a") == [bound]
    assert free.attempts == 0


def test_taken_back_expired_and_taken_out_are_found_wherever_they_wait() -> None:
    one = scheduler()
    gone, free = submit(one, "cuda:0"), submit(one)
    late = BoundRequest(1, 1, "", deadline=1.0, device="cuda:1")
    one.submit(late, 0.0)
    assert one.next_wakeup(0.0) == 1.0
    assert one.cancel(gone)
    assert one.expire(1.0) == [late]
    kept, other = submit(one, "cuda:0"), submit(one, "cuda:1")
    assert one.remove_all("cuda:0") == [kept]
    assert one.remove_all("cuda:7") == []
    assert one.remove_all() == [free, other]
    assert one.statistics().queued == 0


def test_the_delay_of_a_bound_request_is_its_own() -> None:
    one = scheduler("a", "b", delay_us=1_000_000)
    submit(one, "cuda:1", 0.5)
    assert one.next_batch(1.0) is None
    assert one.next_wakeup(1.0) == 1.5
    assert one.next_wakeup(1.0, ["a"]) is None
    batch = must_next(one, 1.5)
    assert batch.instance == "b"


def test_the_limits_are_for_all_requests_together() -> None:
    one = scheduler(queue=QueueSpec(max_requests=2))
    submit(one)
    submit(one, "cuda:0")
    for device in ("", "cuda:0", "cuda:1"):
        with pytest.raises(QueueFull, match="Exceeds maximum queue size of 2 requests"):
            submit(one, device)
    assert one.statistics().rejected == 3
    assert one.statistics().accepted == 2


def test_who_drains_takes_nothing_for_any_device() -> None:
    one = scheduler("a")
    submit(one, "cuda:0")
    one.draining = True
    for device in ("cuda:0", "cuda:1", ""):
        with pytest.raises(Unavailable):
            submit(one, device)
    assert one.next_batch(0.0) is not None


# ---- which models have it, and which requests they take -----------------------------------------


def spec(*devices: str, sequence: SequenceBatching | None = None) -> ModelSpec:
    instances = tuple(InstanceSpec(f"m_{number}", device, {}) for number, device in enumerate(devices))
    made = ModelSpec("m", (), (), 8, instances)
    return made if sequence is None else ModelSpec("m", (), (), 8, instances, sequence=sequence)


def asking(*devices: str) -> InferRequest:
    regions = []
    for device in devices:
        one = RegionSlice("r", 0, 8)
        one.device = device
        regions.append(one)
    return InferRequest("m", "", "", {}, [], (), None, regions=tuple(regions))


def refusal(of: ModelSpec, request: InferRequest) -> RequestError:
    instances = ModelInstances({one.name: one.device for one in of.instances})
    with pytest.raises(RequestError) as caught:
        DeviceCheck(of, instances).check(request)
    return caught.value


def test_only_a_model_on_several_devices_looks_at_them() -> None:
    assert type(make_scheduler(spec("cuda:0", "cuda:0"))) is ModelScheduler
    assert type(make_scheduler(spec("cuda:0", "cuda:1"))) is DeviceScheduler
    assert type(make_scheduler(spec("cpu"))) is ModelScheduler


def test_a_model_that_is_not_on_the_device_says_where_it_is() -> None:
    error = refusal(spec("cuda:0", "cpu"), asking("", "cuda:1"))
    assert isinstance(error, InvalidArgument)
    assert str(error) == (
        "the request names shared memory of cuda:1, but model 'm' runs on cpu, cuda:0: expected regions of "
        "such a device, or of system memory"
    )


def test_regions_of_two_devices_are_refused() -> None:
    error = refusal(spec("cuda:0", "cuda:1"), asking("cuda:0", "cuda:1"))
    assert isinstance(error, InvalidArgument)
    assert "names shared memory of cuda:0 and cuda:1" in str(error)


def test_sequences_on_several_devices_take_no_device_memory() -> None:
    in_sequences = SequenceBatching(strategy="oldest")
    on_two = spec("cuda:0", "cuda:1", sequence=in_sequences)
    assert "sequences of model 'm'" in str(refusal(on_two, asking("cuda:0")))
    on_one = spec("cuda:0", "cuda:0", sequence=in_sequences)
    DeviceCheck(on_one, ModelInstances({"m_0": "cuda:0", "m_1": "cuda:0"})).check(asking("cuda:0"))


def test_a_device_whose_instances_are_down_for_long_is_unavailable_and_others_are_not() -> None:
    of = spec("cuda:0", "cuda:1")
    instances = ModelInstances({one.name: one.device for one in of.instances})
    check = DeviceCheck(of, instances)
    check.check(asking("cuda:0"))
    instances.remove("m_0", restart_in_s=1.0)
    check.check(asking("cuda:0"))
    instances.remove("m_0", restart_in_s=60.0)
    with pytest.raises(Unavailable) as caught:
        check.check(asking("cuda:0"))
    assert str(caught.value) == str(refusals.none_on_device("m", "cuda:0"))
    check.check(asking("cuda:1"))
    check.check(asking("", ""))


def linked(device: str, other: str) -> GpuLink:
    """cuda:0 reaches cuda:1 over NVLink, and the host's memory over PCIe."""
    if device == other:
        return GpuLink.SAME
    return GpuLink.NVLINK if {device, other} == {"cuda:0", "cuda:1"} else GpuLink.PCIE


@pytest.mark.parametrize(
    ("busy", "near", "instance"),
    [
        ("", "cuda:0", "a"), ("", "cuda:1", "b"), ("", "cpu", "c"), ("a", "cuda:0", "b"),
        ("b", "cuda:1", "a"), ("ab", "cuda:1", "c"),
    ],
)  # fmt: skip
def test_a_step_runs_on_the_nearest_device_that_has_room(busy: str, near: str, instance: str) -> None:
    one = scheduler("c", "b", "a", link_between=linked)
    for name in busy:
        submit(one, DEVICES[name])
        assert one.next_batch(0.0) is not None
    step = submit(one, near=near)
    batch = must_next(one, 1.0)
    assert (batch.instance, batch.requests) == (instance, [step])


def test_a_step_waits_behind_no_other_near_its_inputs_while_an_instance_idles() -> None:
    """With a place for a batch that waits, the nearest instance has room though it computes."""
    one = scheduler("c", "b", "a", link_between=linked, prefetch=1, max_batch_size=1)
    for _ in range(6):
        submit(one, near="cuda:0")
    batches = [one.next_batch(0.0) for _ in range(6)]
    assert [batch.instance for batch in batches if batch is not None] == ["a", "b", "c", "a", "b", "c"]
